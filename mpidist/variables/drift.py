"""The drift check: a debug option that compares the ranks' copies of the variables and names those that differ."""

from __future__ import annotations

import zlib

import numpy as np

from mpidist import arrays
from mpidist.comm.group.agreement import name_ranks
from mpidist.errors import MismatchError, mark_shared
from mpidist.variables.memory.arena_memory import ArenaMemory

# A variable on one rank: its name and checksum; None where the node's first rank has the checksum for all.
_Seen = dict[int, tuple[str, int | None]]


class DriftCheck:
    """Compares checksums of the ON_WRITE variables of an arena over its ranks, step by step.

    Local. Variables in node memory are compared between nodes only: the ranks of one node see the same bytes. A
    variable is compared while all ranks hold it.

    Args:
        arena: The arena of the variables.
    """

    def __init__(self, arena: ArenaMemory) -> None:
        self._arena = arena
        self._step = 0
        self._first_seen: dict[int, int] = {}

    def after_step(self) -> None:
        """Collective. Count a step and compare.

        Raises:
            MismatchError: Variables differ. The text names them, the ranks that differ, and the first such step.
        """
        self._step += 1
        if not self._arena.holds_copies():
            return
        communicator = self._arena.communicator
        with self._arena.calls.during("comparing variables"):
            everyone = communicator.all_gather_object((communicator.node_index, self._checksums()))
        held = set.intersection(*(set(seen) for _, seen in everyone))
        lines = []
        for number in sorted(held):
            groups = _by_checksum(number, everyone)
            if len(groups) > 1:
                first = self._first_seen.setdefault(number, self._step)
                got = "; ".join(f"checksum {checksum:#010x} on {name_ranks(ranks)}" for checksum, ranks in groups)
                lines.append(f"variable {everyone[0][1][number][0]!r}, first seen after step {first}: {got}")
            else:
                self._first_seen.pop(number, None)
        if lines:
            more = f", and {len(lines) - 4} others" if len(lines) > 4 else ""
            raise mark_shared(MismatchError(
                f"variables must hold the same values on all ranks, but after step {self._step} (call of `run`) these "
                f"have drifted apart: {' | '.join(lines[:4])}{more}. Write variables only by assign and the like, on "
                "every rank: neither on some ranks, nor through other views of their memory"
            ))

    def _checksums(self) -> _Seen:
        speaks = self._arena.communicator.node.rank == 0
        return {
            number: (
                variable.name,
                zlib.crc32(np.ascontiguousarray(arrays.to_host(variable.value())).tobytes())
                if speaks or not variable.address.slab.is_shared else None,
            )
            for number, variable in self._arena.variables()
        }


def _by_checksum(number: int, everyone: list[tuple[int, _Seen]]) -> list[tuple[int, list[int]]]:
    spoken = {
        node: checksum for node, seen in everyone if (checksum := seen[number][1]) is not None
    }
    groups: dict[int, list[int]] = {}
    for rank, (node, seen) in enumerate(everyone):
        own = seen[number][1]
        groups.setdefault(spoken[node] if own is None else own, []).append(rank)
    return sorted(groups.items(), key=lambda group: group[1])
