"""Timelines as `MPIDIST_TRACE` writes them, of jobs of any size that were never run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

MILLISECOND = 10**6
# What a step consists of, in milliseconds.
READ, COMPUTED, SUMMED = 1, 10, 2


def line(rank: int, name: str, begin: float, end: float, **more: Any) -> str:
    """A call of a rank as a line of its file; times are milliseconds."""
    event = {
        "rank": rank, "name": name, "bytes": 0, "begin": round(begin * MILLISECOND), "end": round(end * MILLISECOND),
        "where": "", "thread": 1, "depth": 0, "communicator": 0, "number": 0, **more,
    }
    return json.dumps(event) + "\n"


def write_trace(folder: Path, ranks: int, steps: int, late: int = 0, seed: int = 0) -> float:
    """Write the timeline of a job in which each step reads, computes, and sums 1 MB; the last step saves.

    Args:
        folder: Where the files go.
        ranks: The number of ranks.
        steps: The number of steps.
        late: A rank that computes twice as long as the others, whose times differ by 0.1 ms.
        seed: Of these differences.

    Returns:
        Milliseconds from the first call to the last one.
    """
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[list[str]] = [[] for _ in range(ranks)]
    begin = 0.0
    for step in range(1, steps + 1):
        arrivals = begin + READ + COMPUTED + random.uniform(0, 0.1, ranks)
        arrivals[late] += COMPUTED
        end = arrivals.max() + SUMMED
        for rank, arrival in enumerate(arrivals):
            lines[rank] += [
                line(rank, "input", begin, begin + READ),
                line(
                    rank, "apply_gradients", arrival, end, communicator=5, number=step, bytes=1 << 20,
                    where="train.py:12 (train_step)",
                ),
            ]
        begin = end
    for rank in range(ranks):
        lines[rank].append(line(rank, "save", begin, begin + 5, communicator=5, number=steps + 1))
        (folder / f"rank-{rank}.jsonl").write_text("".join(lines[rank]))
    return begin + 5
