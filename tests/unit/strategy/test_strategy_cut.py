"""The cut of a global batch over logical replicas and ranks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpidist.strategy.reproducible.micro_batches import MicroBatches


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 20))
def test_every_row_goes_to_the_rank_that_computes_with_it(rows: list[int], logical_replicas: int) -> None:
    cut = MicroBatches(tuple(rows), logical_replicas)
    batch = np.arange(sum(rows))
    parts = np.split(batch, np.cumsum(rows)[:-1])
    arrived = [
        np.concatenate([parts[source][cut.sent(source)[rank]] for source in range(len(rows))])
        for rank in range(len(rows))
    ]
    # The micro-batches are those of array_split, without empty ones, whoever computes them.
    expected = [part.tolist() for part in np.array_split(batch, logical_replicas) if part.size]
    assert len(expected) == cut.count
    computed = [
        arrived[rank][micro.start - cut.wanted(rank).start : micro.stop - cut.wanted(rank).start].tolist()
        for rank in range(len(rows)) for micro in cut.micro_batches[cut.owned[rank]]
    ]
    assert computed == expected
    assert cut.coincides == all(a.tolist() == b.tolist() for a, b in zip(arrived, parts, strict=True))


def test_an_even_cut_moves_nothing() -> None:
    assert MicroBatches((16, 16, 16, 16), 8).coincides
    assert MicroBatches((5, 4), 2).coincides
    assert not MicroBatches((4, 5), 2).coincides
    assert not MicroBatches((6, 6, 6), 8).coincides
