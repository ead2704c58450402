"""Processes that have no descriptor: a thread looks into `/proc` twice a second.

Linux before 5.3 has no descriptors of processes, and elsewhere none may be left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock

# Between two looks.
LOOK_SECONDS = 0.5


class Lives:
    """The lives of processes of this host, of which each is told that ends.

    Args:
        life: Returns a sign of the life of the process with a number, as the function `life` does.
    """

    def __init__(self, life: Callable[[int], str] | None = None) -> None:
        self._life = life or life_of
        self._lock = Lock()
        # Of each process: its number, the sign of its life, and what is called at its end.
        self._watched: list[tuple[int, str, Callable[[], None]]] = []
        self._has_thread = False

    def add(self, number: int, on_end: Callable[[], None]) -> None:
        """Local. Look at one more process.

        Args:
            number: The number of a process that was alive a moment ago.
            on_end: Called once when it has ended, in a thread of ours.
        """
        with self._lock:
            self._watched.append((number, self._life(number), on_end))
            if not self._has_thread:
                self._has_thread = True
                # The thread that waits for descriptors could be woken only by one more, and none may be left.
                threading.Thread(target=self._work, name="mpidist-lives", daemon=True).start()

    def look(self) -> bool:
        """Local. Look at all of them once. Returns whether any are left."""
        with self._lock:
            ended = [one for one in self._watched if not one[1] or self._life(one[0]) != one[1]]
            self._watched = [one for one in self._watched if one not in ended]
            self._has_thread = goes_on = bool(self._watched)
        for _, _, on_end in ended:
            on_end()
        return goes_on

    def _work(self) -> None:
        while self.look():
            time.sleep(LOOK_SECONDS)


def life_of(number: int) -> str:
    """Local. The time at which a process was started, empty if it has ended: its number may be another's by now."""
    try:
        # The name of a program may have brackets and spaces, too.
        state, *fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # Zombies and dead processes wait for their parent (`man 5 proc`).
    return "" if state in "ZX" else fields[18]
