"""The plan of a synchronous step: where gradients and state of some variables lie, and which slice each rank updates.

A step is: barrier; each rank takes its slice block by block, adds the ranks' gradients in a fixed order and applies
the kernel to its slice of the parameters; barrier. Nothing is gathered or broadcast inside a node. Between nodes a
slice is a lane, reduced with the same lane of the other nodes.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpidist.comm.agreement import same_on_all
from mpidist.comm.collective import AnyArray, Collective
from mpidist.comm.communicator import Communicator
from mpidist.errors import mark_collective
from mpidist.options import ReduceOp
from mpidist.variables.arena import Address, Arena
from mpidist.variables.mirrored import MirroredVariable
from mpidist.variables.part import Block, Part, Update
from mpidist.variables.sweep import Sweep

# What goes to another node, or through a collective, at a time.
CHUNK_BYTES = 1 << 20


class Plan:
    """Where gradients and state of some variables lie.

    Collective. Args:
        variables: Of one arena, the same list on every rank.
        slots: Names of the state that the kernel keeps for each element, with its initial value.
        scratch_count: Private blocks that the kernel wants.

    Raises:
        MismatchError: The lists of variables differ between ranks.
        ValueError: Variables of several strategies, or one twice.
        OSError: No node memory for gradients or state, on every rank.
    """

    def __init__(
        self, variables: Sequence[MirroredVariable], slots: Mapping[str, float], scratch_count: int = 0
    ) -> None:
        self.variables = tuple(variables)
        self.arena = _common_arena(self.variables)
        self._numbers = {variable: number for number, variable in enumerate(self.variables)}
        same_on_all(
            self.arena.communicator, "the variables of an optimizer",
            # Many variables have the same name and shape; where they start tells them apart.
            [(v.name, v.shape, v.dtype.name, v.address.start) for v in self.variables],
            "Build the model the same way on every rank and pass its variables in the same order.",
        )
        kinds: dict[tuple[np.dtype[Any], bool], list[tuple[int, MirroredVariable]]] = {}
        for number, variable in enumerate(self.variables):
            kinds.setdefault((variable.dtype, variable.address.slab.is_shared), []).append((number, variable))
        self.parts = [Part(self.arena, chosen, slots, scratch_count) for chosen in kinds.values()]
        self._part_of = {number: part for part in self.parts for number in part.spans}
        self.gradients = tuple(
            self._part_of[n].gradient[slice(*self._part_of[n].spans[n])].reshape(v.shape)
            for n, v in enumerate(self.variables)
        )
        self._steps: dict[tuple[int, ...], list[_PartStep]] = {}
        self._sweeps: dict[tuple[int, ...], Sweep] = {}
        self._header = self._open_header()
        self._count = 0

    def number(self, variable: MirroredVariable) -> int | None:
        """Local. The place of a variable in the plan, None if it is not there."""
        return self._numbers.get(variable)

    def slot(self, name: str, number: int) -> MirroredVariable:
        """Local. The state `name` of variable `number`, as a variable of the same shape."""
        part, variable = self._part_of[number], self.variables[number]
        low, high = part.spans[number]
        address = Address(part.slots[name], low, high - low)
        return MirroredVariable(
            self.arena, address, variable.shape, name=f"{variable.name}/{name}", trainable=False
        )

    def step(self, numbers: tuple[int, ...], update: Update) -> None:
        """Collective. Reduce the gradients of some variables over all ranks and apply `update` to them.

        Args:
            numbers: Of the variables, increasing; the same on every rank, and not empty.
            update: `update(parameter, gradient, slots, scratch)` on flat blocks, in place; may overwrite `gradient`.

        Raises:
            MismatchError: The ranks do not pass the same variables, or are not at the same step.
            ValueError: No variables, on every rank.
        """
        self._run(numbers, update)

    def _run(self, numbers: tuple[int, ...], update: Update | None) -> None:
        self._count += 1
        steps = self._steps.get(numbers)
        self._enter(numbers)
        if not numbers:
            raise mark_collective(
                ValueError(f"no gradients for any of {[v.name for v in self.variables]}; all are None")
            )
        if steps is None:
            steps = [_PartStep(part, chosen) for part in self.parts if (chosen := _within(part, numbers))]
            self._steps[numbers] = steps
        for step in steps:
            if update is None:
                step.reduce()
            else:
                step.apply(update)
        if self._header is not None:
            self.arena.communicator.node.barrier()

    def reduce(self, numbers: tuple[int, ...]) -> None:
        """Collective. Sum the gradients of some variables over all ranks, without changing anything else.

        The sums stand in the first gradient segment of each node, for `sweep`: the half of a step for those who must
        see all gradients before they change a parameter.

        Args:
            numbers: As for `step`.

        Raises:
            MismatchError: As `step`.
        """
        self._run(numbers, None)

    def sweep(self, numbers: tuple[int, ...]) -> Sweep:
        """Local. How this rank goes over some variables one by one, after `reduce`."""
        sweep = self._sweeps.get(numbers)
        if sweep is None:
            sweep = self._sweeps[numbers] = Sweep(
                self.arena, [(part, chosen) for part in self.parts if (chosen := _within(part, numbers))], numbers
            )
        return sweep

    def _open_header(self) -> AnyArray | None:
        if not any(part.is_shared for part in self.parts):
            return None
        node = self.arena.communicator.node
        # One cache line per rank of the node: step count, checksum of the variables' numbers.
        return self.arena.reserve(8 * node.size, np.dtype(np.int64), shared=True).writable.reshape(node.size, 8)

    def _enter(self, numbers: tuple[int, ...]) -> None:
        """The barrier that begins a step; on the way the ranks compare what they are about to do."""
        communicator = self.arena.communicator
        agrees = True
        if self._header is not None:
            mine = self._header[communicator.node.rank]
            mine[0], mine[1] = self._count, zlib.crc32(np.asarray(numbers, np.int64).tobytes())
            communicator.node.barrier()
            agrees = bool((self._header[:, :2] == mine[:2]).all())
        crosses = self._header is None or len(communicator.node_sizes) > 1
        # Only at a step that all ranks know may all of them compare; at others a node that sees a difference is on
        # its own, and the job ends with its error.
        if crosses and (self.arena.options.check or self._count <= 16 or self._count & (self._count - 1) == 0):
            self._compare(communicator, numbers)
        elif not agrees:
            self._compare(communicator.node, numbers)

    def _compare(self, communicator: Communicator, numbers: tuple[int, ...]) -> None:
        same_on_all(
            communicator, "the step's number and the variables with gradients",
            (self._count, {number: self.variables[number].name for number in numbers}),
            "Every rank must apply gradients for the same variables, in the same order of calls.",
        )


class _PartStep:
    """What one rank does in a step for one part and one selection of its variables."""

    def __init__(self, part: Part, numbers: Sequence[int]) -> None:
        self._arena = arena = part.arena
        self._node = node = arena.communicator.node
        self._is_shared = part.is_shared
        self._writes_back = part.writes_back
        spans = part.merged(numbers)
        total = sum(high - low for low, high in spans)
        chunk_bytes = arena.options.bytes_per_pack or CHUNK_BYTES
        mine = part.slice_of(total, node.rank, node.size) if part.is_shared else (0, total)
        # Each chunk: the piece of this rank's (or the node's first) gradient segment, and the blocks in it.
        self._chunks = [
            (part.first_segment[low:high], part.blocks(low, high))
            for low, high in part.pieces(spans, *mine, chunk_bytes)
        ]
        # Where every node has as many ranks as lanes, a rank's slice is its lane, and a chunk goes through reduction,
        # lane and kernel while it is in the cache. Else slices and lanes differ, and the phases are apart.
        self._is_fused = len(set(arena.communicator.node_sizes)) == 1
        self._lane_chunks: list[AnyArray] = []
        if part.is_shared and not self._is_fused and node.rank < arena.lane_count:
            lane = part.slice_of(total, node.rank, arena.lane_count)
            self._lane_chunks = [part.first_segment[a:b] for a, b in part.pieces(spans, *lane, chunk_bytes)]

    def apply(self, update: Update) -> None:
        """Collective. Between the barriers of `Plan.step`."""
        if self._is_shared and len(self._arena.communicator.node_sizes) == 1:
            for _, blocks in self._chunks:
                for parameter, gradients, slots, scratch in blocks:
                    update(parameter, _add(gradients, scratch[0]), slots, scratch[1:])
        elif self._writes_back:
            self._apply_and_write_back(update)
        elif self._is_fused or not self._is_shared:
            for chunk, blocks in self._chunks:
                self._reduce_chunk(chunk, blocks)
                _update_all(blocks, update)
        else:
            self.reduce()
            for _, blocks in self._chunks:
                _update_all(blocks, update)

    def _apply_and_write_back(self, update: Update) -> None:
        """Every rank updates its private state and a copy of the parameters; one per node writes these back."""
        for chunk, blocks in self._chunks:
            self._reduce_chunk(chunk, blocks)
            for parameter, gradients, slots, scratch in blocks:
                np.copyto(scratch[0], parameter)
                update(scratch[0], gradients[0], slots, scratch[1:])
                np.copyto(gradients[0], scratch[0])
        self._node.barrier()
        if self._node.rank == 0:
            for _, blocks in self._chunks:
                for parameter, gradients, _, _ in blocks:
                    np.copyto(parameter, gradients[0])
        self._node.barrier()

    def reduce(self) -> None:
        """Collective. Put the sums into the first segment, between the barriers of `Plan.step`."""
        if self._is_fused or not self._is_shared:
            for chunk, blocks in self._chunks:
                self._reduce_chunk(chunk, blocks)
            return
        for _, blocks in self._chunks:
            _add_in_place(blocks)
        self._node.barrier()
        for chunk in self._lane_chunks:
            _reduce(self._arena.lane, chunk)
        self._node.barrier()

    def _reduce_chunk(self, chunk: AnyArray, blocks: Sequence[Block]) -> None:
        _add_in_place(blocks)
        _reduce(self._arena.lane if self._is_shared else self._arena.collective, chunk)


def _add_in_place(blocks: Sequence[Block]) -> None:
    for block in blocks:
        if len(block.gradients) > 1:
            _add(block.gradients, block.gradients[0])


def _reduce(between: Collective | None, chunk: AnyArray) -> None:
    if between is not None:
        between.all_reduce(chunk, ReduceOp.SUM, in_place=True)


def _update_all(blocks: Sequence[Block], update: Update) -> None:
    for parameter, gradients, slots, scratch in blocks:
        update(parameter, gradients[0], slots, scratch[1:])


def _add(gradients: Sequence[AnyArray], out: AnyArray) -> AnyArray:
    """The sum in the order of the ranks; half precision is added up in float32."""
    if len(gradients) == 1:
        return gradients[0]
    if out.dtype.itemsize == 2 and out.dtype.kind != "i" and out.dtype.kind != "u":
        total = gradients[0].astype(np.float32)
        for gradient in gradients[1:]:
            total += gradient.astype(np.float32)
        out[...] = total.astype(out.dtype)
        return out
    np.add(gradients[0], gradients[1], out=out)
    for gradient in gradients[2:]:
        np.add(out, gradient, out=out)
    return out


def _within(part: Part, numbers: Sequence[int]) -> list[int]:
    return [number for number in numbers if number in part.spans]


def _common_arena(variables: Sequence[MirroredVariable]) -> Arena:
    if not variables:
        raise ValueError("an optimizer needs at least one variable, got an empty list")
    if len(set(variables)) < len(variables):
        raise ValueError(f"a variable stands twice in the list {[v.name for v in variables]}")
    arena = variables[0].arena
    for variable in variables:
        if variable.arena is not arena:
            raise ValueError(
                f"variables {variables[0].name!r} and {variable.name!r} belong to different strategies: create all "
                "variables of a model in the scope of one strategy"
            )
    return arena
