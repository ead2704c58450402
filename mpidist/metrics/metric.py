"""The metric: adds up a measure on every replica; the result is that of the whole data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mpidist.arrays import AnyArray
from mpidist.metrics.argument import as_float_dtype, on_one_device
from mpidist.options import VariableAggregation
from mpidist.variables.creation import current_arena
from mpidist.variables.sync_on_read import SyncOnReadVariable
from mpidist.variables.variable import Variable


class Measure(Protocol):
    """The arithmetic of one metric: sums that can be added over batches and replicas; pure.

    Attributes:
        arguments: Names of what `update_state` takes, in order.
        shape: Of the sums.
    """

    @property
    def arguments(self) -> tuple[str, ...]:
        """Local. Names of what `update_state` takes before `sample_weight`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Local. Shape of the sums."""
        ...

    def contribution(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> AnyArray:
        """Local. What one batch adds to the sums, in float64 and host memory; the values are NumPy's or CuPy's."""
        ...

    def compute(self, sums: AnyArray) -> Any:
        """Local. The metric, from the sums over all batches and replicas."""
        ...


class Metric:
    """Sums of one measure, kept per replica.

    Collective. Make it in the strategy's scope. The sums are one ON_READ variable, which checkpoints save. It is in
    host memory, under a strategy on GPUs too: of CuPy arrays `update_state` makes the sums on the GPU, and brings only
    these numbers over, for which it waits.

    Args:
        measure: The arithmetic.
        name: For people.
        dtype: Floating dtype of the result, which is then a NumPy number; by default it is a Python float. The sums
            are kept in float64 whatever it is: in float32 a count would stop growing at 2**24.

    Raises:
        ValueError: `dtype` is no floating dtype.
    """

    def __init__(self, measure: Measure, *, name: str, dtype: npt.DTypeLike | None = None) -> None:
        self.measure = measure
        self.name = name
        self._dtype = None if dtype is None else as_float_dtype(dtype)
        self.sums = SyncOnReadVariable(
            current_arena(), np.zeros(measure.shape), name=f"{name}/sums", aggregation=VariableAggregation.SUM
        )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Local. Of the result."""
        return np.dtype(np.float64) if self._dtype is None else self._dtype

    @property
    def variables(self) -> list[Variable]:
        """Local. The state."""
        return [self.sums]

    def update_state(
        self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None, **named: npt.ArrayLike
    ) -> None:
        """Local. Add a batch of this replica; an empty one changes nothing.

        Args:
            values: What the metric takes: `(values)` of a mean, `(y_true, y_pred)` of an accuracy; the weights may
                follow. NumPy's, or what NumPy takes for arrays; if one is CuPy's, all are taken to its GPU.
            sample_weight: One weight per example.
            named: The same by name.

        Raises:
            ValueError: Shapes that do not fit, or no numbers.
            TypeError: Another number of arguments, or other names.
        """
        bound, weight = self._bind(values, sample_weight, named)
        *placed, weight = on_one_device([*bound, weight])
        self.sums.accumulate(self.measure.contribution(*placed, sample_weight=weight))

    def result(self) -> Any:
        """Collective. The metric of all data that all replicas have seen since `reset_state`."""
        result = self.measure.compute(self.sums.aggregate())
        return result if self._dtype is None else np.asarray(result).astype(self._dtype)[()]

    def reset_state(self) -> None:
        """Local. Forget this replica's data; call it on every rank."""
        self.sums.clear()

    def reset_states(self) -> None:
        """Local. `reset_state` by its older name."""
        self.reset_state()

    def merge_state(self, metrics: Iterable[Metric]) -> None:
        """Local. Add what this replica has in other metrics; call it on every rank. The others keep their data.

        Args:
            metrics: Metrics of the same kind with the same arguments, of this strategy or of none.

        Raises:
            ValueError: A metric of another kind or with other arguments; then nothing has been added.
        """
        others = list(metrics)
        for other in others:
            if not isinstance(other, Metric) or other.measure != self.measure:
                raise ValueError(
                    f"metric {self.name!r}: merge_state takes metrics of the same kind with the same arguments, "
                    f"expected {self.measure!r}, got {getattr(other, 'measure', other)!r}"
                )
        # Summed first: the metric itself may be among them.
        for component in [other.sums.component.copy() for other in others]:
            self.sums.accumulate(component)

    def _bind(
        self, values: tuple[npt.ArrayLike, ...], weight: npt.ArrayLike | None, named: dict[str, npt.ArrayLike]
    ) -> tuple[list[npt.ArrayLike], npt.ArrayLike | None]:
        names = self.measure.arguments
        if weight is None and len(values) == len(names) + 1:
            values, weight = values[:-1], values[-1]
        bound = dict(zip(names, values, strict=False))
        if len(values) > len(names) or set(named) != set(names) - set(bound):
            count = len(values) + len(named) + (weight is not None)
            by_name = f", of them by name {sorted(named)}" if named else ""
            raise TypeError(
                f"metric {self.name!r}: update_state takes ({', '.join(names)}, sample_weight=None), got {count} "
                f"arguments{by_name}"
            )
        bound.update(named)
        return [bound[name] for name in names], weight

    def __repr__(self) -> str:
        return f"<mpidist.metrics.Metric {self.name!r} {self.measure!r}>"
