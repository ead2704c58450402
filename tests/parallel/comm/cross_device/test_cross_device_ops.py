"""A user's choice of how arrays are combined: CrossDeviceOps, a Collective object, and options of one call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.backends.messages import Traffic
from mpidist.comm.collective import Collective
from mpidist.comm.cross_device.cross_device_ops import CrossDeviceOps
from mpidist.comm.cross_device.reductions import HierarchicalCopyAllReduce, NcclAllReduce, ReductionToOneDevice
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.opening import open_communicator
from mpidist.errors import MismatchError, UnavailableError
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import CommunicationOptions, ReduceOp
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.comm.test_collective import PickledCollective, StackedOps
from tests.parallel.layouts import lay_out

pytestmark = pytest.mark.mpi

OPS: dict[str, Callable[[Communicator], CrossDeviceOps | Collective]] = {
    "one device": lambda _: ReductionToOneDevice(),
    "last device": lambda communicator: ReductionToOneDevice(communicator.size - 1),
    "a sum of one's own": lambda _: ReductionToOneDevice(accumulation_fn=lambda parts: np.sum(parts, axis=0)),
    "hierarchical": lambda _: HierarchicalCopyAllReduce(),
    "nccl": lambda _: NcclAllReduce(),
    "one hook": lambda _: StackedOps(),
    "no subclass": PickledCollective,
}
COUNT = 1200


class Recorded(CrossDeviceOps):
    """Which hooks were called, with which values."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: AnyArray, destinations: Any, options: CommunicationOptions
    ) -> AnyArray:
        self.calls.append(("reduce", options.bytes_per_pack))
        return self.collective.all_reduce(per_replica_value, reduce_op)

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Any, options: CommunicationOptions
    ) -> list[AnyArray]:
        self.calls.append(("batch", len(value_destination_pairs)))
        return [self.collective.all_reduce(value, reduce_op) for value, _ in value_destination_pairs]

    def broadcast_implementation(self, tensor: AnyArray, destinations: Any) -> AnyArray:
        self.calls.append(("broadcast", tensor.dtype.name))
        return self.collective.broadcast(tensor)


def moved(ops: Any) -> int:
    return int(ops.traffic.sent + ops.traffic.received)


@pytest.mark.parametrize("device", [None, "last"])
def test_to_one_device_the_root_moves_most(communicator: Communicator, device: str | None) -> None:
    size = communicator.size
    root = 0 if device is None else size - 1
    ops = ReductionToOneDevice(None if device is None else f"/gpu:{root}")
    ops.bind(communicator)
    array = np.full(COUNT, communicator.rank, np.float32)
    result = ops.reduce(ReduceOp.SUM, array, "cpu:0")
    assert (result == sum(range(size))).all()
    expected = 2 * (size - 1) if communicator.rank == root else 2
    assert moved(ops) == (expected * array.nbytes if size > 1 else 0)


@pytest.mark.parametrize("layout", ["node", "pairs", "each", "first"])
def test_the_hierarchy_crosses_nodes_in_one_stage(communicator: Communicator, layout: str) -> None:
    ranks = lay_out(communicator, layout)
    ops = HierarchicalCopyAllReduce()
    ops.bind(ranks)
    array = np.full(COUNT, ranks.rank, np.float32)
    assert (ops.reduce(ReduceOp.SUM, array, array) == sum(range(ranks.size))).all()
    nodes, here = len(ranks.node_sizes), ranks.node_sizes[ranks.node_index]
    is_first = ranks.all_gather_object(ranks.node_index).index(ranks.node_index) == ranks.rank
    # One ring over the first ranks of the nodes; all else stays inside.
    between = round(2 * (nodes - 1) / nodes * array.nbytes) if is_first else 0
    assert ops.traffic.sent_between_nodes == pytest.approx(between, abs=8)
    inside = (here - 1) * array.nbytes if is_first else array.nbytes
    assert ops.traffic.sent - ops.traffic.sent_between_nodes == inside


def test_around_the_ring_every_rank_sends_as_much(communicator: Communicator) -> None:
    ops = NcclAllReduce()
    ops.bind(communicator)
    array = np.full(COUNT, communicator.rank, np.float32)
    assert (ops.reduce(ReduceOp.SUM, array, array) == sum(range(communicator.size))).all()
    assert ops.traffic.sent == 2 * (communicator.size - 1) * array.nbytes // communicator.size


