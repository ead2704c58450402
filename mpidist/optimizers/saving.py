"""An optimizer's state in a checkpoint: its names, and how it is checked before it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.errors import CheckpointError
from mpidist.variables.update.arithmetic import AVERAGE
from mpidist.variables.update.halves import MASTER_COPY, state_dtype
from mpidist.variables.update.options import (
    ACCUMULATED,
    ACCUMULATES,
    COMPRESSION,
    OUTER_MOMENTUM,
    OUTER_STEPS,
    PartialState,
)
from mpidist.variables.update.parts import initial
from mpidist.variables.variable import BaseVariable, Read, Slot, UpdatePlan, by_number

# The learning rate in a checkpoint, if it is a number.
RATE = "learning_rate"


class Saved(Protocol):
    """An array in a checkpoint."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    casts: bool

    def read(self, start: int, stop: int) -> AnyArray:
        """Local. Elements [start, stop) of the flattened array."""
        ...

    def read_as(self, dtype: np.dtype[Any]) -> Read:
        """Local. Reads like `read`, where it `casts` in another dtype."""
        ...

    def numpy(self) -> AnyArray:
        """Local. All of it."""
        ...


class _Renewed:
    """An array in a checkpoint of an earlier version, as this one would have saved it.

    Args:
        saved: The array.
        factor: The number by which its elements are multiplied.
    """

    def __init__(self, saved: Saved, factor: float) -> None:
        self._saved = saved
        self._factor = factor
        self.shape = saved.shape
        self.dtype = saved.dtype
        self.casts = saved.casts

    def read_as(self, dtype: np.dtype[Any]) -> Read:
        """Local. See `Saved.read_as`."""
        return lambda start, stop: self.read(start, stop).astype(dtype) if self.casts else self.read(start, stop)

    def read(self, start: int, stop: int) -> AnyArray:
        """Local. See `Saved.read`."""
        return self._renewed(self._saved.read(start, stop))

    def numpy(self) -> AnyArray:
        """Local. See `Saved.numpy`."""
        return self._renewed(self._saved.numpy())

    def _renewed(self, array: AnyArray) -> AnyArray:
        wide = array.astype(state_dtype(array.dtype))
        if array.dtype == np.float16:
            # Sums that had overflowed stopped their variables for good. They were at least so large.
            wide[np.isposinf(wide)] = np.finfo(np.float16).max
        return np.asarray(wide * self._factor, wide.dtype)


def renewed(saved: Mapping[str, Any], older: Mapping[str, tuple[str, float]]) -> Mapping[str, Any]:
    """Local. The state in a checkpoint by the present names of slots.

    Args:
        saved: The optimizer's tree in the checkpoint.
        older: The kernel's `older_slots`: for the name of a slot the name that it had in checkpoints of earlier
            versions, and the factor by which its values there are multiplied.
    """
    tree = PartialState(saved) if isinstance(saved, PartialState) else dict(saved)
    for name, (former, factor) in older.items():
        if former in tree and name not in tree and isinstance(tree[former], Mapping):
            tree[name] = {
                key: array if isinstance(array, Mapping) else _Renewed(array, factor)
                for key, array in tree.pop(former).items()
            }
    return tree


def require_names(names: Set[str], slots: Iterable[str], owner: str, *, accumulates: bool) -> None:
    """Local. Raise CheckpointError unless a checkpoint holds the state of such an optimizer.

    Args:
        names: The names of the state in the checkpoint.
        slots: Names of the optimizer's slots.
        owner: The optimizer, for the error.
        accumulates: Whether it accumulates gradients.
    """
    # A missing or outdated copy is taken from the variable itself, and a missing momentum or count begins with zeros.
    names = names - {MASTER_COPY, OUTER_MOMENTUM, OUTER_STEPS}
    expected = {"iterations", *slots, *([ACCUMULATED, ACCUMULATES] if accumulates else [])}
    # Before the first step there are no slots to save.
    if names not in (expected, {"iterations"}):
        raise CheckpointError(
            f"{owner} needs {sorted(expected)}, but the checkpoint holds {sorted(names)}: it was saved with another "
            "optimizer, or with other options"
        )


