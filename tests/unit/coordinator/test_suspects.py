"""Closures whose workers were lost while they ran: who is blamed, when it is run again, and when it fails."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from mpidist.errors import FatalFunctionError
from mpidist.parameter_server.protocol.messages import Finished
from mpidist.parameter_server.protocol.references import arguments_label, dump_arguments
from mpidist.parameter_server.queue.closures import Action
from mpidist.parameter_server.queue.waiting import SETTLED_SECONDS
from mpidist.parameter_server.queue.work import ClosureEnd, End, Name, Rules, Work
from tests.unit.coordinator.test_coordinator_closures import (
    FIRST,
    SECOND,
    THIRD,
    done,
    fail,
    finish,
    lose,
    make,
    schedule,
    take,
)


def error_of(actions: list[Action]) -> Exception:
    """The error of the one closure that ends."""
    (end,) = [action for action in actions if isinstance(action, ClosureEnd)]
    assert end.end is End.ERROR
    error = pickle.loads(end.payload)
    assert isinstance(error, Exception)
    return error


def test_a_closure_fails_when_so_many_workers_were_lost_with_it() -> None:
    closures = make((FIRST, SECOND, THIRD))
    arguments = pickle.dumps(((3, np.zeros((2, 3))), {"rate": 0.5}))
    closures.schedule(Work(Name("function", 1, b"code"), arguments, label="step"), Rules(max_deaths=2), 0.0)
    schedule(closures)
    assert not [one for one in lose(closures, FIRST) if isinstance(one, ClosureEnd)]
    called = "function step(3, <array of shape (2, 3) and dtype float64>, rate=0.5), closure 1,"
    assert closures.suspects() == [f"{called} Lost: "]
    error = error_of(closures.lost(THIRD, 5.0, "worker 2: exit code 0"))
    assert isinstance(error, FatalFunctionError)
    assert str(error).startswith(
        f"{called} was given up: workers were lost 2 times while they ran it, and `max_deaths` is 2. Lost: ; worker 2: "
        "exit code 0. Look in their output"
    )
    # Others go on, and the error is of this one.
    assert closures.error is not None
    assert finish(closures, SECOND, 2)[0] == ClosureEnd(2, End.RESULT, b"result")
    assert closures.is_done


def test_a_closure_waits_until_the_loss_is_settled_and_others_do_not() -> None:
    closures = make((FIRST, SECOND))
    schedule(closures)
    schedule(closures)
    schedule(closures)
    assert done(closures.lost(FIRST, 10.0)) == []
    assert done(finish(closures, SECOND, 2, now=10.1)) == [(SECOND, 3)]
    assert done(finish(closures, SECOND, 3, now=10.2)) == []
    assert closures.look(10.0 + SETTLED_SECONDS / 2) == []
    assert not closures.is_done
    assert closures.in_flight == 0
    assert done(closures.look(10.0 + SETTLED_SECONDS)) == [(SECOND, 1)]
    assert closures.in_flight == 1


def test_only_what_a_worker_runs_is_blamed_for_its_loss() -> None:
    """Not what was sent ahead, what it has finished, or what waits while it makes a value of its own."""
    closures = make((FIRST,), prefetch=True)
    once = Rules(max_deaths=1, on_error="keep")
    schedule(closures, rules=once)
    schedule(closures, rules=once)
    assert isinstance(error_of(lose(closures, FIRST)), FatalFunctionError)
    assert done(closures.joined(SECOND, 3.0)) == [(SECOND, 2)]
    take(closures, SECOND, Finished(2, 2, (1,), (), b"result"))
    assert lose(closures, SECOND)[-1] != ClosureEnd(2, End.ERROR)
    assert closures.joined(THIRD, 6.0)
    closures.resources.build(Work(Name("function", 2, b"code"), b""))
    lose(closures, THIRD)
    closures.joined(6, 9.0)
    assert finish(closures, 6, 2, attempt=4)[0] == ClosureEnd(2, End.RESULT, b"result")


def test_a_suspect_is_cancelled_as_others_are() -> None:
    closures = make((FIRST, SECOND))
    schedule(closures)
    closures.lost(FIRST, 0.0)
    schedule(closures)
    fail(closures, SECOND, 2)
    assert closures.cancel() == [ClosureEnd(1, End.CANCELLED)]
    assert closures.take_error() is not None
    assert closures.is_done
    assert closures.look(100.0) == []


class _Raises:
    def __repr__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(("given", "named", "label"), [
    ((), {}, "()"), ((1, "a" * 100), {"b": None}, "(1, 'aaaaaaaaaaaa...aaaaaaaaaaaaa', b=None)"),
    ((2.5, [0] * 1000), {}, "(2.5, [0, 0, 0, 0, 0, 0, ...])"),
    ((np.zeros(100_000),), {}, "(... 800"), ((_Raises(),), {}, "(<_Raises instance at 0x"),
])
def test_arguments_have_a_short_text(given: tuple[object, ...], named: dict[str, object], label: str) -> None:
    data = dump_arguments((given, named), lambda _: None)
    assert arguments_label(data).startswith(label)
    assert len(arguments_label(data)) < 80


def test_what_arguments_name_has_its_kind_and_what_cannot_be_loaded_none() -> None:
    one = object()
    data = dump_arguments(((one,), {}), lambda given: ("variable", 1) if given is one else None)
    assert arguments_label(data) == "(<variable>)"
    assert arguments_label(b"no pickle") == "(...)"
