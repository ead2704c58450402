"""An optimizer's state in a checkpoint: its names, and how it is checked before it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.errors import CheckpointError
from mpidist.variables.update.options import ACCUMULATED, ACCUMULATES
from mpidist.variables.update.parts import initial
from mpidist.variables.variable import Read, Variable

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


def require_names(names: Set[str], slots: Iterable[str], owner: str, *, accumulates: bool) -> None:
    """Local. Raise CheckpointError unless a checkpoint holds the state of such an optimizer.

    Args:
        names: In the checkpoint.
        slots: Names of the optimizer's slots.
        owner: The optimizer, for the error.
        accumulates: Whether it accumulates gradients.
    """
    expected = {"iterations", *slots, *([ACCUMULATED, ACCUMULATES] if accumulates else [])}
    # Before the first step there are no slots to save.
    if names not in (expected, {"iterations"}):
        raise CheckpointError(
            f"{owner} needs {sorted(expected)}, but the checkpoint holds {sorted(names)}: it was saved with another "
            "optimizer, or with other options"
        )


def numbered(saved: Mapping[str, Any], variables: Sequence[Variable], owner: str) -> dict[str, Any]:
    """Local. Find what a checkpoint holds for each variable, by the path that the variable has in it.

    Args:
        saved: The optimizer's tree in the checkpoint. What is held by number, as in checkpoints without the variables
            and in those of before paths were stored, stays so.
        variables: Of the optimizer, in their order.
        owner: For the error.

    Returns:
        The tree, with the numbers of variables, as strings, in the place of paths.

    Raises:
        CheckpointError: State of a variable that is not among these.
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
        if others or len(set(keys.values())) < len(keys):
            here = [f"{v.name!r}, " + (f"saved as {v.saved_as!r}" if v.saved_as else "not restored") for v in variables]
            raise CheckpointError(
                f"{owner}: expected {name!r} of its own variables ({'; '.join(here[:8])}), the checkpoint also holds "
                f"that of {others[:8]}. Hold the optimizer and its variables in one Checkpoint, build it on the "
                "variables that it was saved with, and restore them first (`restore_new()` where they come late)"
            )
        known = {number: entries[key] for number, key in keys.items() if key in entries}
        tree[name] = {**rest, **known}
    return tree


def require_slots(slots: Mapping[str, Sequence[Variable]], saved: Mapping[str, Any], owner: str) -> None:
    """Local. Raise CheckpointError unless a checkpoint has an array for each variable of an optimizer's state.

    Args:
        slots: The state by name, one variable for each of the optimizer's.
        saved: As `numbered` returns it. A checkpoint from before the first step has no slots.
        owner: For the error.
    """
    for name, targets in slots.items():
        for number, target in enumerate(targets if name in saved else ()):
            array = saved[name].get(str(number)) if isinstance(saved[name], Mapping) else None
            if array is None or tuple(array.shape) != target.shape or array.dtype != target.dtype:
                got = "nothing" if array is None else f"shape {tuple(array.shape)} and dtype {array.dtype}"
                raise CheckpointError(
                    f"{owner}: slot {name!r} of variable {target.name.rsplit('/', 1)[0]!r} needs shape {target.shape} "
                    f"and dtype {target.dtype}, the checkpoint has {got}. Build the optimizer on the variables that it "
                    "was saved with"
                )


def load_slot(targets: Sequence[Variable], arrays: Mapping[str, Saved] | None, value: complex) -> None:
    """Collective. Set the variables of one slot; each rank reads only the elements that it keeps.

    Args:
        targets: Of the optimizer's state, one for each variable.
        arrays: By number; None where the checkpoint is from before the first step. Then `value` is taken.
        value: Of every element at first, as of `Kernel.slots`.
    """
    for number, target in enumerate(targets):
        target.load(_constant(value, target) if arrays is None else arrays[str(number)].read)


def _constant(value: complex, target: Variable) -> Read:
    return lambda start, stop: np.full(stop - start, initial(value, target.dtype), target.dtype)
