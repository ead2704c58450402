"""Central storage: one copy on each node, tf's rules for writes of replicas, and the bits of a mirrored strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.optimizers import Adam
from mpidist.strategy import central_storage
from mpidist.strategy.central_storage import CentralStorageStrategy
from mpidist.variables.kinds.aggregating import AggregatingVariable
from mpidist.variables.kinds.sync_on_read import SyncOnReadVariable
from tests.helpers.strategies import arena_of
from tests.parallel.layouts import lay_out

pytestmark = pytest.mark.mpi

SIZE = 1000


@pytest.fixture
def strategy(communicator: Communicator) -> CentralStorageStrategy:
    return CentralStorageStrategy()


def train(strategy: mpidist.Strategy, steps: int = 5) -> tuple[AnyArray, AnyArray]:
    """The parameters, and the first moments, after some steps of Adam with a clipped norm."""
    with strategy.scope():
        weight = mpidist.Variable(np.linspace(-1, 1, SIZE, dtype=np.float32))
        rows = mpidist.Variable(np.ones((20, 3), np.float32), sparse_gradient=True)
        optimizer = Adam(0.01, global_clipnorm=3.0)
    rank = strategy.communicator.rank

    def step(number: int) -> None:
        random = np.random.default_rng((number, rank))
        slices = mpidist.IndexedSlices(random.normal(size=(4, 3)).astype(np.float32), random.integers(0, 20, 4))
        gradient = random.normal(size=SIZE).astype(np.float32)
        optimizer.apply_gradients([(gradient, weight), (slices, rows)])

    for number in range(steps):
        strategy.run(step, args=(number,))
    return weight.numpy(), np.concatenate([v.numpy().reshape(-1) for v in optimizer.variables])


def test_training_gives_the_bits_of_a_mirrored_strategy(strategy: CentralStorageStrategy) -> None:
    for ours, mirrored in zip(train(strategy), train(mpidist.MirroredStrategy()), strict=True):
        assert ours.tobytes() == mirrored.tobytes()
    assert strategy.num_replicas_in_sync == strategy.communicator.size
    assert arena_of(strategy).shares_memory == (strategy.communicator.size > 1)


def test_the_devices_are_named(strategy: CentralStorageStrategy) -> None:
    assert strategy.extended.parameter_devices == ("/device:CPU:0",)
    assert strategy.extended.worker_devices == ("/device:CPU:0",)
    n = strategy.communicator.size
    named = CentralStorageStrategy([f"cpu:{number}" for number in range(n)], "CPU:0")
    assert named.extended.worker_devices == (f"/device:CPU:{strategy.communicator.rank}",)
    assert named.extended.parameter_devices == ("/device:CPU:0",)


@pytest.mark.parametrize("write", [
    lambda v, value: v.assign(value), lambda v, value: v.assign_add(value), lambda v, value: v.assign_sub(value),
], ids=["assign", "assign_add", "assign_sub"])
def test_a_write_of_replicas_needs_an_aggregation(
    strategy: CentralStorageStrategy, communicator: Communicator, write: Callable[[Any, Any], Any]
) -> None:
    with strategy.scope():
        variable, whole = mpidist.Variable(np.zeros(2, np.float32)), mpidist.Variable(np.zeros(2, np.int32))
    assert isinstance(variable, AggregatingVariable)
    for one in (variable, whole):
        with pytest.raises(ValueError, match=r"specify an aggregation method to update a Aggregating") as caught:
            strategy.run(lambda one=one: write(one, np.ones(2, one.dtype)))
        assert len(set(communicator.all_gather_object(str(caught.value)))) == 1
        assert not one.numpy().any()
    # Outside `run` the first replica's value counts, and an update inside `run` goes on.
    variable.assign(np.full(2, communicator.rank + 1.0))
    assert variable.numpy().tolist() == [1, 1]
    strategy.run(lambda: mpidist.optimizers.SGD(1.0).apply_gradients([(np.ones(2, np.float32), variable)]))
    assert variable.numpy().tolist() == [1 - communicator.size] * 2


@pytest.mark.parametrize(("aggregation", "expected"), [
    ("SUM", lambda n: n * (n + 1) / 2), ("MEAN", lambda n: (n + 1) / 2), ("ONLY_FIRST_REPLICA", lambda _: 1.0),
])
def test_replicas_aggregate_what_they_write(
    strategy: CentralStorageStrategy, aggregation: str, expected: Callable[[int], float]
) -> None:
    with strategy.scope():
        variable = mpidist.Variable(0.0, aggregation=aggregation)
    replica = strategy.communicator.rank
    value = expected(strategy.communicator.size)
    strategy.run(lambda: variable.assign(replica + 1.0))
    assert variable == value
    strategy.run(lambda: variable.assign_add(replica + 1.0))
    assert variable == 2 * value


def test_a_variable_that_is_aggregated_on_reading_has_a_component_for_each_replica(
    strategy: CentralStorageStrategy
) -> None:
    with strategy.scope():
        seen = mpidist.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        mean = mpidist.metrics.Mean()
    assert isinstance(seen, SyncOnReadVariable)
    rank, n = strategy.communicator.rank, strategy.num_replicas_in_sync

    def step() -> float:
        seen.assign_add(rank + 1.0)
        mean.update_state(float(rank))
        return float(seen)

    assert strategy.run(step) == rank + 1
    assert seen.numpy() == n * (n + 1) / 2
    assert mean.result() == (n - 1) / 2


@pytest.mark.mpi(min_size=2)
def test_several_nodes_have_to_be_asked_for(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = lay_out(communicator, "each")
    monkeypatch.setattr(central_storage, "open_communicator", lambda _: apart)
    with pytest.raises(ValueError, match=r"ranks are on \d nodes .* Pass nodes='all' for one copy on each node"):
        CentralStorageStrategy()
    strategy = CentralStorageStrategy(nodes="all")
    for ours, mirrored in zip(train(strategy), train(mpidist.MirroredStrategy()), strict=True):
        np.testing.assert_allclose(ours, mirrored, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("arguments", "error", "text"), [
    ({"nodes": "some"}, ValueError, "`nodes` must be 'one' or 'all', got 'some'"),
    ({"nodes": 1}, ValueError, "`nodes` must be 'one' or 'all', got 1"),
    ({"parameter_device": "abacus"}, ValueError, "not the name of a device: 'abacus'"),
    ({"parameter_device": 3}, TypeError, "a device must be named by a string.*got int: 3"),
    ({"compute_devices": "gpu:0"}, TypeError, "`compute_devices` must be a list of device names"),
])
def test_wrong_arguments_are_named_on_every_rank(
    communicator: Communicator, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        CentralStorageStrategy(**arguments)
    if communicator.size > 1:
        only_last = arguments if communicator.rank == communicator.size - 1 else {}
        with pytest.raises(error, match=text):
            CentralStorageStrategy(**only_last)


@pytest.mark.mpi(min_size=2)
def test_several_ranks_have_their_variables_in_host_memory(communicator: Communicator) -> None:
    with pytest.raises(ValueError, match=r"got 'gpu:0' and \d ranks, whose variables are in host memory"):
        CentralStorageStrategy(parameter_device="gpu:0")
    with pytest.raises(mpidist.errors.MismatchError, match="Make the strategy the same way on every rank"):
        CentralStorageStrategy(nodes="all" if communicator.rank else "one")


def test_a_checkpoint_goes_to_another_strategy_and_back(strategy: CentralStorageStrategy, mpi_tmp_path: Path) -> None:
    def make(one: mpidist.Strategy) -> tuple[Any, Any, mpidist.Checkpoint]:
        with one.scope():
            weight, optimizer = mpidist.Variable(np.ones(SIZE, np.float32)), Adam(0.1)
        return weight, optimizer, mpidist.Checkpoint(weight=weight, optimizer=optimizer)

    gradient = np.linspace(0, 1, SIZE, dtype=np.float32)
    weight, optimizer, saved = make(strategy)
    optimizer.apply_gradients([(gradient, weight)])
    path = saved.save(mpi_tmp_path / "c")
    other, again, loaded = make(mpidist.MirroredStrategy())
    loaded.restore(path).assert_consumed()
    back, third, returned = make(CentralStorageStrategy())
    returned.restore(loaded.save(mpi_tmp_path / "d")).assert_consumed()
    for one, its_optimizer in ((weight, optimizer), (other, again), (back, third)):
        its_optimizer.apply_gradients([(gradient, one)])
    assert weight.numpy().tobytes() == other.numpy().tobytes() == back.numpy().tobytes()
