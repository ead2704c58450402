"""What all-reduce algorithms cost, by latency, bandwidth and arithmetic (alpha, beta, gamma), fitted to times.

Hockney's model: a message of m bytes takes alpha + beta m seconds, adding them takes gamma m more. The counts of
messages and bytes are those of R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication
operations in MPICH, 2005. Ranks of one node share its link to the network; each link is as fast as the others at any
load; and a node has as much memory bandwidth for each of its ranks as the machine that was measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Network:
    """A message between nodes.

    Attributes:
        name: For the command line.
        seconds: Of an empty message.
        bytes_per_second: Of a node's link, each way.
        source: Where the numbers come from.
    """

    name: str
    seconds: float
    bytes_per_second: float
    source: str


_GIST = "gist.github.com/jfgrimm/3af692a5475bdd4ed836b5a18197a209"
NETWORKS = (
    Network("infiniband", 0.9e-6, 11.6e9, f"osu_latency, osu_bw at 64 KB, Open MPI over InfiniBand: {_GIST}"),
    Network("aries", 1.2e-6, 9.9e9, "OSU 5.3.2 on Cray XC: gist.github.com/hppritcha/6a3acd0c192fcfd082bd543fc98e6fe6"),
    Network("usnic", 1.93e-6, 4.65e9, "NetPIPE, Cisco usNIC: news-blogs.cisco.com/performance/mpi-over-40gb-ethernet"),
    Network("gigabit", 24.6e-6, 0.116e9, f"osu_latency, osu_bw at 32 KB, MPICH over TCP: {_GIST}"),
)


@dataclass(frozen=True)
class Line:
    """Seconds of m bytes: `start`, and a slope up to `knee` bytes (what a cache holds), another one beyond."""

    start: float
    slope: float
    knee: float
    slope_beyond: float

    def __call__(self, size: float) -> float:
        """All of it."""
        return self.start + self.variable(size)

    def variable(self, size: float) -> float:
        """The part that depends on the size."""
        return self.slope * min(size, self.knee) + self.slope_beyond * max(0.0, size - self.knee)


@dataclass(frozen=True)
class Machine:
    """A node and its network.

    Attributes:
        message: Between two ranks of a node.
        node: An all-reduce in node memory, by bytes of each rank's array.
        add: Seconds per byte.
        network: Between nodes.
    """

    message: Line
    node: Line
    add: float
    network: Network


_LEAST_KNEE = 1 << 15

# Messages one after another, and bytes that each rank sends, of an all-reduce within one node: by ranks and bytes.
COUNTS: dict[str, Callable[[int, float], tuple[float, float]]] = {
    "RING": lambda n, m: (2 * (n - 1), 2 * (n - 1) / n * m),
    "MPI": lambda n, m: (2 * math.log2(n), 2 * (n - 1) / n * m),
    "NODE": lambda _, m: (1, m),
    "TO ONE": lambda n, m: (2 * (n - 1), 2 * (n - 1) * m),
}


def fit(algorithm: str, points: Mapping[tuple[int, int], float]) -> Line:
    """The line of an algorithm whose largest relative errors are small: least squares of them, no part negative.

    Args:
        algorithm: Of `COUNTS`.
        points: Seconds by ranks and bytes; at least 4.
    """
    if len(points) < 4:
        raise ValueError(f"{algorithm}: expected at least 4 points to fit, got {len(points)}")
    counted = [COUNTS[algorithm](ranks, size) for ranks, size in points]
    messages, moved = (np.array(column, float) for column in zip(*counted, strict=True))
    seconds = np.array(list(points.values()))
    best: tuple[float, Line] | None = None
    # A knee below what any cache holds would only follow the noise of small messages.
    knees = sorted(set(moved))[1:]
    for knee in [one for one in knees if one >= _LEAST_KNEE] or knees[-1:]:
        columns = np.stack([messages, np.minimum(moved, knee), np.maximum(0, moved - knee)], 1) / seconds[:, None]
        start, slope, beyond = _not_negative(columns)
        error = float(np.sum((columns @ np.array([start, slope, beyond]) - 1) ** 2))
        if best is None or error < best[0]:
            best = error, Line(start, slope, float(knee), beyond)
    if best is None:
        raise ValueError(f"{algorithm}: expected points of several sizes")
    return best[1]


def predicted(algorithm: str, line: Line, ranks: int, size: int) -> float:
    """Seconds within one node by a fitted line."""
    messages, moved = COUNTS[algorithm](ranks, size)
    return messages * line.start + line.variable(moved)


def _not_negative(columns: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Least squares against ones, by trying which of the three parts are zero."""
    best, least = np.zeros(3), math.inf
    for kept in itertools.chain.from_iterable(itertools.combinations(range(3), k) for k in (1, 2, 3)):
        found = np.linalg.lstsq(columns[:, kept], np.ones(len(columns)), rcond=None)[0]
        error = float(np.sum((columns[:, kept] @ found - 1) ** 2))
        if found.min() >= 0 and error < least:
            least, best = error, np.zeros(3)
            best[list(kept)] = found
    return float(best[0]), float(best[1]), float(best[2])


