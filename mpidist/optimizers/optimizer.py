"""The optimizer: sums gradients over replicas and applies a kernel, through the plan of its variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpidist import context
from mpidist.arrays import AnyArray
from mpidist.errors import CheckpointError
from mpidist.optimizers import average
from mpidist.optimizers.accumulator import Accumulator
from mpidist.optimizers.gradient import (
    Gradient,
    require_row_wise,
    require_same_gradients,
    take_rows,
    write_gradient,
)
from mpidist.optimizers.kernel import Kernel as Kernel
from mpidist.optimizers.kernel import LayerKernel, Schedule, positive
from mpidist.optimizers.options import OptimizerOptions
from mpidist.optimizers.saving import detach, load_list
from mpidist.optimizers.stepping import UpdateSettings, update_variables
from mpidist.variables.mirrored import MirroredVariable
from mpidist.variables.step.compressed_step import CompressionErrors
from mpidist.variables.step.plan import Plan
from mpidist.variables.variable import Variable

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpidist.optimizers.options import OptionKeywords

# Of accumulated gradients in a checkpoint: the sums, and 1 for each variable that got one.
SUMS, NUMBERS = "accumulated", "accumulates"
# Begins the names of what compressed gradients have left out, and of what else is kept of them.
COMPRESSION = "compression_"


class Optimizer:
    """Applies a kernel to variables; the same on every rank.

    Args:
        kernel: The arithmetic, for instance of `mpidist.optimizers.SGD`.
        learning_rate: A number, or a schedule: a function of the step, counted from 0.
        name: Shown in errors.
        options: Clipping, weight decay, accumulation and averaging; see `OptimizerOptions`.

    Attributes:
        iterations: Calls of `apply_gradients` so far, with gradient accumulation those between updates too; a
            schedule is asked for this number. A kernel's own count of steps is that of updates.
    """

    def __init__(
        self, kernel: Kernel | LayerKernel, learning_rate: float | Schedule, *, name: str,
        **options: Unpack[OptionKeywords],
    ) -> None:
        if not callable(learning_rate):
            if isinstance(learning_rate, bool) or not isinstance(learning_rate, (int, float, np.number)):
                raise TypeError(f"`learning_rate` must be a number or a schedule, got {learning_rate!r}")
            positive(learning_rate=float(learning_rate))
        self.kernel = kernel
        self.learning_rate: float | Schedule = learning_rate
        self.name = name
        self.options = OptimizerOptions(**options)
        self.iterations = 0
        # The average comes last: kernels see their own slots only.
        self._initial = {**kernel.slots, **({average.SLOT: 0.0} if self.options.use_ema else {})}
        self._plan: Plan | None = None
        self._all: tuple[int, ...] = ()
        self._slots: dict[str, list[Variable]] = {}
        self._accumulator: Accumulator | None = None
        self._left_out: CompressionErrors | None = None
        self._pending: Mapping[str, Any] | None = None

    def build(self, variables: Iterable[Variable]) -> None:
        """Collective. Reserve gradients and state for `variables`; the first `apply_gradients` does it otherwise.

        Args:
            variables: ON_WRITE variables of one strategy, in the same order on every rank.

        Raises:
            MismatchError: The lists differ between ranks.
            ValueError: Already built on other variables, no variables, or variables of another strategy; or one made
                with `sparse_gradient=True`, and whole variables are needed: by LAMB, LARS, a moving average, or
                gradient accumulation.
            TypeError: Something that is no ON_WRITE variable.
        """
        chosen = [self._checked(variable) for variable in variables]
        if self._plan is not None:
            # By identity: `==` of variables compares their values.
            if [id(v) for v in chosen] != [id(v) for v in self._plan.variables]:
                raise ValueError(f"{self.name} is already built on other variables; create a second optimizer")
            return
        self._plan = Plan(chosen, self._initial, max(self.kernel.scratch_count, int(self.options.use_ema)))
        self._all = tuple(range(len(chosen)))
        self._left_out = CompressionErrors(chosen, self._plan.memories)
        if self.options.gradient_accumulation_steps:
            self._accumulator = Accumulator(chosen)
        self._slots = self._open_slots(self._plan)
        if self._pending is not None:
            self._load(self._pending)
            self._pending = None

    def gradients(self, variables: Iterable[Variable]) -> tuple[AnyArray, ...]:
        """Collective at the first call (see `build`), then Local. Writable views for the gradients of `variables`.

        A program that writes its gradients here and passes the views to `apply_gradients` copies nothing. Their
        contents are undefined after the step.

        Returns:
            One array per variable, of its shape and dtype.

        Raises:
            ValueError: A variable made with `sparse_gradient=True`, whose gradients are `IndexedSlices`; or one that
                the optimizer was not built on.
        """
        wanted = list(variables)
        if self._plan is None:
            self.build(wanted)
        return tuple(self._view(self._number(variable)) for variable in wanted)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient | None, Variable]], *, skip_gradients_aggregation: bool = False
    ) -> None:
        """Collective. Sum the gradients over all replicas and update the variables.

        With gradient accumulation only every k-th call is collective and updates; the others are Local.

        Args:
            grads_and_vars: Pairs (gradient, variable). Gradients are this replica's, in the shape of the variable or
                `IndexedSlices` of it, of which rows named twice count twice; None leaves the variable alone, on every
                rank alike. Of a variable made with `sparse_gradient=True` they are `IndexedSlices`, on each rank any
                number of rows, and only rows that some rank names are updated, decayed and clipped.
            skip_gradients_aggregation: The gradients are summed over all replicas already, and the same on every rank,
                as those of `Strategy.gradients` are: nothing is summed. In node memory the node's first rank's count.

        Raises:
            ValueError: No gradient at all, another shape, or a variable the optimizer was not built on.
            TypeError: A dtype that does not cast, or a dense gradient where a sparse one was declared.
            MismatchError: The ranks pass gradients for other variables; under `CommunicationOptions(check=True)` also
                other values with `skip_gradients_aggregation`.
            RuntimeError: Inside the function of `Strategy.gradients`, where a rank has several replicas.
        """
        self._apply(grads_and_vars, None, is_summed=skip_gradients_aggregation)

    def apply_scaled_gradients(
        self,
        grads_and_vars: Iterable[tuple[Gradient | None, Variable]],
        scale: float,
        *,
        skip_gradients_aggregation: bool = False,
    ) -> bool | None:
        """Collective. As `apply_gradients`, of a loss that was multiplied by `scale`, unless one is not finite.

        If an element of the sums over all replicas is not finite, or its square not in float64, then no variable and
        no state changes, on any rank; accumulated calls are forgotten, and `iterations` goes back to before them.

        Args:
            grads_and_vars: Pairs (gradient, variable).
            scale: The same on every rank.
            skip_gradients_aggregation: As for `apply_gradients`.

        Returns:
            Whether the variables were updated, the same on every rank; None for a call that only accumulates.
        """
        return self._apply(grads_and_vars, float(scale), is_summed=skip_gradients_aggregation)

    def finalize_variable_values(self, variables: Iterable[Variable] | None = None) -> None:
        """Collective. Set variables to their moving average; nothing without `use_ema` or before the first update.

        Args:
            variables: Some of the optimizer's, by default all.
        """
        numbers = self._all if variables is None else tuple(sorted({self._number(v) for v in variables}))
        if self._plan is not None and numbers and self.options.use_ema and self.iterations >= self.options.accumulated:
            average.overwrite_with_average(self._plan, numbers)

    def _apply(
        self, grads_and_vars: Iterable[tuple[Gradient | None, Variable]], scale: float | None, *, is_summed: bool
    ) -> bool | None:
        context.require_collectives()
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars]
        if self._plan is None:
            self.build([variable for _, variable in pairs])
        else:
            self._require_current(self._plan.variables[0])
        plan, options = cast(Plan, self._plan), self.options
        factor = 1.0 if scale is None else 1 / scale
        if plan.arena.options.check and (is_summed or self._accumulator is None):
            require_same_gradients(plan.arena.communicator, pairs if is_summed else None)
        numbers = self._take(plan, pairs, factor, is_summed=is_summed)
        if self._accumulator is not None:
            if (self.iterations + 1) % options.accumulated:
                self.iterations += 1
                return None
            numbers, factor = self._accumulator.hand_over(plan.gradients), 1 / options.accumulated
            # The accumulated sums are those over the ranks again; see `_take`.
            is_summed = False
        rate = float(self.learning_rate(self.iterations) if callable(self.learning_rate) else self.learning_rate)
        step = self.iterations // options.accumulated + 1
        if self._left_out is not None and not is_summed:
            self._left_out.pay(numbers, plan.gradients)
        settings = UpdateSettings(step, rate, factor, must_be_finite=scale is not None, is_summed=is_summed)
        if not update_variables(plan, numbers, self.kernel, options, settings):
            self.iterations -= options.accumulated - 1
            return False
        if options.use_ema:
            average.update_average(plan, options.ema_momentum, is_first=step == 1)
            if options.ema_overwrite_frequency is not None and step % options.ema_overwrite_frequency == 0:
                average.overwrite_with_average(plan, self._all)
        self.iterations += 1
        return True

    def _take(
        self, plan: Plan, pairs: list[tuple[Gradient | None, Variable]], factor: float, *, is_summed: bool
    ) -> tuple[int, ...]:
        """Put gradients where they are reduced, or add them to earlier ones; returns the numbers, increasing."""
        numbers: list[int] = []
        for gradient, variable in pairs:
            number = self._number(variable)
            if gradient is None:
                continue
            if number in plan.tables:
                plan.tables[number].put(*take_rows(gradient, plan.variables[number]))
            elif self._accumulator is None:
                if not is_summed or plan.takes_sum(number):
                    write_gradient(plan.gradients[number], gradient, plan.variables[number])
            elif is_summed and plan.arena.communicator.rank:
                # Accumulated gradients are saved, and later applied, as sums over the ranks: the first rank has all.
                self._accumulator.numbers.add(number)
            else:
                self._accumulator.add(number, gradient, factor)
            numbers.append(number)
        chosen = self._all if numbers == list(self._all) else tuple(sorted(set(numbers)))
        if len(chosen) < len(numbers):
            raise ValueError(f"{self.name}: a variable stands twice in the list {[v.name for _, v in pairs]}")
        return chosen

    @property
    def variables(self) -> list[Variable]:
        """Local. The state, slot by slot; each slot variable has the shape of its variable."""
        return [variable for slot in self._slots.values() for variable in slot]

    def state(self) -> dict[str, Any]:
        """Local. The tree that a checkpoint stores; of compressed gradients with what each rank has left out."""
        tree: dict[str, Any] = {"iterations": self.iterations, **self._slots}
        if self._left_out is not None:
            for name, arrays in self._left_out.state().items():
                tree[COMPRESSION + name] = arrays
        if self._accumulator is not None:
            tree[NUMBERS] = np.array([number in self._accumulator.numbers for number in self._all], np.uint8)
        return tree

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Collective. Take the state over; what belongs to variables not yet built waits for `build`.

        What compressed gradients have left out comes back on any number of ranks; see `CompressionErrors`.

        Raises:
            CheckpointError: The state of another kind of optimizer, or of other shapes.
        """
        expected = {"iterations", *self._initial}
        if self.options.gradient_accumulation_steps:
            expected |= {SUMS, NUMBERS}
        left_out = {name for name in saved if name.startswith(COMPRESSION)}
        # Before the first step there are no slots to save.
        if saved.keys() - left_out not in (expected, {"iterations"}):
            raise CheckpointError(
                f"{self.name} needs {sorted(expected)}, but the checkpoint holds {sorted(saved)}: it was saved with "
                "another optimizer, or with other options"
            )
        if self._plan is not None:
            self._load(saved)
        else:
            # What all ranks have left out is read by and by, each rank its share: for one it may be too much.
            whole = detach(saved, [name for name in saved if name != "iterations" and name not in left_out])
            self._pending = {**whole, **{name: saved[name] for name in left_out}}
        self.iterations = int(saved["iterations"].numpy())

    def _open_slots(self, plan: Plan) -> dict[str, list[Variable]]:
        slots: dict[str, list[Variable]] = {
            name: [plan.slot(name, number) for number in self._all] for name in self._initial
        }
        if self._accumulator is not None:
            slots[SUMS] = [*self._accumulator.sums]
        return slots

    def _load(self, saved: Mapping[str, Any]) -> None:
        if self._left_out is not None:
            self._left_out.load({
                name.removeprefix(COMPRESSION): saved[name] for name in saved if name.startswith(COMPRESSION)
            })
        for name, targets in self._slots.items():
            load_list(targets, saved, name, self._initial.get(name, 0.0), self.name)
        if self._accumulator is not None:
            flags = saved[NUMBERS].numpy() if NUMBERS in saved else []
            self._accumulator.numbers = {int(number) for number in np.flatnonzero(flags)}

    def _checked(self, variable: Variable) -> MirroredVariable:
        if not isinstance(variable, MirroredVariable):
            raise TypeError(f"{self.name} updates ON_WRITE variables of mpidist, got {variable!r}")
        if variable.dtype.kind in "biu":
            raise TypeError(
                f"{self.name} updates variables of floating dtype, got {variable.name!r} of dtype {variable.dtype}: "
                "create it with dtype='float32', or leave it out"
            )
        self._require_current(variable)
        require_row_wise(variable, self.kernel, self.options, self.name)
        return variable

    def _require_current(self, variable: MirroredVariable) -> None:
        entry = context.innermost()
        if entry is not None and entry.arena is not variable.arena:
            raise ValueError(
                f"variable {variable.name!r} does not belong to the current strategy, so every replica would update "
                "its own copy: create it inside `with strategy.scope():`"
            )

    def _number(self, variable: Variable) -> int:
        number = self._plan.number(variable) if self._plan and isinstance(variable, MirroredVariable) else None
        if number is None:
            raise ValueError(
                f"{self.name} was not built on variable {getattr(variable, 'name', variable)!r}: pass all variables "
                "of the model to `build`, or to the first `apply_gradients`"
            )
        return number

    def _view(self, number: int) -> AnyArray:
        plan = cast(Plan, self._plan)
        if number in plan.tables:
            raise ValueError(
                f"{self.name}: variable {plan.variables[number].name!r} was made with sparse_gradient=True and has no "
                "dense gradient to write to: pass its IndexedSlices to `apply_gradients`"
            )
        return plan.gradients[number]

    def __repr__(self) -> str:
        count = len(self._all)
        return f"<{self.name} iterations={self.iterations} variables={count if self._plan else 'not built'}>"
