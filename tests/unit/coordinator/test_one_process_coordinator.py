"""A process without a launcher that is coordinator, worker and server at once, as in a notebook."""

from __future__ import annotations

import ctypes
import importlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.coordinator import experimental_get_current_worker_index
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.errors import CancelledError, InterruptedCallError
from mpidist.failures import interrupts
from mpidist.parameter_server.options import ServerOptions
from mpidist.parameter_server.queue.commits import RateError
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy


@pytest.fixture
def strategy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ParameterServerStrategy]:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    # Where another one stands, as in a shell's background, the library leaves it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ParameterServerStrategy(options=ServerOptions(heap_bytes=1 << 22)) as strategy:
            yield strategy
    finally:
        signal.signal(signal.SIGINT, before)


def test_functions_run_while_the_program_is_in_the_scope(strategy: ParameterServerStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        weight = mpidist.Variable(np.ones(3))
        optimizer, other = mpidist.optimizers.SGD(0.5), mpidist.optimizers.SGD(0.25)
        optimizer.build([weight])
        other.build([weight])
        # One optimizer is captured, the other one is an argument.
        coordinator.schedule(lambda: optimizer.apply_gradients([(np.ones(3), weight)]))
        coordinator.schedule(lambda given: given.apply_gradients([(np.ones(3), weight)]), (other,))
        coordinator.join()
    assert weight.numpy().tolist() == [0.25] * 3


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"args": 3}, r"`args` must be a tuple of the function's arguments, as args=\(value,\), got 3"),
        ({"args": "abc"}, r"`args` must be a tuple .* got 'abc'"),
        ({"args": np.ones(2)}, r"`args` must be a tuple .* got an? "),
        ({"kwargs": [1]}, r"`kwargs` must be a dictionary of the function's arguments, got \[1\]"),
    ],
    ids=["a number", "a text", "an array", "a list"],
)
def test_arguments_come_in_a_tuple_and_a_dictionary(
    strategy: ParameterServerStrategy, given: dict[str, Any], text: str
) -> None:
    coordinator = ClusterCoordinator(strategy)
    for call in (coordinator.schedule, coordinator.create_per_worker_value):
        with pytest.raises(TypeError, match=text):
            call(abs, **given)
    assert coordinator.schedule(max, (1, 2), {"key": abs}).fetch() == 2


def test_a_coordinator_is_not_sent(strategy: ParameterServerStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)
    with pytest.raises(TypeError, match=r"captures 'coordinator', .* cannot be sent .*: it exists in this process"):
        coordinator.schedule(lambda: coordinator.done() or 3)
    with pytest.raises(TypeError, match=r"is given argument 0, .* cannot be sent .*: it exists in this process"):
        coordinator.schedule(repr, (coordinator,))


def test_schedule_waits_for_room_in_the_queue(strategy: ParameterServerStrategy) -> None:
    coordinator = ClusterCoordinator(strategy, queue_size=2)
    values = [coordinator.schedule(abs, (number,)) for number in range(3)]
    assert not any(value.is_done for value in values), "one is the worker's, and two wait"
    values.append(coordinator.schedule(abs, (3,)))
    assert [value.is_done for value in values] == [True, False, False, False]
    assert coordinator.fetch(values) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "wait",
    [
        lambda coordinator, values: coordinator.join(),
        lambda coordinator, values: coordinator.done(),
        lambda coordinator, values: coordinator.fetch(values),
        lambda coordinator, values: coordinator.schedule(abs, (7,)),
    ],
    ids=["join", "done", "fetch", "schedule"],
)
def test_an_interrupt_comes_between_functions(
    strategy: ParameterServerStrategy, wait: Callable[[ClusterCoordinator, list[Any]], object]
) -> None:
    coordinator = ClusterCoordinator(strategy, queue_size=2)
    with strategy.scope():
        counts = mpidist.Variable(np.zeros(3))

    def work(number: int) -> int:
        counts.assign_add(np.eye(3)[number])
        if number == 0:
            signal.raise_signal(signal.SIGINT)
        return number

    for times in (1, 2):
        values = [coordinator.schedule(work, (number,)) for number in range(3)]
        with pytest.raises(KeyboardInterrupt):
            wait(coordinator, values)
        assert not values[2].is_done
        coordinator.join()
        assert coordinator.fetch(values) == [0, 1, 2]
        assert counts.numpy().tolist() == [times] * 3, "nothing is lost, and nothing counts twice"


