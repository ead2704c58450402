"""Which sizes the automatic collective goes by on this machine: kept ones, measured ones, or the usual ones."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from mpidist.comm.backend import Backend
from mpidist.comm.choice.capabilities import why_not
from mpidist.comm.choice.tuning import (
    NEVER,
    MachineProfile,
    Tuning,
    cache_path,
    core_count,
    keep_tuning,
    processor_name,
    read_tuning,
    usual_tuning,
)
from mpidist.comm.communicator import Communicator
from mpidist.comm.mpi_library import loaded_library
from mpidist.errors import UnavailableError
from mpidist.options import CommunicationImplementation, CommunicationOptions, ReduceOp

TUNE = "MPIDIST_TUNE"

# Opens a backend with options and sizes (None: the usual ones) for the ranks that are measured.
Opener = Callable[[CommunicationImplementation, CommunicationOptions, Tuning | None], Backend]

# How long a whole measurement takes, and what of it one size may take.
SECONDS = 2.0
_SIZE_SECONDS = 0.1
_ROUNDS = 7
_CROSSING_SIZES = tuple(4**power for power in range(2, 11))
_DIRECT_SIZES = tuple(1 << power for power in range(17, 25, 2))
_CHUNK_SIZES = tuple(1 << power for power in range(18, 25, 2))
_CHUNKED_BYTES = 1 << 24
# What has to be gained before the usual way is left: less is within the noise of so short a measurement.
_GAIN = 0.95

# A cache that cannot be written must not cost two seconds for each strategy.
_measured: dict[str, Tuning] = {}


def find_tuning(communicator: Communicator, open_backend: Opener) -> Tuning:
    """Collective. Kept sizes, else measured ones where rank 0's `MPIDIST_TUNE=1` asks for it, else the usual ones.

    Args:
        communicator: More than one rank.
        open_backend: Makes a backend to measure.

    Returns:
        The same on every rank.
    """
    place = MachineProfile(
        str(loaded_library()), max(communicator.node_sizes), len(communicator.node_sizes), core_count(),
        processor_name(),
    )
    wants, known = False, None
    if communicator.rank == 0:
        wants = os.environ.get(TUNE, "").strip().lower() in ("1", "true", "yes", "on")
        known = _measured.get(place.key) or read_tuning(cache_path(), place.key)
    place, wants, known = communicator.broadcast_object((place, wants, known))
    if known is not None or not wants:
        return known or usual_tuning(place)
    begin = time.perf_counter()
    tuning = measure(communicator, open_backend, usual_tuning(place))
    if communicator.rank == 0:
        tuning = replace(tuning, source=f"measured now in {time.perf_counter() - begin:.1f} s")
        _measured[place.key] = tuning
        keep_tuning(cache_path(), place.key, tuning)
    return communicator.broadcast_object(tuning)


def measure(communicator: Communicator, open_backend: Opener, usual: Tuning, seconds: float = SECONDS) -> Tuning:
    """Collective. Sizes measured on these ranks; what there is no time for stays as usual.

    Args:
        communicator: More than one rank.
        open_backend: Makes a backend to measure.
        usual: To begin with.
        seconds: How long it may take, about.
    """
    stopwatch = _Stopwatch(communicator, time.perf_counter() + seconds)
    chunks = [
        open_backend(CommunicationImplementation.MPI, CommunicationOptions(bytes_per_pack=size), None)
        for size in _CHUNK_SIZES
    ]
    taken = stopwatch.compare(chunks, _CHUNKED_BYTES)
    chunk_bytes = _best(_CHUNK_SIZES, taken, usual.chunk_bytes)
    mpi = open_backend(CommunicationImplementation.MPI, CommunicationOptions(bytes_per_pack=chunk_bytes), None)
    shares = why_not(CommunicationImplementation.NODE, communicator) is None
    kind = CommunicationImplementation.NODE if shares else CommunicationImplementation.RING
    try:
        other = open_backend(kind, CommunicationOptions(), None)
    except UnavailableError:
        return replace(usual, chunk_bytes=chunk_bytes)
    tuning = replace(usual, chunk_bytes=chunk_bytes)
    if not shares:
        return replace(tuning, ring_from=_crossed(stopwatch, mpi, other, _CROSSING_SIZES, usual.ring_from))
    tuning = replace(tuning, node_from=_crossed(stopwatch, mpi, other, _CROSSING_SIZES, usual.node_from))
    blocks, copies = (open_backend(kind, CommunicationOptions(), Tuning(direct_from=size)) for size in (NEVER, 0))
    return replace(tuning, direct_from=_crossed(stopwatch, blocks, copies, _DIRECT_SIZES, usual.direct_from))


def _crossed(stopwatch: _Stopwatch, first: Backend, second: Backend, sizes: Sequence[int], usual: int) -> int:
    """Collective. From which size on the second backend is faster; as usual where there is no time to measure."""
    ratios: list[tuple[int, float]] = []
    # From large to small: if time runs out, the sizes left out are those that matter least.
    for size in reversed(sizes):
        pair = stopwatch.compare([first, second], size)
        if pair is None:
            # Too few sizes would say that the second way is for all of them.
            return usual
        ratios.insert(0, (size, pair[1] / pair[0]))
    return crossing(ratios)


def crossing(ratios: Sequence[tuple[int, float]]) -> int:
    """Local. From which size on to go the second way, so that the product of all times is least.

    Unlike the first size at which it wins, that does not change much if one size was disturbed.

    Args:
        ratios: Sizes, rising, and the second way's time over the first's.

    Returns:
        0 where the second way is for all sizes, `NEVER` where it is for none.
    """
    best, least, total = NEVER, 0.0, 0.0
    for size, ratio in reversed(ratios):
        total += math.log(ratio)
        if total < least:
            best, least = size, total
    return 0 if best == ratios[0][0] else best


def _best(sizes: Sequence[int], taken: Sequence[float] | None, usual: int) -> int:
    if taken is None:
        return usual
    time_of = dict(zip(sizes, taken, strict=True))
    best = min(sizes, key=time_of.__getitem__)
    return best if time_of[best] < _GAIN * time_of.get(usual, NEVER) else usual


class _Stopwatch:
    """Times ways in turns, the slowest rank counting, until time is up."""

    def __init__(self, communicator: Communicator, end: float) -> None:
        self._communicator = communicator
        self._end = end

    def compare(self, ways: Sequence[Backend], byte_count: int) -> list[float] | None:
        """Collective. Nanoseconds of an all-reduce in each way, the least of some rounds; None if there is no time."""
        communicator = self._communicator
        array = np.zeros(byte_count // 4, np.float32)
        begin = time.perf_counter()
        if communicator.broadcast_object(begin >= self._end):
            return None
        for way in ways:
            way.all_reduce(array, array, ReduceOp.SUM)
        # The same number of calls and rounds on all ranks; the first time of a way is longer than later ones.
        once = communicator.all_reduce_max(int((time.perf_counter() - begin) * 1e9)) / 1e9
        calls = max(1, min(50, int(_SIZE_SECONDS / _ROUNDS / max(once, 1e-9))))
        least = [float("inf")] * len(ways)
        for _ in range(_ROUNDS):
            for number, way in enumerate(ways):
                communicator.barrier()
                begin = time.perf_counter()
                for _ in range(calls):
                    # Just written by its own rank, as gradients are: the lines of cache lie there, and it matters.
                    array.fill(0)
                    way.all_reduce(array, array, ReduceOp.SUM)
                taken = communicator.all_reduce_max(int((time.perf_counter() - begin) * 1e9))
                least[number] = min(least[number], taken / calls)
            if communicator.broadcast_object(time.perf_counter() >= self._end):
                break
        return least
