"""The optimizer: sums gradients over replicas and applies a kernel, through the plan that its variables' home makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpidist import context
from mpidist.arguments import flag, number, python_numbers
from mpidist.arrays import AnyArray
from mpidist.attributes import FixedAttributes
from mpidist.comm.group.agreement import together
from mpidist.missing import Missing
from mpidist.optimizers.rates import NO_RATES, no_rate, rate_at, refused_rate, require_rate
from mpidist.optimizers.requirements import (
    Then,
    callback,
    instead_of_setting,
    listed,
    refuse_unknown,
    require_dense,
    require_kernel,
    require_pairs,
    require_updatable,
    wholes,
)
from mpidist.optimizers.saving import RATE, read_slots, renewed, require_names, slot_loads
from mpidist.variables.reading import load_all
from mpidist.variables.update.arithmetic import UpdateSettings, slots_of
from mpidist.variables.update.halves import MASTER_COPY
from mpidist.variables.update.kernel import Kernel, LayerKernel, Schedule
from mpidist.variables.update.options import ACCUMULATES, COMPRESSION, OUTER_MOMENTUM, OUTER_STEPS, OptimizerOptions
from mpidist.variables.update.parts import by_parts
from mpidist.variables.variable import BaseVariable, Gradient, UpdatePlan, by_number, common_home

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mpidist.variables.update.options import OptionKeywords


class Optimizer(FixedAttributes):
    """Local. Updates variables by a kernel, from the sums of their gradients; the same on every rank.

    Args:
        kernel: The arithmetic, for instance of `mpidist.optimizers.SGD`.
        learning_rate: A number, or a schedule: a function of the step, counted from 0.
        name: A name for the texts of errors.
        options: Clipping, weight decay, accumulation and averaging; see `OptimizerOptions`.

    Only these attributes, and `name`, may be set. To set another one, or one that does not exist, is an AttributeError.

    Attributes:
        iterations: Number of calls of `apply_gradients` so far; with gradient accumulation also of the calls between
            updates. A schedule gets this number, a kernel the number of updates.
        learning_rate: The constructor's argument; it may be set. Checkpoints hold a number, and not a schedule.
    """

    minimize = Missing()
    _assignable = frozenset({"iterations", "learning_rate", "name"})
    _fixed = frozenset({"kernel", "options"})

    def __init__(
        self, kernel: Kernel | LayerKernel, learning_rate: float | Schedule, *, name: str,
        **options: Unpack[OptionKeywords],
    ) -> None:
        require_rate(learning_rate)
        refuse_unknown(options, name)
        require_kernel(kernel)
        python_numbers(kernel)
        self.kernel = kernel
        self.learning_rate: float | Schedule = learning_rate
        self.name = name
        self.options = OptimizerOptions(**options)
        self.iterations = 0
        self._initial = slots_of(kernel, self.options)
        self._accumulated = self.options.accumulated
        self._overwrites = self.options.ema_overwrite_frequency
        self._plan: UpdatePlan | None = None
        self._numbers: dict[int, int] = {}
        self._pending: Mapping[str, Any] | None = None
        self._older: Mapping[str, tuple[str, float]] = getattr(kernel, "older_slots", {})
        self._settle(Optimizer)

    def build(self, variables: Iterable[BaseVariable]) -> None:
        """Collective. Reserve gradients and state for `variables`; otherwise the first `apply_gradients` does it.

        Args:
            variables: ON_WRITE variables of one strategy, in the same order on every rank.

        Raises:
            MismatchError: The lists differ between ranks.
            ValueError: The optimizer was built on other variables; there are none; they are of another strategy; or
                one was made with `sparse_gradient=True`, and LAMB, LARS, a moving average or gradient accumulation
                needs whole variables.
            TypeError: An element is no ON_WRITE variable.
        """
        self._build(variables)

    def _build(self, variables: Iterable[BaseVariable]) -> UpdatePlan:
        given = listed(variables, "variables", self.name)
        chosen = wholes([require_updatable(one, self.kernel, self.options, self.name) for one in given])
        if self._plan is not None:
            # By identity: `==` of variables compares their values.
            if [id(v) for v in chosen] != [id(v) for v in self._plan.variables]:
                raise ValueError(f"{self.name} is already built on other variables; create a second optimizer")
            return self._plan
        kernel = by_parts(self.kernel) if any(one.dtype.kind == "c" for one in chosen) else self.kernel
        self._initial = slots_of(kernel, self.options)
        plan = common_home(chosen).plan(chosen, kernel, self.options)
        if self.plan is not None:
            return self._build(chosen)  # another thread has built it, since a worker has asked for it
        self._plan = plan
        # By identity: hashing a variable is a call of Python. The plan keeps them alive.
        self._numbers = {id(variable): number for number, variable in enumerate(chosen)}
        if self._pending is not None:
            self._load(self._plan, self._pending)
            self._pending = None
        return self._plan

    def gradients(self, variables: Iterable[BaseVariable]) -> tuple[AnyArray, ...]:
        """Collective at the first call (see `build`), then Local. Writable views for the gradients of `variables`.

        A program that writes its gradients here and passes the views to `apply_gradients` copies nothing. Their
        contents are undefined after the step.

        Returns:
            One array per variable, of its shape and dtype.

        Raises:
            ValueError: A variable was made with `sparse_gradient=True` (its gradients are `IndexedSlices`), or the
                optimizer was not built on it.
        """
        wanted = listed(variables, "variables", self.name)
        plan = self._plan or self._build(wanted)
        numbers = [self._number(variable) for variable in wanted]
        require_dense(wanted, self.name)
        return tuple(plan.gradient(number) for number in numbers)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient | None, BaseVariable]], *,
        skip_gradients_aggregation: bool = False,
    ) -> None:
        """Collective. Sum the gradients over all replicas and update the variables.

        With gradient accumulation only every k-th call is collective and updates; the others are Local.

        Args:
            grads_and_vars: Pairs (gradient, variable). A gradient is this replica's: an array in the shape of the
                variable, or `IndexedSlices` of it, in which a repeated row counts each time. None, on every rank, does
                not change the variable. For a variable made with `sparse_gradient=True` it is `IndexedSlices` with any
                number of rows on each rank, and only rows that occur on some rank are updated, decayed and clipped.
            skip_gradients_aggregation: Whether the gradients are already sums over all replicas, the same on every
                rank, as those of `Strategy.gradients` are. They are not summed again. In node memory the gradients of
                the node's first rank count.

        Raises:
            ValueError: There is no gradient, one has another shape, or the optimizer was not built on a variable.
            TypeError: There is no list of pairs, a dtype does not cast, or a gradient is dense where a sparse one was
                declared.
            MismatchError: The ranks pass gradients for other variables; under `CommunicationOptions(check=True)` also
                other values with `skip_gradients_aggregation`.
            OverflowError: State has become infinite; on every rank, and at each call until state is restored.
            RuntimeError: The call is inside `Strategy.gradients`, where a rank has several replicas.
        """
        self._apply(grads_and_vars, None, None, is_summed=skip_gradients_aggregation)

    def apply_scaled_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient | None, BaseVariable]], scale: float, *,
        skip_gradients_aggregation: bool = False, then: Then = None,
    ) -> bool | None:
        """Collective. Apply the gradients of a loss that was multiplied by `scale`, if all of them are finite.

        If an element of the sums over all replicas is not finite, or its square is not finite in float64, no variable
        and no state changes, on any rank. Accumulated calls are then discarded, and `iterations` has its value from
        before them.

        Args:
            grads_and_vars: Pairs (gradient, variable).
            scale: The factor of the loss, the same on every rank.
            skip_gradients_aggregation: See `apply_gradients`.
            then: A function that is called with the result before an interrupt is possible, unless the call only
                accumulates.

        Returns:
            Whether the variables were updated, the same on every rank; None for a call that only accumulates.

        Raises:
            ValueError: `scale` is 0 or not finite; or as `apply_gradients`.
            TypeError: `scale` is no number; or as `apply_gradients`.
        """
        if not number("scale", scale):
            raise ValueError("`scale` must not be 0: gradients are divided by it")
        then = callback(then, self.name)
        return self._apply(grads_and_vars, float(scale), then, is_summed=skip_gradients_aggregation)

    def flush(self) -> None:
        """Collective. With gradient accumulation, update by the mean over the calls made since the last update.

        It is one update: `iterations` becomes what it would be after all calls. Without such calls nothing happens.

        Raises:
            MismatchError: The ranks differ in the number of calls, or in the variables that have gradients.
            ValueError: None of the calls had a gradient.
        """
        self.flush_scaled(must_be_finite=False)

    def flush_scaled(self, *, must_be_finite: bool = True, then: Then = None) -> bool | None:
        """Collective. `flush` for `apply_scaled_gradients`, with its result; None if there were no calls."""
        context.require_collectives()
        then, finite = callback(then, self.name), flag("must_be_finite", must_be_finite)
        plan, count = self._plan, self.iterations % self._accumulated
        if plan is None or self._accumulated == 1:
            return None
        with plan.during():
            last = self.iterations - count + self._accumulated - 1
            rate = self.rate_at(last) if count else 0.0
            if not rate >= 0:
                raise refused_rate(rate, self.learning_rate, last, self.name)
            settings = UpdateSettings(last // self._accumulated + 1, rate, must_be_finite=finite)
            was_applied = plan.flush(count, settings)
            if count:
                self.iterations = last + 1 if was_applied else self.iterations - count
                if then is not None:
                    then(was_applied)
        return was_applied if count else None

    def finalize_variable_values(self, variables: Iterable[BaseVariable] | None = None) -> None:
        """Collective. Set variables to their moving average; nothing without `use_ema` or before the first update.

        Args:
            variables: Some of the optimizer's variables; default: all.
        """
        chosen: Iterable[int] = self._numbers.values()
        if variables is not None:
            chosen = {self._number(variable) for variable in listed(variables, "variables", self.name)}
        updates, calls = divmod(self.iterations, self._accumulated)
        if self._plan is not None and self.options.use_ema and updates and chosen:
            self._plan.take_average(tuple(sorted(chosen)), calls)

    def _apply(
        self, grads_and_vars: Iterable[tuple[Gradient | None, BaseVariable]], scale: float | None, then: Then, *,
        is_summed: bool,
    ) -> bool | None:
        plan = self._plan
        # Looked at here, since a step pays for each function that it enters; these two raise the errors.
        if levels := context.stack.entries:
            if levels[-1].refusal is not None:
                context.require_collectives()
            if plan is not None and levels[-1].home is not plan.variables[0].home:
                context.require_home(plan.variables[0].home, plan.variables[0].name)
        if type(is_summed) is not bool:
            is_summed = flag("skip_gradients_aggregation", is_summed)  # type: ignore[unreachable]
        # By type, which takes no call in the usual cases.
        is_usual = type(grads_and_vars) in (list, zip)
        pairs = [*grads_and_vars] if is_usual else listed(grads_and_vars, "pairs (gradient, variable)", self.name)
        if plan is None:
            require_pairs(pairs, self.name)
            plan = self._build([variable for _, variable in pairs])
        try:
            gradients = self._by_number(pairs)
        except (TypeError, ValueError):
            require_pairs(pairs, self.name)
            raise
        factor = 1.0 if scale is None else 1 / scale
        # An interrupt comes when variables and `iterations` fit each other again.
        with plan.during():
            done = self._apply_whole(plan, gradients, factor, is_summed=is_summed, must_be_finite=scale is not None)
            if then is not None and done is not None:
                then(done)
        return done

    def _apply_whole(
        self, plan: UpdatePlan, gradients: Mapping[int, Gradient], factor: float, *, is_summed: bool,
        must_be_finite: bool,
    ) -> bool | None:
        if (self.iterations + 1) % self._accumulated:
            plan.accumulate(gradients, factor, is_summed=is_summed)
            updates, calls = divmod(self.iterations, self._accumulated)
            if self._overwrites and updates and not calls and (updates + 1) % self._overwrites == 0:
                # As in Keras: the gradients of the calls that follow are taken at the average.
                plan.take_average(tuple(self._numbers.values()), 1)
            self.iterations += 1
            return None
        # Before any state changes: a schedule is the program's own, and may raise.
        given: Any = self.learning_rate(self.iterations) if callable(self.learning_rate) else self.learning_rate
        # As `rates.rate_at`: a step pays for each function that it enters.
        if isinstance(given, NO_RATES) or getattr(given, "ndim", 0) > 0:
            raise no_rate(given, self.learning_rate, self.iterations, self.name)
        try:
            rate = float(given)
        except (TypeError, ValueError):
            raise no_rate(given, self.learning_rate, self.iterations, self.name) from None
        if not rate >= 0:
            raise refused_rate(rate, self.learning_rate, self.iterations, self.name)
        step = self.iterations // self._accumulated + 1
        if not plan.apply(gradients, UpdateSettings(step, rate, factor, is_summed, must_be_finite)):
            self.iterations -= self._accumulated - 1
            return False
        # Not by `__setattr__`, which every step would pay for.
        self.__dict__["iterations"] += 1
        return True

    def rate_at(self, iteration: int) -> float:
        """Local. The learning rate of a step, counted from 0; see `rates.rate_at`."""
        return rate_at(self.learning_rate, iteration, self.name)

    def _by_number(self, pairs: Iterable[tuple[Gradient | None, BaseVariable]]) -> dict[int, Gradient]:
        gradients: dict[int, Gradient] = {}
        for gradient, variable in pairs:
            number = self._numbers[id(variable)] if id(variable) in self._numbers else self._number(variable)
            if gradient is None:
                continue
            if number in gradients:
                raise ValueError(f"{self.name}: variable {variable.name!r} appears twice in the list; pass it once")
            gradients[number] = gradient
        return gradients

    @property
    def variables(self) -> list[BaseVariable]:
        """Local. The state, slot by slot; each slot variable has the shape of its variable."""
        slots = {} if self._plan is None else self._plan.slots
        return [variable for slot in slots.values() for variable in by_number(slot).values()]

    @property
    def may_lack(self) -> frozenset[str]:
        """Local. Entries of the state that are missing in checkpoints of earlier versions and of other options."""
        return frozenset({RATE, MASTER_COPY, OUTER_MOMENTUM, OUTER_STEPS, *self._older})

    @property
    def plan(self) -> UpdatePlan | None:
        """Local. The update plan that the home of its variables has made; None before `build`."""
        return self._plan

    @property
    def built_on(self) -> Sequence[BaseVariable]:
        """Local. The variables that it updates; their numbers are those of its state. None before `build`."""
        return () if self._plan is None else self._plan.variables

    def state(self) -> dict[str, Any]:
        """Local. The tree that a checkpoint stores, with each rank's errors of compressed gradients."""
        tree: dict[str, Any] = {"iterations": self.iterations}
        if not callable(self.learning_rate):
            tree[RATE] = rate_at(self.learning_rate, self.iterations, self.name)
        if self._plan is not None:
            tree.update(self._plan.slots)
            tree.update(self._plan.state())
            if ACCUMULATES in tree:
                tree[ACCUMULATES] = list(tree[ACCUMULATES])
        elif self._pending is not None:
            # State that waits for `build` is saved again: a program may be stopped before its first step.
            tree.update({name: entries for name, entries in self._pending.items() if name not in ("iterations", RATE)})
        return tree

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Collective. Set the state to that of a checkpoint, or keep that for `build`, which then reads it.

        Each variable gets what was saved under its path. A saved learning rate replaces the present one if both are
        numbers; a schedule stays. Errors of compressed gradients are restored on any number of ranks; see
        `CompressionErrors`.

        Raises:
            CheckpointError: The state is of another kind of optimizer, of other variables, or of other shapes.
        """
        def look() -> tuple[int, float | Schedule]:
            names = {name for name in renewed(saved, self._older) if name != RATE and not name.startswith(COMPRESSION)}
            require_names(names, self._initial, self.name, accumulates=self._accumulated > 1)
            # Files of before it was saved have none.
            takes = RATE in saved and not callable(self.learning_rate)
            return int(saved["iterations"].numpy()), float(saved[RATE].numpy()) if takes else self.learning_rate

        if self._plan is None:
            (self.iterations, self.learning_rate), self._pending = look(), saved
            return
        iterations, rate = together(self._plan.variables[0].group, f"reading the state of {self.name}", look)
        self._load(self._plan, saved)
        self.iterations, self.learning_rate = iterations, rate

    def _load(self, plan: UpdatePlan, saved: Mapping[str, Any]) -> None:
        """Collective."""
        group, older, owner = plan.variables[0].group, self._older, self.name
        tree = together(group, f"reading the state of {owner}", lambda: read_slots(plan, saved, older, owner))
        plan.load(tree)
        load_all(group, slot_loads(plan.slots, tree, self._initial), f"restoring the state of {owner}")

    def _number(self, variable: BaseVariable) -> int:
        number = self._numbers.get(id(variable))
        if number is None:
            raise ValueError(
                f"{self.name} was not built on variable {getattr(variable, 'name', variable)!r}: pass all variables "
                "of the model to `build`, or to the first `apply_gradients`"
            )
        return number

    def _way_out(self, name: str) -> str:
        return instead_of_setting(name, self.name, self.kernel) or super()._way_out(name)

    def __repr__(self) -> str:
        count = "not built" if self._plan is None else len(self._plan.variables)
        return f"<{self.name} iterations={self.iterations} variables={count}>"
