"""The staged backend: arrays pass piece by piece through rooms, memory in which another backend combines them.

While a piece is combined, the next one is copied from the array into a room, and the one before is copied back. Arrays
in GPU memory pass either through pinned host memory, in which a backend for host arrays works, or through a few rooms
in GPU memory, in which a CUDA-aware MPI works. MPI then always gets the same addresses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from mpidist import arrays
from mpidist.arrays import AnyArray, as_bytes
from mpidist.comm.arithmetic.slices import cut_by_length, slices_of
from mpidist.comm.backend import Backend
from mpidist.comm.gpu.staging_copier import DONE, StagingCopier, Ticket
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import end_all
from mpidist.options import CommunicationOptions, ReduceOp

# The size of a piece: large enough for the full speed of a copy between GPU and host, small enough that a gradient has
# many pieces.
PIECE_BYTES = 1 << 22
# One piece is copied in, one is combined, one is copied out.
_TURNS = 3
# The size of an element of the widest dtype. A room holds at least one such element of every rank.
_WIDEST = 32


class _Piece:
    """A piece of this rank's arrays, which passes through the rooms at once.

    Attributes:
        sources: Arrays of bytes to copy into a room, one after the other.
        targets: Arrays of bytes to fill, one after another, from the room that `combine` returns.
        combine: A function of the room that holds the sources and of another room; it returns the one with the result.
    """

    __slots__ = ("combine", "sources", "targets")

    def __init__(
        self,
        sources: Sequence[AnyArray],
        targets: Sequence[AnyArray],
        combine: Callable[[AnyArray, AnyArray], AnyArray],
    ) -> None:
        self.sources = sources
        self.targets = targets
        self.combine = combine


class _Rooms:
    """The rooms of a copier, in pairs for a piece and its result. Pieces take the pairs in turn.

    Results may still be copied out when the call returns. Their tickets are kept, and a room is filled again only
    after its result has left.
    """

    def __init__(self, copier: StagingCopier, byte_count: int) -> None:
        self.copier = copier
        self._rooms = [(copier.allocate(byte_count), copier.allocate(byte_count)) for _ in range(_TURNS)]
        self._leaving: list[Ticket] = [DONE] * _TURNS
        # CuPy's pool gives freed pinned memory to the next caller, which would overwrite results before their copy.
        weakref.finalize(self, _wait_for_all, copier, self._leaving).atexit = False
        self._next_in = 0
        self._next_out = 0

    def current(self) -> tuple[AnyArray, AnyArray]:
        """Local. The rooms of the piece that is combined next."""
        return self._rooms[self._next_out]

    def bring_in(self, piece: _Piece) -> Ticket:
        """Local. Wait until the next room is free, and start to copy a piece into it."""
        turn = self._next_in
        self._next_in = (turn + 1) % _TURNS
        self.copier.wait(self._leaving[turn])
        return self.copier.copy_to_room(piece.sources, self._rooms[turn][0])

    def bring_out(self, room: AnyArray, piece: _Piece) -> None:
        """Local. Start to copy the result of the piece that was just combined to its targets."""
        turn = self._next_out
        self._next_out = (turn + 1) % _TURNS
        self._leaving[turn] = self.copier.copy_from_room(room, piece.targets)


def _wait_for_all(copier: StagingCopier, tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        copier.wait(ticket)


class StagedBackend(Backend):
    """Another backend, which works in rooms of memory.

    With arrays in host memory the results are those of the backend inside, and slower: each byte is copied twice more.

    Args:
        communicator: The ranks.
        options: The options, of which `bytes_per_pack` is the size of a piece.
        inside: The backend that combines in the rooms, over the same ranks.
        open_copier: A function that makes the copier for arrays that are in the same memory as the given one.

    Attributes:
        inside: The constructor's argument.
    """

    takes_device_arrays = True

    def __init__(
        self,
        communicator: Communicator,
        options: CommunicationOptions,
        inside: Backend,
        open_copier: Callable[[AnyArray], StagingCopier],
    ) -> None:
        self.communicator = communicator
        self.inside = inside
        self._open_copier = open_copier
        self._room_bytes = max(options.bytes_per_pack or PIECE_BYTES, _WIDEST * communicator.size)
        # By device, None for the host. Rooms are made when the first array of a device comes.
        self._rooms: dict[int | None, _Rooms] = {}

    def _end(self, *, is_collective: bool) -> None:
        self._rooms.clear()
        end_all([self.inside], is_collective=is_collective)

    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. See `Backend.all_reduce`."""
        def combine(room: AnyArray, _: AnyArray) -> AnyArray:
            values = room.view(source.dtype)
            self.inside.all_reduce(values, values, op)
            return room

        self._go_through(
            source,
            [_Piece([as_bytes(source[piece])], [as_bytes(total[piece])], combine) for piece in self._slices(source)],
        )

    def reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        """Collective. See `Backend.reduce`."""
        is_root = self.communicator.rank == root

        def combine(room: AnyArray, other: AnyArray) -> AnyArray:
            values = room.view(source.dtype)
            result = other[: room.size].view(source.dtype) if is_root else values
            self.inside.reduce(values, result, op, root)
            return other

        self._go_through(
            source,
            [
                _Piece([as_bytes(source[piece])], [as_bytes(total[piece])] if is_root else [], combine)
                for piece in self._slices(source)
            ],
        )

    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. See `Backend.reduce_scatter`."""
        starts = [one.start for one in slices_of(counts)]
        length = self._room_bytes // source.itemsize // len(counts)
        pieces = []
        for begin in range(0, max(counts), length):
            # A piece of every rank's slice, side by side.
            sizes = [min(length, max(0, count - begin)) for count in counts]

            def combine(room: AnyArray, other: AnyArray, sizes: list[int] = sizes) -> AnyArray:
                own = sizes[self.communicator.rank] * source.itemsize
                result = other[:own].view(source.dtype)
                self.inside.reduce_scatter(room.view(source.dtype), result, sizes, op)
                return other

            sources = [
                as_bytes(source[start + begin : start + begin + size])
                for start, size in zip(starts, sizes, strict=True)
            ]
            own = sizes[self.communicator.rank]
            pieces.append(_Piece(sources, [as_bytes(mine[begin : begin + own])], combine))
        self._go_through(source, pieces)

    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. See `Backend.broadcast`."""
        data = as_bytes(data)
        is_root = self.communicator.rank == root
        pieces = []
        for piece in self._slices(data):
            def combine(room: AnyArray, other: AnyArray, size: int = piece.stop - piece.start) -> AnyArray:
                self.inside.broadcast(room if is_root else other[:size], root)
                return other

            pieces.append(_Piece([data[piece]] if is_root else [], [] if is_root else [data[piece]], combine))
        self._go_through(data, pieces)

    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        """Collective. See `Backend.all_gather`."""
        slices = slices_of(counts)
        length = self._room_bytes // len(counts)
        pieces = []
        for begin in range(0, max(counts), length):
            sizes = [min(length, max(0, count - begin)) for count in counts]

            def combine(room: AnyArray, other: AnyArray, sizes: list[int] = sizes) -> AnyArray:
                self.inside.all_gather(room, other[: sum(sizes)], sizes)
                return other

            targets = [gathered[one][begin : begin + length] for one in slices]
            pieces.append(_Piece([mine[begin : begin + length]], targets, combine))
        self._go_through(gathered, pieces)

    def all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        """Collective. See `Backend.all_to_all`."""
        outgoing, incoming = slices_of(sent_counts), slices_of(got_counts)
        length = self._room_bytes // len(sent_counts)
        # Every rank makes as many calls as the pair of ranks with the most bytes: the backend inside is collective.
        longest = self.communicator.all_reduce_max(max(sent_counts))
        pieces = []
        for begin in range(0, longest, length):
            out_sizes = [min(length, max(0, count - begin)) for count in sent_counts]
            in_sizes = [min(length, max(0, count - begin)) for count in got_counts]

            def combine(
                room: AnyArray, other: AnyArray, out: list[int] = out_sizes, into: list[int] = in_sizes
            ) -> AnyArray:
                self.inside.all_to_all(room, out, other[: sum(into)], into)
                return other

            pieces.append(_Piece(
                [sent[one][begin : begin + length] for one in outgoing],
                [got[one][begin : begin + length] for one in incoming],
                combine,
            ))
        self._go_through(got, pieces)

    def _go_through(self, like: AnyArray, pieces: Sequence[_Piece]) -> None:
        """Copy the pieces in, combine them in their order, and copy the results out, with up to three at a time."""
        rooms = self._rooms_for(like)
        copier = rooms.copier
        copier.begin()
        coming = rooms.bring_in(pieces[0]) if pieces else DONE
        for number, piece in enumerate(pieces):
            here = coming
            room, other = rooms.current()
            following = number + 1
            coming = rooms.bring_in(pieces[following]) if following < len(pieces) else DONE
            copier.wait(here)
            result = piece.combine(room[: sum(source.size for source in piece.sources)], other)
            rooms.bring_out(result, piece)
        copier.end()

    def _rooms_for(self, like: AnyArray) -> _Rooms:
        place = arrays.device_index(like)
        if place not in self._rooms:
            self._rooms[place] = _Rooms(self._open_copier(like), self._room_bytes)
        return self._rooms[place]

    def _slices(self, array: AnyArray) -> list[slice]:
        return cut_by_length(array.size, self._room_bytes // array.itemsize)