def numbered(saved: Mapping[str, Any], variables: Sequence[BaseVariable], owner: str) -> dict[str, Any]:
    """Local. Find what a checkpoint holds for each variable, by the path that the variable has in it.

    Args:
        saved: The optimizer's tree in the checkpoint. Entries by number, as in checkpoints without the variables and in
            those of versions that stored no paths, stay as they are.
        variables: The variables of the optimizer, in their order.
        owner: For the error.

    Returns:
        The tree, with the numbers of variables, as strings, in the place of paths. Where all entries are by path, a
        variable without an entry gets None, and entries of other variables are left out.

    Raises:
        CheckpointError: The checkpoint has state of other variables than these, and may hold state of variables that
            are made later.
    """
    is_partial = isinstance(saved, PartialState)
    tree: dict[str, Any] = {}
    for name, entries in saved.items():
        if not isinstance(entries, Mapping):
            tree[name] = entries
            continue
        if any(isinstance(array, Mapping) for array in entries.values()):
            raise CheckpointError(f"{owner}: expected arrays in {name!r} of the checkpoint, got {sorted(entries)[:8]}")
        keys = {str(n): v.saved_as if v.saved_as in entries else str(n) for n, v in enumerate(variables)}
        rest = {key: array for key, array in entries.items() if key not in set(keys.values())}
        others = [key for key in rest if not key.isdecimal()]
        known = {number: entries[key] for number, key in keys.items() if key in entries}
        by_path = not any(map(str.isdecimal, entries))
        # One that was not restored may be one of the others, which comes late.
        is_whole = all(v.saved_as for v in variables)
        if (others and not (by_path and is_whole) and not is_partial) or len(set(keys.values())) < len(keys):
            here = [f"{v.name!r}, " + (f"saved as {v.saved_as!r}" if v.saved_as else "not restored") for v in variables]
            raise CheckpointError(
                f"{owner}: expected {name!r} of its own variables ({'; '.join(here[:8])}), the checkpoint also holds "
                f"that of {others[:8]}. Hold the optimizer and its variables in one Checkpoint, build it on the "
                "variables that it was saved with, and restore them first (`restore_new()` where they come late)"
            )
        # Only some gradients are compressed.
        fresh = dict.fromkeys(keys) if by_path and entries and not name.startswith(COMPRESSION) else {}
        tree[name] = {**fresh, **({} if by_path else rest), **known}
    return tree


def require_slots(
    slots: Mapping[str, Slot], saved: Mapping[str, Any], variables: Sequence[BaseVariable], owner: str
) -> None:
    """Local. Raise CheckpointError unless what a checkpoint has of an optimizer's state fits.

    Args:
        slots: The state by name.
        saved: The value that `numbered` returns. A checkpoint from before the first step has no slots.
        variables: The variables of the optimizer.
        owner: For the error.
    """
    for name, targets in slots.items():
        for number, target in by_number(targets if name in saved else ()).items():
            arrays = saved[name] if isinstance(saved[name], Mapping) else {}
            array = arrays.get(str(number))
            # An average does not begin with a constant.
            if array is None and str(number) in arrays and name != AVERAGE:
                continue
            if not _fits(array, target):
                got = "nothing" if array is None else f"shape {tuple(array.shape)} and dtype {array.dtype}"
                variable = variables[number].saved_as or variables[number].name
                raise CheckpointError(
                    f"{owner}: slot {name!r} of variable {variable!r} needs shape {target.shape} and dtype "
                    f"{target.dtype}, the checkpoint has {got}. Build the optimizer on the variables that it was saved "
                    "with"
                )


def _fits(array: Saved | None, target: BaseVariable) -> bool:
    if array is None or tuple(array.shape) != target.shape:
        return False
    # Earlier versions saved the state of half precision in the variable's dtype.
    return state_dtype(array.dtype) == target.dtype or array.casts


def _without_unfit(slots: Mapping[str, Slot], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The value that `numbered` returns, with None for what is missing or does not fit."""
    tree = dict(saved)
    for name, targets in slots.items():
        if isinstance(tree.get(name), Mapping):
            numbers = {str(number): target for number, target in by_number(targets).items()}
            tree[name] = {
                number: array if _fits(array := tree[name].get(number), target) else None
                for number, target in numbers.items()
            }
    return tree


def read_slots(
    plan: UpdatePlan, saved: Mapping[str, Any], older: Mapping[str, tuple[str, float]], owner: str
) -> dict[str, Any]:
    """Local. The state in a checkpoint, as `numbered` gives it, if it fits.

    Args:
        plan: The plan of the optimizer.
        saved: The optimizer's tree in the checkpoint.
        older: See `renewed`.
        owner: The optimizer, for the errors.

    Raises:
        CheckpointError: The state is that of other variables, or of other shapes.
    """
    tree = numbered(renewed(saved, older), plan.variables, owner)
    if isinstance(saved, PartialState):
        tree = _without_unfit(plan.slots, tree)
    require_slots(plan.slots, tree, plan.variables, owner)
    if isinstance(tree.get(ACCUMULATES), Mapping):
        tree[ACCUMULATES] = np.array(
            [0 if flag is None else flag.numpy() for _, flag in sorted(tree[ACCUMULATES].items(), key=_number_of)],
            np.uint8,
        )
    return tree


def _number_of(item: tuple[str, object]) -> int:
    return int(item[0])


def slot_loads(
    slots: Mapping[str, Slot], saved: Mapping[str, Any], initial_values: Mapping[str, complex]
) -> list[tuple[BaseVariable, Read]]:
    """Local. List the variables of an optimizer's state, each with what it loads.

    Args:
        slots: The state by name.
        saved: The value that `read_slots` returns. Where it has nothing of a variable, or of a slot, since it is from
            before the first step, every element gets its initial value.
        initial_values: These values by the name of the slot, as of `Kernel.slots`; 0 where there is none.
    """
    loads = []
    for name, targets in slots.items():
        arrays = saved.get(name)
        for number, target in by_number(targets).items():
            array = None if arrays is None else arrays[str(number)]
            value = initial_values.get(name, 0.0)
            loads.append((target, _constant(value, target) if array is None else array.read_as(target.dtype)))
    return loads


def _constant(value: complex, target: BaseVariable) -> Read:
    return lambda start, stop: np.full(stop - start, initial(value, target.dtype), target.dtype)
