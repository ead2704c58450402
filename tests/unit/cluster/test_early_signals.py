"""Signals that are noted from the import on: who gets them in the end, and which processes note them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from mpidist.cluster import early_signals
from mpidist.cluster.early_signals import EarlySignals
from mpidist.cluster.slurm import job
from mpidist.comm.calls.order import CallOrder
from mpidist.errors import LauncherError
from mpidist.recorder.calls import LoneCalls
from tests.helpers.launching import ROOT, launch_environment
from tests.helpers.waiting import until

NUMBER = signal.SIGUSR2


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    """The disposition of the signal, and the way into calls."""
    before, methods = signal.getsignal(NUMBER), (CallOrder.enter, CallOrder.sign_step)
    assert before == signal.SIG_DFL
    yield
    signal.signal(NUMBER, before)
    assert (CallOrder.enter, CallOrder.sign_step) == methods


def note(*, asks: bool = False) -> EarlySignals:
    early = EarlySignals()
    early.begin((NUMBER,), asks=asks)
    return early


def make_call(name: str = "reduce") -> None:
    CallOrder(LoneCalls(), [], is_alone=True).enter(name, None, None).leave()


def make_step() -> None:
    order = CallOrder(LoneCalls(), [], is_alone=True)
    with order.during("apply_gradients"):
        order.sign_step("apply_gradients", None, 0, sign=1, meets=False)


def taken() -> list[int]:
    """What a handler of the program's own gets from now on."""
    found: list[int] = []

    def take(number: int, _: FrameType | None) -> None:
        found.append(number)

    signal.signal(NUMBER, take)
    return found


def test_a_handler_that_takes_over_hears_what_has_come() -> None:
    early = note()
    assert not early.hand_over(signal.SIGWINCH)
    signal.raise_signal(NUMBER)
    # A variable gets its first value: no handler can be there yet.
    make_call("assign")
    assert early.hand_over(NUMBER)
    assert signal.getsignal(NUMBER) == signal.SIG_DFL
    make_call()


@pytest.mark.parametrize("call", [make_call, make_step])
def test_without_a_signal_the_former_disposition_is_there_again_from_the_first_call_on(
    call: Callable[[], None],
) -> None:
    early = note()
    assert signal.getsignal(NUMBER) == early.take
    call()
    assert signal.getsignal(NUMBER) == signal.SIG_DFL
    assert not early.hand_over(NUMBER)


def test_a_handler_of_the_program_gets_it_once_at_the_first_call() -> None:
    note()
    signal.raise_signal(NUMBER)
    signal.raise_signal(NUMBER)
    found = taken()
    own = signal.getsignal(NUMBER)
    assert found == []
    make_call()
    make_call()
    assert (found, signal.getsignal(NUMBER)) == ([NUMBER], own)


def test_what_the_program_handles_already_is_not_touched() -> None:
    found = taken()
    own = signal.getsignal(NUMBER)
    note()
    assert signal.getsignal(NUMBER) == own
    signal.raise_signal(NUMBER)
    assert found == [NUMBER]


@pytest.mark.parametrize("why", ["a job that ends for good", "too late"])
def test_nobody_waits_for_a_handler_in_vain(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "too late":
        monkeypatch.setattr(early_signals, "MOST_SECONDS", 0.0)
    else:
        monkeypatch.setattr(job, "can_be_requeued", lambda: False)
    early = note(asks=why != "too late")
    found = taken()
    # It came before the program's own handler.
    early._began += 1.0
    early.take(NUMBER)
    until(lambda: found, "the program's handler")
    make_call()
    assert found == [NUMBER]


def test_slurm_that_does_not_answer_gives_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask() -> bool:
        asked.append("")
        raise LauncherError("no answer")

    monkeypatch.setattr(job, "can_be_requeued", ask)
    early = note(asks=True)
    signal.raise_signal(NUMBER)
    until(lambda: asked, "the question")
    assert early.hand_over(NUMBER)
    make_call()


RANK = {"PMI_RANK": "0", "PMI_SIZE": "1"}
SLURM = {"SLURM_JOB_ID": "5"}
CODE = "import mpidist, signal; print([one.name for one in (signal.SIGTERM, signal.SIGUSR1) if signal.getsignal(one)])"


@pytest.mark.parametrize(
    ("environment", "noted"),
    [
        ({}, []),
        (RANK, []),
        (SLURM, []),
        ({"MPIDIST_SIGNALS": "TERM"}, []),
        ({**RANK, **SLURM}, ["SIGTERM", "SIGUSR1"]),
        ({**RANK, "MPIDIST_SIGNALS": "usr1"}, ["SIGUSR1"]),
    ],
    ids=["alone", "rank", "shell-in-job", "not-launched", "rank-in-job", "variable"],
)
def test_only_ranks_that_want_it_handle_signals_at_the_import(environment: dict[str, str], noted: list[str]) -> None:
    clean = {
        name: text for name, text in launch_environment().items()
        if not name.startswith(("SLURM_", "PMI_", "OMPI_COMM", "MPIDIST_SIGNALS"))
    }
    result = subprocess.run(
        [sys.executable, "-c", CODE], env={**clean, **environment, "PYTHONPATH": str(ROOT)}, text=True,
        capture_output=True, check=False, timeout=60,
    )
    assert result.stdout == f"{noted}\n", result.stderr
    assert os.environ.get("MPIDIST_SIGNALS") is None
