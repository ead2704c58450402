"""A checkpoint of groups: all settle, one writes, and any number of groups continues."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.data import Dataset
from mpidist.errors import MismatchError
from mpidist.optimizers import SGD
from mpidist.variables.variable import BaseVariable
from tests.helpers.amounts import turns
from tests.parallel.strategy.hybrid.making import Array, Outer, halves_of, home_of, make_hybrid
from tests.parallel.strategy.hybrid.test_training import SIZE, same_everywhere

pytestmark = pytest.mark.mpi

RATE, MOMENTUM = 0.7, 0.6


def gradient(group: int, step: int) -> Array:
    return np.random.default_rng((group, step)).normal(size=SIZE)


def outer() -> mpidist.optimizers.Optimizer:
    return SGD(RATE, MOMENTUM, nesterov=True)


def train(
    strategy: mpidist.HybridStrategy, optimizer: mpidist.optimizers.Optimizer, variable: BaseVariable, steps: range
) -> None:
    for number in steps:
        share = gradient(strategy.group_index, number) / strategy.num_replicas_in_sync
        strategy.run(lambda one: optimizer.apply_gradients([(one, variable)]), (share,))


@pytest.mark.parametrize(
    ("layout", "earlier", "later"), turns([
        ("node", "halves", "same"), ("node", "halves", "one"), ("node", "halves", "each"), ("node", "one", "halves"),
        ("node", "each", "halves"), ("node", "each", "one"), ("each", "halves", "same"), ("each", "halves", "each"),
        ("each", "each", "halves"),
    ], 2, always=[("node", "halves", "same"), ("node", "halves", "each")]),
)
def test_nothing_is_lost_and_nothing_counted_twice(
    communicator: Communicator, layout: str, earlier: str, later: str, tmp_path: Path
) -> None:
    folder = communicator.broadcast_object(str(tmp_path))
    ranks = [*range(communicator.size)]
    divisions = {"halves": halves_of(communicator), "one": [ranks], "each": [[rank] for rank in ranks]}
    first, groups = divisions[earlier], divisions.get(later, divisions[earlier])
    # The momenta of all groups of the first half add up, and those of the second half have equal shares of the sum.
    total, before = np.arange(SIZE, dtype=float), [Outer(SIZE, RATE, MOMENTUM, nesterov=True) for _ in first]
    for begin, end in ((0, 2), (2, 4), (4, 5)):
        for group, one in enumerate(before):
            difference = np.sum([0.1 * gradient(group, step) for step in range(begin, end)], axis=0) / len(first)
            total = total + one.increment(difference)
    after = [Outer(SIZE, RATE, MOMENTUM, nesterov=True) for _ in groups]
    momentum = np.sum([one.velocity for one in before], axis=0)

    with make_hybrid(communicator, layout, first, every=2, outer=outer()) as strategy:
        with strategy.scope():
            variable, optimizer = mpidist.Variable(np.arange(SIZE, dtype=float)), SGD(0.1, 0.0)
        checkpoint = mpidist.Checkpoint(variable=variable, optimizer=optimizer)
        # The last window is not full.
        train(strategy, optimizer, variable, range(5))
        path = checkpoint.save(f"{folder}/ckpt")
        assert os.listdir(folder).count("ckpt-1.h5") == 1
        np.testing.assert_allclose(same_everywhere(communicator, variable.numpy()), total, rtol=1e-12)
        # What comes after it does not count when it is restored.
        train(strategy, optimizer, variable, range(3 + strategy.group_index))
        if later == "same":
            checkpoint.restore(path).assert_consumed()
            _continue(communicator, strategy, optimizer, variable, (total, momentum, after))
    if later == "same":
        return
    with make_hybrid(communicator, layout, groups, every=2, outer=outer()) as strategy:
        with strategy.scope():
            variable, optimizer = mpidist.Variable(np.zeros(SIZE)), SGD(0.1, 0.0)
        checkpoint = mpidist.Checkpoint(variable=variable, optimizer=optimizer)
        # The optimizer does not exist yet.
        checkpoint.restore(path)
        _continue(communicator, strategy, optimizer, variable, (total, momentum, after))


def _continue(
    communicator: Communicator, strategy: mpidist.HybridStrategy, optimizer: mpidist.optimizers.Optimizer,
    variable: BaseVariable, known: tuple[Array, Array, list[Outer]],
) -> None:
    total, momentum, after = known
    for one in after:
        one.velocity = momentum / len(after)
    for group, one in enumerate(after):
        total = total + one.increment(0.1 * (gradient(group, 7) + gradient(group, 8)) / len(after))
    train(strategy, optimizer, variable, range(7, 9))
    strategy.finish()
    np.testing.assert_allclose(same_everywhere(communicator, variable.numpy()), total, rtol=1e-12)


@pytest.mark.parametrize(("earlier", "later"), [("halves", "each"), ("each", "halves"), ("halves", "plain")])
def test_other_groups_continue_in_the_data_where_all_were(
    communicator: Communicator, earlier: str, later: str, tmp_path: Path
) -> None:
    folder = communicator.broadcast_object(str(tmp_path))
    rows = 24 * communicator.size
    divisions = {"halves": halves_of(communicator), "each": [[rank] for rank in range(communicator.size)]}

    def begin(strategy: mpidist.Strategy) -> tuple[mpidist.Checkpoint, Any]:
        with strategy.scope():
            variable = mpidist.Variable(np.zeros(1))
        # Its seed is drawn, and is part of the position.
        batches = iter(strategy.experimental_distribute_dataset(Dataset.range(rows).shuffle(rows).batch(2)))
        return mpidist.Checkpoint(variable=variable, batches=batches), batches

    def read(batches: Any, steps: int | None = None) -> list[int]:
        return [row for batch in itertools.islice(batches, steps) for row in np.asarray(batch).tolist()]

    with make_hybrid(communicator, groups=divisions[earlier]) as first:
        checkpoint, batches = begin(first)
        # The last group is a step behind the others, as it may be at a notice of the job's end.
        is_behind = first.group_index == len(first.groups) - 1 > 0
        seen = read(batches, 2 if is_behind else 3)
        path = checkpoint.save(f"{folder}/ckpt")
    as_before = make_hybrid(communicator, groups=divisions[earlier])
    others = mpidist.MultiWorkerMirroredStrategy() if later == "plain" else make_hybrid(
        communicator, groups=divisions[later]
    )
    for strategy in (as_before, others):
        with strategy:
            checkpoint, batches = begin(strategy)
            checkpoint.restore(path).assert_consumed()
            parts = communicator.all_gather_object([*seen, *read(batches)])
        assert sorted(row for part in parts for row in part) == [*range(rows)]


def test_a_schedule_of_the_outer_rate_continues(communicator: Communicator, tmp_path: Path) -> None:
    folder = communicator.broadcast_object(str(tmp_path))
    counts: list[int] = []

    def rate(count: int) -> float:
        counts.append(count)
        return 0.5

    for number, groups in enumerate((halves_of(communicator), [[*range(communicator.size)]])):
        with make_hybrid(communicator, groups=groups, every=2, outer=SGD(rate)) as strategy:
            with strategy.scope():
                variable, optimizer = mpidist.Variable(np.zeros(SIZE)), SGD(0.1)
            checkpoint = mpidist.Checkpoint(variable=variable, optimizer=optimizer)
            if number:
                # The optimizer does not exist yet.
                checkpoint.restore(f"{folder}/ckpt-1.h5")
            counts.clear()
            train(strategy, optimizer, variable, range(4))
            assert counts == ([2 * number, 2 * number + 1] if home_of(strategy).leads else [])
            checkpoint.save(f"{folder}/ckpt")


def test_it_fits_other_strategies(communicator: Communicator, tmp_path: Path) -> None:
    folder = communicator.broadcast_object(str(tmp_path))
    with make_hybrid(communicator, every=2) as strategy:
        with strategy.scope():
            variable, optimizer = mpidist.Variable(np.arange(SIZE, dtype=float)), SGD(0.1, 0.9)
        train(strategy, optimizer, variable, range(3))
        path = mpidist.Checkpoint(variable=variable, optimizer=optimizer).save(f"{folder}/ckpt")
        saved = variable.numpy()
    with mpidist.MultiWorkerMirroredStrategy() as plain:
        with plain.scope():
            variable, optimizer = mpidist.Variable(np.zeros(SIZE)), SGD(0.1, 0.9)
            optimizer.build([variable])
        checkpoint = mpidist.Checkpoint(variable=variable, optimizer=optimizer)
        checkpoint.restore(path)
        assert variable.numpy().tolist() == saved.tolist()
        plain.run(lambda: optimizer.apply_gradients([(np.ones(SIZE), variable)]))
        path = checkpoint.save(f"{folder}/plain")
    with make_hybrid(communicator, every=1, outer=SGD(1.0, 0.5)) as strategy:
        with strategy.scope():
            restored, optimizer = mpidist.Variable(np.zeros(SIZE)), SGD(0.1, 0.9)
            optimizer.build([restored])
        mpidist.Checkpoint(variable=restored, optimizer=optimizer).restore(path)
        assert (restored.numpy() != saved).all()
        train(strategy, optimizer, restored, range(1))
        strategy.finish()
        same_everywhere(communicator, restored.numpy())


def test_a_file_that_cannot_be_written_is_an_error_of_all_groups(communicator: Communicator, tmp_path: Path) -> None:
    folder = communicator.broadcast_object(str(tmp_path))
    with make_hybrid(communicator, every=2) as strategy:
        with strategy.scope():
            variable, optimizer = mpidist.Variable(np.arange(SIZE, dtype=float)), SGD(0.1)
        train(strategy, optimizer, variable, range(3))
        checkpoint = mpidist.Checkpoint(variable=variable, optimizer=optimizer)
        if communicator.rank == 0:
            Path(folder, "file").touch()
        communicator.barrier()
        with pytest.raises(OSError, match="file"):
            checkpoint.save(f"{folder}/file/ckpt")
        path = checkpoint.save(f"{folder}/ckpt")
        assert Path(path).exists()
        manager = mpidist.CheckpointManager(checkpoint, f"{folder}/kept", max_to_keep=1)
        for _ in range(2):
            train(strategy, optimizer, variable, range(2))
            path = str(manager.save())
        communicator.barrier()
        kept = {name for name in os.listdir(f"{folder}/kept") if name.endswith(".h5")}
        assert kept == {Path(path).name}
        assert manager.latest_checkpoint == path
        manager.close()


def test_a_model_of_other_shapes_is_an_error_of_all_groups(communicator: Communicator) -> None:
    if communicator.size == 1:
        pytest.skip("one rank is one group")
    with make_hybrid(communicator) as strategy:
        with strategy.scope():
            variable, optimizer = mpidist.Variable(np.zeros(3 + strategy.group_index)), SGD(0.1)
        with pytest.raises(MismatchError) as caught:
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(variable.shape), variable)]))
        # On the ranks, too, that do not meet other groups.
        assert communicator.all_gather_object(str(caught.value)) == communicator.size * [
            "HybridStrategy: an optimizer must have the same variables in all groups, got as its variable number 0 "
            "shape (3,) and dtype float64 in group 0 and shape (4,) and dtype float64 in group 1. Build the same model "
            "in every group"
        ]
        assert home_of(strategy).leads == (strategy.communicator.rank == 0)
