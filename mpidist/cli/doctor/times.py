"""The doctor's table of times: sums by the chosen collective, and by MPI alone."""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.cli.doctor.finding import Finding
from mpidist.comm.choice.selection import OVERRIDE
from mpidist.comm.collective import Collective
from mpidist.comm.cores import node_cores
from mpidist.comm.group.agreement import together
from mpidist.comm.group.communicator import Communicator

# Bytes of one rank's array.
SIZES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
SECONDS = 10.0
# The least duration of one measurement of an algorithm, and its largest number of calls.
_LOOK_SECONDS, _MOST_CALLS = 2e-3, 50
_LEAST_LOOKS, _MOST_LOOKS = 5, 25
# From this size on twice the bytes take twice the time, or less.
_LINEAR_FROM = 1 << 16
# The collective counts as slower by this factor, in this fraction of the looks, and by more than the time that checks
# and conversions in Python take.
_SLOWER, _IN_LOOKS, _PYTHON_SECONDS = 1.5, 0.8, 50e-6
_OWN, _RAW = 0, 1
_NO_TIME = "no time was left"


@dataclass
class Sums:
    """Times of the sums of one size, the same on all ranks.

    Attributes:
        size: Bytes of one rank's array.
        looks: Seconds of a call by the collective and by MPI, in each measurement.
        is_wrong: Whether a sum of the collective was wrong.
    """

    size: int
    looks: list[tuple[float, float]] = field(default_factory=list)
    is_wrong: bool = False

    def median(self, way: int) -> float:
        """Local. The median of the seconds of one algorithm."""
        return statistics.median(look[way] for look in self.looks)

    def is_slower(self) -> bool:
        """Local. Whether the collective is clearly slower than MPI."""
        slower = sum(own > _SLOWER * raw for own, raw in self.looks)
        return (
            len(self.looks) >= _LEAST_LOOKS and slower >= _IN_LOOKS * len(self.looks)
            and self.median(_OWN) > self.median(_RAW) + _PYTHON_SECONDS
        )


def look_at_times(communicator: Communicator, collective: Collective, seconds: float = SECONDS) -> list[Finding]:
    """Collective. Measure sums over all ranks.

    Args:
        communicator: All ranks, more than one.
        collective: The chosen one.
        seconds: The time limit, after which all ranks stop together.
    """
    findings = _crowded(communicator)
    measured, left_out = _Table(communicator, collective, seconds).fill()
    findings += [_shown(sums, communicator.size) for sums in measured]
    for why in dict.fromkeys(left_out.values()):
        names = ", ".join(name_size(size) for size, other in left_out.items() if other == why)
        fix = f"mpidist doctor --seconds {max(60, 6 * seconds):g}" if why == _NO_TIME else "run it where more is free"
        findings.append(Finding("sums left out", "note", f"{names}: {why}", fix, {"bytes": list(left_out)}))
    return findings


def name_size(size: int) -> str:
    """Local. A size for people: 64 KiB."""
    return next(
        (f"{size >> shift} {unit}" for shift, unit in ((20, "MiB"), (10, "KiB")) if size >> shift), f"{size} B"
    )


def _crowded(communicator: Communicator) -> list[Finding]:
    cores = node_cores(communicator.node)
    told = communicator.all_gather_object((communicator.node.size - cores, cores))
    more, cores = max(told)
    if more <= 0:
        return []
    return [Finding(
        "times", "note", "ranks share cores: one that waits in MPI spins on the core that another needs, so the times "
        "below are mostly those of the scheduler", f"mpirun -n {cores} on each host",
    )]


