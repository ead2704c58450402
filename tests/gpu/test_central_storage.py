"""Central storage where replicas compute on GPUs: variables are in host memory, and each rank's GPU has copies."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.optimizers import Adam, Optimizer
from mpidist.strategy.central_storage import CentralStorageStrategy
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.variable import BaseVariable
from tests.gpu.host_runtime import streams
from tests.helpers.strategies import arena_of

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]

SHAPE = (40, 5)


@pytest.fixture
def strategy(cupy: Any, job: Communicator, monkeypatch: pytest.MonkeyPatch) -> CentralStorageStrategy:
    """Variables in host memory, also of a single rank."""
    monkeypatch.setenv("MPIDIST_DEVICE", "gpu")
    monkeypatch.setenv("MPIDIST_SHARE_GPU", "1")
    return CentralStorageStrategy(parameter_device="cpu:0")


def value_of(strategy: mpidist.Strategy, variable: BaseVariable) -> Any:
    """What a replica reads: an array of CuPy."""
    return strategy.run(variable.value)


def gradient(number: int, rank: int) -> AnyArray:
    made: AnyArray = np.random.default_rng((number, rank)).normal(size=SHAPE).astype(np.float32)
    return made


def train(
    strategy: mpidist.Strategy, xp: Any, make: Callable[[], Optimizer], *, has_rows: bool, steps: int = 5
) -> tuple[AnyArray, ...]:
    """Parameters after some steps whose gradients depend on the parameters, with a table."""
    rank = strategy.communicator.rank
    with strategy.scope():
        weight = mpidist.Variable(np.ones(SHAPE, np.float32))
        table = mpidist.Variable(np.ones((20, 3), np.float32), sparse_gradient=has_rows)
        optimizer = make()

    def step(number: int) -> None:
        rows = np.array([number % 20, (3 * number + rank) % 20])
        found = table.read_rows(xp.asarray(rows))
        assert isinstance(found, xp.ndarray)
        given = weight.value() * xp.asarray(gradient(number, rank)) + xp.sum(found)
        slices = mpidist.IndexedSlices(found * np.float32(0.5), rows)
        optimizer.apply_gradients([(given, weight), (slices, table)])

    for number in range(steps):
        strategy.run(step, args=(number,))
    optimizer.finalize_variable_values()
    return weight.numpy(), table.numpy()


@pytest.mark.parametrize("options", [
    {}, {"global_clipnorm": 1.0}, {"gradient_accumulation_steps": 2}, {"use_ema": True, "ema_momentum": 0.5},
], ids=["plain", "clipped", "accumulated", "average"])
def test_training_on_gpus_gives_what_cpus_give(
    strategy: CentralStorageStrategy, cupy: Any, monkeypatch: pytest.MonkeyPatch, is_simulated: bool,
    options: dict[str, Any],
) -> None:
    has_rows = not {"gradient_accumulation_steps", "use_ema"} & options.keys()
    ours = train(strategy, cupy, lambda: Adam(0.05, **options), has_rows=has_rows)
    monkeypatch.delenv("MPIDIST_DEVICE")
    expected = train(CentralStorageStrategy(), np, lambda: Adam(0.05, **options), has_rows=has_rows)
    for one, other in zip(ours, expected, strict=True):
        assert type(one) is np.ndarray
        np.testing.assert_allclose(one, other, rtol=1e-5 if is_simulated else 1e-4, atol=1e-6)


def test_replicas_get_arrays_of_their_gpu_and_the_variables_stay(strategy: CentralStorageStrategy, cupy: Any) -> None:
    with strategy.scope():
        weight = mpidist.Variable(cupy.ones(SHAPE, np.float32), aggregation="MEAN")
    assert strategy.extended.parameter_devices == ("/device:CPU:0",)
    assert weight.device == "/device:CPU:0"
    assert type(weight.value()) is np.ndarray
    assert arena_of(strategy).shares_memory == (strategy.communicator.size > 1)

    def look() -> Any:
        assert isinstance(weight.value(), cupy.ndarray)
        assert isinstance(weight * 2, cupy.ndarray)
        assert type(weight.numpy()) is np.ndarray
        assert float(weight[0, 0]) == 1
        return weight.value()

    first: Any = strategy.run(look)
    second = strategy.run(look)
    # One copy serves until the next write.
    assert first is second
    rank, n = strategy.communicator.rank, strategy.communicator.size
    # The mean of what the replicas write, from wherever they have it.
    strategy.run(lambda: weight.assign(cupy.full(SHAPE, rank + 1, np.float32)))
    assert (weight.numpy() == (n + 1) / 2).all()
    assert (value_of(strategy, weight).get() == (n + 1) / 2).all()
    assert (first.get() == 1).all()
    strategy.run(lambda: weight.assign_add(np.ones(SHAPE, np.float32)))
    assert (value_of(strategy, weight).get() == (n + 1) / 2 + 1).all()
    dataset = mpidist.data.Dataset.from_tensor_slices(np.arange(12.0, dtype=np.float32)).batch(6)
    assert all(isinstance(batch, cupy.ndarray) for batch in strategy.experimental_distribute_dataset(dataset))
    mean = strategy.reduce("MEAN", strategy.run(lambda: weight.value().sum()), axis=None)
    assert float(mean) == pytest.approx((n + 3) / 2 * np.prod(SHAPE))


def test_a_copy_is_given_up_after_a_step_a_write_and_a_restore(
    strategy: CentralStorageStrategy, cupy: Any, mpi_tmp_path: Path
) -> None:
    with strategy.scope():
        weight, optimizer = mpidist.Variable(np.zeros(SHAPE, np.float32)), mpidist.optimizers.SGD(1.0)
    path = mpidist.Checkpoint(weight=weight).save(mpi_tmp_path / "c")
    rows = mpidist.IndexedSlices(np.ones((1, 5), np.float32), np.array([0]))
    changes: list[Callable[[], object]] = [
        lambda: optimizer.apply_gradients([(cupy.ones(SHAPE, np.float32), weight)]),
        lambda: weight.assign(np.full(SHAPE, 7, np.float32)), lambda: weight.scatter_update(rows),
        lambda: mpidist.Checkpoint(weight=weight).restore(path),
    ]
    for change in changes:
        strategy.run(weight.value)
        change()
        np.testing.assert_array_equal(value_of(strategy, weight).get(), weight.numpy())


def test_gradients_may_be_written_in_place(strategy: CentralStorageStrategy, cupy: Any) -> None:
    with strategy.scope():
        weight, optimizer = mpidist.Variable(np.zeros(SHAPE, np.float32)), mpidist.optimizers.SGD(1.0)
    (place,) = optimizer.gradients([weight])
    assert isinstance(place, cupy.ndarray)
    for number in range(1, 3):
        place[...] = number
        optimizer.apply_gradients([(place, weight)])
    assert (weight.numpy() == -3 * strategy.communicator.size).all()


@pytest.mark.host_gpus
def test_a_write_waits_until_gpus_have_read(strategy: CentralStorageStrategy, cupy: Any) -> None:
    """The memory is page-locked, so a copy runs as late as the stream does."""
    with strategy.scope():
        weight = mpidist.Variable(np.ones(SHAPE, np.float32))
    assert isinstance(weight, MirroredVariable)
    assert not streams.is_pageable(weight.address.writable.ctypes.data)
    for number in range(3):
        copy = value_of(strategy, weight)
        weight.assign(np.full(SHAPE, number + 2, np.float32))
        assert (copy.get() == number + 1).all()


@pytest.mark.host_gpus
def test_memory_is_given_back_to_the_system_unlocked(strategy: CentralStorageStrategy, cupy: Any) -> None:
    before = dict(streams.pinned)
    with strategy.scope():
        variables = [mpidist.Variable(np.ones(1 << 18, np.float32)) for _ in range(3)]
        optimizer = Adam(0.1)
    optimizer.apply_gradients([(cupy.ones(1 << 18, np.float32), one) for one in variables])
    assert len(streams.pinned) > len(before)
    strategy.close()
    del variables, optimizer, strategy
    gc.collect()


def test_the_rank_of_one_gpu_has_its_variables_there(
    cupy: Any, job: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIDIST_SHARE_GPU", "1")
    own = f"gpu:{cupy.cuda.Device().id}"
    if job.size > 1:
        monkeypatch.setenv("MPIDIST_DEVICE", "gpu")
        with pytest.raises(ValueError, match=r"`parameter_device` may be a GPU where one rank computes on it"):
            CentralStorageStrategy(parameter_device=own)
        return
    for strategy in (CentralStorageStrategy(parameter_device=own), CentralStorageStrategy([own])):
        with strategy.scope():
            weight = mpidist.Variable(np.ones(SHAPE, np.float32))
            optimizer = Adam(0.1)
        assert strategy.extended.parameter_devices == (f"/device:{own.upper()}",)
        assert isinstance(weight.value(), cupy.ndarray)
        optimizer.apply_gradients([(cupy.ones(SHAPE, np.float32), weight)])
        np.testing.assert_allclose(weight.numpy(), 0.9, rtol=1e-5)
    with pytest.raises(ValueError, match=r"on the GPU that computes with them, which is GPU:\d, or in host memory"):
        CentralStorageStrategy([own], f"gpu:{(cupy.cuda.Device().id + 1) % 8 + 1}")