def test_an_accumulation_of_ones_own(communicator: Communicator) -> None:
    size = communicator.size
    ops = ReductionToOneDevice(accumulation_fn=lambda parts: np.max(parts, axis=0))
    ops.bind(communicator)
    mine = np.arange(6, dtype=np.float32).reshape(2, 3) + communicator.rank
    highest = np.arange(6, dtype=np.float32).reshape(2, 3) + size - 1
    np.testing.assert_array_equal(ops.reduce(ReduceOp.SUM, mine, mine), highest)
    np.testing.assert_array_equal(ops.reduce(ReduceOp.MEAN, mine, mine), highest / np.float32(size))
    wrong = ReductionToOneDevice(accumulation_fn=lambda _: np.zeros(1))
    wrong.bind(communicator)
    with pytest.raises(ValueError, match="`accumulation_fn` must return an array of the shape"):
        wrong.reduce(ReduceOp.SUM, mine, mine)


@pytest.mark.parametrize("kind", ["hierarchical", "nccl"])
@pytest.mark.parametrize("num_packs", [0, 1, 2, 9])
def test_packs_give_what_single_reductions_give(communicator: Communicator, kind: str, num_packs: int) -> None:
    ops = (HierarchicalCopyAllReduce if kind == "hierarchical" else NcclAllReduce)(num_packs)
    ops.bind(communicator)
    rank, size = communicator.rank, communicator.size
    values = [
        np.full((2, 3), rank, np.float32), np.full(5, rank, np.float64), np.float32(rank), np.zeros((0, 2), np.float32),
        np.full(4, rank, np.float32), np.full(3, rank, np.int32), rank,
    ]
    results = ops.batch_reduce(ReduceOp.MEAN, [(value, "cpu:0") for value in values])
    for value, result in zip(values, results, strict=True):
        np.testing.assert_array_equal(result, np.full(np.shape(value), (size - 1) / 2))
        is_integer = np.asarray(value).dtype.kind == "i"
        assert result.dtype == (np.float64 if is_integer else np.asarray(value).dtype)
    assert ops.batch_reduce(ReduceOp.SUM, []) == []


def test_rows_and_broadcasts(communicator: Communicator) -> None:
    ops = ReductionToOneDevice()
    ops.bind(communicator)
    rank, size = communicator.rank, communicator.size
    mine = IndexedSlices(np.full((1, 2), rank, np.float32), np.array([rank]), (size, 2))
    rows = ops.reduce(ReduceOp.SUM, mine, "cpu")
    np.testing.assert_array_equal(rows.to_dense(), np.arange(size, dtype=np.float32)[:, np.newaxis] * [1, 1])
    np.testing.assert_array_equal(ops.broadcast(np.arange(3) + rank, "cpu:0"), np.arange(3))
    assert ops.broadcast(rank + 0.5, "cpu:0") == 0.5


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda ops: ops.reduce("SUM", np.ones(1), "cpu"), "`reduce_op` must be one of ReduceOp.SUM"),
        (lambda ops: ops.reduce(ReduceOp.SUM, np.ones(1), None), "destinations must be one of"),
        (lambda ops: ops.reduce(ReduceOp.SUM, np.ones(1), ["cpu:0"]), "destinations must be one of"),
        (lambda ops: ops.broadcast(np.ones(1), ""), "destinations must not be empty"),
        (lambda ops: ops.batch_reduce(ReduceOp.SUM, [[np.ones(1), "cpu"]]), "tuples"),
        (lambda ops: ops.batch_reduce(ReduceOp.SUM, [(np.ones(1),)]), "tuples"),
        (lambda _: HierarchicalCopyAllReduce(-1), "`num_packs`"),
        (lambda _: NcclAllReduce(num_packs=-1), "`num_packs`"),
        (lambda _: ReductionToOneDevice("abacus"), "`reduce_to_device`"),
        (lambda ops: ReductionToOneDevice(99).bind(ops.communicator), "strategy's ranks, 0 to .*, got rank 99"),
    ],
)
def test_what_makes_no_sense(communicator: Communicator, call: Callable[[Any], object], text: str) -> None:
    ops = StackedOps()
    ops.bind(communicator)
    with pytest.raises(ValueError, match=text):
        call(ops)


def test_an_object_belongs_to_its_ranks(communicator: Communicator) -> None:
    ops = HierarchicalCopyAllReduce()
    with pytest.raises(RuntimeError, match="give it to a strategy"):
        ops.reduce(ReduceOp.SUM, np.ones(1), "cpu")
    ArenaStrategy(communicator, cross_device_ops=ops)
    again = ArenaStrategy(communicator, cross_device_ops=ops)
    assert again.reduce("SUM", 1, axis=None) == communicator.size
    if communicator.size > 1:
        with pytest.raises(ValueError, match="make one object for each strategy"):
            ArenaStrategy(lay_out(communicator, "each"), cross_device_ops=ops)


@pytest.mark.mpi(min_size=2)
def test_values_that_differ_are_a_mismatch(communicator: Communicator) -> None:
    ops = ReductionToOneDevice()
    ops.bind(communicator)
    with pytest.raises(MismatchError, match=r"the same on all ranks, got .*values of cross_device_ops.*\(2,\).*\(3,\)"):
        ops.reduce(ReduceOp.SUM, np.ones(2 + communicator.rank), "cpu")


