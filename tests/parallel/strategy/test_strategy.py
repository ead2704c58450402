"""Strategies over ranks: contexts, reduce, gather, and which ranks a strategy takes."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import context
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import MismatchError, is_shared
from mpidist.options import CommunicationOptions
from mpidist.strategy import default, mirrored
from mpidist.strategy.base import Strategy
from tests.parallel.layouts import LAYOUTS, lay_out, make_strategy

pytestmark = pytest.mark.mpi


@pytest.fixture(params=["node", "private", "first"])
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> Strategy:
    return make_strategy(communicator, request.param)


def dealt(strategy: Strategy, *components: Any) -> tuple[Any, list[Any]]:
    """This rank's component, and all: ranks beyond the given ones take them again in turn."""
    every = [components[rank % len(components)] for rank in range(strategy.num_replicas_in_sync)]
    return every[strategy.communicator.rank], every


def test_run_knows_its_replica(strategy: Strategy) -> None:
    def replica_fn(x: int, *, scale: int) -> tuple[int, int, int]:
        context = mpidist.get_replica_context()
        assert context is not None
        assert context.strategy is mpidist.get_strategy() is strategy
        assert not mpidist.in_cross_replica_context()
        return context.replica_id_in_sync_group, context.num_replicas_in_sync, x * scale

    result = strategy.run(replica_fn, args=(2,), kwargs={"scale": 3})
    assert result == (strategy.communicator.rank, strategy.communicator.size, 6)
    assert strategy.experimental_local_results(result) == (result,)
    ids = strategy.communicator.all_gather_object(result[0])
    assert ids == list(range(strategy.num_replicas_in_sync))


def test_values_from_a_function(strategy: Strategy) -> None:
    value = strategy.experimental_distribute_values_from_function(
        lambda context: np.array([context.replica_id_in_sync_group, context.num_replicas_in_sync])
    )
    assert value.tolist() == [strategy.communicator.rank, strategy.num_replicas_in_sync]
    assert isinstance(value, mpidist.DistributedValues)


