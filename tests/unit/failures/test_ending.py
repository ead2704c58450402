"""The hooks of one process, without MPI: who prints what, and when the job is ended."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from mpidist.errors import mark_shared
from mpidist.failures import ending, farewell, interrupts
from mpidist.failures.deaths import DeathWatch
from mpidist.failures.watchdog import Watchdog
from tests.unit.failures.settable_clock import Clock


class AbortedError(Exception):
    """Stands for the end of the process."""


class Barrier:
    """The others reach it after a few looks."""

    def __init__(self, looks: int = 3) -> None:
        self.looks = looks

    def Ibarrier(self) -> Barrier:
        return self

    def Test(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    clock.put_into(monkeypatch, ending, farewell)
    return clock


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Callable[..., ending._Ending]:

    def abort(code: int) -> None:
        raise AbortedError(code)

    def build(rank: int = 0, *, finalized: bool = False) -> ending._Ending:
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        functions = ending.MpiFunctions(abort, lambda: finalized, lambda: None, lambda _: [])
        return ending._Ending(rank, 3, "host", functions)

    return build


def caught(error: BaseException) -> tuple[type[BaseException], BaseException, Any]:
    try:
        raise error
    except BaseException as raised:
        return type(raised), raised, raised.__traceback__


@pytest.mark.parametrize("rank", [0, 2])
def test_a_failure_is_printed_whole_and_ends_the_job(
    make: Callable[..., ending._Ending], capfd: pytest.CaptureFixture[str], rank: int
) -> None:
    with pytest.raises(AbortedError, match="1"):
        make(rank).on_exception(*caught(ValueError("the cause")))
    text = capfd.readouterr().err
    assert text.startswith(f"mpidist: rank {rank} of 3 on host failed, the job ends\nTraceback (most recent call last)")
    assert text.count("ValueError: the cause") == 1
    assert "raise error" in text


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_has_no_traceback(
    make: Callable[..., ending._Ending], clock: Clock, capfd: pytest.CaptureFixture[str], rank: int
) -> None:
    """The first rank says so at once; another one only if the first has not ended the job until its turn."""
    with pytest.raises(AbortedError, match="130"):
        make(rank).on_exception(*caught(KeyboardInterrupt()))
    assert capfd.readouterr().err == "mpidist: interrupted\n"
    assert clock.slept[0] == (ending.TURN_SECONDS if rank else 0)


def test_an_interrupt_is_told_once_though_the_abort_comes_back(
    make: Callable[..., ending._Ending], capfd: pytest.CaptureFixture[str]
) -> None:
    """In a job of 64 ranks the launcher needs time to end them."""
    hooks = make(0)
    codes: list[int] = []
    hooks.abort = codes.append
    hooks.on_exception(*caught(KeyboardInterrupt()))
    assert (codes, capfd.readouterr().err) == ([130], "mpidist: interrupted\n")


def test_a_rank_leaves_the_printing_of_a_shared_error_to_rank_0(
    make: Callable[..., ending._Ending], clock: Clock
) -> None:
    hooks = make(1)
    with pytest.raises(AbortedError, match="1"):
        hooks.on_exception(*caught(mark_shared(ValueError("shared"))))
    assert ending.GRACE_SECONDS < clock.slept[0] < ending.GRACE_SECONDS + 2 * ending.TURN_SECONDS
    clock.slept.clear()
    with pytest.raises(AbortedError, match="1"):
        hooks.on_exception(*caught(ValueError("lone")))
    assert max(clock.slept) < ending.GRACE_SECONDS


def test_exit_with_a_code_is_noticed_only_if_nobody_catches_it(make: Callable[..., ending._Ending]) -> None:
    hooks = make()
    for code in (3, "text", True):
        with pytest.raises(SystemExit) as info:
            hooks.exit(code)
        assert info.value.code == code
        del info
    assert hooks.code is None
    for harmless in (None, 0):
        with pytest.raises(SystemExit):
            hooks.exit(harmless)
    hooks.at_exit()


def test_leaving_with_a_code_ends_the_job(
    make: Callable[..., ending._Ending], capfd: pytest.CaptureFixture[str]
) -> None:
    hooks = make(2)
    hooks.code = 4
    with pytest.raises(AbortedError, match="4"):
        hooks.at_exit()
    assert capfd.readouterr().err == "mpidist: rank 2 of 3 on host exited with 4, the job ends\n"


def test_nothing_is_asked_of_an_mpi_that_has_ended(make: Callable[..., ending._Ending]) -> None:
    hooks = make(finalized=True)
    one = farewell.Farewell(None, ())
    hooks.at_exit()
    del one
    hooks.on_exception(*caught(ValueError("late")))


def test_a_long_wait_is_explained_once(
    make: Callable[..., ending._Ending], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIDIST_WARN_SECONDS", "-1")
    assert farewell.leave_together([farewell.Farewell(one, ()) for one in (Barrier(), Barrier(5))], make(1).wait_at_end)
    text = capfd.readouterr().err
    assert text.count("mpidist: rank 1 of 3 on host has ended and still waits for other ranks") == 1


def test_a_wait_at_the_end_has_the_limit_of_all_waits(
    make: Callable[..., ending._Ending], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIDIST_TIMEOUT", "7")
    hooks = make(1)
    hooks.wait_at_end(6.9)
    with pytest.raises(AbortedError, match="1"):
        hooks.wait_at_end(7.1)
    text = capfd.readouterr().err
    assert text == "mpidist: rank 1 of 3 on host has ended and has waited 7 s for other ranks, the job ends\n"


def test_it_is_installed_once_and_not_when_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_installed", [])
    # What is installed stays in these, and would end the process of the tests that follow.
    monkeypatch.setattr(interrupts, "WATCH", types.SimpleNamespace(hear=lambda *_: None))
    for name, own in {"WATCH": DeathWatch(), "WATCHDOG": Watchdog(), "INTERRUPTS": interrupts.Interrupts()}.items():
        monkeypatch.setattr(ending, name, own)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "exit", sys.exit)
    for name in ("exit", "quit"):
        monkeypatch.setattr(builtins, name, None, raising=False)

    def install() -> None:
        functions = ending.MpiFunctions(lambda _: None, lambda: False, lambda: None, lambda _: [])
        ending.install(0, 2, "host", functions, aborts_in_threads=True)

    monkeypatch.setenv("MPIDIST_ABORT", "0")
    assert ending.is_switched_off()
    monkeypatch.delenv("MPIDIST_ABORT")
    assert not ending.is_switched_off()
    install()
    hook = sys.excepthook
    assert hook is not sys.__excepthook__
    assert sys.exit == builtins.exit == builtins.quit
    install()
    assert sys.excepthook is hook
