"""Samples that other ranks of the job send, of programs without this library.

The sender of a stream of samples says, with one tag, to one rank:

1. a text, the header: dtype and shape of each array of a sample, as in "float32 64 64; int64";
2. each sample, as one message of bytes: its arrays one after another, without gaps;
3. an empty message, the end.

A receiver takes a fixed number of samples of each sender ahead, whenever it is asked for one. A sender of synchronous
messages (`MPI_Ssend`) is never further ahead than that. MPI itself keeps small messages of `MPI_Send`, without a limit.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpidist.comm.group.duplicates import prepare_end
from mpidist.comm.group.mpi_communicator import MPI
from mpidist.failures.ending import exit_code
from mpidist.failures.exit_code import was_left
from mpidist.failures.startup.ranks import ranks_here
from mpidist.observe.output import flush, say
from mpidist.recorder.time_limits import LIMIT_VARIABLE, limit_seconds, warn_seconds

Sample = tuple[npt.NDArray[Any], ...]

_HEADER_BYTES = 4096
_HEADER = 'a text with dtype and shape of each array, such as "float32 64 64; int64"'
# A rank that waits yields its core first, and sleeps after this time.
_SPIN_SECONDS = 0.001
_NAP_SECONDS = 0.0002


class Layout(NamedTuple):
    """An array of a sample.

    Attributes:
        dtype: The dtype of numbers.
        shape: The shape; empty for a number.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Local. The size of an array in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __str__(self) -> str:
        return " ".join([self.dtype.name, *map(str, self.shape)])


class _Stream:
    """The samples of one sender.

    Attributes:
        rank: The sender.
        layouts: The layouts of the arrays of a sample; empty before the header has come.
        has_ended: Whether nothing more comes.
        count: The number of samples that have come.
    """

    def __init__(self, mpi: MPI.Intracomm, rank: int, tag: int, depth: int) -> None:
        self._mpi, self.rank, self._tag, self._depth = mpi, rank, tag, depth
        self.layouts: tuple[Layout, ...] = ()
        self.has_ended = False
        self.count = 0
        self._status = MPI.Status()
        self._ahead: deque[Sample] = deque()

    @property
    def is_read(self) -> bool:
        """Local. Whether the stream has ended and all of its samples were taken."""
        return self.has_ended and not self._ahead

    def take(self) -> Sample | None:
        """Local. The next sample that has come; None if there is none."""
        return self._ahead.popleft() if self._ahead else None

    def receive(self) -> None:
        """Local. Receive what has come, as far as there is room."""
        while not self.has_ended and len(self._ahead) < self._depth:
            # Looked at first: where a message is too long for its receive, Open MPI writes beyond the buffer.
            found = self._mpi.Improbe(self.rank, self._tag, self._status)
            if found is None:
                break
            size = self._status.Get_count(MPI.BYTE)
            self._check(size)
            buffer = np.empty(size, np.uint8)
            found.Recv([buffer, MPI.BYTE])
            if not self.layouts:
                self.layouts = _parse(buffer.tobytes(), self.rank)
                break
            if size == 0:
                self._end()
                break
            self.count += 1
            self._ahead.append(self._cut(buffer))

    def _check(self, size: int) -> None:
        if self.layouts:
            expected = sum(layout.size for layout in self.layouts)
            if size in (expected, 0):
                return
            header = "; ".join(map(str, self.layouts))
            what = f'a sample of the header "{header}", {expected} bytes without gaps, or an empty message at the end'
        else:
            if size <= _HEADER_BYTES:
                return
            what = f"{_HEADER}, of at most {_HEADER_BYTES} bytes"
        raise ValueError(
            f"from_ranks: expected from rank {self.rank} {what}, got {size} bytes after {self.count} samples. Let the "
            "header say what the samples are; a struct in C may have gaps between its members"
        )

    def _cut(self, buffer: npt.NDArray[np.uint8]) -> Sample:
        arrays, offset = [], 0
        for layout in self.layouts:
            piece = buffer[offset : offset + layout.size]
            offset += layout.size
            # An array in the middle of a message may be at an address that does not fit its dtype.
            aligned = piece if not piece.ctypes.data % layout.dtype.alignment else piece.copy()
            arrays.append(aligned.view(layout.dtype).reshape(layout.shape))
        return tuple(arrays)

    def _end(self) -> None:
        self.has_ended = True
        if self._mpi.Iprobe(self.rank, self._tag):
            raise ValueError(
                f"from_ranks: expected nothing from rank {self.rank} after its empty message, the end of its samples, "
                f"got another message with the tag {self._tag}. Give another stream another tag"
            )


