"""The thread that keeps a coordinator going while the program does something else."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, Protocol

# Seconds between two looks.
_NAP_SECONDS = 0.001


class Going(Protocol):
    """The part of a coordinator that this module uses."""

    strategy: Any

    def go_on(self) -> None:
        """Local. Process the messages that have arrived."""
        ...


def keep_going(given: Going, lock: Any) -> None:
    """Local. Let a coordinator process messages whenever it is not in use, until it or its strategy is deleted.

    Args:
        given: The coordinator, which the thread does not keep alive.
        lock: The lock that a thread holds while it uses the coordinator.
    """
    # A thread that held it would keep a coordinator that the program has dropped.
    arguments = weakref.ref(given), lock
    threading.Thread(target=_keep_going, args=arguments, name="mpidist-coordinator", daemon=True).start()


def _keep_going(reference: weakref.ref[Any], lock: Any) -> None:
    while True:
        time.sleep(_NAP_SECONDS)
        coordinator: Going | None = reference()
        if coordinator is None or coordinator.strategy.is_closed:
            return
        # The thread that holds it takes the messages itself, and may hold it for long: a thread that waited would come
        # between two of its calls, and do again what the next one does anyway.
        if lock.acquire(blocking=False):
            try:
                coordinator.go_on()
            finally:
                lock.release()
        # Not while this thread sleeps: see above.
        del coordinator