@pytest.mark.parametrize(
    ("components", "op", "axis"),
    [
        (([0, 1, 2, 3], [4, 5, 6, 7]), "SUM", None),
        (([0.0, 1, 2, 3], [4, 5, 6, 7]), "mean", None),
        (([0, 1, 2, 3], [4, 5, 6, 7]), "SUM", 0),
        (([0, 1, 2, 3], [4, 5, 6, 7]), "MEAN", 0),
        (([0, 1, 2, 3], [4, 5]), "SUM", 0),
        (([0.0, 1, 2, 3], [4.0, 5]), "MEAN", 0),
        (([3.0, 5], []), "SUM", 0),
        (([3.0, 5], []), "MEAN", 0),
        (([3.0, 5], []), "MAX", 0),
        (([[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]), "MEAN", 1),
        (([[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]), "MEAN", -1),
        (([[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]), "MEAN", (0, 1)),
        (([[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]), "SUM", [0, 1]),
        (([[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]), "MIN", 0),
        (([[1, 2], [3, 4]], [[1, 2], [2, 1]]), "PROD", 1),
        (([True, False], [True, True]), "MIN", 0),
    ],
)
def test_reduce_table(strategy: Strategy, components: Any, op: str, axis: Any) -> None:
    dtype = np.asarray(components[0]).dtype
    mine, every = dealt(strategy, *(np.asarray(c, dtype) for c in components))
    if axis is None:
        stacked = np.stack(every)
        expected = {"SUM": stacked.sum(0), "mean": stacked.mean(0)}[op]
    else:
        axes = (axis,) if isinstance(axis, int) else tuple(axis)
        # Components end to end along the reduced axis.
        whole = np.concatenate(every, axes[0])
        functions: dict[str, Any] = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max, "PROD": np.prod}
        # A replica has its own elements along the other axes: they are combined over replicas for SUM and MEAN alike.
        expected = functions[op](whole, axis=axes)
    result = strategy.reduce(op, mine, axis=axis)
    np.testing.assert_allclose(result, expected)
    if op == "MEAN" and dtype.kind in "iu":
        assert np.asarray(result).dtype == np.float64
    elif op != "mean":
        assert np.asarray(result).dtype == dtype


def test_reduce_without_any_elements_is_nan(strategy: Strategy) -> None:
    assert np.isnan(strategy.reduce("MEAN", np.zeros(0, "float32"), axis=0))
    assert strategy.reduce("SUM", np.zeros(0, "float32"), axis=0) == 0


def test_reduce_of_scalars_nests_and_variables(strategy: Strategy) -> None:
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    result = strategy.reduce("MEAN", rank + 1, axis=None)
    assert (result, result.dtype) == ((n + 1) / 2, np.float64)
    nest = {"b": 3.0, "a": (1, [np.array([rank])])} if rank % 2 else {"a": (1, [np.array([rank])]), "b": 3.0}
    reduced = strategy.reduce(mpidist.ReduceOp.SUM, nest, axis=None)
    assert reduced["a"][0] == n
    assert reduced["a"][1][0].tolist() == [n * (n - 1) // 2]
    assert (reduced["b"], reduced["b"].dtype) == (3.0 * n, np.float32)
    with strategy.scope():
        variable = mpidist.Variable([9.0])
    before = strategy.reduce("MEAN", variable, axis=None)
    variable.assign([0.0])
    assert before.tolist() == [9], "a result is no live view"
    with strategy.scope():
        local = mpidist.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: local.assign(rank + 1.0))
    assert strategy.reduce("SUM", local, axis=None) == n * (n + 1) / 2


def test_reduce_errors(strategy: Strategy) -> None:
    x = np.zeros((2, 3))
    axes: list[Any] = [2, -3, (0, 2)]
    for axis in axes:
        with pytest.raises(ValueError, match="out of range"):
            strategy.reduce("SUM", x, axis=axis)
    for op, kind in (("MEDIAN", ValueError), (3, TypeError), (None, TypeError)):
        with pytest.raises(kind, match="reduce_op"):
            strategy.reduce(op, x, axis=None)  # type: ignore[arg-type]  # that is the point
    refused: list[tuple[Any, str]] = [
        (np.array([True]), "SUM of booleans is not defined"), ("text", "got 'text' of type str"),
        (None, "got None of type NoneType"), ([object()], "of type object"),
    ]
    for value, text in refused:
        with pytest.raises(TypeError, match=text):
            strategy.reduce("SUM", value, axis=None)
    for op in ("MIN", "MAX"):
        for none_or_axis in (None, 0):
            with pytest.raises(TypeError, match="complex"):
                strategy.reduce(op, np.zeros(2, complex), axis=none_or_axis)
    with pytest.raises(TypeError, match="axis"):
        strategy.reduce("SUM", x, axis=True)
    with pytest.raises(ValueError, match=r"expected None for a component of shape \(\), got 0"):
        strategy.reduce("MEAN", 1.0, axis=0)
    for axis in ((0, 0), (0, -2)):
        with pytest.raises(ValueError, match=r"`axis` names a dimension twice, of a component of shape \(2, 3\)"):
            strategy.reduce("SUM", x, axis=axis)
    # Read once, it would name no dimension the second time.
    once: Any = iter((0, 1))
    with pytest.raises(TypeError, match="`axis` must be None, an int or a sequence of ints"):
        strategy.reduce("SUM", x, axis=once)


@pytest.mark.mpi(min_size=2)
def test_shapes_must_fit(strategy: Strategy) -> None:
    odd = strategy.communicator.rank == 1
    for _ in range(2):
        with pytest.raises(MismatchError, match="the collective call, its shape and dtype must be") as caught:
            strategy.reduce("SUM", np.zeros(3 + odd), axis=None)
        assert is_shared(caught.value)
        with pytest.raises(MismatchError, match="gather: shape apart from the gathered axis"):
            strategy.gather(np.zeros((2, 3 + odd)), axis=0)
        with pytest.raises(MismatchError, match="gather: number of dimensions, dtype and axis"):
            strategy.gather(np.zeros((2, 3)[: 2 - odd]), axis=0)


def test_gather(strategy: Strategy) -> None:
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    parts = [np.full((r, 2), r) for r in range(n)]
    np.testing.assert_array_equal(strategy.gather(parts[rank], axis=0), np.concatenate(parts))
    for axis in (1, -1):
        assert strategy.gather(parts[rank].T, axis=axis).shape == (2, n * (n - 1) // 2)
    gathered = strategy.run(
        lambda: mpidist.get_replica_context().all_gather({"a": [np.array([rank])]}, axis=0)  # type: ignore[union-attr]
    )
    assert gathered["a"][0].tolist() == list(range(n))
    with pytest.raises(ValueError, match="at least one dimension"):
        strategy.gather(1.0, axis=0)
    with pytest.raises(ValueError, match="out of range"):
        strategy.gather(np.zeros(3), axis=1)


def test_all_reduce_and_merge_call(strategy: Strategy) -> None:
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank

    def merge_fn(given: Strategy, x: float, *, factor: int) -> Any:
        assert given is strategy
        assert mpidist.in_cross_replica_context()
        assert mpidist.get_replica_context() is None
        nested = given.run(lambda: rank)
        return factor * given.reduce("SUM", x, axis=None) + nested

    def replica_fn() -> tuple[Any, Any, Any]:
        context = mpidist.get_replica_context()
        assert context is not None
        summed = context.all_reduce("sum", {"x": np.float32(rank), "y": (rank,)})
        return summed, context.all_reduce("MAX", rank), context.merge_call(merge_fn, (1,), {"factor": 10})

    summed, largest, merged = strategy.run(replica_fn)
    assert summed == {"x": n * (n - 1) / 2, "y": (n * (n - 1) // 2,)}
    assert largest == n - 1
    assert merged == 10 * n + rank


def test_the_loss_adds_up_to_the_mean(strategy: Strategy) -> None:
    losses = np.arange(12.0, dtype="float32")
    mine = np.array_split(losses, strategy.num_replicas_in_sync)[strategy.communicator.rank]
    loss = strategy.run(mpidist.compute_average_loss, args=(mine,), kwargs={"global_batch_size": 12})
    assert loss.dtype == np.float32
    assert strategy.reduce("SUM", loss, axis=None) == pytest.approx(losses.mean())
    equal = strategy.run(mpidist.compute_average_loss, args=([1.0, 3.0],))
    assert strategy.reduce("SUM", equal, axis=None) == pytest.approx(2)


def test_a_loss_of_a_guessed_batch_size_warns_once_where_rows_change(
    strategy: Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync
    # The last batch has a row for the first rank only.
    batches = [np.full(2, 3.0), np.full(2, 3.0), np.full(int(rank == 0), 3.0), np.full(1, 3.0), np.full(2, 3.0)]
    losses = []
    with caplog.at_level(logging.WARNING, "mpidist"):
        for number, mine in enumerate(batches):
            given = {"global_batch_size": 1} if number == 2 and size == 1 else {}
            losses.append(strategy.reduce(
                "SUM", strategy.run(mpidist.compute_average_loss, args=(mine,), kwargs=given), axis=None
            ))
            texts = [r.getMessage() for r in caplog.records if "without `global_batch_size`" in r.getMessage()]
            assert len(texts) == (number >= 2 and size > 1)
    # The formula is tf.nn's: rows times replicas, which is right only where all have equally many.
    assert losses == pytest.approx([3.0, 3.0, 3.0 / size, 3.0, 3.0])
    for text in texts:
        assert text.startswith(f"rank {rank}: ")
        assert f"for {int(rank == 0)} examples, and for 2 at the first time" in text
        assert f"times {size} replicas" in text


def test_other_threads_see_the_default_strategy(strategy: Strategy) -> None:
    seen: list[Any] = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append((mpidist.has_strategy(), mpidist.get_strategy())))
        thread.start()
        thread.join()
    assert seen == [(False, default.default_strategy())]


def calls_outside_run() -> dict[str, Callable[[], Any]]:
    replica = mpidist.get_replica_context()
    assert replica is not None
    return {
        "all_reduce": lambda: replica.all_reduce("SUM", 2.5),
        "all_gather": lambda: replica.all_gather([1.0], axis=0),
        "all_gather_object": lambda: replica.all_gather_object("x"),
    }


def error_in_thread(call: Callable[[], Any]) -> BaseException | None:
    with ThreadPoolExecutor() as pool:
        return pool.submit(call).exception()


@pytest.fixture
def no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strategies of earlier tests, which modules keep, do not count."""
    monkeypatch.setattr(context, "_made", weakref.WeakSet())


@pytest.mark.mpi(min_size=2)
def test_collectives_outside_run_are_refused_while_a_strategy_is_open(no_other: None, strategy: Strategy) -> None:
    for name, call in calls_outside_run().items():
        expected = rf"\(\)\.{name} was called outside `run`.*got one in the default .*`strategy\.run\(function\)`"
        with strategy.scope():
            # A thread begins outside the scope.
            assert f"{name} was called outside `run`" in str(error_in_thread(call))
        for run in (lambda call: call(), mpidist.get_strategy().run):
            with pytest.raises(RuntimeError, match=expected):
                run(call)
    replica = mpidist.get_replica_context()
    assert replica is not None
    # What library code asks without a strategy stays.
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync) == (0, 1)
    assert replica.merge_call(lambda _, value: value, (3,)) == 3
    assert mpidist.get_strategy().reduce("SUM", 2.5, axis=None) == 2.5
    strategy.close()
    assert mpidist.get_replica_context().all_reduce("SUM", 2.5) == 2.5  # type: ignore[union-attr]


@pytest.mark.mpi(min_size=2)
def test_collectives_outside_run_warn_once_without_a_strategy(
    no_other: None, communicator: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    # Nobody has closed it: the program has forgotten it.
    assert make_strategy(communicator, "node").num_replicas_in_sync > 1
    default._warn_about_own_values.cache_clear()
    for call in calls_outside_run().values():
        with caplog.at_level(logging.WARNING, "mpidist"):
            call()
    texts = [record.getMessage() for record in caplog.records if "called outside `run`" in record.getMessage()]
    assert len(texts) == (communicator.rank == 0)
    assert all(f"combines nothing over the {communicator.size} ranks" in text for text in texts)


def test_the_constructors_take_all_ranks(communicator: Communicator) -> None:
    for strategy in (
        mpidist.MirroredStrategy(), mpidist.MultiWorkerMirroredStrategy(),
        mpidist.experimental.MultiWorkerMirroredStrategy("MPI"),
        mpidist.MirroredStrategy(communication_options=CommunicationOptions(implementation="mpi"), shared=False),
    ):
        assert strategy.num_replicas_in_sync == communicator.size
        assert strategy.reduce("SUM", 1, axis=None) == communicator.size


def test_mixing_strategies_is_refused(communicator: Communicator) -> None:
    first, second = mpidist.MirroredStrategy(), mpidist.MirroredStrategy()
    with first.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        second.reduce("SUM", 1.0, axis=None)
    default = mpidist.get_strategy()
    with first.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        default.reduce("SUM", 1.0, axis=None)
    assert second.reduce("SUM", 1.0, axis=None) == communicator.size


def test_devices_are_one_per_rank(communicator: Communicator) -> None:
    n = communicator.size
    strategy = mpidist.MirroredStrategy([f"/cpu:{i}" for i in range(n)])
    assert str(strategy.device) == f"/device:CPU:{communicator.rank}"
    with pytest.raises(ValueError, match=rf"expected {n}, got {n + 1}.*mpirun -n {n + 1}"):
        mpidist.MirroredStrategy([f"cpu:{i}" for i in range(n + 1)])
    with pytest.raises(ValueError, match="twice"):
        mpidist.MirroredStrategy(["cpu:0"] * max(2, n))
    with pytest.raises(ValueError, match="not the name of a device"):
        mpidist.MirroredStrategy(["tpu"] * n)
    assert mpidist.MirroredStrategy([]).device is None


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in ("node", "private")])
def test_mirrored_wants_one_node(communicator: Communicator, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    ranks = lay_out(communicator, layout)
    if len(ranks.node_sizes) == 1:
        pytest.skip("two ranks in pairs are one node")
    monkeypatch.setattr(mirrored, "open_communicator", lambda _: ranks)
    with pytest.raises(ValueError, match=r"nodes with \[.*Use MultiWorkerMirroredStrategy") as caught:
        mpidist.MirroredStrategy()
    assert is_shared(caught.value)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", ["default", "one device"])
def test_independent_programs_are_warned_about_once(
    communicator: Communicator, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    default.warn_about_independent_programs.cache_clear()
    with caplog.at_level(logging.WARNING, logger="mpidist"):
        for _ in range(3):
            if case == "default":
                mpidist.get_strategy().run(lambda: None)
            else:
                assert mpidist.OneDeviceStrategy("cpu:0").num_replicas_in_sync == 1
    texts = [r.getMessage() for r in caplog.records if "independent programs" in r.getMessage()]
    assert len(texts) == (1 if communicator.rank == 0 else 0)
    if texts:
        assert f"{communicator.size} independent programs" in texts[0]
        assert "MultiWorkerMirroredStrategy" in texts[0]


def test_a_communicator_may_be_given(communicator: Communicator) -> None:
    if isinstance(communicator, SoloCommunicator):
        with pytest.raises(TypeError, match="mpi4py intracommunicator"):
            mpidist.MultiWorkerMirroredStrategy(communicator=3)
        return
    half = communicator.mpi.Split(communicator.rank % 2)
    strategy = mpidist.MultiWorkerMirroredStrategy(communicator=half)
    assert strategy.num_replicas_in_sync == half.size
    members = range(communicator.rank % 2, communicator.size, 2)
    assert strategy.reduce("SUM", communicator.rank, axis=None) == sum(members)
    half.Free()
