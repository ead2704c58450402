"""Variables of any home: an optimizer, a metric and a checkpoint need the interface `Home` and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.checkpoint.file.layout import PIECE_BYTES
from mpidist.comm.group.communicator import Communicator
from mpidist.indexed_slices import IndexedSlices
from mpidist.optimizers import SGD, Adam, LossScaleOptimizer
from mpidist.variables.variable import BaseVariable, Home
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.variables.shelf import Shelf, ShelfSums, ShelfVariable

pytestmark = pytest.mark.mpi

FIRST = np.linspace(-1, 1, 60, dtype=np.float32).reshape(20, 3)


@pytest.fixture
def shelf(communicator: Communicator) -> Shelf:
    return Shelf(communicator)


def gradient(step: int, rank: int) -> AnyArray:
    return np.asarray(np.random.default_rng((step, rank)).normal(size=FIRST.shape).astype(np.float32))


def on_both(shelf: Shelf, **options: Any) -> tuple[BaseVariable, BaseVariable]:
    """The same variable on the shelf and in an arena."""
    strategy = ArenaStrategy(shelf.communicator, shared=False)
    with shelf.current():
        ours = mpidist.Variable(FIRST, **options)
    with strategy.scope():
        return ours, mpidist.Variable(FIRST, **options)


def test_new_variables_live_in_the_home_that_is_current(shelf: Shelf) -> None:
    home: Home = shelf
    with shelf.current():
        variable, metric = mpidist.Variable(FIRST), mpidist.metrics.Mean()
        with pytest.raises(RuntimeError, match="compute_average_loss must be called inside `run`"):
            mpidist.compute_average_loss(np.ones(4))
    assert isinstance(variable, ShelfVariable)
    assert isinstance(metric.sums, ShelfSums)
    assert variable.home is home
    assert variable.distribute_strategy is shelf
    np.testing.assert_array_equal(variable.numpy(), FIRST)


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.1, "clipvalue": 0.5}, {"use_ema": True, "ema_momentum": 0.5},
     {"gradient_accumulation_steps": 2}],
    ids=["plain", "around", "average", "accumulated"],
)
def test_an_optimizer_updates_variables_of_any_home(shelf: Shelf, options: dict[str, Any]) -> None:
    pair = on_both(shelf)
    optimizers = [Adam(0.1, **options) for _ in pair]
    for step in range(4):
        for variable, optimizer in zip(pair, optimizers, strict=True):
            optimizer.apply_gradients([(gradient(step, shelf.communicator.rank), variable)])
    for optimizer in optimizers:
        optimizer.finalize_variable_values()
    np.testing.assert_allclose(pair[0].numpy(), pair[1].numpy(), rtol=1e-5, atol=1e-6)
    assert not np.array_equal(pair[0].numpy(), FIRST)
    for ours, theirs in zip(*(optimizer.variables for optimizer in optimizers), strict=False):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=["plain", "accumulated"])
def test_training_goes_on_in_another_home(shelf: Shelf, mpi_tmp_path: Path, options: dict[str, Any]) -> None:
    pair = on_both(shelf)
    optimizers = [Adam(0.1, **options) for _ in pair]
    checkpoints = [mpidist.Checkpoint(v=v, adam=adam) for v, adam in zip(pair, optimizers, strict=True)]
    straight, plain = on_both(shelf)[1], Adam(0.1, **options)
    for step in range(6):
        given = gradient(step, shelf.communicator.rank)
        plain.apply_gradients([(given, straight)])
        # After an odd number of steps, in the middle of what is accumulated.
        here = 0 if step in (0, 1, 2) else 1
        optimizers[here].apply_gradients([(given, pair[here])])
        if step == 2:
            checkpoints[1].restore(checkpoints[0].save(mpi_tmp_path / "c")).assert_consumed()
    np.testing.assert_allclose(pair[1].numpy(), straight.numpy(), rtol=1e-5, atol=1e-6)


def test_an_optimizer_updates_rows_of_any_home(shelf: Shelf) -> None:
    pair = on_both(shelf, sparse_gradient=True)
    optimizers = [Adam(0.1) for _ in pair]
    for step in range(3):
        indices = np.random.default_rng((step, shelf.communicator.rank)).integers(0, 20, 7)
        rows = IndexedSlices(gradient(step, shelf.communicator.rank)[:7], indices)
        for variable, optimizer in zip(pair, optimizers, strict=True):
            optimizer.apply_gradients([(rows, variable)])
    np.testing.assert_allclose(pair[0].numpy(), pair[1].numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="has no dense gradient"):
        optimizers[0].gradients([pair[0]])


def test_a_step_that_is_not_finite_is_skipped_in_any_home(shelf: Shelf) -> None:
    with shelf.current():
        variable = mpidist.Variable(FIRST)
    optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=4.0)
    bad = np.full(FIRST.shape, np.inf if shelf.communicator.rank == 0 else 1, np.float32)
    optimizer.apply_gradients([(bad, variable)])
    np.testing.assert_array_equal(variable.numpy(), FIRST)
    assert optimizer.dynamic_scale == 2.0
    (view,) = optimizer.gradients([variable])
    view[...] = 2.0
    optimizer.apply_gradients([(view, variable)])
    np.testing.assert_allclose(variable.numpy(), FIRST - shelf.communicator.size)


def test_an_optimizer_refuses_variables_of_two_homes(shelf: Shelf) -> None:
    ours, theirs = on_both(shelf)
    with pytest.raises(ValueError, match="belong to different strategies"):
        Adam().build([ours, theirs])
    with shelf.current(), pytest.raises(ValueError, match="does not belong to the current strategy"):
        Adam().build([theirs])


def test_a_metric_adds_up_in_any_home(shelf: Shelf) -> None:
    rank, size = shelf.communicator.rank, shelf.communicator.size
    with shelf.current():
        mean, other = mpidist.metrics.Mean(), mpidist.metrics.Mean()
    mean.update_state([float(rank)] * (rank + 1))
    values = [r for r in range(size) for _ in range(r + 1)]
    assert mean.result() == pytest.approx(np.mean(values))
    other.merge_state([mean])
    assert other.result() == mean.result()
    mean.reset_state()
    assert mean.sums.component.sum() == 0


@pytest.mark.parametrize("rows", [3, 1000, 3 * PIECE_BYTES // 12 + 5], ids=["in a page", "pages", "pieces"])
def test_a_checkpoint_reads_ranges_and_no_rank_has_all(shelf: Shelf, mpi_tmp_path: Path, rows: int) -> None:
    expected = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    with shelf.current():
        table, scalar, metric = mpidist.Variable(expected), mpidist.Variable(7.0), mpidist.metrics.Sum()
    metric.update_state(1.0)
    optimizer = Adam(0.1)
    optimizer.build([table])
    shelf.asked.clear()
    path = mpidist.Checkpoint(table=table, scalar=scalar, metric=metric, adam=optimizer).save(mpi_tmp_path / "c")
    # Each element once, no rank those of another one (`_read` refuses them), and never more than a piece.
    own = len(shelf.parts[table.name])
    assert sum(shelf.asked) == 3 * own + len(shelf.parts[scalar.name])
    assert max(shelf.asked, default=0) <= PIECE_BYTES // 4
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["table"][:], expected)
        assert file["scalar"][()] == 7.0
    # Reading checks every checksum, also of pieces that several ranks have written.
    with ArenaStrategy(shelf.communicator).scope():
        whole, number, total = mpidist.Variable(np.zeros_like(expected)), mpidist.Variable(0.0), mpidist.metrics.Sum()
    again = Adam(0.1)
    again.build([whole])
    checkpoint = mpidist.Checkpoint(table=whole, scalar=number, metric=total, adam=again)
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_array_equal(whole.numpy(), expected)
    assert total.result() == shelf.communicator.size
    whole.assign(expected + 1)
    mpidist.Checkpoint(table=table, scalar=scalar, metric=metric, adam=optimizer).restore(
        checkpoint.save(mpi_tmp_path / "d")
    ).assert_consumed()
    np.testing.assert_array_equal(table.numpy(), expected + 1)


def test_a_rank_that_cannot_read_its_part_fails_a_save_on_all(shelf: Shelf, mpi_tmp_path: Path) -> None:
    with shelf.current():
        variable = mpidist.Variable(np.zeros((5000, 3), np.float32))
    assert isinstance(variable, ShelfVariable)
    if shelf.communicator.rank == shelf.communicator.size - 1:
        variable.end = variable.begin
    with pytest.raises((IndexError, RuntimeError), match="is on another rank"):
        mpidist.Checkpoint(v=variable).save(mpi_tmp_path / "c")
    shelf.communicator.barrier()
    assert not list(mpi_tmp_path.iterdir())
