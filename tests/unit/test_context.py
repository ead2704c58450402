"""The stack of contexts, through the strategies that use it (one rank)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import mpidist
from mpidist import context
from mpidist.context import Entry


def state() -> tuple[bool, bool, bool]:
    replica = mpidist.get_replica_context()
    assert (replica is not None) != mpidist.in_cross_replica_context()
    return replica is not None, mpidist.in_cross_replica_context(), mpidist.has_strategy()


START = (True, False, False)
SCOPE = MERGE = (False, True, True)
RUN = (True, False, True)


def test_stack_is_per_thread() -> None:
    entry = Entry("strategy", None, "arena")
    seen: list[Any] = []
    context.push(entry)
    thread = threading.Thread(target=lambda: seen.append(context.innermost()))
    thread.start()
    thread.join()
    assert context.innermost() is entry
    context.pop()
    assert context.innermost() is None
    assert seen == [None]


def test_states_in_turn() -> None:
    strategy = mpidist.OneDeviceStrategy("cpu:0")
    seen = [state()]

    def merge_fn(given: Any) -> None:
        seen.append(state())
        assert given is mpidist.get_strategy() is strategy
        given.run(lambda: seen.append(state()))

    def replica_fn() -> None:
        seen.append(state())
        mpidist.get_replica_context().merge_call(merge_fn)  # type: ignore[union-attr]
        seen.append(state())

    with strategy.scope() as given:
        assert given is strategy
        seen.append(state())
        strategy.run(replica_fn)
        seen.append(state())
    seen.append(state())
    strategy.run(lambda: seen.append(state()))
    assert seen == [START, SCOPE, RUN, MERGE, RUN, RUN, SCOPE, START, RUN]


def test_scopes_nest_and_are_entered_again() -> None:
    strategy = mpidist.OneDeviceStrategy("cpu:0")
    scope = strategy.scope()
    with scope:
        with strategy.scope(), scope:
            assert state() == SCOPE
        assert state() == SCOPE
    assert state() == START
    with scope:
        assert state() == SCOPE
    assert state() == START


def test_exceptions_leave_it_clean() -> None:
    strategy = mpidist.OneDeviceStrategy("cpu:0")

    def fail(*_: Any) -> None:
        raise KeyError("on purpose")

    def merge() -> None:
        mpidist.get_replica_context().merge_call(fail)  # type: ignore[union-attr]

    for function in (fail, merge):
        with pytest.raises(KeyError), strategy.scope():
            strategy.run(function)
        assert state() == START


def test_what_is_not_allowed_in_run() -> None:
    strategy = mpidist.OneDeviceStrategy("cpu:0")
    calls: list[Callable[[], object]] = [
        lambda: strategy.run(lambda: None),
        lambda: strategy.reduce("SUM", 1.0, axis=None),
        strategy.scope().__enter__,
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="Method requires being in cross-replica context"):
            strategy.run(call)
    with pytest.raises(RuntimeError, match="all_gather"):
        strategy.run(lambda: strategy.gather([1.0], axis=0))
    assert state() == START


def test_strategies_do_not_mix() -> None:
    first, second = mpidist.OneDeviceStrategy("cpu:0"), mpidist.OneDeviceStrategy("cpu:0")
    calls: list[Callable[[], object]] = [
        second.scope().__enter__, lambda: second.run(lambda: None),
        lambda: second.reduce("SUM", 1.0, axis=None), lambda: second.gather([1.0], axis=0),
    ]
    for call in calls:
        with first.scope(), pytest.raises(RuntimeError, match=r"Mixing different tf.distribute.Strategy objects"):
            call()
    assert state() == START


def test_a_context_belongs_to_its_run() -> None:
    strategy = mpidist.OneDeviceStrategy("cpu:0")
    replica = strategy.run(mpidist.get_replica_context)
    assert replica is not None
    with strategy.scope(), pytest.raises(RuntimeError, match="not the current one"):
        replica.merge_call(lambda _: None)


def test_the_default_strategy() -> None:
    strategy = mpidist.get_strategy()
    assert strategy is mpidist.get_strategy()
    assert strategy.num_replicas_in_sync == 1
    value = object()
    assert strategy.run(lambda x: x, args=(value,)) is value
    assert strategy.reduce("any", value, axis=None) is value
    assert strategy.gather(value, axis=0) is value
    with strategy.scope():
        assert state() == START
    replica = mpidist.get_replica_context()
    assert replica is not None
    assert replica.replica_id_in_sync_group == 0
    assert replica.all_reduce("SUM", 2.5) == 2.5
    variable = mpidist.Variable(1.0)

    def merge_fn(given: Any, x: Any) -> Any:
        assert given is strategy
        assert state() == (False, True, False)
        # Variables made here live with those made outside.
        mpidist.optimizers.SGD(0.1).build([variable, mpidist.Variable(2.0)])
        return x

    assert replica.merge_call(merge_fn, (value,)) is value
