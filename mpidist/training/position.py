"""The position of a training: its epoch and step, the sums of the epoch, and the history; a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.metrics.metric import Metric
from mpidist.training.results import Measured, mean_of
from mpidist.training.served_metrics import ServedMetrics


@dataclass(frozen=True)
class History:
    """The values of each epoch, the same on every rank.

    Attributes:
        history: Lists by name, with a value for each epoch.
        epoch: The numbers of the epochs.
    """

    history: dict[str, list[float]] = field(default_factory=dict)
    epoch: list[int] = field(default_factory=list)

    def __getitem__(self, name: str) -> list[float]:
        return self.history[name]

    def copy(self) -> History:
        """Local. A copy, which does not change with the training."""
        return History({name: [*values] for name, values in self.history.items()}, [*self.epoch])

    def add(self, epoch: int, logs: Mapping[str, float]) -> None:
        """Local. Add an epoch; what it lacks of the values of others is NaN."""
        for name in {**self.history, **logs}:
            before = self.history.setdefault(name, [])
            before += [float("nan")] * (len(self.epoch) - len(before))
            before.append(float(logs.get(name, float("nan"))))
        self.epoch.append(epoch)


class Totals:
    """The sums of an epoch's steps over all ranks, from which its means and metrics are made."""

    def __init__(self) -> None:
        self.sums: dict[str, AnyArray] = {}
        # The metrics are the program's; after a restore they are known from the first step on, and until then the
        # values that were saved.
        self.metrics: dict[str, Metric] = {}
        self._saved_values: dict[str, float] = {}
        self._kinds: dict[str, str] = {}
        # Of metrics on parameter servers, as they were when last read.
        self.served_values: dict[str, float] = {}

    def note(self, measured: Measured) -> None:
        """Local. Note what a step has returned on this rank, before it is added up.

        Raises:
            ValueError: A value is of another kind than the one of its name before.
        """
        for name, value in measured.sums.items():
            kind, known = measured.kind_of(name), self.sums.get(name)
            before = self._kinds.setdefault(name, kind)
            if kind != before or (known is not None and known.shape != value.shape):
                raise ValueError(
                    f"the step returned {name!r} as {kind}, and before as {before}. Return the same kind of value "
                    "under one name"
                )
        self.metrics.update(measured.metrics)

    def add(self, sums: Mapping[str, AnyArray]) -> None:
        """Local. Add the sums of a step."""
        for name, value in sums.items():
            known = self.sums.get(name)
            self.sums[name] = value.copy() if known is None else known + value
        self._saved_values.clear()

    def values(self) -> dict[str, float]:
        """Local. The means and metrics so far."""
        if self._saved_values:
            return dict(self._saved_values)
        found = dict(self.served_values)
        for name, sums in self.sums.items():
            metric = self.metrics.get(name)
            result = mean_of(sums) if metric is None else metric.measure.compute(sums)
            # A confusion matrix is no number for a history.
            if np.ndim(result) == 0:
                found[name] = float(result)
        return {name: found[name] for name in sorted(found)}

    def clear(self) -> None:
        """Local. Begin an epoch."""
        self.sums.clear()
        self.served_values = {}
        self._saved_values.clear()

    def means(self, sums: Mapping[str, AnyArray]) -> dict[str, float]:
        """Local. The means of arrays over one global batch, without metrics."""
        return {name: mean_of(value) for name, value in sums.items() if name not in self.metrics}

    def state(self) -> dict[str, Any]:
        """Local. The sums, and the values that they give."""
        return {"sums": dict(self.sums), "values": self.values()}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Local. Take the sums of a saved epoch."""
        self.sums = {name: np.array(one.numpy(), np.float64) for name, one in saved.get("sums", {}).items()}
        self._saved_values = {name: float(one) for name, one in saved.get("values", {}).items()}


class TrainingPosition:
    """The position of a training. A checkpoint saves it beside the iterator over the data.

    Attributes:
        call: The number of the next call of `fit` in this program.
        fit: The number of the call of `fit` to which the rest belongs; -1 before the first one.
        epoch: The number of complete epochs.
        step: The number of steps in the epoch that is not complete.
        total: The number of steps in all its epochs.
        steps_per_epoch: The argument of `fit`; None if an epoch is a pass over the data.
        begun: The last epoch whose pass over the data has begun, where an epoch is a pass.
        validations: The number of passes over the validation data.
        epochs: The argument of `fit`.
        is_ended: Whether the training was ended before all epochs, and is complete.
        is_loaded: Whether it was restored from a checkpoint, and no `fit` has continued there.
        totals: The sums of the epoch that is not complete.
        histories: The histories of all calls of `fit`.
        served: The metrics on parameter servers.
        callbacks: What gives the states of callbacks, by their names.
        saved_callbacks: The states that were restored.
    """

    def __init__(self) -> None:
        self.call = 0
        self.fit = -1
        self.epoch = self.step = self.total = self.begun = self.validations = self.epochs = 0
        self.steps_per_epoch: int | None = None
        self.is_ended = self.is_loaded = False
        self.totals = Totals()
        self.histories: list[History] = []
        self.served = ServedMetrics()
        self.callbacks: dict[str, Callable[[], dict[str, Any]]] = {}
        self.saved_callbacks: dict[str, dict[str, Any]] = {}
        self._catch_up: Callable[[], None] = _nothing

    def begin(self, number: int) -> None:
        """Local. Begin another `fit`."""
        self.fit = number
        self.epoch = self.step = self.total = self.begun = self.validations = 0
        self.is_ended = self.is_loaded = False
        self.totals.clear()
        self.histories += [History() for _ in range(number + 1 - len(self.histories))]
        self.saved_callbacks = {}

    def catch_up_by(self, function: Callable[[], None] | None) -> None:
        """Local. Call a function before a state is saved: it counts the steps that other processes have ended."""
        self._catch_up = _nothing if function is None else function

    def count(self, sums: Mapping[str, AnyArray]) -> None:
        """Local. Count a step, of all ranks."""
        self.totals.add(sums)
        self.step += 1
        self.total += 1

    def end_epoch(self, logs: Mapping[str, float]) -> None:
        """Local. Count an epoch, with its values."""
        self.histories[self.fit].add(self.epoch, logs)
        self.epoch += 1
        self.step = 0
        self.totals.clear()

    def state(self) -> dict[str, Any]:
        """Local. The state that a checkpoint saves, the same on every rank."""
        self._catch_up()
        limit = -1 if self.steps_per_epoch is None else self.steps_per_epoch
        counts = {
            "fit": self.fit, "epoch": self.epoch, "step": self.step, "total": self.total, "steps_per_epoch": limit,
            "begun": self.begun, "validations": self.validations, "epochs": self.epochs, "is_ended": int(self.is_ended),
        }
        histories = {
            str(number): {
                "epoch": np.array(one.epoch, np.int64),
                "history": {name: np.array(values) for name, values in one.history.items()},
            }
            for number, one in enumerate(self.histories)
        }
        callbacks = {name: give() for name, give in self.callbacks.items()}
        return {
            "counts": counts, "totals": self.totals.state(), "histories": histories,
            "callbacks": {name: state for name, state in callbacks.items() if state}, "served": self.served.state(),
        }

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Local. Take the position of a checkpoint; the next `fit` continues there.

        In a program that has called `fit` already this is the saved call; in another one the calls before it return
        at once, with the history that was saved.
        """
        counts = {name: int(value) for name, value in saved["counts"].items()}
        self.fit, self.epoch, self.step, self.total = (counts[name] for name in ("fit", "epoch", "step", "total"))
        limit = counts["steps_per_epoch"]
        self.steps_per_epoch = None if limit < 0 else limit
        self.validations, self.epochs = counts["validations"], counts["epochs"]
        # A checkpoint without it was not saved between the begin of a pass and its first step.
        self.begun = counts.get("begun", self.epoch if self.step or self.epoch == 0 else -1)
        self.is_ended, self.is_loaded = bool(counts["is_ended"]), True
        if self.call:
            self.call = max(0, self.fit)
        self.totals.load_state(saved.get("totals", {}))
        self.served.load_state(saved.get("served", {}))
        histories = saved.get("histories", {})
        self.histories = [_history(histories[str(number)]) for number in range(len(histories))]
        self.saved_callbacks = {
            name: {key: value.numpy() for key, value in state.items()}
            for name, state in saved.get("callbacks", {}).items()
        }


def _history(saved: Mapping[str, Any]) -> History:
    values = {name: one.numpy().tolist() for name, one in saved.get("history", {}).items()}
    return History(values, saved["epoch"].numpy().tolist())


def _nothing() -> None:
    """Nothing."""