class _Table:
    """Measures sums of all sizes, the small ones first, as long as there is time and memory."""

    def __init__(self, communicator: Communicator, collective: Collective, seconds: float) -> None:
        self._communicator = communicator
        self._end = time.monotonic() + seconds
        mpi: Any = importlib.import_module("mpi4py.MPI")
        self._ways: tuple[Callable[[Any], object], ...] = (
            lambda given: collective.all_reduce(given, in_place=True),
            lambda given: communicator.mpi.Allreduce(mpi.IN_PLACE, given),
        )

    def fill(self) -> tuple[list[Sums], dict[int, str]]:
        """Collective. Measure.

        Returns:
            The times, and the sizes that were left out, each with the reason; the same on all ranks.
        """
        # Of all ranks of a node, each with its array and its part of the algorithms' own memory.
        room = min(self._communicator.all_gather_object(_free_memory())) // (8 * max(self._communicator.node_sizes))
        measured: list[Sums] = []
        left_out: dict[int, str] = {}
        once, last = 0.0, SIZES[0]
        for number, size in enumerate(SIZES):
            expected = once * (size / last if size > _LINEAR_FROM else 2)
            if size > room:
                left_out[size] = "too little memory is free"
            elif left_out or not self._allows((1 + _LEAST_LOOKS) * expected):
                left_out[size] = _NO_TIME
            else:
                measured.append(Sums(size))
                share = max(0.0, self._end - time.monotonic()) / (len(SIZES) - number)
                once, last = self._measure(measured[-1], time.monotonic() + share), size
        for sums in measured:
            # One disturbance lasts longer than some looks: those that seem slower are looked at again.
            if sums.is_slower() and self._allows(_LEAST_LOOKS * (sums.median(_OWN) + sums.median(_RAW))):
                self._measure(sums, self._end)
        return measured, left_out

    def _allows(self, seconds: float, until: float | None = None) -> bool:
        """Collective. Whether rank 0 has this many seconds left, before the end of all, or an earlier one."""
        end = self._end if until is None else min(until, self._end)
        return self._communicator.broadcast_object(time.monotonic() + seconds <= end)

    def _measure(self, sums: Sums, until: float) -> float:
        """The seconds of a call with both algorithms."""
        communicator = self._communicator
        values = together(
            communicator, "making the arrays that are summed", lambda: np.zeros(sums.size // 4, np.float32)
        )
        for way in self._ways:
            # The first call of an algorithm takes longer. Small integers: their sums are exact, in any order.
            values.fill(1 + communicator.rank % 7)
            way(values)
            expected = sum(1 + rank % 7 for rank in range(communicator.size))
            is_wrong = communicator.all_reduce_max(int(not (values == expected).all()))
            sums.is_wrong = sums.is_wrong or bool(is_wrong)
        # Sums of zeros stay zeros, however often they are made.
        values.fill(0)
        once = sum(self._look(values, 1))
        calls = max(1, min(_MOST_CALLS, int(_LOOK_SECONDS / max(once, 1e-9))))
        most = len(sums.looks) + _MOST_LOOKS
        while len(sums.looks) < most and self._allows(once * calls, until):
            own, raw = self._look(values, calls)
            sums.looks.append((own, raw))
        if not sums.looks:
            own, raw = self._look(values, 1)
            sums.looks.append((own, raw))
        return once

    def _look(self, values: Any, calls: int) -> list[float]:
        """The seconds of a call with each algorithm, on the slowest rank."""
        taken = []
        for way in self._ways:
            self._communicator.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                way(values)
            spent = time.perf_counter() - begin
            taken.append(self._communicator.all_reduce_max(int(spent * 1e9)) / calls / 1e9)
        return taken


def _free_memory(root: Path = Path("/")) -> int:
    """The bytes that are free on this host, a large number where the system does not say."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError, StopIteration):
        return 1 << 62


def _shown(sums: Sums, ranks: int) -> Finding:
    # The bytes on the slowest link if all links are used alike, as benchmarks of all-reduce count them.
    on_bus = sums.size * 2 * (ranks - 1) / ranks / 1e9
    own, raw = sums.median(_OWN), sums.median(_RAW)
    subject = f"sum of {name_size(sums.size)}"
    text = (
        f"{own * 1e6:9.1f} us {on_bus / own:7.3f} GB/s, MPI alone {raw * 1e6:9.1f} us {on_bus / raw:7.3f} GB/s "
        f"(median of {len(sums.looks)})"
    )
    data: dict[str, object] = {
        "bytes": sums.size, "us": own * 1e6, "bus_GB_per_s": on_bus / own, "mpi_us": raw * 1e6,
        "mpi_bus_GB_per_s": on_bus / raw, "looks": len(sums.looks),
    }
    if sums.is_wrong:
        return Finding(
            subject, "wrong", f"{text}; a sum is wrong", f"export {OVERRIDE}=MPI, and tell mpidist's authors", data
        )
    if sums.is_slower():
        fix = f"unset {OVERRIDE}" if os.environ.get(OVERRIDE) else f"export {OVERRIDE}=MPI"
        return Finding(subject, "note", f"{text}; {own / raw:.1f} times as long as MPI alone", fix, data)
    return Finding(subject, "ok", text, data=data)
