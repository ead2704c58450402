"""The end of a program that is preempted, as tests on several ranks see it."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from mpidist.checkpoint.preemption import handler as preemption
from mpidist.experimental import PreemptionCheckpointHandler


def train_until_preempted(handler: PreemptionCheckpointHandler, train: Callable[[], None], steps: int) -> None:
    """Collective. Train, and require that the handler ends the program with its code after so many steps."""
    # The exit code of a program, which the test must not agree on.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preemption, "agree_on_exit", lambda: None)
        patch.setattr(preemption, "leave_later", lambda *_: None)
        with pytest.raises(SystemExit) as caught, handler:
            train()
    assert caught.value.code == 42
    assert handler.total_run_calls == steps
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