class Incoming:
    """The samples of some ranks, each one once, in turns: one of the first rank, one of the second, and so on.

    Attributes:
        mpi: The communicator of the messages.
        ranks: The constructor's argument.
        tag: The constructor's argument.

    Args:
        communicator: An mpi4py intracommunicator; None means all ranks of the job.
        ranks: The senders.
        tag: The tag of all messages.
        depth: The number of samples of each sender that are received ahead.

    Raises:
        TypeError: `communicator` is no intracommunicator of mpi4py.
        ValueError: A rank or the tag is out of range, or another dataset receives the same messages.
    """

    def __init__(self, communicator: Any, ranks: Sequence[int], tag: int, depth: int) -> None:
        mpi = MPI.COMM_WORLD if communicator is None else communicator
        if not isinstance(mpi, MPI.Intracomm) or mpi == MPI.COMM_NULL:
            raise TypeError(
                f"from_ranks: `communicator` must be an mpi4py intracommunicator, got {communicator!r}: pass "
                "MPI.COMM_WORLD, or leave it out"
            )
        wrong = [rank for rank in ranks if not 0 <= rank < mpi.size or rank == mpi.rank]
        if wrong or len(set(ranks)) < len(ranks):
            raise ValueError(
                f"from_ranks: `ranks` must be different ranks of 0 to {mpi.size - 1} without {mpi.rank}, which is this "
                f"rank itself, got {list(ranks)!r}. They are ranks of `communicator`, by default of the whole job"
            )
        largest = mpi.Get_attr(MPI.TAG_UB)
        if isinstance(largest, int) and tag > largest:
            raise ValueError(f"from_ranks: `tag` must be at most {largest}, MPI's largest tag, got {tag}")
        for other in _RECEIVING:
            both = set(ranks) & set(other.ranks)
            if both and tag == other.tag and MPI.Comm.Compare(mpi, other.mpi) == MPI.IDENT:
                raise ValueError(
                    f"from_ranks: rank {min(both)} sends its samples with the tag {tag} to another dataset of this "
                    "program, and each message arrives once. Give the second stream another tag"
                )
        prepare_end(mpi)
        self.mpi: MPI.Intracomm = mpi
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.tag: int = tag
        self._streams = [_Stream(mpi, rank, tag, depth) for rank in ranks]
        self._thread = threading.get_ident()
        self._began = False
        if not _RECEIVING:
            atexit.register(_drain)
        _RECEIVING.append(self)

    def layouts(self) -> tuple[Layout, ...]:
        """Local. The arrays of a sample; waits for the headers of all senders.

        Raises:
            ValueError: A message is no header, or the headers of two ranks differ.
        """
        for stream in self._streams:
            while not stream.layouts:
                self._take(stream, "the header of its samples")
            if stream.layouts != self._streams[0].layouts:
                first, got = ("; ".join(map(str, one.layouts)) for one in (self._streams[0], stream))
                raise ValueError(
                    f'from_ranks: the headers of all ranks must be the same, got "{first}" from rank '
                    f'{self._streams[0].rank} and "{got}" from rank {stream.rank}. Receive different samples in '
                    "datasets of their own, with different tags"
                )
        return self._streams[0].layouts

    def samples(self, start: int) -> Iterator[Sample]:
        """Local. All samples, from the first one on.

        Args:
            start: The number of samples that the reader has already had; it must be 0.

        Raises:
            RuntimeError: Samples were asked for before, or another thread asks.
            TimeoutError: A sample has not come within the limit that the environment sets.
            ValueError: A message is no sample.
        """
        if self._began or start:
            raise RuntimeError(
                "from_ranks: samples of other ranks arrive once, so a dataset of them is read once and from its "
                f"beginning, got {'a second pass' if self._began else f'a saved position, after {start} samples'}. "
                "Keep them with cache() for further passes; leave the iterator out of checkpoints"
            )
        self._began = True
        self.layouts()
        waiting = deque(self._streams)
        while waiting:
            stream = waiting[0]
            sample = self._take(stream, "a sample")
            if sample is None:
                waiting.popleft()
                continue
            waiting.rotate(-1)
            yield sample

    def drain(self) -> None:
        """Local. Receive and drop what the ranks still send, to the end: else they would wait without end."""
        self._thread = threading.get_ident()
        for stream in self._streams:
            while not stream.is_read:
                self._take(stream, "the end of its samples, which nobody reads any more,")

    def _take(self, stream: _Stream, what: str) -> Sample | None:
        """The next sample of a rank; None where it has sent its header, or the end."""
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "from_ranks: expected to be read by the thread that has made the dataset, got "
                f"{threading.current_thread().name}. Samples are received ahead without a thread (`receives`): leave "
                "out `prefetch`, and set `experimental_per_replica_buffer_size` to 0"
            )
        begin, had_header = time.monotonic(), bool(stream.layouts)
        patience, limit = warn_seconds(), limit_seconds()
        while True:
            # All of them: what others have sent meanwhile lets them continue.
            for one in self._streams:
                one.receive()
            sample = stream.take()
            if sample is not None or stream.is_read or bool(stream.layouts) != had_header:
                return sample
            seconds = time.monotonic() - begin
            if seconds < _SPIN_SECONDS:
                os.sched_yield()
                continue
            time.sleep(_NAP_SECONDS)
            if limit and seconds > limit:
                raise TimeoutError(f"{self._tell(stream, what, seconds)}\nThe limit is {limit:g} s ({LIMIT_VARIABLE})")
            if seconds > patience:
                patience = 3 * seconds
                say(f"{self._tell(stream, what, seconds)}\n  {LIMIT_VARIABLE}=SECONDS ends a job that waits longer")

    def _tell(self, stream: _Stream, what: str, seconds: float) -> str:
        """Print which rank this one waits for, in a line and one about the other rank."""
        rank = MPI.Group.Translate_ranks(self.mpi.Get_group(), [stream.rank], MPI.COMM_WORLD.Get_group())[0]
        seen = [one for one in ranks_here(MPI.COMM_WORLD.size) if one.rank == rank]
        about = "runs on another host, or has ended without an empty message"
        if seen:
            about = f"is process {seen[0].process}{', which is stopped' if seen[0].is_stopped else ''}: "
            about += seen[0].command[:200]
        return (
            f"rank {self.mpi.rank} of {self.mpi.size} has waited {seconds:.0f} s for rank {stream.rank} to send "
            f"{what} with the tag {self.tag}, after {stream.count} samples\n  rank {stream.rank} {about}"
        )


