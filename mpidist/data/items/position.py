"""Position of an iteration, as a few plain integers that a checkpoint keeps.

The names and the meaning of these integers are a file format: checkpoints that exist must stay loadable.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpidist.data.items.stream import Stream

_ITERATION = "iteration"
_BATCH = "batch"
_READERS = "readers"


def position_state(stream: Stream, iteration: int, taken: int, readers: int = 0) -> dict[str, int]:
    """Local. The position as plain integers.

    Args:
        stream: Its drawn seeds belong to the position: without them nobody could make the same order again.
        iteration: Number of the pass over the data.
        taken: Number of elements that the consumer has taken in this pass. Elements that a thread has only read ahead
            do not count: after a restart they must be read again.
        readers: Number of ranks that share the files of this pass; 0 where the ranks do not share files.

    Returns:
        `iteration`, `batch`, `readers` unless it is 0, and `seed_<k>` for each seed that was drawn.
    """
    seeds = {f"seed_{k}": seed.value for k, seed in enumerate(stream.seeds()) if seed.drawn}
    return {_ITERATION: iteration, _BATCH: taken, **({_READERS: readers} if readers else {}), **seeds}


def load_position(stream: Stream, state: Mapping[str, int], readers: int = 0) -> tuple[int, int, int]:
    """Local. Read a position, and give the stream's drawn seeds the values that it holds.

    Args:
        stream: Its drawn seeds are set.
        state: A result of `position_state`.
        readers: 0 where the position must not name any.

    Returns:
        The iteration, the number of elements taken, and the number of readers.

    Raises:
        ValueError: The state belongs to another pipeline. Nothing is changed then.
    """
    seeds = {f"seed_{k}": seed for k, seed in enumerate(stream.seeds()) if seed.drawn}
    expected = {_ITERATION, _BATCH, *seeds, *([_READERS] if readers else [])}
    if set(state) != expected or any(int(state[name]) < (name == _READERS) for name in expected):
        raise ValueError(
            f"the saved position of a dataset does not fit this dataset: expected {sorted(expected)}, none of them "
            f"negative, got {dict(state)!r}. Build the pipeline as it was when the position was saved. Each shuffle "
            "without a seed counts, since the position holds the seed that it drew"
        )
    for name, seed in seeds.items():
        seed.value = int(state[name])
    return int(state[_ITERATION]), int(state[_BATCH]), int(state.get(_READERS, 0))