def test_signals_of_one_key_press_are_one_interrupt(strategy: ParameterServerStrategy) -> None:
    """Launchers pass the terminal's on, and a key that is held down repeats: no message is left in the middle."""
    coordinator = ClusterCoordinator(strategy)

    def work() -> int:
        for _ in range(5):
            signal.raise_signal(signal.SIGINT)
        return 5

    value = coordinator.schedule(work)
    with pytest.raises(KeyboardInterrupt):
        coordinator.join()
    coordinator.join()
    assert value.fetch() == 5


def test_a_second_interrupt_in_a_message_ends_the_coordinator(
    strategy: ParameterServerStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message may be lost: who waited for its effect would wait without end."""
    coordinator = ClusterCoordinator(strategy)
    monkeypatch.setattr(interrupts, "_ONE_PRESS_SECONDS", -1.0)
    station: Any = strategy._station
    poll = station.window.poll

    def interrupted(seconds: float = 0.0) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return poll(seconds)

    coordinator.schedule(abs, (1,))
    with monkeypatch.context() as patch:
        patch.setattr(station.window, "poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            coordinator.join()
    for call in (coordinator.join, lambda: coordinator.schedule(abs, (1,)), coordinator.done):
        with pytest.raises(InterruptedCallError, match=r"a second interrupt .* Restart the job"):
            call()


def test_an_interrupt_while_an_error_cancels_leaves_the_error(strategy: ParameterServerStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)

    def fail() -> None:
        raise LookupError("of the function")

    failed = coordinator.schedule(fail)
    # This one runs when the first has failed, and is waited for.
    interrupting = coordinator.schedule(signal.raise_signal, (signal.SIGINT,))
    behind = coordinator.schedule(abs, (1,))
    with pytest.raises(KeyboardInterrupt):
        coordinator.join()
    with pytest.raises(LookupError, match="of the function"):
        coordinator.join()
    with pytest.raises(CancelledError):
        behind.fetch()
    with pytest.raises(LookupError, match="of the function"):
        failed.fetch()
    assert interrupting.fetch() is None
    assert coordinator.schedule(abs, (-2,)).fetch() == 2


def test_a_function_knows_the_index_of_its_worker(strategy: ParameterServerStrategy) -> None:
    coordinator, index = ClusterCoordinator(strategy), experimental_get_current_worker_index
    assert coordinator.schedule(index).fetch() == 0
    assert coordinator.schedule(lambda: strategy.run(index)).fetch() == 0
    made = coordinator.create_per_worker_value(index)
    assert coordinator.schedule(lambda value: value, (made,)).fetch() == 0
    with strategy.scope(), pytest.raises(RuntimeError, match=r"inside a function .* ClusterCoordinator\(strategy\)"):
        index()
    with pytest.raises(RuntimeError, match="inside a function that a worker runs"):
        index()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"worker": 1}, "`worker` must be between 0 and 0, got 1"),
        ({"worker": True}, "`worker` must be an integer of at least 0, got True"),
        ({"retries": -1}, "`retries` must be an integer of at least 0, got -1"),
        ({"priority": "high"}, "`priority` must be a number, got 'high'"),
        ({"on_error": ["keep"]}, r"`on_error` must be 'cancel' or 'keep', got \['keep'\]"),
        ({"kwargs": {1: 2}}, "the names of the function's arguments as keys, got 1"),
        ({"queue_size": 0}, "`queue_size` must be an integer of at least 1, got 0"),
        ({"closure_timeout": 0}, "`closure_timeout` must be above 0 seconds"),
        ({"prefetch": 1}, "`prefetch` must be True or False, got 1"),
        ({"max_deaths": 0}, "`max_deaths` must be an integer of at least 1, got 0"),
        ({"max_deaths": 1.5}, "`max_deaths` must be an integer of at least 1, got 1.5"),
    ],
)
def test_a_wrong_rule_is_named(strategy: ParameterServerStrategy, given: dict[str, Any], text: str) -> None:
    is_option = given.keys() <= {"queue_size", "closure_timeout", "prefetch", "max_deaths"}
    if is_option:
        with pytest.raises((TypeError, ValueError), match=text):
            ClusterCoordinator(strategy, **given)
    if not is_option or "max_deaths" in given:
        with pytest.raises((TypeError, ValueError), match=text):
            ClusterCoordinator(strategy).schedule(abs, **given)


def test_later_coordinators_have_the_options_of_the_first(strategy: ParameterServerStrategy) -> None:
    first = ClusterCoordinator(strategy, 5, queue_size=7)
    assert ClusterCoordinator(strategy) is ClusterCoordinator(strategy, 5.0, queue_size=7) is first
    others: list[tuple[str, Any, Any]] = [
        ("queue_size", 8, 7), ("closure_timeout", 6.5, 5), ("prefetch", True, False), ("max_deaths", 1, 3),
    ]
    for name, given, used in others:
        with pytest.raises(ValueError, match=rf"`{name}` must be {used}, as when .* was made, got {given}: a strategy"):
            ClusterCoordinator(strategy, **{name: given})


@pytest.mark.parametrize(
    ("given", "text"), [(-1, "got -1"), (True, "got True"), (0.5, "got 0.5"), ("1", "got '1'")]
)
def test_a_wrong_staleness_is_named(given: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"`staleness` must be an integer of at least 0.*{text}"):
        ParameterServerStrategy(staleness=given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"synchronous": 1}, "`synchronous` must be True or False, got 1"),
        ({"backup_workers": -1, "synchronous": True}, "`backup_workers` must be an integer of at least 0, got -1"),
        ({"backup_workers": 1}, "`backup_workers` must be 0 unless synchronous=True, got 1"),
        ({"backup_workers": 1, "synchronous": True}, "less than the number of workers, which is 1, got 1"),
        ({"staleness": 0, "synchronous": True}, "`staleness` must be None with synchronous=True, got 0"),
    ],
)
def test_a_wrong_pace_is_named(given: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        ParameterServerStrategy(**given)


def test_synchronous_functions_are_not_prefetched() -> None:
    strategy = ParameterServerStrategy(synchronous=True)
    with pytest.raises(ValueError, match="`prefetch` must be False with synchronous=True"):
        ClusterCoordinator(strategy, prefetch=True)
    assert ClusterCoordinator(strategy).late_updates == 0
    strategy.close()


def fail(text: str) -> None:
    raise LookupError(text)


@pytest.mark.parametrize("raiser", ["schedule", "join", "done"])
def test_the_first_error_comes_once_from_whoever_is_next(strategy: ParameterServerStrategy, raiser: str) -> None:
    coordinator = ClusterCoordinator(strategy, prefetch=True)
    with strategy.scope():
        count = mpidist.Variable(0)
    here = coordinator.create_per_worker_value(lambda: 5)
    # The worker has two functions at the same time.
    first, second = (coordinator.schedule(fail, (text,)) for text in ("first", "second"))
    behind = [coordinator.schedule(lambda: count.assign_add(1)) for _ in range(3)]
    while not first.is_done:
        pass
    with pytest.raises(LookupError, match="first"):
        coordinator.schedule(lambda: count.assign_add(10)) if raiser == "schedule" else getattr(coordinator, raiser)()
    coordinator.join()
    assert coordinator.done()
    for value, text in ((first, "first"), (second, "second")):
        with pytest.raises(LookupError, match=text):
            value.fetch()
    with pytest.raises(CancelledError, match=r"function is cancelled\. Please reschedule the function\."):
        behind[-1].fetch()
    assert int(count) < 3, "what was cancelled does not run, nor what was given to the `schedule` that raised"
    assert coordinator.schedule(lambda value: value + 1, (here,)).fetch() == 6


@pytest.mark.parametrize("fetches", ["the failed", "one that takes its value"])
@pytest.mark.parametrize("then", ["schedule", "join", "done"])
def test_an_error_that_a_value_has_raised_is_not_raised_again(
    strategy: ParameterServerStrategy, then: str, fetches: str
) -> None:
    coordinator = ClusterCoordinator(strategy)
    failed = coordinator.schedule(fail, ("first",))
    taking = coordinator.schedule(repr, (failed,))
    # The first of them may run meanwhile.
    behind = [coordinator.schedule(abs, (1,)) for _ in range(3)]
    with pytest.raises(LookupError, match="first"):
        (failed if fetches == "the failed" else taking).fetch()
    # What waited is cancelled all the same.
    next_one = coordinator.schedule(abs, (-2,)) if then == "schedule" else None
    coordinator.join() if then != "done" else coordinator.done()
    with pytest.raises(CancelledError):
        behind[-1].fetch()
    assert next_one is None or next_one.fetch() == 2
    # The next error is another one.
    coordinator.schedule(fail, ("second",))
    with pytest.raises(LookupError, match="second"):
        coordinator.join()


def test_a_function_that_cannot_be_sent_is_not_scheduled(strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    coordinator, lock, communicator = ClusterCoordinator(strategy), threading.Lock(), SoloCommunicator()
    library = ctypes.PyDLL(None)
    mirrored, other = mpidist.Variable(1.0, name="mine"), mpidist.OneDeviceStrategy("cpu:0")
    with open(tmp_path / "file", "w") as file:
        captures: dict[str, Callable[[], object]] = {
            "lock": lambda: lock, "file": lambda: file, "communicator": lambda: communicator, "other": lambda: other,
            "mirrored": lambda: mirrored, "library": lambda: library,
        }
        for name in captures:
            with pytest.raises(TypeError, match=rf"captures '{name}', .* cannot be sent to a worker: .*Make it inside"):
                coordinator.schedule(captures[name])
            with pytest.raises(TypeError, match=r"is given argument 'value', .* cannot be sent to a worker"):
                coordinator.schedule(repr, kwargs={"value": captures[name]()})
    assert coordinator.done()
    assert coordinator.schedule(abs, (-1,)).fetch() == 1


FACTOR = 2
FACTORS = {"a": 2}


def test_a_global_that_is_bound_anew_is_sent_anew(
    strategy: ParameterServerStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = ClusterCoordinator(strategy)
    times = lambda value: (value * FACTOR, value * FACTORS["a"])  # noqa: E731  # sent by its code, having no name
    assert coordinator.schedule(times, (3,)).fetch() == (6, 6)
    # What is changed in place stays as it was sent.
    monkeypatch.setitem(FACTORS, "a", 7)
    assert coordinator.schedule(times, (3,)).fetch() == (6, 6)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 5)
    with pytest.warns(RuntimeWarning, match=r"uses the global 'FACTOR', which has changed .* as an argument"):
        value = coordinator.schedule(times, (3,))
    assert value.fetch() == (15, 21)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 6)
    # It is said once.
    assert coordinator.schedule(times, (3,)).fetch() == (18, 21)


def test_retries_priorities_and_kept_errors(strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    coordinator, log = ClusterCoordinator(strategy), tmp_path / "log"
    with strategy.scope():
        count = mpidist.Variable(0)

    def work(name: str, failures: int = 0) -> int:
        with log.open("a") as file:
            file.write(f"{name} ")
        count.assign_add(1)
        times = log.read_text().split().count(name)
        if times <= failures:
            raise LookupError(name)
        return times

    # The first is the worker's at once.
    values = [
        coordinator.schedule(work, (name, failures), priority=priority, retries=retries, on_error="keep")
        for name, failures, priority, retries in (
            ("a", 0, 0, 0), ("b", 0, 0.5, 0), ("c", 2, 3, 2), ("d", 2, 3, 1), ("e", 0, -1, 0), ("f", 1, 0.5, 0),
        )
    ]
    coordinator.join()
    assert log.read_text().split() == ["a", "c", "c", "c", "d", "d", "b", "f", "e"]
    assert coordinator.fetch([values[0], values[1], values[2], values[4]]) == [1, 1, 3, 1]
    for value, name in ((values[3], "d"), (values[5], "f")):
        with pytest.raises(LookupError, match=name):
            value.fetch()
    assert int(count) == 4, "what a function pushed before it raised never counts"


def test_a_class_of_the_program_stays_as_it_is(strategy: ParameterServerStrategy) -> None:
    """Its methods would come back from the worker, which is this process, with globals of their own."""
    space: dict[str, Any] = {"__name__": "__main__", "FACTOR": 1.0}
    exec("class Step:\n    def run(self):\n        return FACTOR\n", space)
    coordinator, kind = ClusterCoordinator(strategy), space["Step"]
    method, step = kind.run, kind()
    assert coordinator.schedule(step.run).fetch() == 1
    assert kind.run is method
    space["FACTOR"] = 2.0
    assert step.run() == 2
    with pytest.warns(RuntimeWarning, match="uses the global 'FACTOR', which has changed"):
        assert coordinator.schedule(step.run).fetch() == 2
    assert coordinator.schedule(lambda given: isinstance(given, kind), (step,)).fetch()


GO = threading.Event()
REFUSED: list[str] = []


def test_a_thread_that_outlives_its_function_is_refused(strategy: ParameterServerStrategy) -> None:
    with strategy.scope():
        count = mpidist.Variable(0)

    def leave() -> None:
        def late(go: threading.Event, refused: list[str]) -> None:
            go.wait()
            for use in (count.numpy, lambda: count.assign_add(1)):
                try:
                    use()
                except RuntimeError as error:
                    refused.append(str(error))
            refused.append("end")

        this = importlib.import_module("tests.unit.coordinator.test_one_process_coordinator")
        threading.Thread(target=late, args=(this.GO, this.REFUSED)).start()

    ClusterCoordinator(strategy).schedule(leave).fetch()
    GO.set()
    while "end" not in REFUSED:
        time.sleep(0.01)
    assert len(REFUSED) == 3, REFUSED
    assert all("while no function runs here: join the threads" in text for text in REFUSED[:2]), REFUSED
    assert int(count) == 0


@pytest.mark.parametrize("rate", [lambda _: np.nan, lambda _: "fast", lambda _: 1 / 0])
def test_a_step_without_a_learning_rate_ends(strategy: ParameterServerStrategy, rate: Callable[[int], Any]) -> None:
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        weight, count = mpidist.Variable(np.ones(3)), mpidist.Variable(0)
    optimizer = mpidist.optimizers.SGD(rate)
    optimizer.build([weight])

    def step() -> None:
        count.assign_add(1)
        optimizer.apply_gradients([(np.ones(3), weight)])

    with pytest.raises(RateError, match="The update is not applied"):
        coordinator.schedule(step, on_error="keep").fetch()
    coordinator.schedule(step)
    with pytest.raises(RateError, match="The update is not applied"):
        coordinator.join()
    assert (weight.numpy().tolist(), int(count)) == ([1] * 3, 0)
    optimizer.learning_rate = 0.5
    # More than there are slots.
    for _ in range(8):
        coordinator.schedule(step)
    coordinator.join()
    assert (weight.numpy().tolist(), int(count)) == ([-3] * 3, 8)


class Named:
    """Names a variable for functions that do not capture it."""

    weight: Any = None


def test_what_a_class_names_is_changed_with_the_function(strategy: ParameterServerStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        Named.weight = mpidist.Variable(np.zeros((3, 2)))
        table = mpidist.Variable(np.zeros((3, 2)), sparse_gradient=True)
    rows = mpidist.IndexedSlices(np.ones((1, 2)), np.array([1]))

    def change(fails: bool) -> list[Any]:
        Named.weight.assign_add(np.ones((3, 2)))
        Named.weight.scatter_add(rows)
        seen = [Named.weight.numpy().tolist(), Named.weight.sparse_read([1]).tolist()]
        Named.weight.assign(Named.weight.value() + 1)
        if fails:
            raise ZeroDivisionError
        return seen

    try:
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                coordinator.schedule(change, (True,), on_error="keep").fetch()
        assert Named.weight.numpy().tolist() == [[0, 0]] * 3
        assert coordinator.schedule(change, (False,)).fetch() == [[[1, 1], [2, 2], [1, 1]], [[2, 2]]]
        assert Named.weight.numpy().tolist() == [[2, 2], [3, 3], [2, 2]]
        # Outside functions it is changed at once.
        Named.weight.assign_add(np.ones((3, 2)))
        table.scatter_add(rows)
        assert Named.weight.sparse_read([0, 1]).tolist() == [[3, 3], [4, 4]]
    finally:
        Named.weight = None


def test_who_only_looks_lets_functions_run(strategy: ParameterServerStrategy) -> None:
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        count = mpidist.Variable(0)
    values = [coordinator.schedule(lambda: count.assign_add(1)) for _ in range(3)]
    while not all(value.is_done for value in values):
        time.sleep(0.001)
    assert int(count) == 3


def test_after_its_end_the_strategy_says_so() -> None:
    strategy = ParameterServerStrategy(options=ServerOptions(heap_bytes=1 << 22))
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        weight = mpidist.Variable(1.0)
    late = coordinator.schedule(lambda: 1)
    strategy.close()
    acts: list[Callable[[], object]] = [
        weight.numpy, lambda: weight.assign(2.0), lambda: coordinator.schedule(lambda: 1), late.fetch,
        coordinator.join, lambda: coordinator.create_per_worker_value(lambda: 1),
    ]
    for act in acts:
        with pytest.raises(RuntimeError, match="this ParameterServerStrategy is closed: its servers have ended"):
            act()
    for act in (strategy.scope().__enter__, strategy.replicas.require_open):
        with pytest.raises(RuntimeError, match=r"this strategy is closed: .* Its variables on servers are gone"):
            act()
    assert not late.is_done


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"trainable": "False"}, TypeError, "variable 'w': `trainable` must be True or False, got 'False'"),
        ({"sparse_gradient": 1}, TypeError, "variable 'w': `sparse_gradient` must be True or False, got 1"),
        ({"synchronization": "ON_READ", "trainable": True}, ValueError, "trainable=True is for variables that"),
        ({"synchronization": "NONE"}, ValueError, "synchronization NONE is not supported"),
    ],
)
def test_variables_of_servers_take_the_arguments_of_others(
    strategy: ParameterServerStrategy, arguments: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with strategy.scope(), pytest.raises(kind, match=text):
        mpidist.Variable([1.0], name="w", **arguments)
