"""Where an iteration stands, as a few plain integers that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Mapping

from mpidist.data.stream import Stream

_ITERATION = "iteration"
_BATCH = "batch"


def position_state(stream: Stream, iteration: int, taken: int) -> dict[str, int]:
    """Local. The position as plain integers.

    Args:
        stream: The seeds that it drew belong to the position: without them the order could not be made again.
        iteration: Number of the pass over the data.
        taken: How many elements the consumer has taken in this pass.

    Returns:
        `iteration`, `batch`, and `seed_<k>` for each seed that was drawn.
    """
    seeds = {f"seed_{k}": seed.value for k, seed in enumerate(stream.seeds()) if seed.drawn}
    return {_ITERATION: iteration, _BATCH: taken, **seeds}


def load_position(stream: Stream, state: Mapping[str, int]) -> tuple[int, int]:
    """Local. The iteration and the number of elements taken; drawn seeds get the values that they had.

    Raises:
        ValueError: The state is that of another pipeline; nothing is changed.
    """
    seeds = {f"seed_{k}": seed for k, seed in enumerate(stream.seeds()) if seed.drawn}
    expected = {_ITERATION, _BATCH, *seeds}
    if set(state) != expected or any(int(state[name]) < 0 for name in expected):
        raise ValueError(
            f"the saved position of a dataset does not fit this one: expected {sorted(expected)}, none negative, got "
            f"{dict(state)!r}. Build the pipeline as it was when the position was saved: each shuffle without a seed "
            "keeps the one it drew"
        )
    for name, seed in seeds.items():
        seed.value = int(state[name])
    return int(state[_ITERATION]), int(state[_BATCH])
