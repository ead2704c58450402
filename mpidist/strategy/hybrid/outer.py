"""The outer step: a group's difference becomes an increment of the parameters that all groups share.

The method is that of DiLoCo (Douillard et al. 2023, arXiv:2311.08105) without a server. Momentum is linear in the
differences: the sum of all groups' increments, each made with a momentum of the group's own, is the step that one
optimizer would make of the mean of the differences. Adding commutes, so increments may arrive in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from mpidist import arrays
from mpidist.arguments import described, settings_of
from mpidist.arrays import AnyArray
from mpidist.optimizers.families.sgd import SGDKernel
from mpidist.optimizers.optimizer import Optimizer
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.memory.slab import SlabRange
from mpidist.variables.update.halves import state_dtype
from mpidist.variables.update.options import OptimizerOptions

# Elements that are updated at a time: the scratch of a step stays small, and in the cache.
_BLOCK = 1 << 16
# The largest piece of parameters that travels as one message; a multiple of all items. A window takes 1 GiB at most.
PIECE_BYTES = 1 << 28

Flat = list[AnyArray]


class Place(NamedTuple):
    """The place of a variable in flat arrays.

    Attributes:
        section: The number of the flat array.
        start: Its first element there.
        stop: The element after its last one.
    """

    section: int
    start: int
    stop: int


class Member(NamedTuple):
    """The memory of a variable, for a part; it is nobody else's as long as the part lives.

    It does not refer to the variable itself, so that a program can drop that.

    Attributes:
        name: The name of the variable.
        shape: The shape of its value.
        dtype: The dtype of its value.
        address: Its memory.
        claim: See `MirroredVariable`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    address: SlabRange
    claim: object

    @classmethod
    def of(cls, variable: MirroredVariable) -> Member:
        """Local. The member for a variable."""
        return cls(variable.name, variable.shape, variable.dtype, variable.address, variable.claim)


class FlatLayout:
    """Local. The flat arrays that hold all of some variables: one for each dtype of their arithmetic.

    Args:
        members: The variables.

    Attributes:
        places: The place of each variable.
        dtypes: The dtype of each flat array.
        sizes: The number of elements of each flat array.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.dtypes: list[np.dtype[Any]] = []
        self.sizes: list[int] = []
        self.places: list[Place] = []
        for member in members:
            dtype = flat_dtype(member.dtype)
            if dtype not in self.dtypes:
                self.dtypes.append(dtype)
                self.sizes.append(0)
            section = self.dtypes.index(dtype)
            start = self.sizes[section]
            self.sizes[section] += member.address.size * (2 if member.dtype.kind == "c" else 1)
            self.places.append(Place(section, start, self.sizes[section]))

    def zeros(self) -> Flat:
        """Local. Flat arrays of zeros."""
        return [np.zeros(size, dtype) for size, dtype in zip(self.sizes, self.dtypes, strict=True)]

    def pieces(self) -> list[Place]:
        """Local. The pieces in which all flat arrays travel."""
        found: list[Place] = []
        for section, (size, dtype) in enumerate(zip(self.sizes, self.dtypes, strict=True)):
            step = PIECE_BYTES // dtype.itemsize
            found += [Place(section, start, min(start + step, size)) for start in range(0, size, step)]
        return found


def in_messages(parts: Iterable[tuple[Sequence[Place], Flat]]) -> list[Flat]:
    """Local. Views of the pieces of several parts, one message after the other; at least one, which may be empty.

    Args:
        parts: The pieces of each part, and its flat arrays.
    """
    messages: list[Flat] = [[]]
    room = PIECE_BYTES
    for pieces, flat in parts:
        for section, start, stop in pieces:
            piece = flat[section][start:stop]
            if piece.nbytes > room:
                messages.append([])
                room = PIECE_BYTES
            messages[-1].append(piece)
            room -= piece.nbytes
    return messages


def flat_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Local. The dtype of the arithmetic on variables of a dtype: float32 for half precision, reals for complex."""
    return np.empty(0, dtype).real.dtype if dtype.kind == "c" else state_dtype(dtype)


