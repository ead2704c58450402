"""What of an optimizer's state comes back from a checkpoint, checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.errors import CheckpointError
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
        """Local. The same, read into memory: the file may go away."""
        ...


def load_list(
    targets: Sequence[Variable], saved: Mapping[str, Any], name: str, initial: float, owner: str
) -> None:
    """Collective. Set variables from the list `name` of a checkpoint.

    Args:
        targets: Of the optimizer's state, one for each variable.
        saved: The optimizer's part of the checkpoint.
        name: In it; where it is missing, since it was saved before the first step, `initial` is taken.
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
    """Local. Lists and arrays of a checkpoint, read into memory."""
    return {
        name: {key: array.detach() for key, array in saved[name].items()}
        if isinstance(saved[name], Mapping) else saved[name].detach()
        for name in names if name in saved
    }


def _constant(value: float, target: Variable) -> Read:
    return lambda start, stop: np.full(stop - start, value, target.dtype)