def ring(machine: Machine, ranks: int, per_node: int, size: float) -> float:
    """Around all ranks: each step waits for its slowest link."""
    n, part = ranks, size / ranks
    inside = 2 * (n - 1) * machine.message.start + machine.message.variable(2 * (n - 1) * part)
    if ranks <= per_node:
        return inside
    step = machine.network.seconds + part / machine.network.bytes_per_second
    return max(inside, 2 * (n - 1) * step + (n - 1) * part * machine.add)


def recursive_doubling(machine: Machine, ranks: int, per_node: int, size: float) -> float:
    """Whole arrays to ever farther partners; all ranks of a node send at once."""
    local, nodes = min(ranks, per_node), math.ceil(ranks / per_node)
    inside = math.log2(local) * (machine.message(size) + size * machine.add)
    step = machine.network.seconds + local * size / machine.network.bytes_per_second + size * machine.add
    return inside + math.ceil(math.log2(nodes)) * step


def rabenseifner(machine: Machine, ranks: int, per_node: int, size: float) -> float:
    """Halves to ever farther partners, and back: what MPI libraries do with large arrays, if in one piece."""
    local, nodes = min(ranks, per_node), math.ceil(ranks / per_node)
    moved = 2 * (local - 1) / local * size
    inside = 2 * math.log2(local) * machine.message.start + machine.message.variable(moved)
    return inside + _between(machine, nodes, size, size / local)


def node_and_lanes(machine: Machine, ranks: int, per_node: int, size: float) -> float:
    """Ours: node memory inside, and each local rank a slice with its like on other nodes, all at once."""
    nodes = math.ceil(ranks / per_node)
    return machine.node(size) + _between(machine, nodes, size, size / min(ranks, per_node))


def hierarchical(machine: Machine, ranks: int, per_node: int, size: float) -> float:
    """To the first rank of each node, between these, and back."""
    local, nodes = min(ranks, per_node), math.ceil(ranks / per_node)
    to_first = (local - 1) * (machine.message(size) + size * machine.add)
    back = math.ceil(math.log2(local)) * machine.message(size) if local > 1 else 0.0
    return to_first + _between(machine, nodes, size, size) + back


def to_one(machine: Machine, ranks: int, per_node: int, size: float) -> float:
    """A parameter server, or a reduction to one device: all arrays through one link, there and back.

    However many arrive at once, each message keeps that rank as busy as one within the node.
    """
    local, far = min(ranks, per_node) - 1, max(0, ranks - per_node)
    inside = 2 * machine.message.variable(local * size)
    wire = 2 * (machine.network.seconds + far * size / machine.network.bytes_per_second) if far else 0.0
    return inside + wire + (ranks - 1) * (2 * machine.message.start + size * machine.add)


def _between(machine: Machine, nodes: int, size: float, added: float) -> float:
    """Halving and doubling between nodes, through whose link `size` bytes go in all; a rank adds `added` bytes."""
    share = (nodes - 1) / nodes
    steps = 2 * math.ceil(math.log2(nodes)) * machine.network.seconds
    return steps + 2 * share * size / machine.network.bytes_per_second + share * added * machine.add


Cost = Callable[[Machine, int, int, float], float]
ALGORITHMS: dict[str, Cost] = {
    "node memory and lanes": node_and_lanes,
    "ring": ring,
    "recursive doubling": recursive_doubling,
    "halving and doubling": rabenseifner,
    "hierarchical": hierarchical,
    "to one": to_one,
}


def best(machine: Machine, ranks: int, per_node: int, size: float, names: Sequence[str] = tuple(ALGORITHMS)) -> str:
    """The algorithm of least predicted time."""
    return min(names, key=lambda name: ALGORITHMS[name](machine, ranks, per_node, size))
