"""The metric: it adds up a measure on every replica, and its result is that of all data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mpidist.arguments import settings_of
from mpidist.arrays import AnyArray
from mpidist.attributes import FixedAttributes
from mpidist.comm.group.agreement import same_on_all
from mpidist.metrics.argument import as_float_dtype, on_one_device
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.variables.arena import current_home
from mpidist.variables.kinds.sync_on_read import OnReadVariable
from mpidist.variables.variable import BaseVariable


class Measure(Protocol):
    """The arithmetic of one metric, as sums that can be added over batches and replicas. It has no state.

    A measure must not average: the mean of the ranks' means is wrong where ranks have different numbers of examples.
    It gives sums (of values and of weights, for example), and `compute` divides them when all are added up.
    """

    @property
    def arguments(self) -> tuple[str, ...]:
        """Local. The names of the arguments of `update_state`, in their order, without `sample_weight`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Local. The shape of the sums."""
        ...

    def contribution(self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None) -> AnyArray:
        """Local. The sums of one batch, in float64 and in host memory; the values are NumPy or CuPy arrays."""
        ...

    def compute(self, sums: AnyArray) -> Any:
        """Local. The metric, from the sums over all batches and replicas."""
        ...


class Metric(FixedAttributes):
    """Collective. The sums of one measure, kept per replica.

    Make it in the strategy's scope. The sums are one ON_READ variable, which checkpoints save. The variable
    is in host memory, also under a strategy on GPUs: `update_state` computes the sums of CuPy arrays on the GPU,
    waits for them, and copies only these few numbers.

    Args:
        measure: The arithmetic.
        name: A name for display and errors.
        dtype: Floating dtype of the result, which is then a NumPy number; by default it is a Python float. The sums
            are always kept in float64: in float32 a count would stop growing at 2**24.

    Raises:
        ValueError: `dtype` is not a floating dtype.
        MismatchError: The metrics differ between ranks.
        TypeError: `measure` is no `Measure`, or the strategy makes no ON_READ variables.
    """

    _assignable = frozenset({"name"})
    _fixed = frozenset({"measure", "sums"})

    def __init__(self, measure: Measure, *, name: str, dtype: npt.DTypeLike | None = None) -> None:
        if not hasattr(measure, "contribution"):
            raise TypeError(
                f"`measure` must be the arithmetic of a metric (mpidist.metrics.Measure), got {measure!r} of type "
                f"{type(measure).__name__}. Use mpidist.metrics.Mean() or another built-in metric"
            )
        self.measure = measure
        self.name = name
        self._dtype = None if dtype is None else as_float_dtype(dtype)
        home = current_home()
        same_on_all(
            home.communicator, f"the settings of metric {name!r}", settings_of(measure),
            "Replicas' sums are added: make the metric the same way on every rank.",
        )
        sums = home.create_variable(
            np.zeros(measure.shape), name=f"{name}/sums", synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        if not isinstance(sums, OnReadVariable):
            raise TypeError(f"metric {name!r} needs an ON_READ variable, and its home made {sums!r}")
        self.sums = sums
        self._settle(Metric)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Local. The dtype of the result."""
        return np.dtype(np.float64) if self._dtype is None else self._dtype

    @property
    def variables(self) -> list[BaseVariable]:
        """Local. The variables that hold the state."""
        return [self.sums]

    def update_state(
        self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None, **named: npt.ArrayLike
    ) -> None:
        """Local. Add a batch of this replica to the sums; an empty batch changes nothing.

        Args:
            values: The metric's arguments: `(values)` of a mean, `(y_true, y_pred)` of an accuracy; the weights may
                follow. Each is an array, or a value that `np.asarray` takes. If one is a CuPy array, all are moved to
                its GPU.
            sample_weight: One weight per example.
            named: The same arguments by name.

        Raises:
            ValueError: Shapes do not fit together, or an argument does not hold numbers.
            TypeError: The number or the names of the arguments are wrong.
        """
        bound, weight = self._bind(values, sample_weight, named)
        *placed, weight = on_one_device([*bound, weight])
        self.sums.accumulate(self.measure.contribution(*placed, sample_weight=weight))

    def result(self) -> Any:
        """Collective. The metric of all data given to `update_state` on all replicas since `reset_state`."""
        result = self.measure.compute(self.sums.aggregate())
        return result if self._dtype is None else np.asarray(result).astype(self._dtype)[()]

    def __call__(
        self, *values: npt.ArrayLike, sample_weight: npt.ArrayLike | None = None, **named: npt.ArrayLike
    ) -> Any:
        """Collective. `update_state` with these arguments, then `result`: of all data, and not of this batch alone."""
        self.update_state(*values, sample_weight=sample_weight, **named)
        return self.result()

    def reset_state(self) -> None:
        """Local. Set this replica's sums to 0. Call it on every rank: `result` adds up the sums of all ranks."""
        self.sums.clear()

    def reset_states(self) -> None:
        """Local. `reset_state` under its older name."""
        self.reset_state()

    def merge_state(self, metrics: Iterable[Metric]) -> None:
        """Local. Add this replica's sums of other metrics, which keep theirs. Call it on every rank.

        Args:
            metrics: Metrics of the same kind with the same arguments, made under this strategy or under none.

        Raises:
            ValueError: A metric has another kind or other arguments. Nothing is added then.
            TypeError: `metrics` is no list of metrics.
        """
        if not isinstance(metrics, Iterable):
            raise TypeError(f"metric {self.name!r}: merge_state takes a list of metrics, got {metrics!r}. Use [metric]")
        others = list(metrics)
        for other in others:
            if not isinstance(other, Metric) or other.measure != self.measure:
                raise ValueError(
                    f"metric {self.name!r}: merge_state takes metrics of the same kind with the same arguments, "
                    f"expected {self.measure!r}, got {getattr(other, 'measure', other)!r}"
                )
        # Copied before anything is added: the metric itself may be among the others.
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
