"""The sizes of AUTO on this machine: kept from an earlier run, measured now, or the usual ones."""

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
    keep_tuning,
    processor_name,
    read_tuning,
    usual_tuning,
)
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.mpi_library import loaded_library
from mpidist.errors import UnavailableError
from mpidist.options import CommunicationImplementation, CommunicationOptions, ReduceOp

TUNE = "MPIDIST_TUNE"

# Opens a backend to measure, with options and with sizes (None: the usual ones).
Opener = Callable[[CommunicationImplementation, CommunicationOptions, Tuning | None], Backend]

# The time of a whole measurement, and of that the time for one size.
SECONDS = 2.0
_SIZE_SECONDS = 0.1
_ROUNDS = 7
_CROSSING_SIZES = tuple(4**power for power in range(2, 11))
_DIRECT_SIZES = tuple(1 << power for power in range(17, 25, 2))
_CHUNK_SIZES = tuple(1 << power for power in range(18, 25, 2))
_CHUNKED_BYTES = 1 << 24
# A chunk replaces the usual one only if it takes less than this fraction of its time: smaller differences are within
# the noise of so short a measurement.
_GAIN = 0.95

# Sizes measured by this process. If the file cannot be written, each further strategy would measure again.
_measured: dict[str, Tuning] = {}


def find_tuning(communicator: Communicator, open_backend: Opener) -> Tuning:
    """Collective. Kept sizes if there are any; else measured ones if rank 0 has `MPIDIST_TUNE=1`; else the usual ones.

    Args:
        communicator: The ranks, more than one.
        open_backend: Makes a backend to measure.

    Returns:
        The sizes, the same on every rank: ranks that chose different backends would wait for each other forever.
    """
    profile = MachineProfile(
        str(loaded_library()), max(communicator.node_sizes), len(communicator.node_sizes),
        communicator.core_count, processor_name(),
    )
    wants, known = False, None
    if communicator.rank == 0:
        wants = os.environ.get(TUNE, "").strip().lower() in ("1", "true", "yes", "on")
        known = _measured.get(profile.key) or read_tuning(cache_path(), profile.key)
    profile, wants, known = communicator.broadcast_object((profile, wants, known))
    if known is not None or not wants:
        return known or usual_tuning(profile)
    begin = time.perf_counter()
    tuning = measure(communicator, open_backend, usual_tuning(profile))
    if communicator.rank == 0:
        tuning = replace(tuning, source=f"measured now in {time.perf_counter() - begin:.1f} s")
        _measured[profile.key] = tuning
        keep_tuning(cache_path(), profile.key, tuning)
    return communicator.broadcast_object(tuning)


def measure(communicator: Communicator, open_backend: Opener, usual: Tuning, seconds: float = SECONDS) -> Tuning:
    """Collective. Measure the sizes on these ranks. Sizes for which the time does not suffice stay as usual.

    Args:
        communicator: The ranks, more than one.
        open_backend: Makes a backend to measure.
        usual: The usual sizes.
        seconds: The approximate time for the whole measurement.
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
    """Collective. The size from which on the second backend is faster; the usual one if the time does not suffice."""
    ratios: list[tuple[int, float]] = []
    # Large sizes first: measuring them matters most.
    for size in reversed(sizes):
        pair = stopwatch.compare([first, second], size)
        if pair is None:
            # With some sizes only, those that are left out would seem to favor the second backend.
            return usual
        ratios.insert(0, (size, pair[1] / pair[0]))
    return crossing(ratios)


def crossing(ratios: Sequence[tuple[int, float]]) -> int:
    """Local. The size from which on the second way should be taken, so that the product of all times is smallest.

    One disturbed measurement changes this size less than it would change the first size at which the second way wins.

    Args:
        ratios: Rising sizes, each with the second way's time divided by the first way's.

    Returns:
        The size; 0 if the second way is the better one for all sizes, `NEVER` if it is for none.
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
    """Times backends in turns until the time is up. The slowest rank counts."""

    def __init__(self, communicator: Communicator, end: float) -> None:
        self._communicator = communicator
        self._end = end

    def compare(self, ways: Sequence[Backend], byte_count: int) -> list[float] | None:
        """Collective. The nanoseconds of an all-reduce in each way, the least of some rounds; None if time is up."""
        communicator = self._communicator
        array = np.zeros(byte_count // 4, np.float32)
        begin = time.perf_counter()
        if communicator.broadcast_object(begin >= self._end):
            return None
        for way in ways:
            way.all_reduce(array, array, ReduceOp.SUM)
        # The calls before this line were not timed, since the first call in each way takes longer. All ranks must make
        # the same number of calls and rounds.
        once = communicator.all_reduce_max(int((time.perf_counter() - begin) * 1e9)) / 1e9
        calls = max(1, min(50, int(_SIZE_SECONDS / _ROUNDS / max(once, 1e-9))))
        least = [float("inf")] * len(ways)
        for _ in range(_ROUNDS):
            for number, way in enumerate(ways):
                communicator.barrier()
                begin = time.perf_counter()
                for _ in range(calls):
                    # Gradients lie in the cache of the rank that has just written them. This changes the times.
                    array.fill(0)
                    way.all_reduce(array, array, ReduceOp.SUM)
                taken = communicator.all_reduce_max(int((time.perf_counter() - begin) * 1e9))
                least[number] = min(least[number], taken / calls)
            if communicator.broadcast_object(time.perf_counter() >= self._end):
                break
        return least
