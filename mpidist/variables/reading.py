"""The reading of saved values: what a rank reads must fit the variable, and the ranks agree on the outcome."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.group.agreement import together
from mpidist.comm.group.communicator import Communicator
from mpidist.variables.variable import BaseVariable, Read

# Values are read in blocks of this size, which begin at multiples of it: a checkpoint has a checksum for each of them.
BLOCK_BYTES = 1 << 20
# Less is not shared out to the ranks of a node.
_SMALL_BYTES = 4096


class LoadedInBlocks(ABC):
    """A variable of an arena that `load_all` loads beside others, block by block; the base of such kinds.

    Attributes:
        takes_blocks: Whether `put` takes any part of what this rank loads, or all of it at once.
    """

    takes_blocks = True

    @property
    @abstractmethod
    def loaded_here(self) -> tuple[int, int]:
        """Local. The elements that this rank loads: the first, and the one after the last."""

    @abstractmethod
    def put(self, start: int, data: AnyArray) -> None:
        """Local. Write elements from `start` on, between two meetings of the node's ranks."""

    @property
    def is_loaded_beside_others(self) -> bool:
        """Local. Whether `load_all` may load it so; the same on every rank."""
        return True

    def through(self, read: Read) -> Read:
        """Local. The function that reads the elements of `loaded_here`."""
        return read

    def note_loaded(self) -> None:  # noqa: B027  # most kinds do nothing then
        """Local. Do what follows a load."""


def read_together(variable: BaseVariable, read: Read, start: int, stop: int) -> AnyArray:
    """Collective. The elements of a variable that this rank asks for, one-dimensional, in host memory.

    Args:
        variable: The variable.
        read: See `BaseVariable.load`.
        start: The first element.
        stop: The element after the last.

    Raises:
        Exception: The error that `read` raises on any rank; on every rank.
        ValueError: `read` returns another number of elements, on any rank.
        TypeError: `read` returns a dtype that does not cast, on any rank.
    """
    return together(
        variable.group, f"reading variable {variable.name!r}", lambda: _read_and_check(variable, read, start, stop)
    )


def load_all(communicator: Communicator, loads: Sequence[tuple[BaseVariable, Read]], step: str) -> None:
    """Collective. Load several variables, block by block, in one meeting whatever their number.

    Each rank reads and writes what it has of all of them. Where reading fails on any rank, some variables have new
    values, others not.

    Args:
        communicator: The ranks that have the variables.
        loads: The variables, the same on every rank, each with what `BaseVariable.load` takes.
        step: The operation, for the error.

    Raises:
        Exception: The error that reading raises on any rank; on every rank; see `read_together`.
    """
    several: list[tuple[BaseVariable, Read]] = []
    alone: list[tuple[BaseVariable, Read]] = []
    arenas: dict[int, Any] = {}
    for variable, read in loads:
        if isinstance(variable, LoadedInBlocks) and variable.is_loaded_beside_others:
            several.append((variable, read))
            home: Any = variable.home
            arenas[id(home)] = home
        else:
            alone.append((variable, read))
    with ExitStack() as stack:
        for arena in arenas.values():
            stack.enter_context(arena.guard)
        # Another rank may still be reading the old values.
        for arena in arenas.values():
            arena.barrier()
        if several:
            # It is also the meeting behind which all values are there.
            together(communicator, step, lambda: _load_blocks(several))
    for variable, _ in several:
        if isinstance(variable, LoadedInBlocks):
            variable.note_loaded()
    for variable, read in alone:
        variable.load(read)


def block_range(size: int, itemsize: int, part: int, parts: int) -> tuple[int, int]:
    """Local. Choose the elements of one of several parts.

    Parts of what has several blocks begin with blocks: each is read by one rank. What is small is in the last part.
    """
    nbytes = size * itemsize
    length = size if nbytes < _SMALL_BYTES else 1 if nbytes <= BLOCK_BYTES else _block_length(itemsize)
    blocks = -(-size // length) if length else 0
    start, stop = (min(size, blocks * edge // parts * length) for edge in (part, part + 1))
    return start, stop


def _load_blocks(loads: Sequence[tuple[BaseVariable, Read]]) -> None:
    for variable, read in loads:
        if isinstance(variable, LoadedInBlocks):
            start, stop = variable.loaded_here
            own = variable.through(read)
            if not variable.takes_blocks:
                variable.put(start, _read_and_check(variable, own, start, stop))
                continue
            for first, last in _blocks(start, stop, _block_length(variable.saved_dtype.itemsize)):
                variable.put(first, _read_and_check(variable, own, first, last))


def _blocks(start: int, stop: int, length: int) -> Iterator[tuple[int, int]]:
    # Also where there is nothing: what reads must fail on all ranks alike.
    while True:
        end = min((start // length + 1) * length, stop)
        yield start, end
        start = end
        if start >= stop:
            return


def _block_length(itemsize: int) -> int:
    return max(1, BLOCK_BYTES // itemsize)


def _read_and_check(variable: BaseVariable, read: Read, start: int, stop: int) -> AnyArray:
    data = np.asarray(read(start, stop))
    if data.size != stop - start or not np.can_cast(data.dtype, variable.saved_dtype, "same_kind"):
        kind = ValueError if data.size != stop - start else TypeError
        raise kind(
            f"variable {variable.name!r}: reading the elements [{start}, {stop}) must give {stop - start} values "
            f"that cast to {variable.saved_dtype}, got {data.size} of {data.dtype}. Check what `read` returns"
        )
    return data.reshape(-1)
