"""The report of `mpidist trace`, as lines for people."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpidist.cli.trace.efficiency import LATE_SECONDS, Efficiency, Operation
from mpidist.cli.trace.growth import Expected
from mpidist.cli.trace.timeline import KINDS

# Ranks that are listed one by one; of more, those for which the others wait the longest, and those that wait longest.
MOST_RANKS = 16
# A size has the bandwidth of one that is smaller by this factor at most. Those that the doctor measures are nearer to
# each other; where its time is short, it leaves the large ones out.
_NEAR = 12


@dataclass(frozen=True)
class Machine:
    """The bandwidth of sums on this machine, as `mpidist doctor` has measured it.

    Attributes:
        sums: Bytes on the bus in a second, by bytes of a rank's array.
    """

    sums: Mapping[int, float]

    def bandwidth(self, size: int) -> float | None:
        """Local. That of the measured size that is nearest, by its logarithm; None where none is near."""
        if not self.sums or size < min(self.sums) / 2:
            return None
        nearest = min(self.sums, key=lambda one: abs(math.log(one / size)))
        return None if size > _NEAR * nearest else self.sums[nearest]


def read_machine(path: Path) -> Machine:
    """Local. Read the output of `mpidist doctor --json` on the ranks of a job.

    Raises:
        ValueError: The file has no measured sums.
        OSError: It cannot be read.
    """
    try:
        findings = json.loads(path.read_text())["findings"]
        sums = {
            one["data"]["bytes"]: 1e9 * max(one["data"]["bus_GB_per_s"], one["data"]["mpi_bus_GB_per_s"])
            for one in findings if "bus_GB_per_s" in one["data"]
        }
    except (ValueError, KeyError, TypeError):
        sums = {}
    if not sums:
        raise ValueError(
            f"{path}: expected the measured sums of `mpidist doctor --json`, found none. Run `mpirun -n "
            f"4 mpidist doctor --json > {path.name}` with the ranks of the job"
        )
    return Machine(sums)


def text_of(found: Efficiency, expected: Sequence[Expected], machine: Machine | None) -> str:
    """Local. The report.

    Args:
        found: The shares of time.
        expected: What more ranks would give.
        machine: What the machine can do; None where that is not known.
    """
    timeline = found.timeline
    lines = [
        f"{len(timeline.ranks)} ranks, {len(timeline)} calls, {found.meetings} meetings, "
        f"{timeline.last / 1e9:.3f} s; the ranks compute {found.share:.1%} of the time", "",
    ]
    lines += _ranks(found)
    if found.operations:
        lines += ["", f"{'call':28}{'meetings':>9}{'bytes':>11}{'us':>11}{'total s':>9}{'GB/s':>9}  of the machine"]
        lines += [_operation(one, machine) for one in found.operations]
        lines += ["From the last arrival on; bytes of one rank, and on the bus for a sum. Medians."]
    if expected:
        lines += ["", f"{'ranks':>9}{'compute':>10}{'work per second':>18}"]
        lines += [f"{one.ranks:9}{one.efficiency:10.1%}{one.speed:17.2f}x" for one in expected]
        lines += ["A model: each rank keeps its work, and further hosts are connected as those at hand."]
    if timeline.clipped:
        lines += ["", f"{timeline.clipped} lines could not be read: a rank was killed while it wrote."]
    return "\n".join(lines) + "\n"


def listed(found: Efficiency) -> list[int]:
    """Local. The places of the ranks that are listed one by one, ascending."""
    count = len(found.timeline.ranks)
    if count <= MOST_RANKS:
        return list(range(count))
    half = MOST_RANKS // 2
    latest = np.argsort(-found.caused, kind="stable")[:half]
    patient = [one for one in np.argsort(-found.seconds[:, -1], kind="stable") if one not in latest][:half]
    return sorted(int(one) for one in (*latest, *patient))


def _ranks(found: Efficiency) -> list[str]:
    heading = f"{'rank':>9}" + "".join(f"{kind:>15}" for kind in KINDS) + f"{'late':>13}{'others waited':>16}"
    lines = [heading]
    for number in listed(found):
        lines.append(_row(
            str(found.timeline.ranks[number]), found.seconds[number],
            f"{found.late[number]} of {found.meetings}", found.caused[number],
        ))
    lines.append(_row("mean", found.seconds.mean(axis=0), "", float(found.caused.mean())))
    left = len(found.timeline.ranks) - MOST_RANKS
    if left > 0:
        lines.append(f"and {left} more ranks, which --json and the page have")
    lines.append(f"Seconds. Late: the last one of a meeting, {LATE_SECONDS * 1e3:g} ms after the mean or more.")
    return lines


def _row(name: str, seconds: np.ndarray[tuple[int], np.dtype[np.float64]], late: str, caused: float) -> str:
    whole = max(float(seconds.sum()), 1e-12)
    shares = "".join(f"{one:9.3f}{one / whole:6.0%}" for one in seconds)
    return f"{name:>9}{shares}{late:>13}{caused:16.3f}"


def _operation(one: Operation, machine: Machine | None) -> str:
    rate = "" if one.bandwidth is None else f"{one.bandwidth / 1e9:.3f}"
    best = machine.bandwidth(one.size) if machine is not None and one.size else None
    of_machine = "" if best is None or one.bandwidth is None else f"  {one.bandwidth / best:.0%} of {best / 1e9:.3f}"
    times = f"{one.seconds * 1e6:11.1f}{one.total:9.3f}"
    return f"{one.name[:27]:28}{one.meetings:9}{one.size:11}{times}{rate:>9}{of_machine}"
