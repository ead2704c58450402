"""Split variables: a tile on each logical device, one variable in a checkpoint, and the training of the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.checkpoint.file.saved import SavedArray
from mpidist.comm.group.communicator import Communicator
from mpidist.optimizers import SGD, Adam
from mpidist.strategy.tpu.context import LogicalReplicaContext
from mpidist.variables import tiles
from mpidist.variables.kinds.split import SplitVariable
from tests.helpers.amounts import turns
from tests.parallel.layouts import LAYOUTS
from tests.parallel.strategy.tpu.making import devices_of, make_tpu

pytestmark = pytest.mark.mpi

SIZES = 12, 24, 8  # of the network's layers; 4, 3 and 2 divide them
BATCH = 48


def divisors(communicator: Communicator) -> list[int]:
    """The numbers of logical devices that the ranks of a run allow."""
    return [count for count in range(1, communicator.size + 1) if communicator.size % count == 0]


class Network:
    """A perceptron whose hidden layer is split by columns, then by rows; the last bias is replicated."""

    def __init__(self, devices: int | None, optimizer: Callable[[], Any]) -> None:
        random = np.random.default_rng(1)

        def make(value: AnyArray, name: str, dimensions: list[int]) -> Any:
            split = {} if devices is None else {"partition_dimensions": dimensions}
            return mpidist.Variable(value, name=name, **split)  # type: ignore[arg-type]

        inputs, hidden, outputs = SIZES
        count = devices or 1
        self.w1 = make(random.normal(size=(inputs, hidden)) / 4, "w1", [1, count])
        self.b1 = make(np.zeros(hidden), "b1", [count])
        self.w2 = make(random.normal(size=(hidden, outputs)) / 4, "w2", [count, 1])
        self.b2 = mpidist.Variable(np.zeros(outputs), name="b2")
        self.optimizer = optimizer()

    @property
    def variables(self) -> list[Any]:
        return [self.w1, self.b1, self.w2, self.b2]

    def step(self, x: AnyArray, y: AnyArray) -> Any:
        replica = mpidist.get_replica_context()
        hidden = np.tanh(x @ self.w1.value() + self.b1.value())
        z = hidden @ self.w2.value()
        if isinstance(replica, LogicalReplicaContext):
            z = replica.logical_all_reduce("SUM", z)
        z = z + self.b2.value()
        delta = (z - y) / BATCH
        hidden_delta = (delta @ self.w2.value().T) * (1 - hidden**2)
        gradients = [x.T @ hidden_delta, hidden_delta.sum(0), hidden.T @ delta, delta.sum(0)]
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))
        return ((z - y) ** 2).sum() / BATCH

    def wholes(self) -> list[AnyArray]:
        return [one.numpy() for one in [*self.variables, *self.optimizer.variables]]


def batches(first: int, count: int) -> list[tuple[AnyArray, AnyArray]]:
    random = np.random.default_rng(7)
    made = [(random.normal(size=(BATCH, SIZES[0])), random.normal(size=(BATCH, SIZES[2]))) for _ in range(20)]
    return made[first : first + count]


def train(strategy: mpidist.Strategy, network: Network, first: int, count: int) -> list[float]:
    n, replica = strategy.num_replicas_in_sync, strategy.communicator.rank
    losses = []
    for x, y in batches(first, count):
        own = slice(BATCH * replica // n, BATCH * (replica + 1) // n)
        losses.append(float(strategy.reduce("SUM", strategy.run(network.step, args=(x[own], y[own])), axis=None)))
    return losses


def alone(optimizer: Callable[[], Any], count: int) -> tuple[list[float], list[AnyArray]]:
    """Losses and parameters of one rank that has the whole."""
    network = Network(None, optimizer)
    return train(mpidist.get_strategy(), network, 0, count), network.wholes()


def close(got: Any, expected: Any) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: Adam(0.02),
    "clipped": lambda: Adam(0.02, global_clipnorm=0.3, weight_decay=0.01),
    "accumulated": lambda: Adam(0.02, gradient_accumulation_steps=2, use_ema=True),
}


@pytest.mark.parametrize("layout", turns(LAYOUTS, 1, always=("node",)))
@pytest.mark.parametrize("name", turns(tuple(OPTIMIZERS), 2))
def test_a_split_model_trains_as_the_whole_does(communicator: Communicator, layout: str, name: str) -> None:
    losses, wholes = alone(OPTIMIZERS[name], 5)
    for devices in divisors(communicator) if layout == "node" else [devices_of(communicator)]:
        with make_tpu(communicator, layout, devices) as strategy:
            with strategy.scope():
                network = Network(devices, OPTIMIZERS[name])
            close(train(strategy, network, 0, 5), losses)
            close(network.wholes(), wholes)


@pytest.mark.timeout_seconds(180)
@pytest.mark.parametrize("name", turns(tuple(OPTIMIZERS), 1))
def test_a_checkpoint_restores_under_any_layout(communicator: Communicator, name: str, mpi_tmp_path: Path) -> None:
    losses, _ = alone(OPTIMIZERS[name], 6)
    paths = {}
    middle = devices_of(communicator)
    some = turns(divisors(communicator), 1, always=(middle,))
    for devices in some:
        with make_tpu(communicator, devices=devices) as strategy:
            with strategy.scope():
                network = Network(devices, OPTIMIZERS[name])
            train(strategy, network, 0, 3)
            paths[devices] = mpidist.Checkpoint(network=network).save(mpi_tmp_path / f"c{devices}")
    for saved, path in paths.items():
        with h5py.File(path) as file:
            assert file["network/w1"].shape == SIZES[:2]
            assert file["network/optimizer/velocity/network%2Fw2"].shape == SIZES[1:]
        # From the middle one to each, and from each to the middle one.
        for devices in some if saved == middle else [middle]:
            with make_tpu(communicator, "each", devices) as strategy:
                with strategy.scope():
                    network = Network(devices, OPTIMIZERS[name])
                network.optimizer.build(network.variables)
                mpidist.Checkpoint(network=network).restore(path).assert_consumed()
                close(train(strategy, network, 3, 3), losses[3:])
        network = Network(None, OPTIMIZERS[name])
        mpidist.Checkpoint(network=network).restore(path)
        close(train(mpidist.get_strategy(), network, 3, 3), losses[3:])


@pytest.mark.parametrize("layout", turns(("node", "private", "pairs"), 1))
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_whole_is_written_and_read(communicator: Communicator, layout: str, axis: int, mpi_tmp_path: Path) -> None:
    with make_tpu(communicator, layout) as strategy:
        devices, device = strategy.logical_devices.count, strategy.logical_devices.device
        shape, dimensions = [5, 3, 2], [1, 1, 1]
        shape[axis], dimensions[axis] = 6 * devices, devices
        whole = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
        own = np.split(whole, devices, axis)[device]
        with strategy.scope():
            # Ranks that draw numbers of their own: logical device 0 of replica 0 counts.
            variable = mpidist.Variable(whole + communicator.rank, partition_dimensions=dimensions, aggregation="SUM")
        assert isinstance(variable, SplitVariable)
        assert variable.shape == tuple(shape)
        assert variable.value().tolist() == own.tolist()
        assert variable.numpy().tolist() == whole.tolist()
        variable.assign_add(np.ones(shape))
        variable.assign_sub(np.full(shape, 0.5))
        assert variable.numpy().tolist() == (whole + 0.5).tolist()
        path = mpidist.Checkpoint(variable=variable).save(mpi_tmp_path / "c")
        with h5py.File(path) as file:
            assert file["variable"][...].tolist() == (whole + 0.5).tolist()
        variable.assign(whole * 2)
        assert variable.value().tolist() == (own * 2).tolist()
        mpidist.Checkpoint(variable=variable).restore(path)
        assert variable.numpy().tolist() == (whole + 0.5).tolist()
        strategy.run(lambda: variable.assign(whole * 3))
        assert variable.numpy().tolist() == (whole * 3 * strategy.num_replicas_in_sync).tolist()
        rows = np.array([0, len(whole) - 1])
        variable.scatter_update(mpidist.IndexedSlices(np.zeros((2, *shape[1:])), rows))
        assert [bool(row.any()) for row in variable.numpy()] == [0 < row < len(whole) - 1 for row in range(len(whole))]
        with pytest.raises(ValueError, match="vocabulary_parallel_embedding"):
            variable.sparse_read([0])


def test_a_rank_reads_and_writes_its_rows_only(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_tpu(communicator, "private") as strategy:
        devices = strategy.logical_devices.count
        shape = 48 * devices, 40
        with strategy.scope():
            numbers = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
            by_rows = mpidist.Variable(numbers, partition_dimensions=[devices, 1])
            by_columns = mpidist.Variable(np.ones((shape[1], shape[0])), partition_dimensions=[1, devices])
        checkpoint = mpidist.Checkpoint(rows=by_rows, columns=by_columns)
        path = checkpoint.save(mpi_tmp_path / "c")
        reads: list[tuple[str, int, int]] = []
        read = SavedArray.read

        def counting(self: SavedArray, start: int, stop: int) -> AnyArray:
            reads.append((self.name, start, stop))
            return read(self, start, stop)

        monkeypatch.setattr(SavedArray, "read", counting)
        # Four rows of the wide array at a time.
        monkeypatch.setattr(tiles, "_PIECE_BYTES", 4 * 8 * shape[0])
        by_rows.assign(np.zeros(shape))
        checkpoint.restore(path)
        device, size = strategy.logical_devices.device, by_rows.size
        mine = [one for one in reads if one[0] == "rows"]
        assert min(start for _, start, _ in mine) == size * device // devices
        assert max(stop for *_, stop in mine) == size * (device + 1) // devices
        assert max(stop - start for name, start, stop in reads if name == "columns") <= 4 * shape[0]
        assert by_rows.numpy().tolist() == numbers.tolist()
        assert by_columns.numpy().all()
        for variable in (by_rows, by_columns):
            begin, end = variable.bounds[communicator.rank : communicator.rank + 2]  # type: ignore[index]
            assert end - begin <= -(-variable.size // communicator.size) + variable.shape[1]
            part = variable.reader()(begin, end)
            assert part.base is None or part.base.size <= end - begin


def test_a_table_is_split_by_rows(communicator: Communicator, mpi_tmp_path: Path) -> None:
    with make_tpu(communicator) as strategy:
        devices, device = strategy.logical_devices.count, strategy.logical_devices.device
        with strategy.scope():
            table = mpidist.Variable(np.ones((4 * devices, 2)), partition_dimensions=[devices, 1], sparse_gradient=True)
            dense = mpidist.Variable(np.ones(3))
            optimizer = SGD(1.0, momentum=0.5)

        def step() -> None:
            slices = mpidist.IndexedSlices(np.full((1, 2), 0.25), np.array([device % 4]))
            optimizer.apply_gradients([(slices, table), (np.ones(3), dense)])

        strategy.run(step)
        expected = np.ones((devices, 4, 2))
        for one in range(devices):
            expected[one, one % 4] -= 0.25 * strategy.num_replicas_in_sync
        assert table.numpy().tolist() == expected.reshape(-1, 2).tolist()
        path = mpidist.Checkpoint(table=table, optimizer=optimizer).save(mpi_tmp_path / "c")
        with h5py.File(path) as file:
            assert file["table"].shape == (4 * devices, 2)


def test_a_function_that_makes_shards_makes_the_tile_only(communicator: Communicator) -> None:
    with make_tpu(communicator) as strategy:
        devices, device = strategy.logical_devices.count, strategy.logical_devices.device
        shape = 3, 4 * devices
        asked = []

        def make(shard_info: Any) -> AnyArray:
            asked.append(tuple(shard_info))
            return np.full(shard_info.shape, shard_info.offset[1], np.float32)

        with strategy.scope():
            variable = mpidist.Variable(make, shape=shape, dtype="float32", partition_dimensions=[1, devices])
        assert asked == [((3, 4), (0, 4 * device))]
        assert variable.numpy()[0].tolist() == [4 * one for one in range(devices) for _ in range(4)]


def test_what_cannot_be_split_is_one_error(communicator: Communicator) -> None:
    with make_tpu(communicator) as strategy, strategy.scope():
        devices = strategy.logical_devices.count
        for error, match, value, arguments in (
            (ValueError, "a number for each dimension", np.zeros((4, 4)), {"partition_dimensions": [devices]}),
            (ValueError, "must be divisible", np.zeros((4, 7)), {"partition_dimensions": [1, 5]}),
            (ValueError, "which is", np.zeros((4, 15)), {"partition_dimensions": [1, 5]}),
            (TypeError, "a whole number for each", np.zeros(4), {"partition_dimensions": 2}),
            (ValueError, "floating dtype", np.zeros(4 * devices, int), {"partition_dimensions": [devices]}),
            (ValueError, "ON_WRITE", np.zeros(4), {"partition_dimensions": [devices], "synchronization": "ON_READ"}),
        ):
            with pytest.raises(error, match=match) as caught:
                mpidist.Variable(value, name="w", **arguments)
            assert len(set(communicator.all_gather_object(str(caught.value)))) == 1
        if communicator.size > 1:
            with pytest.raises(ValueError, match="floating dtype"):
                mpidist.Variable(
                    np.zeros(4 * devices, float if communicator.rank else int), partition_dimensions=[devices]
                )
        variable = mpidist.Variable(np.zeros((2, devices)), partition_dimensions=[1, devices])
        with pytest.raises(ValueError, match="shape"):
            variable.assign(np.zeros((2, devices + 1)))
    with pytest.raises(ValueError, match="which a TPUStrategy has"):
        mpidist.Variable(np.zeros(4), partition_dimensions=[2])
