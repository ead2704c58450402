"""Restores in part by all ranks together: the same on each, and an error of one is an error of all."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError, MismatchError
from mpidist.optimizers.families.adam import Adam
from mpidist.variables.making.creation import create_variable
from tests.helpers.strategies import ArenaStrategy

pytestmark = pytest.mark.mpi


def trained(strategy: ArenaStrategy, sizes: dict[str, int], *, steps: int) -> dict[str, Any]:
    model = SimpleNamespace(**{
        name: create_variable(strategy.arena, np.zeros(size, "f4")) for name, size in sizes.items()
    })
    adam = Adam(0.5)
    adam.build(list(vars(model).values()))
    objects = {"model": model, "adam": adam}
    for _ in range(steps):
        step(strategy, objects)
    return objects


def step(strategy: ArenaStrategy, objects: dict[str, Any]) -> None:
    gradients = [(np.full(one.shape, 2.0, "f4"), one) for one in vars(objects["model"]).values()]
    strategy.run(lambda: objects["adam"].apply_gradients(gradients))


def test_all_ranks_restore_the_same_part(communicator: Communicator, mpi_tmp_path: Path) -> None:
    strategy = ArenaStrategy(communicator)
    old = trained(strategy, {"a": 1000, "b": 7, "c": 3}, steps=2)
    path = Checkpoint(**old).save(mpi_tmp_path / "c")
    new = trained(strategy, {"b": 8, "d": 4, "a": 1000}, steps=0)
    checkpoint = Checkpoint(**new)
    checkpoint.restore(path, partial=True)
    np.testing.assert_array_equal(new["model"].a.numpy(), old["model"].a.numpy())
    assert not new["model"].b.numpy().any()
    assert (int(new["adam"].iterations), checkpoint.save_counter) == (2, 1)
    # One more step moves the same variable to the same bits.
    for objects in (old, new):
        step(strategy, objects)
    np.testing.assert_array_equal(new["model"].a.numpy(), old["model"].a.numpy())
    assert checkpoint.save(mpi_tmp_path / "next")
    other = trained(strategy, {"x": 1000}, steps=0)
    Checkpoint(net=other["model"]).restore(path, rename={"model/a": "net/x"}, only="net").assert_consumed()
    assert other["model"].x.numpy().any()


def test_an_error_of_one_rank_is_one_of_all(communicator: Communicator, mpi_tmp_path: Path) -> None:
    strategy = ArenaStrategy(communicator)
    objects = trained(strategy, {"a": 5, "b": 5}, steps=1)
    checkpoint = Checkpoint(**objects)
    path = checkpoint.save(mpi_tmp_path / "c")
    before = objects["model"].a.numpy().copy()
    last = communicator.rank == communicator.size - 1
    with pytest.raises(TypeError, match="`only` must be"):
        checkpoint.restore(path, only=3 if last else None)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="nothing at 'other'"):
        checkpoint.restore(path, rename={"other": "model"} if last else None)
    with pytest.raises(TypeError, match="metadata"):
        checkpoint.save(mpi_tmp_path / "c", metadata={"a": object()} if last else {})
    if communicator.size > 1:
        with pytest.raises(MismatchError):
            checkpoint.restore(path, only="model/a" if last else None)
        with pytest.raises(MismatchError, match="metadata of checksum"):
            checkpoint.save(mpi_tmp_path / "c", metadata={"rank": communicator.rank})
    np.testing.assert_array_equal(objects["model"].a.numpy(), before)
    checkpoint.restore(path).assert_consumed()
    assert checkpoint.save(mpi_tmp_path / "c").endswith("c-2.h5")