def test_a_hook_must_give_an_array_of_the_shape(communicator: Communicator) -> None:
    class Forgetful(CrossDeviceOps):
        def reduce_implementation(self, *_: Any) -> Any:
            return None

    class Unfinished(CrossDeviceOps):
        pass

    with pytest.raises(ValueError, match=r"hook of Forgetful must return an array of the shape.*\(3,\).*NoneType"):
        ArenaStrategy(communicator, cross_device_ops=Forgetful()).reduce("SUM", np.ones(3), axis=None)
    with pytest.raises(NotImplementedError, match="Unfinished must have a method `reduce_implementation`"):
        ArenaStrategy(communicator, cross_device_ops=Unfinished()).reduce("SUM", np.ones(3), axis=None)


def train(strategy: ArenaStrategy) -> dict[str, AnyArray]:
    """Two steps with dense and sparse gradients, and all else that a strategy sends."""
    rank, size = strategy.communicator.rank, strategy.communicator.size
    generator = np.random.default_rng(rank)
    with strategy.scope():
        dense = mpidist.Variable(np.linspace(0, 1, 60, dtype=np.float32).reshape(12, 5), name="dense")
        half = mpidist.Variable(np.linspace(0, 1, 7).astype(np.float16), name="half")
        table = mpidist.Variable(np.zeros((size + 1, 2), np.float32), name="table", sparse_gradient=True)
        count: Any = mpidist.Variable(
            0, synchronization=mpidist.VariableSynchronization.ON_READ,
            aggregation=mpidist.VariableAggregation.SUM,
        )
        optimizer = mpidist.optimizers.Adam(0.1)

    def step() -> None:
        rows = IndexedSlices(np.ones((2, 2), np.float32), np.array([rank, size]), table.shape)
        gradients: list[Any] = [generator.standard_normal(dense.shape).astype("f4"), np.full(7, 0.5, np.float16), rows]
        optimizer.apply_gradients(zip(gradients, [dense, half, table], strict=True))
        count.assign_add(rank + 1)

    for _ in range(2):
        strategy.run(step)
    results = {"dense": dense.numpy(), "half": half.numpy(), "table": table.numpy(), "count": count.aggregate()}
    half.assign(np.full(7, rank))
    results["assigned"] = half.numpy()
    results["gathered"] = strategy.gather(np.full((rank, 2), rank), axis=0)
    results["mean"] = strategy.reduce("MEAN", np.arange(rank + 1.0), axis=0)
    results["broadcast"] = strategy.extended.broadcast_to(np.arange(4) + rank)
    rows = strategy.reduce("SUM", IndexedSlices(np.ones((1, 3)), np.array([rank]), (size, 3)), axis=None)
    results["rows"] = rows.to_dense()
    return {name: np.asarray(result) for name, result in results.items()}


@pytest.mark.parametrize("kind", OPS)
def test_a_step_gives_what_auto_gives(communicator: Communicator, kind: str) -> None:
    strategy = ArenaStrategy(communicator, cross_device_ops=OPS[kind](communicator))
    assert not strategy.arena.shares_memory, "an explicit choice turns the arena's own reduction off"
    expected = train(ArenaStrategy(communicator))
    for name, result in train(strategy).items():
        tolerance = 2e-3 if name == "half" else 1e-6
        np.testing.assert_allclose(result, expected[name], rtol=tolerance, atol=tolerance, err_msg=name)
        assert len(set(communicator.all_gather_object(result.tobytes()))) == 1


def test_the_choice_is_logged_and_every_way_leads_to_the_hooks(
    communicator: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    ops = Recorded()
    with caplog.at_level(logging.INFO, "mpidist"):
        strategy = mpidist.MultiWorkerMirroredStrategy(cross_device_ops=ops)
    assert ("collective Recorded: given as cross_device_ops" in caplog.text) == (communicator.rank == 0)
    strategy.reduce("MEAN", np.ones(3), axis=None)
    strategy.extended.broadcast_to(np.ones(3, np.int16))
    results = strategy.extended.batch_reduce_to(
        "SUM", [({"a": np.ones(2), "b": 1.0}, "cpu:0"), (np.ones((2, 2), np.float16), "cpu:0")]
    )
    assert results[0]["b"] == communicator.size
    assert (results[1] == communicator.size).all()
    assert results[1].dtype == np.float16
    assert ops.calls == [("reduce", 0), ("broadcast", "int16"), ("batch", 3)]
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(3, np.float32))
        optimizer = mpidist.optimizers.SGD(1.0)
    ops.calls.clear()
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(3, np.float32), variable)]))
    assert ("reduce", 0) in ops.calls
    assert variable.numpy().tolist() == [-communicator.size] * 3


