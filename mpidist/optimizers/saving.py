"""An optimizer's state in a checkpoint: its names, and how it is checked before it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.errors import CheckpointError
from mpidist.variables.update.arithmetic import AVERAGE
from mpidist.variables.update.halves import MASTER_COPY, state_dtype
from mpidist.variables.update.options import ACCUMULATED, ACCUMULATES, COMPRESSION, OUTER_MOMENTUM
from mpidist.variables.update.parts import initial
from mpidist.variables.variable import BaseVariable, Read, Slot, UpdatePlan, by_number

# The learning rate in a checkpoint, if it is a number.
RATE = "learning_rate"


class Saved(Protocol):
    """An array in a checkpoint."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self, start: int, stop: int) -> AnyArray:
        """Local. Elements [start, stop) of the flattened array."""
        ...

    def numpy(self) -> AnyArray:
        """Local. All of it."""
        ...


class _Renewed:
    """An array in a checkpoint of an earlier version, as this one would have saved it.

    Args:
        saved: The array.
        factor: It is multiplied with it.
    """

    def __init__(self, saved: Saved, factor: float) -> None:
        self._saved = saved
        self._factor = factor
        self.shape = saved.shape
        self.dtype = saved.dtype

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
        older: By the name of a slot, of the kernel's `older_slots`: the name that it had in checkpoints of earlier
            versions, and the factor that makes the one of the other.
    """
    tree = dict(saved)
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
        names: In the checkpoint.
        slots: Names of the optimizer's slots.
        owner: The optimizer, for the error.
        accumulates: Whether it accumulates gradients.
    """
    # A missing or outdated copy is taken from the variable itself, and a missing momentum begins with zeros.
    names = names - {MASTER_COPY, OUTER_MOMENTUM}
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
        saved: The optimizer's tree in the checkpoint. What is held by number, as in checkpoints without the variables
            and in those of before paths were stored, stays so.
        variables: The variables of the optimizer, in their order.
        owner: For the error.

    Returns:
        The tree, with the numbers of variables, as strings, in the place of paths. Where all is held by paths, a
        variable of which there is nothing has None, and what is of none of these variables is left out.

    Raises:
        CheckpointError: State of variables that are not among these, where others may wait to be restored.
    """
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
        if (others and not (by_path and is_whole)) or len(set(keys.values())) < len(keys):
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
            # Earlier versions saved the state of half precision in the variable's dtype.
            dtype = None if array is None else state_dtype(array.dtype)
            if array is None or tuple(array.shape) != target.shape or dtype != target.dtype:
                got = "nothing" if array is None else f"shape {tuple(array.shape)} and dtype {array.dtype}"
                variable = variables[number].saved_as or variables[number].name
                raise CheckpointError(
                    f"{owner}: slot {name!r} of variable {variable!r} needs shape {target.shape} and dtype "
                    f"{target.dtype}, the checkpoint has {got}. Build the optimizer on the variables that it was saved "
                    "with"
                )


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
        CheckpointError: The state of other variables, or of other shapes.
    """
    tree = numbered(renewed(saved, older), plan.variables, owner)
    require_slots(plan.slots, tree, plan.variables, owner)
    if isinstance(tree.get(ACCUMULATES), Mapping):
        tree[ACCUMULATES] = np.array(
            [0 if flag is None else flag.numpy() for _, flag in sorted(tree[ACCUMULATES].items(), key=_number_of)],
            np.uint8,
        )
    return tree


def _number_of(item: tuple[str, object]) -> int:
    return int(item[0])


def load_slot(targets: Slot, arrays: Mapping[str, Saved | None] | None, value: complex) -> None:
    """Collective. Set the variables of one slot; each rank reads only the elements that it keeps.

    Args:
        targets: The targets of the optimizer's state.
        arrays: By number; None where the checkpoint has nothing of a variable, or is from before the first step. Then
            `value` is taken.
        value: The value of every element at first, as of `Kernel.slots`.
    """
    for number, target in by_number(targets).items():
        array = None if arrays is None else arrays[str(number)]
        target.load(_constant(value, target) if array is None else array.read)


def _constant(value: complex, target: BaseVariable) -> Read:
    return lambda start, stop: np.full(stop - start, initial(value, target.dtype), target.dtype)
