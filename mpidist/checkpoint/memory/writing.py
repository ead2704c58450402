"""The writing of a copy: each rank writes its share to the memory of its node, and sends what is its own to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.checkpoint.file.layout import PIECE_BYTES, Record
from mpidist.checkpoint.memory.layout import CopyLayout, Move, sum_of
from mpidist.checkpoint.transfer import ArrayToWrite
from mpidist.comm.backends.messages import Messages
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError
from mpidist.variables.variable import Read


class WrittenShare(NamedTuple):
    """The share that a rank has written.

    Attributes:
        whole: The sum of its share of the arrays that all ranks can read.
        own: The sum of the parts that it alone can read.
        error: The reason why it has not written all of it; empty if it has.
    """

    whole: int
    own: int
    error: str


def write_share(
    communicator: Communicator, arrays: Sequence[ArrayToWrite], layout: CopyLayout, data: AnyArray
) -> WrittenShare:
    """Collective. Write this rank's share of the arrays into the memory of its node.

    A rank that fails continues with opening the arrays, which is Collective.

    Args:
        communicator: The ranks.
        arrays: The arrays, in the order of the layout.
        layout: The layout.
        data: The data of the buffer.
    """
    node = communicator.node
    own_parts: dict[int, list[tuple[int, int]]] = {}
    for number, begin, end in layout.own_parts(communicator.rank):
        own_parts.setdefault(number, []).append((begin, end))
    whole = own = 0
    text = ""
    for number, (array, record, offset) in enumerate(zip(arrays, layout.records, layout.offsets, strict=True)):
        try:
            content = array.content.reshape(-1) if isinstance(array.content, np.ndarray) else array.content()
        except Exception as error:
            text = text or f"{type(error).__name__}: {error}"
            continue
        if text:
            continue
        try:
            if layout.parts[number] is None:
                low, high = layout.whole_share(number, node.rank, node.size)
                whole += _write(data, offset, record, content, (low, high), 0)
                continue
            for begin, end in own_parts.get(number, ()):
                size = record.dtype.itemsize
                # A reader of a component counts from its beginning.
                first = begin // size if record.replicas else 0
                own += _write(data, offset, record, content, (begin // size, end // size), first)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    return WrittenShare(whole, own, text)


def _write(
    data: AnyArray, offset: int, record: Record, content: AnyArray | Read, elements: tuple[int, int], first: int
) -> int:
    """Copy elements of an array, block by block; returns their sum, taken while they are in the cache."""
    size, total = record.dtype.itemsize, 0
    step = max(1, PIECE_BYTES // 2 // size)
    for low in range(*elements, step):
        high = min(elements[1], low + step)
        block = content[low:high] if isinstance(content, np.ndarray) else content(low - first, high - first)
        if block.shape != (high - low,) or block.dtype.newbyteorder("=") != record.dtype:
            raise CheckpointError(
                f"{record.path!r}: expected {high - low} elements of dtype {record.dtype}, as the variable says, got "
                f"shape {block.shape} and dtype {block.dtype}"
            )
        begin = offset + low * size
        target = data[begin : begin + block.nbytes]
        np.copyto(target, np.ascontiguousarray(block, record.dtype).view(np.uint8))
        total += sum_of(target, begin)
    return total


def move(communicator: Communicator, moves: Sequence[Move], data: AnyArray) -> None:
    """Collective. Send bytes of the buffers between nodes.

    Args:
        communicator: The ranks.
        moves: The bytes that are sent, the same on every rank.
        data: The data of this node's buffer; what this rank sends is complete.
    """
    if not moves:
        return
    messages, requests = Messages(communicator), []
    with communicator.calls.during("exchange between ranks"):
        for source, target, begin, end in moves:
            if communicator.rank not in (source, target):
                continue
            piece = data[begin:end]
            for part in messages.pieces(piece.size, 1):
                if communicator.rank == target:
                    requests.append(messages.start_receive(piece[part], source))
                else:
                    requests.append(messages.start_send(piece[part], target))
        for request in requests:
            request.Wait()
