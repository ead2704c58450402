"""What functions capture is as it was when they were first sent; what is bound to something else is noticed."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.helpers.amounts import amount
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)

# A worker cannot import functions with these globals: they are sent.
SPACE: dict[str, Any] = {"__name__": "__main__", "FACTOR": 0.0}
exec("""
def factor():
    return FACTOR

def by_name(given=None):
    return factor()

class Step:
    def __init__(self):
        self.rate = 0.0

    def run(self):
        return self.rate, FACTOR

    def __call__(self):
        return self.run()

class Later:
    rate = 1.0
    __slots__ = ("__dict__", "slot")

    def over_the_class(self):
        return self.rate

    def set_later(self):
        return getattr(self, "mask", None)

    def in_a_slot(self):
        return getattr(self, "slot", None)

    @classmethod
    def of_the_class(cls):
        return cls.rate

def made_later():
    try:
        return LATER
    except NameError:
        return None

def of_the_function():
    return of_the_function.count

of_the_function.count = None
""", SPACE)


def first_of(numbers: list[float]) -> float:
    return numbers[0]


def test_the_value_of_the_moment_counts(communicator: Communicator) -> None:
    """Memory is used again: what is bound now may lie where something lay that was bound when it was sent before."""

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del strategy
        value = 0.0

        def cell() -> float:
            return value

        def default(given: float = 0.0) -> float:
            return given

        def named(*, given: float = 0.0) -> float:
            return given

        def captured(number: float) -> Callable[[], float]:
            return lambda: number

        def defaulted(number: float) -> Callable[[], float]:
            def own(given: float = number) -> float:
                return given

            return own

        calls: list[tuple[str, Callable[[float], Callable[[], float]]]] = [
            ("a cell", lambda number: cell), ("a default", lambda number: default),
            ("a named default", lambda number: named), ("a lambda", lambda number: lambda: number),
            ("its own default", defaulted),
            ("a partial", lambda number: functools.partial(default, number)),
            ("a named partial", lambda number: functools.partial(default, given=number)),
            ("a partial of a partial", lambda number: functools.partial(functools.partial(max, number), -1.0)),
            ("a method of a new object", lambda number: types.MethodType(first_of, [number])),
        ]
        # With nothing between, the next tuple lies where the one before the last lay.
        for number in range(20):
            default.__defaults__ = (number * 1.5,)
            assert coordinator.schedule(default, worker=0).fetch() == number * 1.5, number
        for number in range(12):
            value = number * 1.5
            default.__defaults__ = (value,)
            named.__kwdefaults__ = {"given": number * 1.5}
            for name, make in calls:
                assert coordinator.schedule(make(value), worker=0).fetch() == number * 1.5, (name, number)

    on_chief(communicator, program)


def test_what_is_bound_to_something_else_is_noticed(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del strategy
        step = SPACE["Step"]()
        functions: dict[str, tuple[Any, Callable[[float], Any]]] = {
            "factor": (SPACE["factor"], lambda number: number),
            "by_name": (functools.partial(SPACE["by_name"], 1), lambda number: number),
            "run": (step.run, lambda number: (number, number)),
            "Step": (step, lambda number: (number, number)),
        }
        for name, (function, expected) in functions.items():
            # A moment before, so that each has something to notice.
            SPACE["FACTOR"] = step.rate = -1.0
            coordinator.schedule(function, worker=0).fetch()
            for number in (1.5, 2.5):
                SPACE["FACTOR"] = step.rate = number
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    assert coordinator.schedule(function, worker=0).fetch() == expected(number), name
                texts = [str(one.message) for one in caught if one.category is RuntimeWarning]
                # Once for each function.
                assert len(texts) == (number == 1.5), (name, texts)
                assert all("which has changed since the function was sent to the workers: it is" in t for t in texts)
        # What is changed in place is not looked into.
        kept = [1.0]
        inside = lambda: kept[0]  # noqa: E731
        assert coordinator.schedule(inside, worker=0).fetch() == 1
        kept[0] = 2.0
        assert coordinator.schedule(inside, worker=0).fetch() == 1

    on_chief(communicator, program)


def test_names_that_come_later_are_noticed(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        del strategy
        kind = SPACE["Later"]
        later, scale = kind(), 1.0

        def inner() -> float:
            return scale

        def outer() -> float:
            return inner()

        def rescale() -> None:
            nonlocal scale
            scale = 7.0

        cases: list[tuple[Callable[[], Any], Callable[[], object], object]] = [
            (later.over_the_class, lambda: setattr(later, "rate", 7.0), 1.0),
            (later.set_later, lambda: setattr(later, "mask", 7.0), None),
            (later.in_a_slot, lambda: setattr(later, "slot", 7.0), None),
            (kind.of_the_class, lambda: setattr(kind, "rate", 7.0), 1.0),
            (SPACE["made_later"], lambda: SPACE.update(LATER=7.0), None),
            (SPACE["of_the_function"], lambda: setattr(SPACE["of_the_function"], "count", 7.0), None),
            (outer, rescale, 1.0),
        ]
        try:
            for function, change, before in cases:
                assert coordinator.schedule(function, worker=0).fetch() == before
                change()
                with pytest.warns(RuntimeWarning, match="which has changed since the function was sent"):
                    assert coordinator.schedule(function, worker=0).fetch() == 7.0
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    assert coordinator.schedule(function, worker=0).fetch() == 7.0
        finally:
            kind.rate, SPACE["of_the_function"].count = 1.0, None
            SPACE.pop("LATER", None)

    on_chief(communicator, program)


def test_functions_that_are_made_anew_each_time_are_forgotten(communicator: Communicator) -> None:
    count = amount(400, 10_000)

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            total = mpidist.Variable(0, dtype="int64")

        def known() -> int:
            home: Any = mpidist.get_strategy().home
            return sum(kind == "function" for kind, _ in (*home._named, *home._codes))

        for number in range(count):
            coordinator.schedule(lambda number=number: total.assign_add(number), worker=0)
            if number % 200 == 199:
                coordinator.join()
        coordinator.join()
        assert int(total) == sum(range(count))
        # So many are kept for their next use, and one runs.
        assert coordinator.schedule(known, worker=0).fetch() <= 258
        functions: Any = coordinator._functions
        assert len(functions._kept) <= 256

    on_chief(communicator, program)
