"""A small problem for trainers: a line through points, whose values a test can compute itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

import mpidist
from mpidist.strategy.base import Strategy
from mpidist.training import Callback

Array = npt.NDArray[Any]
Step = Callable[[Array, Array], dict[str, Any]]
# Batches of 8 leave one of 2: in the last step of an epoch some ranks have no example.
EXAMPLES, BATCH = 42, 8
STEPS = -(-EXAMPLES // BATCH)
X = np.random.default_rng(0).normal(size=(EXAMPLES, 3))
Y = X @ np.array([[1.0], [2.0], [3.0]])


class Line:
    """A model with its optimizer, a metric, a checkpoint, and a trainer of them.

    Args:
        strategy: The strategy.
        folder: For checkpoints; None: nothing is saved.
        rate: The learning rate.
    """

    def __init__(self, strategy: Strategy, folder: Path | None = None, rate: float = 0.1) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.weight = mpidist.Variable(np.zeros((3, 1)), name="weight")
            self.optimizer = mpidist.optimizers.Adam(rate)
            self.error = mpidist.metrics.MeanAbsoluteError()
        self.checkpoint = mpidist.Checkpoint(weight=self.weight, optimizer=self.optimizer)
        self.manager = None if folder is None else mpidist.CheckpointManager(self.checkpoint, folder, max_to_keep=3)
        self.step, self.evaluate_step = functions_of(self.weight, self.optimizer, self.error)
        self.trainer = mpidist.Trainer(strategy, self.step, checkpoint=self.manager, evaluate_step=self.evaluate_step)

    def end(self) -> None:
        """Let another one save to the folder."""
        if self.manager is not None:
            self.manager.close()

    def loss(self) -> float:
        """The mean loss of all points."""
        return float(np.mean((X @ self.weight.numpy() - Y) ** 2))


Make = Callable[..., Line]


def made_lines(make: Make) -> Iterator[Make]:
    """Gives a test what makes its lines, as a fixture does; at its end, ends them and their strategies."""
    made: list[Line] = []

    def line(*args: Any, **kwargs: Any) -> Line:
        made.append(make(*args, **kwargs))
        return made[-1]

    yield line
    for one in made:
        one.end()
        one.strategy.close()


def functions_of(weight: Any, optimizer: Any, error: Any) -> tuple[Step, Step]:
    """A step of the optimizer, and one that evaluates; no methods, which would take the trainer to a worker."""

    def step(x: Array, y: Array) -> dict[str, Any]:
        difference = x @ weight.value() - y
        context = mpidist.get_replica_context()
        assert context is not None
        count = context.all_reduce("SUM", len(x))
        optimizer.apply_gradients([(x.T @ difference / count, weight)])
        error.update_state(y, y + difference)
        return {"loss": difference[:, 0] ** 2, "error": error}

    def evaluate_step(x: Array, y: Array) -> dict[str, Any]:
        difference = x @ weight.value() - y
        error.update_state(y, y + difference)
        return {"loss": difference[:, 0] ** 2, "error": error}

    return step, evaluate_step


def points(count: int = EXAMPLES, *, seed: int | None = 1) -> mpidist.data.Dataset:
    """Global batches of the first points, in another order in each pass where there is a seed."""
    dataset = mpidist.data.Dataset.from_tensor_slices((X[:count], Y[:count]))
    return (dataset if seed is None else dataset.shuffle(count, seed=seed)).batch(BATCH)


class Noted(Callback):
    """Notes the calls of its hooks; and leaves the training after so many steps.

    Args:
        stops: The number of steps; None: it stays.
        pauses: Whether another program is to continue there.
    """

    def __init__(self, stops: int | None = None, *, pauses: bool = True) -> None:
        self.stops, self.pauses = stops, pauses
        self.losses: list[float] = []
        self.calls: list[str] = []

    @override
    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        assert logs is not None
        self.losses.append(logs["loss"])
        if len(self.losses) == self.stops:
            if self.pauses:
                self.trainer.pause()
            else:
                self.trainer.stop_training = True

    @override
    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        self.calls.append("train begin")

    @override
    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        self.calls.append(f"train end {sorted(logs or {})}")

    @override
    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        self.calls.append(f"epoch {epoch} begin")

    @override
    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        self.calls.append(f"epoch {epoch} end {sorted(logs or {})}")

    @override
    def on_test_begin(self, logs: Mapping[str, float] | None = None) -> None:
        self.calls.append("test begin")

    @override
    def on_test_end(self, logs: Mapping[str, float] | None = None) -> None:
        self.calls.append(f"test end {sorted(logs or {})}")
