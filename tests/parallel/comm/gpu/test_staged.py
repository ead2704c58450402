"""The staged pipeline with copies that really run beside it: nothing is overtaken, whatever is slow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.comm.backend import Backend
from mpidist.comm.choice.selection import open_backend
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.gpu.staged import StagedBackend
from mpidist.comm.gpu.staging_copier import HostCopier, Ticket
from mpidist.comm.group.communicator import Communicator
from mpidist.options import CommunicationImplementation, CommunicationOptions, ReduceOp

pytestmark = pytest.mark.mpi

PIECE_BYTES = 256


class _Copy:
    def __init__(self, future: Future[Ticket]) -> None:
        self.future = future

    def synchronize(self) -> None:
        self.future.result(30)


class ThreadCopier(HostCopier):
    """Host memory whose copies run on a thread for each direction, as CUDA's do on streams, and take their time."""

    def __init__(self, in_seconds: float, out_seconds: float) -> None:
        self.seconds = {"in": in_seconds, "out": out_seconds}
        self.threads = {direction: ThreadPoolExecutor(1) for direction in self.seconds}
        self.under_way = 0
        self.most_under_way = 0
        self.last: Ticket | None = None

    def copy_to_room(self, sources: Sequence[AnyArray], room: AnyArray) -> Ticket:
        return self._start("in", lambda: super(ThreadCopier, self).copy_to_room(sources, room))

    def copy_from_room(self, room: AnyArray, targets: Sequence[AnyArray]) -> Ticket:
        self.last = self._start("out", lambda: super(ThreadCopier, self).copy_from_room(room, targets))
        return self.last

    def end(self) -> None:
        # The host looks at results at once, where a GPU's stream would wait.
        if self.last is not None:
            self.wait(self.last)

    def _start(self, direction: str, copy: object) -> Ticket:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)

        def run() -> Ticket:
            time.sleep(self.seconds[direction])  # simulates work: the copies of a GPU
            done: Ticket = copy()  # type: ignore[operator]
            self.under_way -= 1
            return done

        return _Copy(self.threads[direction].submit(run))


@pytest.fixture
def inside(communicator: Communicator) -> Backend:
    if communicator.size == 1:
        pytest.skip("one rank combines nothing")
    return open_backend(CommunicationImplementation.MPI, communicator, CommunicationOptions())


def staged(inside: Backend, copier: ThreadCopier) -> CollectiveFront:
    options = CommunicationOptions(bytes_per_pack=PIECE_BYTES)
    return CollectiveFront(StagedBackend(inside.communicator, options, inside, lambda _: copier), options)


@pytest.mark.parametrize(("in_seconds", "out_seconds"), [(0.0, 0.004), (0.004, 0.0), (0.002, 0.002)])
def test_slow_copies_are_waited_for(inside: Backend, in_seconds: float, out_seconds: float) -> None:
    copier = ThreadCopier(in_seconds, out_seconds)
    collective = staged(inside, copier)
    rank, size = inside.communicator.rank, inside.communicator.size
    # Twelve pieces, the last one not full: rooms are used four times over.
    count = 11 * PIECE_BYTES // 8 + 5
    values = np.arange(count, dtype=np.float64)
    for number in range(3):
        got = collective.all_reduce(values * (rank + 1) + number)
        np.testing.assert_array_equal(got, values * sum(range(1, size + 1)) + number * size)
    mine = values + rank
    collective.all_reduce(mine, ReduceOp.MAX, in_place=True)
    np.testing.assert_array_equal(mine, values + size - 1)
    root = size - 1
    reduced = collective.reduce(values + rank, ReduceOp.MIN, root)
    assert (reduced is None) is (rank != root)
    if reduced is not None:
        np.testing.assert_array_equal(reduced, values)
    for root in range(size):
        np.testing.assert_array_equal(collective.broadcast(values + rank, root), values + root)
    gathered = collective.all_gather(values[: 40 * (rank + 1)] + rank)
    np.testing.assert_array_equal(gathered, np.concatenate([values[: 40 * (r + 1)] + r for r in range(size)]))
    scattered = collective.reduce_scatter(values + rank)
    np.testing.assert_array_equal(scattered, np.array_split(size * values + sum(range(size)), size)[rank])
    sent = [np.full(70 * to + rank, 100.0 * rank + to) for to in range(size)]
    for source, part in enumerate(collective.all_to_all(sent)):
        np.testing.assert_array_equal(part, np.full(70 * rank + source, 100.0 * source + rank))


def test_copies_run_beside_the_collective(inside: Backend) -> None:
    copier = ThreadCopier(0.002, 0.002)
    collective = staged(inside, copier)
    values = np.ones(10 * PIECE_BYTES // 8)
    np.testing.assert_array_equal(collective.all_reduce(values), values * inside.communicator.size)
    # One comes in while one goes out.
    assert copier.most_under_way >= 2


def test_small_pieces_are_combined_by_the_collective_inside(inside: Backend) -> None:
    calls: list[int] = []
    inner = inside.all_reduce

    def counted(source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        calls.append(source.nbytes)
        inner(source, total, op)

    inside.all_reduce = counted  # type: ignore[method-assign]
    collective = staged(inside, ThreadCopier(0, 0))
    collective.all_reduce(np.zeros(2 * PIECE_BYTES // 8 + 1))
    assert calls == [PIECE_BYTES, PIECE_BYTES, 8]