# All of this process: each message comes once, and the end of the program receives what is left.
_RECEIVING: list[Incoming] = []


def _drain() -> None:
    # A program that fails ends the job, and does not wait for senders.
    if was_left() or exit_code() or MPI.Is_finalized():
        return
    flush()
    for incoming in _RECEIVING:
        incoming.drain()


def _parse(header: bytes, rank: int) -> tuple[Layout, ...]:
    """The arrays of a header.

    Raises:
        ValueError: `header` is no header.
    """
    # A C program may send the zero at the end of its text, too.
    text = header.rstrip(b"\0").decode("ascii", errors="replace")
    try:
        layouts = tuple(_layout(part.split()) for part in text.split(";"))
    except (TypeError, ValueError) as error:
        why = str(error)[:80]
        raise ValueError(
            f"from_ranks: the first message of rank {rank} must be a header, {_HEADER}, got {text[:80]!r}: {why}"
        ) from error
    return layouts


def _layout(words: Sequence[str]) -> Layout:
    if not words:
        raise ValueError("an array without a dtype")
    dtype = np.dtype(words[0])
    if dtype.kind not in "biufc":
        raise ValueError(f"{words[0]} is no dtype of numbers")
    shape = tuple(map(int, words[1:]))
    if any(size < 1 for size in shape):
        raise ValueError(f"the sizes {shape!r} must be 1 or more, since an empty message is the end")
    return Layout(dtype, shape)
