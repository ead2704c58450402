"""A small home of variables: a shelf, on which each rank keeps its own rows of each variable in a dictionary.

It is written against the interfaces alone: no arena, no plan, no slab. No rank has room for a whole variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpidist import context
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import Resource
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import VariableAggregation, VariableSynchronization, parse_enum
from mpidist.variables.kinds.sync_on_read import OnReadVariable
from mpidist.variables.making.creation import initial_array
from mpidist.variables.scatter import apply_rows, checked_rows
from mpidist.variables.update.arithmetic import UpdateArithmetic, UpdateSettings, take_average
from mpidist.variables.update.kernel import Kernel, LayerKernel, Update
from mpidist.variables.update.options import ACCUMULATED, ACCUMULATES, OptimizerOptions
from mpidist.variables.update.rows import RowArithmetic
from mpidist.variables.variable import BaseVariable, Gradient, Read, UpdatePlan

S = TypeVar("S", bound=BaseVariable)


class Shelf(Resource):
    """The home.

    Attributes:
        communicator: The ranks.
        strategy: Itself: a strategy only has to be told from others.
        strategy_number: 0: it is not numbered.
        saves_once: False: there is one group.
        parts: This rank's elements of each variable, flat.
        asked: Number of elements of each read.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.strategy: Any = self
        self.strategy_number = 0
        self.saves_once = False
        self.parts: dict[str, AnyArray] = {}
        self.asked: list[int] = []

    @contextmanager
    def current(self) -> Iterator[None]:
        """Local. Make this home that of new variables."""
        context.push(context.Entry(self, None, self))
        try:
            yield
        finally:
            context.pop()

    def bounds(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Local. Rank r has r + 1 times as many rows as the first one; nothing ends where a page does."""
        rows, ranks = (shape[0] if shape else 1), self.communicator.size
        width = int(np.prod(shape[1:], dtype=np.int64))
        return tuple(rows * (r * (r + 1)) // (ranks * (ranks + 1)) * width for r in range(ranks + 1))

    def create_variable(
        self,
        initial_value: npt.ArrayLike | BaseVariable | Callable[[], npt.ArrayLike],
        *,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        trainable: bool | None = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
        sparse_gradient: bool = False,
    ) -> BaseVariable:
        """Collective. See `Home.create_variable`."""
        how = parse_enum(VariableAggregation, aggregation, "aggregation")
        array = initial_array(initial_value, dtype, str(name), how, has_rows=sparse_gradient)
        array = self.communicator.broadcast_object(array)
        key = f"{name} {len(self.parts)}"
        if parse_enum(VariableSynchronization, synchronization, "s") is VariableSynchronization.ON_READ:
            return ShelfSums(self, key, array)
        return ShelfVariable(self, key, array, has_rows=sparse_gradient)

    def plan(
        self, variables: Sequence[BaseVariable], kernel: Kernel | LayerKernel, options: OptimizerOptions
    ) -> UpdatePlan:
        """Collective. See `Home.plan`."""
        return ShelfPlan(self, [v for v in variables if isinstance(v, ShelfVariable)], kernel, options)

    def set_strategy(self, strategy: object) -> None:
        """Local. See `Home.set_strategy`."""
        self.strategy = strategy

    def after_run(self) -> None:
        """Local. See `Home.after_run`."""

    def save_once(self, write: Callable[[Mapping[int, Any]], float], told: object) -> float:
        """Collective. See `Home.save_once`."""
        return write({0: told})

    def colocated(self, variable: BaseVariable) -> AbstractContextManager[None]:
        """Local. See `Home.colocated`."""
        del variable
        return nullcontext()


class ShelfVariable(BaseVariable):
    """A variable whose rows lie on the ranks."""

    def __init__(self, home: Shelf, key: str, array: AnyArray, *, has_rows: bool = False) -> None:
        self.home = home
        self.name, self.shape, self.dtype, self.trainable = key, array.shape, array.dtype, True
        self.synchronization, self.aggregation = VariableSynchronization.ON_WRITE, VariableAggregation.NONE
        self.sparse_gradient = has_rows
        self.bounds: tuple[int, ...] = home.bounds(array.shape)
        rank = home.communicator.rank
        self.begin, self.end = self.bounds[rank], self.bounds[rank + 1]
        home.parts[key] = self.own(array).copy()
        self._home = home

    @property
    def part(self) -> AnyArray:
        """Local. This rank's elements, flat."""
        return self._home.parts[self.name]

    def own(self, array: AnyArray) -> AnyArray:
        """Local. Of a whole array, what belongs to this rank."""
        return array.reshape(-1)[self.begin : self.end]

    def value(self) -> AnyArray:
        """Collective. Only a test may do this: it puts the whole variable together."""
        return np.concatenate(self.group.all_gather_object(self.part)).reshape(self.shape)

    def write_array(self, array: AnyArray) -> None:
        """Collective. See `BaseVariable.write_array`."""
        self.part[...] = self.own(self.group.broadcast_object(array))

    def add_array(self, array: AnyArray, method: str = "assign_add") -> None:
        """Collective. See `BaseVariable.add_array`."""
        self.part[...] += self.own(self.group.broadcast_object(array))

    def scatter(self: S, kind: str, sparse_delta: IndexedSlices) -> S:
        """Collective. See `Scatter.scatter`."""
        rows = self.group.broadcast_object(checked_rows(self, kind, sparse_delta))
        whole = self.value().copy()
        apply_rows(kind, whole, rows.values, rows.indices)
        self.assign(whole)
        return self

    def reader(self) -> Read:
        """Local. See `BaseVariable.reader`."""
        return self._read

    def _read(self, start: int, stop: int) -> AnyArray:
        if not self.begin <= start <= stop <= self.end:
            raise IndexError(f"{self.name}: [{start}, {stop}) is on another rank, not in [{self.begin}, {self.end})")
        self._home.asked.append(stop - start)
        return self.part[start - self.begin : stop - self.begin]

    def load(self, read: Read) -> None:
        """Local. See `BaseVariable.load`."""
        self.part[...] = read(self.begin, self.end)


class ShelfSums(OnReadVariable):
    """An ON_READ variable: each rank has a component, and reading adds them up."""

    def __init__(self, home: Shelf, key: str, array: AnyArray) -> None:
        self.home = home
        self.name, self.shape, self.dtype, self.trainable = key, array.shape, array.dtype, False
        self.synchronization, self.aggregation = VariableSynchronization.ON_READ, VariableAggregation.SUM
        home.parts[key] = array.copy()
        self._component = home.parts[key]

    @property
    def component(self) -> AnyArray:
        """Local. See `OnReadVariable.component`."""
        return self._component

    def aggregate(self) -> AnyArray:
        """Collective. See `OnReadVariable.aggregate`."""
        total: AnyArray = np.sum(self.group.all_gather_object(self._component), axis=0)
        return total

    value = aggregate

    def accumulate(self, delta: AnyArray) -> None:
        """Local. See `OnReadVariable.accumulate`."""
        self._component += delta

    def clear(self) -> None:
        """Local. See `OnReadVariable.clear`."""
        self._component[...] = 0

    def write_array(self, array: AnyArray) -> None:
        """Local. See `BaseVariable.write_array`."""
        self._component[...] = array if self.group.rank == 0 else 0

    def add_array(self, array: AnyArray, method: str = "assign_add") -> None:
        """Local. See `BaseVariable.add_array`."""
        self.accumulate(array)

    def scatter(self: S, kind: str, sparse_delta: IndexedSlices) -> S:
        """Local. Refuse."""
        raise NotImplementedError(kind, sparse_delta)

    def reader(self) -> Read:
        """Collective. See `BaseVariable.reader`."""
        flat = self.aggregate().reshape(-1)
        return lambda start, stop: flat[start:stop]

    def load(self, read: Read) -> None:
        """Local. See `BaseVariable.load`."""
        self.write_array(read(0, self.size).reshape(self.shape))


class ShelfPlan:
    """The plan: each rank gets all ranks' gradients and updates its own rows, as one block."""

    def __init__(
        self, home: Shelf, variables: Sequence[ShelfVariable], kernel: Kernel | LayerKernel, options: OptimizerOptions
    ) -> None:
        self.variables = tuple(variables)
        self._home = home
        self._arithmetic = arithmetic = UpdateArithmetic(kernel, options)
        self.slots: dict[str, Sequence[BaseVariable]] = {
            name: [ShelfVariable(home, f"{v.name} {name}", np.full(v.shape, initial, v.dtype)) for v in variables]
            for name, initial in arithmetic.slots.items()
        }
        self._states = [[home.parts[slot[n].name] for slot in self.slots.values()] for n in range(len(variables))]
        self._sums = [ShelfSums(home, f"{v.name} sum", np.zeros(v.shape, v.dtype)) for v in variables]
        if options.gradient_accumulation_steps:
            self.slots[ACCUMULATED] = self._sums
        self._gradients = [np.zeros(() if v.sparse_gradient else v.shape, v.dtype) for v in variables]
        self._numbers: set[int] = set()
        self._averages, self._accumulated = options.use_ema, options.accumulated

    def during(self) -> AbstractContextManager[object]:
        """Local. See `UpdatePlan.during`."""
        return self._home.communicator.order.during("apply_gradients")

    def gradient(self, number: int) -> AnyArray:
        """Local. See `UpdatePlan.gradient`."""
        return self._gradients[number]

    def accumulate(self, gradients: Mapping[int, Gradient], factor: float, *, is_summed: bool) -> None:
        """Local. See `UpdatePlan.accumulate`."""
        assert not is_summed
        for number, gradient in gradients.items():
            self._sums[number].accumulate(np.multiply(_plain(gradient)[0], factor))
            self._numbers.add(number)

    def apply(self, gradients: Mapping[int, Gradient], settings: UpdateSettings) -> bool:
        """Collective. See `UpdatePlan.apply`."""
        given: Mapping[int, Any] = gradients
        if self._accumulated > 1:
            self.accumulate(gradients, settings.factor, is_summed=settings.is_summed)
            given = {number: self._sums[number].component.copy() for number in sorted(self._numbers)}
            self._numbers.clear()
            for total in self._sums:
                total.clear()
            settings = settings._replace(factor=1 / self._accumulated)
        everyone = self._home.communicator.all_gather_object({n: _plain(g) for n, g in given.items()})
        everyone = everyone[:1] if settings.is_summed else everyone
        sums = {number: _sum([one[number] for one in everyone]) for number in given}
        if settings.must_be_finite and not all(np.isfinite(s[-1]).all() for s in sums.values()):
            return False
        update = self._arithmetic.prepare(settings)
        for number, gradient in sums.items():
            self._apply_block(number, update, gradient)
        if self._averages:
            follow = self._arithmetic.follow(settings.step)
            for number in range(len(self.variables)):
                self._apply_block(number, follow, (np.zeros(self.variables[number].shape),))
        return True

    def flush(self, count: int, settings: UpdateSettings) -> bool:
        """Collective. See `UpdatePlan.flush`."""
        raise NotImplementedError

    def take_average(self, numbers: tuple[int, ...], moves: int = 0) -> None:
        """Local. See `UpdatePlan.take_average`."""
        assert not moves
        for number in numbers:
            self._apply_block(number, take_average, (np.zeros(self.variables[number].shape),))

    def _apply_block(self, number: int, update: Update, total: tuple[AnyArray, ...]) -> None:
        variable, count = self.variables[number], self._arithmetic.scratch_count
        slots = self._states[number]
        if len(total) == 1:
            gradient = variable.own(total[0].astype(variable.dtype))
            update(variable.part, gradient, slots, [np.empty_like(gradient) for _ in range(count)])
            return
        width = variable.size // variable.shape[0]
        rows = RowArithmetic(variable.part.reshape(-1, width), [s.reshape(-1, width) for s in slots], count)
        indices, values = total
        first, last = variable.begin // width, variable.end // width
        mine = (indices >= first) & (indices < last)
        rows.apply(rows.merge(indices[mine] - first, values[mine]), update)

    def state(self) -> dict[str, Any]:
        """Local. See `UpdatePlan.state`."""
        flags = np.array([number in self._numbers for number in range(len(self.variables))], np.uint8)
        return {ACCUMULATES: flags} if self._accumulated > 1 else {}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Local. See `UpdatePlan.load`."""
        if ACCUMULATES in saved:
            self._numbers = {int(number) for number in np.flatnonzero(np.asarray(saved[ACCUMULATES]))}


def _plain(gradient: Any) -> tuple[AnyArray, ...]:
    if isinstance(gradient, IndexedSlices):
        return gradient.indices, gradient.values
    return (np.asarray(gradient),)


def _sum(gradients: Sequence[tuple[AnyArray, ...]]) -> tuple[AnyArray, ...]:
    if len(gradients[0]) == 2:
        indices, values = zip(*gradients, strict=True)
        return np.concatenate(indices), np.concatenate(values)
    total = gradients[0][0].copy()
    for (gradient,) in gradients[1:]:
        total = total + gradient
    return (total,)
