"""Turns: parties go on in any order, one of them much slower than the others, and one may be lost on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

# The channel of each party: the calls that it makes one after another.
Channels = Mapping[int, list[Callable[[], object]]]

_MOST_TURNS = 1000


def take_turns(channels: Channels, workers: Sequence[int], seed: int, lose: Callable[[int], None] | None) -> None:
    """Let parties go on until none can.

    Args:
        channels: Theirs.
        workers: Those among them that may be lost, the first one, and slow, the second one.
        seed: Of the order.
        lose: Called with the first worker at some time; None where nobody is lost.
    """
    rng = np.random.default_rng(seed)
    at = int(rng.integers(1, 40)) if lose else -1
    for turn in range(_MOST_TURNS):
        if lose and turn == at:
            lose(workers[0])
        ready = [one for one, channel in channels.items() if channel]
        if not ready:
            return
        slow = [one for one in ready if one != workers[1]]
        channels[int(rng.choice(slow if slow and rng.random() < 0.9 else ready))].pop(0)()
