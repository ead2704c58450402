"""An optimizer's state in a checkpoint: its names, and how it is checked before it is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.errors import CheckpointError
from mpidist.variables.update.options import ACCUMULATED, ACCUMULATES
from mpidist.variables.variable import Read, Variable


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
        """Local. The same array, read into memory, for when the file is gone."""
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


def load_list(
    targets: Sequence[Variable], saved: Mapping[str, Any], name: str, initial: float, owner: str
) -> None:
    """Collective. Set variables from the list `name` of a checkpoint.

    Args:
        targets: Of the optimizer's state, one for each variable.
        saved: The optimizer's tree in the checkpoint.
        name: In it. A checkpoint from before the first step does not have it; then `initial` is taken.
        initial: Value of every element.
        owner: For the error.

    Raises:
        CheckpointError: An array is missing or has another shape.
    """
    if name not in saved:
        for target in targets:
            target.load(_constant(initial, target))
        return
    for number, target in enumerate(targets):
        array = saved[name].get(str(number))
        if array is None or tuple(array.shape) != target.shape:
            got = "nothing" if array is None else f"shape {tuple(array.shape)}"
            raise CheckpointError(
                f"{owner}: slot {name!r} of variable {target.name.rsplit('/', 1)[0]!r} needs shape {target.shape}, the "
                f"checkpoint has {got}"
            )
        target.load(array.read)


def detach(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Local. Read lists and arrays of a checkpoint into memory."""
    return {
        name: {key: array.detach() for key, array in saved[name].items()}
        if isinstance(saved[name], Mapping) else saved[name].detach()
        for name in names if name in saved
    }


def _constant(value: float, target: Variable) -> Read:
    return lambda start, stop: np.full(stop - start, value, target.dtype)