def test_what_is_no_collective_is_one_error_on_every_rank(communicator: Communicator) -> None:
    class Half:
        def all_reduce(self) -> None: ...

    wrongs: list[tuple[Any, type[Exception], str]] = [
        (HierarchicalCopyAllReduce, TypeError, r"use HierarchicalCopyAllReduce\(\)"),
        (Half(), TypeError, "got Half without reduce, broadcast.*communicator"),
        ("nccl", TypeError, "got str without all_reduce"),
    ]
    for wrong, kind, text in wrongs:
        with pytest.raises(kind, match=text) as caught:
            mpidist.MirroredStrategy(cross_device_ops=wrong)
        assert len(set(communicator.all_gather_object(str(caught.value)))) == 1
    if communicator.size > 1:
        only_last = "abacus" if communicator.rank == communicator.size - 1 else None
        with pytest.raises(TypeError, match=f"failed on rank {communicator.size - 1}.*got str"):
            ArenaStrategy(communicator, cross_device_ops=only_last)
        other: Any = StackedOps() if communicator.rank else None
        with pytest.raises(MismatchError, match="StackedOps"):
            ArenaStrategy(communicator, cross_device_ops=other)
        alone = open_communicator(communicator.mpi.Split(communicator.rank))
        with pytest.raises(ValueError, match="make it for the strategy's ranks"):
            ArenaStrategy(communicator, cross_device_ops=PickledCollective(alone))


def test_what_cannot_be_had_together(communicator: Communicator) -> None:
    for options in (CommunicationOptions(wire_dtype="float16"), CommunicationOptions(reproducible=True)):
        with pytest.raises(ValueError, match="leave out the option"):
            ArenaStrategy(communicator, options=options, cross_device_ops=StackedOps())
    with pytest.raises(ValueError, match="choose one of them"):
        ArenaStrategy(communicator, options=CommunicationOptions(implementation="RING"), cross_device_ops=StackedOps())
    with pytest.raises(ValueError, match="choose one of them"):
        ArenaStrategy(communicator, shared=True, cross_device_ops=StackedOps())


@pytest.mark.mpi(min_size=2)
def test_options_of_one_call(communicator: Communicator, caplog: pytest.LogCaptureFixture) -> None:
    strategy = ArenaStrategy(communicator)
    ring = CommunicationOptions(implementation="RING")
    collective: Any = strategy.replicas.collective_for(ring)
    assert type(collective.backend).__name__ == "RingBackend"
    traffic: Traffic = collective.backend.traffic
    again: object = strategy.replicas.collective_for(CommunicationOptions(implementation="ring"))
    assert again is collective
    assert strategy.replicas.collective_for(CommunicationOptions()) is strategy.arena.collective
    assert strategy.replicas.collective_for(None) is strategy.arena.collective
    array = np.full(240, communicator.rank, np.float32)
    total = sum(range(communicator.size))

    def replica() -> None:
        context = mpidist.get_replica_context()
        assert context is not None
        assert (context.all_reduce("SUM", array, ring) == total).all()
        assert context.all_gather(array[:1], 0, options=ring).tolist() == list(range(communicator.size))

    sent = [traffic.sent]
    strategy.run(replica)
    sent.append(traffic.sent)
    assert (strategy.extended.reduce_to("SUM", array, "cpu:0", options=ring) == total).all()
    sent.append(traffic.sent)
    assert strategy.extended.batch_reduce_to("SUM", [(array, "cpu:0")], options=ring)[0][0] == total
    sent.append(traffic.sent)
    assert (np.diff(sent) > 0).all(), f"calls with RING must go around the ring, its bytes sent were {sent}"
    apart = ArenaStrategy(lay_out(communicator, "each"))
    with pytest.raises(UnavailableError, match=r"NODE.*no two ranks share memory"):
        apart.extended.reduce_to("SUM", array, "cpu:0", options=CommunicationOptions(implementation="NODE"))
    with pytest.raises(MismatchError, match="communication options"):
        strategy.replicas.collective_for(CommunicationOptions(bytes_per_pack=64 + communicator.rank))


def test_options_of_one_call_under_cross_device_ops(communicator: Communicator) -> None:
    ops = Recorded()
    strategy = ArenaStrategy(communicator, options=CommunicationOptions(bytes_per_pack=64), cross_device_ops=ops)
    strategy.reduce("SUM", np.ones(2), axis=None)
    strategy.extended.reduce_to("SUM", np.ones(2), "cpu:0", options=CommunicationOptions(bytes_per_pack=128))
    assert ops.calls == [("reduce", 64), ("reduce", 128)]
    own = ArenaStrategy(communicator, cross_device_ops=PickledCollective(communicator))
    options = CommunicationOptions(bytes_per_pack=128)
    assert own.extended.reduce_to("SUM", np.ones(2), "cpu:0", options=options).tolist() == [communicator.size] * 2