def read_members(members: Sequence[Member], layout: FlatLayout) -> Flat:
    """Local. The values of variables, as flat arrays in host memory."""
    flat = layout.zeros()
    for member, place in zip(members, layout.places, strict=True):
        value = arrays.to_host(member.address.readable)
        if value.dtype.kind == "c":
            value = value.view(flat[place.section].dtype)
        np.copyto(flat[place.section][place.start : place.stop], value, casting="unsafe")
    return flat


def write_members(members: Sequence[tuple[Member, Place]], flat: Flat) -> None:
    """Local. Set variables to the values in flat arrays, between the barriers of a write."""
    for member, place in members:
        value = flat[place.section][place.start : place.stop]
        if member.dtype.kind == "c":
            value = value.view(member.dtype)
        target = member.address.writable
        target[...] = arrays.move(value.astype(member.dtype, copy=False), arrays.namespace(target))


class OuterStep:
    """Local. The arithmetic of the outer optimizer.

    Args:
        optimizer: An optimizer with linear momentum, of `mpidist.optimizers`.

    Raises:
        TypeError: `optimizer` is no optimizer.
        ValueError: Its momentum is not linear in the gradients, it has options, or it updates variables already.

    Attributes:
        has_momentum: Whether a group has a momentum of its own.
        is_scheduled: Whether the learning rate depends on the number of outer steps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = require_linear(optimizer)
        self._kernel: SGDKernel = optimizer.kernel  # type: ignore[assignment]  # `require_linear` has looked at it
        self.has_momentum = bool(self._kernel.slots)
        self.is_scheduled = callable(optimizer.learning_rate)

    def __repr__(self) -> str:
        rate = self._optimizer.learning_rate
        # Ranks compare this text, and that of a function has its address.
        return f"{self._kernel!r} with rate {settings_of(rate) if callable(rate) else repr(rate)}"

    def apply(self, differences: Flat, velocity: Flat, count: int) -> Flat:
        """Local. The increments of the parameters, which a group adds and sends.

        Args:
            differences: Parameters at the begin of the window without those at its end, divided by the number of
                groups. They are used up.
            velocity: The momentum; it is changed.
            count: The number of the group's outer steps so far.

        Returns:
            New flat arrays.
        """
        update = self._kernel.prepare(count + 1, self._optimizer.rate_at(count))
        increments = [np.zeros_like(difference) for difference in differences]
        for increment, difference, momentum in zip(increments, differences, velocity, strict=True):
            scratch = np.empty(min(_BLOCK, increment.size), increment.dtype)
            for part in _blocks(increment.size):
                slots = [momentum[part]] if self.has_momentum else []
                size = part.stop - part.start
                update(increment[part], difference[part], slots, [scratch[:size]] * self._kernel.scratch_count)
        return increments


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK))


def require_linear(optimizer: object) -> Optimizer:
    """Local. The optimizer, if it can be the outer one; see `OuterStep` for the errors."""
    advice = "Use mpidist.optimizers.SGD(learning_rate, momentum, nesterov)"
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"`outer` must be an optimizer of mpidist.optimizers, got {described(optimizer)}. {advice}")
    if not isinstance(optimizer.kernel, SGDKernel):
        raise ValueError(
            f"`outer` must have linear momentum, got {optimizer.name}: what it makes of the sum of two groups' "
            f"differences is not the sum of what it makes of each, and groups would come to different parameters. "
            f"{advice}"
        )
    plain = OptimizerOptions()
    given = [
        field.name for field in fields(OptimizerOptions)
        if getattr(optimizer.options, field.name) != getattr(plain, field.name)
    ]
    if given:
        raise ValueError(
            f"`outer` must be without options, which are not linear in a group's differences, got {optimizer.name} "
            f"with {', '.join(given)}. Give them to the optimizer that the program calls in its steps"
        )
    if optimizer.plan is not None:
        raise ValueError(
            f"`outer` must be an optimizer for the strategy alone, got {optimizer.name}, which updates variables of "
            "the program. Make another one"
        )
    return optimizer
