"""Metrics on parameter servers, whose sums only grow: the part of one epoch is the difference of two readings."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.metrics.metric import Measure
from mpidist.variables.variable import BaseVariable


class ServedMetric(NamedTuple):
    """A metric on servers, as a worker sends it back.

    Attributes:
        measure: Its arithmetic.
        sums: Its sums, over all workers.
    """

    measure: Measure
    sums: BaseVariable


@dataclass
class Reading:
    """Sums of a metric.

    Attributes:
        before: The sums at the beginning of the epoch.
        now: The sums when they were last read.
    """

    before: AnyArray
    now: AnyArray


class ServedMetrics:
    """Local. The metrics on servers that steps have returned, by the function that returns them and by name.

    The chief learns of a metric by the first step that returns it. A restored program may end an epoch before that, so
    the readings are part of a checkpoint.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], ServedMetric] = {}
        self._readings: dict[tuple[str, str], Reading] = {}
        # By function: the sums at the beginning of its last epoch, by the identity of their variable.
        self._begins: dict[str, dict[int, AnyArray]] = {}

    def note(self, function: str, metrics: Mapping[str, ServedMetric], saved: Container[int]) -> None:
        """Local. Note what a step has returned.

        Args:
            function: The function of the step.
            metrics: The metrics by name.
            saved: The identities of the variables that the program's checkpoint holds.
        """
        for name, metric in metrics.items():
            key = function, name
            if key in self._known:
                continue
            self._known[key] = metric
            zeros = np.zeros(metric.sums.shape)
            reading = self._readings.setdefault(key, Reading(zeros, zeros))
            begin = self._begins.get(function, {}).get(id(metric.sums))
            if begin is not None:
                # Another function returns it, too.
                reading.before = begin
            elif id(metric.sums) not in saved:
                # Its sums have begun at 0 in this program.
                reading.before = reading.before - reading.now

    def begin(self, function: str) -> None:
        """Local. Begin an epoch, or an evaluation."""
        self.read()
        for key, reading in self._readings.items():
            if key[0] == function:
                reading.before = reading.now
        self._begins[function] = {id(one.sums): self._readings[key].now for key, one in self._known.items()}

    def read(self) -> None:
        """Local. Read the sums."""
        for key, metric in sorted(self._known.items()):
            self._readings[key].now = np.array(metric.sums.numpy(), np.float64)

    def values(self, function: str) -> dict[str, float]:
        """Local. The metrics of the epoch, as they were read, as far as they are numbers."""
        found = {
            name: metric.measure.compute(self._readings[of, name].now - self._readings[of, name].before)
            for (of, name), metric in sorted(self._known.items()) if of == function
        }
        return {name: float(value) for name, value in found.items() if np.ndim(value) == 0}

    def state(self) -> dict[str, Any]:
        """Local. The readings."""
        saved: dict[str, Any] = {}
        for (function, name), one in sorted(self._readings.items()):
            saved.setdefault(function, {})[name] = {"before": one.before, "now": one.now}
        return saved

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Local. Take the readings of a checkpoint."""
        self._readings = {
            (function, name): Reading(one["before"].numpy(), one["now"].numpy())
            for function, readings in saved.items() for name, one in readings.items()
        }
        # Looked at again: they may not be what the checkpoint has.
        self._known, self._begins = {}, {}
