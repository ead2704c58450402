"""Trainers on several ranks: all have the same history, and leave the loop together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import training
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError
from mpidist.strategy.base import Strategy
from tests.helpers.clocks import SetClock
from tests.helpers.fitting import STEPS, Line, Make, Noted, X, Y, made_lines, points
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import lay_out
from tests.parallel.strategy.hybrid.making import make_hybrid
from tests.parallel.strategy.tpu.making import make_tpu

pytestmark = pytest.mark.mpi


@pytest.fixture
def make(communicator: Communicator) -> Iterator[Make]:
    """Makes lines over all ranks, or by another strategy, and ends them."""

    def line(folder: Path | None = None, strategy: Strategy | None = None) -> Line:
        return Line(ArenaStrategy(communicator) if strategy is None else strategy, folder)

    yield from made_lines(line)


def everywhere(communicator: Communicator, value: Any) -> None:
    """Whether all ranks have this value."""
    assert communicator.all_gather_object(value) == [value] * communicator.size


@pytest.mark.parametrize("layout", ["node", "pairs"])
def test_the_history_is_that_of_all_examples_on_every_rank(communicator: Communicator, layout: str) -> None:
    """Also where the last batch leaves some ranks without an example."""
    with ArenaStrategy(lay_out(communicator, layout)) as strategy:
        line = Line(strategy, rate=0.0)
        history = line.trainer.fit(points(), 2, validation_data=points(13), callbacks=[noted := Noted()])
        np.testing.assert_allclose(history["loss"], np.mean(Y**2))
        np.testing.assert_allclose(history["error"], np.mean(np.abs(Y)))
        np.testing.assert_allclose(history["val_loss"], np.mean(Y[:13] ** 2))
        np.testing.assert_allclose(history["val_error"], np.mean(np.abs(Y[:13])))
        everywhere(communicator, (history.history, noted.losses, noted.calls))


@pytest.mark.parametrize("steps_per_epoch", [None, 4])
def test_a_resumed_fit_continues_in_the_epoch_to_the_same_bits(
    communicator: Communicator, mpi_tmp_path: Path, make: Make, steps_per_epoch: int | None
) -> None:
    whole, seen = make(), Noted()
    expected = whole.trainer.fit(points(), 3, steps_per_epoch, points(13), [seen])
    losses: list[float] = []
    for stops in (3, 5, None):
        # Another rank each time is the one that leaves.
        is_mine = communicator.rank == (stops or 0) % communicator.size
        line, noted = make(mpi_tmp_path), Noted(stops if is_mine else None)
        history = line.trainer.fit(points(), 3, steps_per_epoch, points(13), [noted])
        line.end()
        losses += noted.losses
    assert history == expected
    assert losses == seen.losses
    assert line.weight.numpy().tobytes() == whole.weight.numpy().tobytes()
    everywhere(communicator, losses)


@pytest.mark.mpi(min_size=2)
def test_another_number_of_ranks_continues(communicator: Communicator, mpi_tmp_path: Path, make: Make) -> None:
    whole = make().trainer.fit(points(), 3, validation_data=points(13))
    first = make(mpi_tmp_path)
    first.trainer.fit(points(), 3, validation_data=points(13), callbacks=[Noted(STEPS + 1)])
    first.end()
    # One rank alone has it all.
    alone = communicator.split(communicator.rank, 0)
    with ArenaStrategy(alone) as strategy:
        if communicator.rank == 0:
            last = Line(strategy, mpi_tmp_path)
            history = last.trainer.fit(points(), 3, validation_data=points(13))
            last.end()
            for name, values in whole.history.items():
                np.testing.assert_allclose(history[name], values, rtol=1e-6)
    alone.close()


def logical(strategy: Strategy, folder: Path | None = None) -> Line:
    """A line whose steps are made by logical replicas."""
    line = Line(strategy)
    if folder is not None:
        checkpoint = mpidist.Checkpoint(weight=line.weight, optimizer=line.optimizer)
        line.manager = mpidist.CheckpointManager(checkpoint, folder, max_to_keep=3)

    def step(x: Any, y: Any) -> Any:
        difference = x @ line.weight.value() - y
        line.error.update_state(y, y + difference)
        return {"loss": difference[:, 0] ** 2, "error": line.error}, (x.T @ difference, len(x))

    def update(sums: Any) -> None:
        gradient, count = sums
        line.optimizer.apply_gradients([(gradient / count, line.weight)], skip_gradients_aggregation=True)

    line.trainer = mpidist.Trainer(
        strategy, step, checkpoint=line.manager, evaluate_step=line.evaluate_step, logical_replicas=4, update=update
    )
    return line


@pytest.mark.mpi(min_size=2)
def test_logical_replicas_continue_on_another_number_of_ranks_to_the_same_bits(
    communicator: Communicator, mpi_tmp_path: Path
) -> None:
    fits: list[Any] = []
    alone = communicator.split(communicator.rank, 0)
    with ArenaStrategy(alone) as strategy:
        line = logical(strategy)
        fits.append(line.trainer.fit(points(), 3, validation_data=points(13)))
        expected = line.weight.numpy().tobytes()
    with ArenaStrategy(communicator) as strategy:
        line = logical(strategy, mpi_tmp_path)
        line.trainer.fit(points(), 3, validation_data=points(13), callbacks=[Noted(STEPS + 2)])
        line.end()
    communicator.barrier()
    # Another number of ranks goes on in the middle of an epoch: one, or again all.
    if communicator.rank == 0:
        with ArenaStrategy(alone) as strategy:
            line = logical(strategy, mpi_tmp_path)
            fits.append(line.trainer.fit(points(), 3, validation_data=points(13), callbacks=[Noted(2)]))
            line.end()
    communicator.barrier()
    with ArenaStrategy(communicator) as strategy:
        line = logical(strategy, mpi_tmp_path)
        assert line.trainer.fit(points(), 3, validation_data=points(13)) == fits[0]
        assert line.weight.numpy().tobytes() == expected
        line.end()
    alone.close()


@pytest.mark.parametrize("pauses", [True, False])
def test_who_leaves_does_not_leave_alone(communicator: Communicator, make: Make, *, pauses: bool) -> None:
    last = communicator.size - 1
    noted = Noted(2 if communicator.rank == last else None, pauses=pauses)
    line = make()
    history = line.trainer.fit(points(), 3, callbacks=[noted])
    everywhere(communicator, (len(noted.losses), history.epoch))
    assert (len(noted.losses), history.epoch) == (3, [] if pauses else [0])


class Ending(training.Callback):
    """Ends the training on one rank, at the end of the first epoch or before the first step."""

    def __init__(self, *, is_mine: bool, begins: bool) -> None:
        self.is_mine, self.begins = is_mine, begins

    def on_train_begin(self, logs: Any = None) -> None:
        self.trainer.stop_training = self.is_mine and self.begins

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.trainer.stop_training = self.is_mine


@pytest.mark.parametrize("begins", [True, False])
def test_who_leaves_between_epochs_leaves_with_all(communicator: Communicator, make: Make, *, begins: bool) -> None:
    ending = Ending(is_mine=communicator.rank == communicator.size - 1, begins=begins)
    epochs = make().trainer.fit(points(), 3, callbacks=[ending]).epoch
    everywhere(communicator, epochs)
    assert epochs == ([] if begins else [0])


def test_the_clock_of_one_rank_decides(communicator: Communicator, make: Make) -> None:
    clock = SetClock()

    class Passing(training.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if communicator.rank == communicator.size - 1:
                clock.forward(1)

    line = make()
    line.trainer.fit(points(), 3, callbacks=[Passing(), training.TrainingTimeLimit(4, clock=clock)])
    everywhere(communicator, (line.trainer.position.epoch, line.trainer.position.step))
    assert line.trainer.position.step == 5


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["name", "metric"])
def test_ranks_whose_steps_return_other_values(communicator: Communicator, make: Make, kind: str) -> None:
    line, rank = make(), communicator.rank
    with line.strategy.scope():
        metrics = [mpidist.metrics.Mean(), mpidist.metrics.Sum()]

    def step(x: Any, _: Any) -> dict[str, Any]:
        # One name for both: sums and a number, and two sums.
        values: Any = {"name": {f"loss_{rank}": x[:, 0]}, "metric": {"loss": x[:, 0] if rank else metrics[0]}}
        return dict(values[kind])

    trainer = mpidist.Trainer(line.strategy, step)
    if kind == "metric":
        # They have the same shape: what differs would be added up in silence.
        assert metrics[0].sums.shape == (2,)
    with pytest.raises(MismatchError, match="what the step returns"):
        trainer.fit(points())


def test_a_file_that_the_first_rank_cannot_write_is_an_error_of_all(
    communicator: Communicator, mpi_tmp_path: Path, make: Make
) -> None:
    words = r"missing/\.?log\.csv" if communicator.size == 1 else r"opening .*missing/log\.csv"
    with pytest.raises(OSError, match=words):
        make().trainer.fit(points(), callbacks=[training.CSVLogger(mpi_tmp_path / "missing" / "log.csv")])
    logger = training.CSVLogger(mpi_tmp_path / "log.csv")
    make().trainer.fit(points(), 2, callbacks=[logger])
    communicator.barrier()
    assert len((mpi_tmp_path / "log.csv").read_text().split()) == 3


def test_two_trainers_side_by_side(communicator: Communicator, mpi_tmp_path: Path, make: Make) -> None:
    lines = [make(mpi_tmp_path / str(number)) for number in range(2)]
    for _ in range(2):
        first, second = [line.trainer.fit(points(), 1) for line in lines]
        assert first == second
        everywhere(communicator, first.history)


@pytest.mark.parametrize("device", ["first", "last"])
def test_a_logical_device_that_wishes_the_end(communicator: Communicator, make: Make, device: str) -> None:
    """Only the first one of a replica is in sums over replicas."""
    strategy = make_tpu(communicator)
    wanted = 0 if device == "first" else communicator.size - 1
    noted = Noted(2 if communicator.rank == wanted else None)
    make(strategy=strategy).trainer.fit(points(), 3, callbacks=[noted])
    everywhere(communicator, len(noted.losses))
    assert len(noted.losses) == 3


def test_a_resumed_fit_of_other_groups_continues_in_the_epoch(
    communicator: Communicator, mpi_tmp_path: Path, make: Make
) -> None:
    """The epoch goes on behind what all groups have read, and no group makes more steps than others."""
    seen: list[float] = []
    dataset = mpidist.data.Dataset.from_tensor_slices((X, Y)).shuffle(len(X), seed=1).batch(2)
    batches = len(X) // 2

    def begin(strategy: Any, callbacks: list[Any]) -> None:
        line = make(None, strategy)
        checkpoint = mpidist.Checkpoint(weight=line.weight, optimizer=line.optimizer)
        manager = mpidist.CheckpointManager(checkpoint, mpi_tmp_path / "run", max_to_keep=2)

        def step(x: Any, y: Any) -> dict[str, Any]:
            seen.extend(y[:, 0].tolist())
            return line.step(x, y)

        try:
            mpidist.Trainer(strategy, step, checkpoint=manager).fit(dataset, callbacks=callbacks)
        finally:
            manager.close()

    class Ends(training.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            del logs
            if batch == 3:
                raise RuntimeError("the program ends here")

    first = make_hybrid(communicator, every=2)
    with pytest.raises(RuntimeError, match="the program ends here"):
        begin(first, [Ends(), training.ModelCheckpoint(1)])
    first.close()
    taken = 3 * len(first.groups)
    begin(make_hybrid(communicator, groups=[[rank] for rank in range(communicator.size)], every=2), [])
    count = communicator.size
    left = count * (batches // count - -(-taken // count))
    rows = [row for part in communicator.all_gather_object(seen) for row in part]
    assert len(rows) == 2 * (taken + left)
    assert len(set(rows)) == len(rows)


def test_groups_that_do_not_wait_for_each_other(communicator: Communicator, mpi_tmp_path: Path, make: Make) -> None:
    """All groups make as many steps, the first one decides on the end, and only one of them writes."""
    strategy = make_hybrid(communicator, every=2)
    line, path = make(mpi_tmp_path / "run", strategy), mpi_tmp_path / "log.csv"
    callbacks = [training.CSVLogger(path), noted := Noted()]
    history = line.trainer.fit(points(), 2, validation_data=points(13), callbacks=callbacks)
    assert history.epoch == [0, 1]
    groups = len(strategy.groups)
    everywhere(communicator, len(noted.losses))
    assert len(noted.losses) == 2 * (STEPS // groups)
    # The fit has ended with `finish`.
    everywhere(communicator, line.weight.numpy().tobytes())
    assert line.trainer.evaluate(points(seed=None))["loss"] == pytest.approx(line.loss())
    communicator.barrier()
    assert len(path.read_text().split()) == 3
    # Not before the end of the epoch, and not by another group.
    for leader, ends in ((0, [0]), (communicator.size - 1, [0] if groups == 1 else [0, 1])):
        noted = Noted(1 if communicator.rank == leader else None, pauses=False)
        assert line.trainer.fit(points(), 2, callbacks=[noted]).epoch == ends
