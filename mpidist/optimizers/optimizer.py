"""The optimizer: sums gradients over replicas and applies a kernel, through the plan of its variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from mpidist import context
from mpidist.errors import CheckpointError
from mpidist.variables.mirrored import MirroredVariable
from mpidist.variables.plan import Plan, Update
from mpidist.variables.variable import AnyArray, Variable

Schedule = Callable[[int], float]


class Kernel(Protocol):
    """The arithmetic of one family of optimizers: element-wise, pure, and without communication.

    Attributes:
        slots: State kept for each element: name and initial value.
        scratch_count: Private blocks that `update` wants.
    """

    @property
    def slots(self) -> Mapping[str, float]:
        """Local. Name and initial value of each slot, in the order in which `update` gets them."""
        ...

    @property
    def scratch_count(self) -> int:
        """Local. How many scratch blocks `update` gets."""
        ...

    def prepare(self, step: int, learning_rate: float) -> Update:
        """Local. The update of one step.

        Args:
            step: 1 in the first step.
            learning_rate: Of this step.

        Returns:
            `update(parameter, gradient, slots, scratch)` on flat blocks of one dtype, all in place; it may overwrite
            `gradient`, the sum over all replicas.
        """
        ...


class Saved(Protocol):
    """An array in a checkpoint."""

    shape: tuple[int, ...]

    def read(self, start: int, stop: int) -> AnyArray:
        """Local. Elements [start, stop) of the flattened array."""
        ...

    def numpy(self) -> AnyArray:
        """Local. All of it."""
        ...

    def detach(self) -> Saved:
        """Local. The same, read into memory: the file may go away."""
        ...


class Optimizer:
    """Applies a kernel to variables; the same on every rank.

    Args:
        kernel: The arithmetic, for instance of `mpidist.optimizers.SGD`.
        learning_rate: A number, or a schedule: a function of the step, counted from 0.
        name: Shown in errors.
    """

    def __init__(self, kernel: Kernel, learning_rate: float | Schedule, *, name: str) -> None:
        if not callable(learning_rate):
            if isinstance(learning_rate, bool) or not isinstance(learning_rate, (int, float, np.number)):
                raise TypeError(f"`learning_rate` must be a number or a schedule, got {learning_rate!r}")
            positive(learning_rate=float(learning_rate))
        self.kernel = kernel
        self.learning_rate: float | Schedule = learning_rate
        self.name = name
        self.iterations = 0
        self._plan: Plan | None = None
        self._all: tuple[int, ...] = ()
        self._pending: Mapping[str, Any] | None = None

    def build(self, variables: Iterable[Variable]) -> None:
        """Collective. Reserve gradients and state for `variables`; the first `apply_gradients` does it otherwise.

        Args:
            variables: ON_WRITE variables of one strategy, in the same order on every rank.

        Raises:
            MismatchError: The lists differ between ranks.
            ValueError: Already built on other variables, no variables, or variables of another strategy.
            TypeError: Something that is no ON_WRITE variable.
        """
        chosen = [self._checked(variable) for variable in variables]
        if self._plan is not None:
            # By identity: `==` of variables compares their values.
            if [id(v) for v in chosen] != [id(v) for v in self._plan.variables]:
                raise ValueError(f"{self.name} is already built on other variables; create a second optimizer")
            return
        self._plan = Plan(chosen, self.kernel.slots, self.kernel.scratch_count)
        self._all = tuple(range(len(chosen)))
        if self._pending is not None:
            self._load_slots(self._plan, self._pending)
            self._pending = None

    def gradients(self, variables: Iterable[Variable]) -> tuple[AnyArray, ...]:
        """Collective at the first call (see `build`), then Local. Writable views for the gradients of `variables`.

        A program that writes its gradients here and passes the views to `apply_gradients` copies nothing. Their
        contents are undefined after the step.

        Returns:
            One array per variable, of its shape and dtype.
        """
        wanted = list(variables)
        if self._plan is None:
            self.build(wanted)
        return tuple(self._view(self._number(variable)) for variable in wanted)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[npt.ArrayLike | None, Variable]]) -> None:
        """Collective. Sum the gradients over all replicas and update the variables.

        Args:
            grads_and_vars: Pairs (gradient, variable). Gradients are this replica's, in the shape of the variable;
                None leaves the variable alone, on every rank alike.

        Raises:
            ValueError: No gradient at all, another shape, or a variable the optimizer was not built on.
            MismatchError: The ranks pass gradients for other variables.
        """
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars]
        if self._plan is None:
            self.build([variable for _, variable in pairs])
        else:
            self._require_current(self._plan.variables[0])
        numbers: list[int] = []
        for gradient, variable in pairs:
            number = self._number(variable)
            if gradient is None:
                continue
            view = self._view(number)
            if gradient is not view:
                np.copyto(view, variable.coerce(gradient))
            numbers.append(number)
        chosen = self._all if numbers == list(self._all) else tuple(sorted(set(numbers)))
        if len(chosen) < len(numbers):
            raise ValueError(f"{self.name}: a variable stands twice in the list {[v.name for _, v in pairs]}")
        rate = self.learning_rate(self.iterations) if callable(self.learning_rate) else self.learning_rate
        cast(Plan, self._plan).step(chosen, self.kernel.prepare(self.iterations + 1, float(rate)))
        self.iterations += 1

    @property
    def variables(self) -> list[Variable]:
        """Local. The state, slot by slot; each slot variable has the shape of its variable."""
        return [variable for slot in self._slots().values() for variable in slot]

    def state(self) -> dict[str, Any]:
        """Local. The tree that a checkpoint stores."""
        return {"iterations": self.iterations, **self._slots()}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Collective. Take the state over; what belongs to variables not yet built waits for `build`.

        Raises:
            CheckpointError: The state of another kind of optimizer, or of other shapes.
        """
        expected = {"iterations", *self.kernel.slots}
        # Before the first step there are no slots to save.
        if set(saved) not in (expected, {"iterations"}):
            raise CheckpointError(
                f"{self.name} needs {sorted(expected)}, but the checkpoint holds {sorted(saved)}: it was saved with "
                "another optimizer"
            )
        if self._plan is not None:
            self._load_slots(self._plan, saved)
        else:
            self._pending = {
                name: {key: array.detach() for key, array in saved[name].items()}
                for name in self.kernel.slots if name in saved
            }
        self.iterations = int(saved["iterations"].numpy())

    def _slots(self) -> dict[str, list[Variable]]:
        if self._plan is None:
            return {}
        plan = self._plan
        return {name: [plan.slot(name, number) for number in self._all] for name in self.kernel.slots}

    def _load_slots(self, plan: Plan, saved: Mapping[str, Mapping[str, Saved]]) -> None:
        for name in self.kernel.slots:
            for number, variable in enumerate(plan.variables):
                if name not in saved:
                    # Saved before the first step: the initial value.
                    plan.slot(name, number).load(self._initial(name, variable))
                    continue
                array = saved[name].get(str(number))
                if array is None or tuple(array.shape) != variable.shape:
                    got = "nothing" if array is None else f"shape {tuple(array.shape)}"
                    raise CheckpointError(
                        f"{self.name}: slot {name!r} of variable {variable.name!r} needs shape {variable.shape}, the "
                        f"checkpoint has {got}"
                    )
                plan.slot(name, number).load(array.read)

    def _initial(self, name: str, variable: Variable) -> Callable[[int, int], AnyArray]:
        return lambda start, stop: np.full(stop - start, self.kernel.slots[name], variable.dtype)

    def _checked(self, variable: Variable) -> MirroredVariable:
        if not isinstance(variable, MirroredVariable):
            raise TypeError(f"{self.name} updates ON_WRITE variables of mpidist, got {variable!r}")
        if variable.dtype.kind in "biu":
            raise TypeError(
                f"{self.name} updates variables of floating dtype, got {variable.name!r} of dtype {variable.dtype}: "
                "create it with dtype='float32', or leave it out"
            )
        self._require_current(variable)
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
        return cast(Plan, self._plan).gradients[number]

    def __repr__(self) -> str:
        count = len(self._all)
        return f"<{self.name} iterations={self.iterations} variables={count if self._plan else 'not built'}>"


def positive(**values: float) -> None:
    """Local. Raise ValueError for a negative hyperparameter."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"`{name}` must not be negative, got {value!r}")
