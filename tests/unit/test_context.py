"""The stack of contexts, through the strategies that use it (one rank)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import mpidist
from mpidist import context
from mpidist.context import Entry
from mpidist.strategy.default import experimental_set_strategy


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
        with pytest.raises(KeyError, match="on purpose"), strategy.scope():
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
    other = mpidist.OneDeviceStrategy("cpu:0")
    calls: list[Callable[[], object]] = [
        lambda: replica.merge_call(lambda _: None), lambda: replica.all_reduce("SUM", 1.0),
        lambda: replica.all_gather([1.0], axis=0), lambda: replica.all_gather_object("x"),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"Need to be inside `call_for_each_replica\(\)`.*not the current one"):
            call()
        with strategy.scope(), pytest.raises(RuntimeError, match="Need to be inside"):
            call()
        with pytest.raises(RuntimeError, match=r"Mismatching tf.distribute.Strategy objects"):
            other.run(call)
    stranger = mpidist.ReplicaContext(strategy, 0)
    with pytest.raises(RuntimeError, match=r"Mismatching ReplicaContext\."):
        strategy.run(lambda: stranger.merge_call(lambda _: None))
    default = mpidist.get_strategy().run(mpidist.get_replica_context)
    assert default is not None
    with strategy.scope(), pytest.raises(RuntimeError, match="Need to be inside"):
        default.merge_call(lambda _: None)
    assert state() == START


def test_a_strategy_is_set_for_the_rest() -> None:
    first, second = mpidist.OneDeviceStrategy("cpu:0"), mpidist.OneDeviceStrategy("cpu:0")
    try:
        experimental_set_strategy(first)
        assert state() == SCOPE
        assert mpidist.get_strategy() is first
        assert mpidist.Variable(1.0).distribute_strategy is first
        assert first.run(state) == RUN
        with pytest.raises(RuntimeError, match="Mixing different"), second.scope():
            pass
        with first.scope():
            assert state() == SCOPE
            for strategy in (first, second, None):
                with pytest.raises(RuntimeError, match=r"Must not be called inside a `tf.distribute.Strategy` scope"):
                    experimental_set_strategy(strategy)
        with pytest.raises(RuntimeError, match="Must not be called inside"):
            first.run(lambda: experimental_set_strategy(None))
        experimental_set_strategy(second)
        assert mpidist.get_strategy() is second
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(state()))
        thread.start()
        thread.join()
        assert seen == [START]
    finally:
        experimental_set_strategy(None)
    assert state() == START
    experimental_set_strategy(None)
    with first.scope(), pytest.raises(RuntimeError, match="Must not be called inside"):
        experimental_set_strategy(None)
    experimental_set_strategy(mpidist.get_strategy())
    assert state() == START


def test_the_default_strategy_is_not_used_in_the_scope_of_another() -> None:
    """It would give each rank its own value in silence."""
    default, strategy = mpidist.get_strategy(), mpidist.OneDeviceStrategy("cpu:0")
    scope = default.scope()
    calls: list[Callable[[], object]] = [
        scope.__enter__, lambda: default.run(lambda: None),
        lambda: default.reduce("SUM", 1.0, axis=None), lambda: default.gather([1.0], axis=0),
        lambda: default.extended.reduce_to("SUM", 1.0, "cpu:0"),
        lambda: default.extended.reduce_to("SUM", 1.0, "cpu:0", mpidist.experimental.CommunicationOptions()),
        lambda: default.extended.batch_reduce_to("SUM", [(1.0, "cpu:0")]),
        lambda: default.extended.call_for_each_replica(lambda: None),
    ]
    for call in calls:
        with strategy.scope(), pytest.raises(RuntimeError, match=r"Mixing different .*OneDeviceStrategy.*get_strategy"):
            call()
    replica = mpidist.get_replica_context()
    assert replica is not None
    for call in (lambda: replica.all_reduce("SUM", 1.0), lambda: replica.all_gather([1.0], axis=0)):
        with strategy.scope(), pytest.raises(RuntimeError, match=r"Need to be inside .*not the current one"):
            call()
        with pytest.raises(RuntimeError, match=r"Mismatching tf.distribute.Strategy objects"):
            strategy.run(call)
    assert state() == START
    for _ in range(2):
        with scope as entered:
            assert entered is default
            assert state() == START


def test_the_default_strategy_checks_arguments_as_the_others() -> None:
    default = mpidist.get_strategy()
    replica = mpidist.get_replica_context()
    assert replica is not None
    with pytest.raises(ValueError, match=r"must be a list or tuple, got int: use args=\(value,\)"):
        default.run(lambda x: x, args=5)  # type: ignore[arg-type]
    for axis in (None, 1.0, True):
        with pytest.raises(TypeError, match="`axis` must be an int"):
            default.gather([1.0], axis=axis)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="`axis` must be an int"):
            replica.all_gather([1.0], axis=axis)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`reduce_op`"):
        replica.all_reduce("SUMM", 1.0)


@pytest.mark.parametrize("strategy", [mpidist.get_strategy(), mpidist.OneDeviceStrategy("cpu:0")], ids=["default", ""])
def test_what_cannot_be_called_is_named(strategy: mpidist.Strategy) -> None:
    calls: list[Callable[..., object]] = [
        strategy.run, strategy.extended.call_for_each_replica,
        lambda *given: strategy.run(lambda: mpidist.get_replica_context().merge_call(*given)),  # type: ignore[union-attr]
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"expected a function to call, got NoneType: None\. Pass the function"):
            call(None)
        with pytest.raises(TypeError, match="keyword args must be a dict or None, got int"):
            call(print, (), 5)
    assert state() == START


def test_the_default_strategy() -> None:
    strategy = mpidist.get_strategy()
    assert strategy is mpidist.get_strategy()
    assert strategy.num_replicas_in_sync == 1
    value = (1, "two")
    assert strategy.run(lambda x: x, args=(value,)) is value
    assert strategy.reduce("any", value, axis=None) is value
    assert strategy.gather(value, axis=0) is value
    with strategy.scope():
        assert state() == START
    replica = mpidist.get_replica_context()
    assert replica is not None
    assert replica.replica_id_in_sync_group == 0
    assert replica.all_reduce("SUM", 2.5) == 2.5
    assert replica.all_gather(value, axis=0) is value
    assert replica.all_gather_object(value) != []
    for devices in ("worker_devices", "parameter_devices"):
        with pytest.raises(RuntimeError, match=f"{devices} unsupported by default"):
            getattr(strategy.extended, devices)
    assert strategy.extended.variable_created_in_scope(mpidist.Variable(1.0))
    assert strategy.extended.reduce_to("any", value, "cpu:0") is value
    variable = mpidist.Variable(1.0)

    def merge_fn(given: Any, x: Any) -> Any:
        assert given is strategy
        assert state() == (False, True, False)
        # Variables made here live with those made outside.
        mpidist.optimizers.SGD(0.1).build([variable, mpidist.Variable(2.0)])
        return x

    assert replica.merge_call(merge_fn, (value,)) is value


def test_only_a_strategy_can_be_set() -> None:
    with pytest.raises(TypeError, match=r"`strategy` must be a strategy.* or None to leave the scope, got int: 3"):
        experimental_set_strategy(3)  # type: ignore[arg-type]
    assert state() == START
