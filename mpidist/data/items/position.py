"""Where an iteration stands, as a few plain integers that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Mapping

from mpidist.data.items.stream import Stream

_ITERATION = "iteration"
_BATCH = "batch"
_READERS = "readers"


def position_state(stream: Stream, iteration: int, taken: int, readers: int = 0) -> dict[str, int]:
    """Local. The position as plain integers.

    Args:
        stream: The seeds that it drew belong to the position: without them the order could not be made again.
        iteration: Number of the pass over the data.
        taken: How many elements the consumer has taken in this pass.
        readers: How many ranks the files are shared out to in this pass; 0 where that says nothing.

    Returns:
        `iteration`, `batch`, `readers` unless it is 0, and `seed_<k>` for each seed that was drawn.
    """
    seeds = {f"seed_{k}": seed.value for k, seed in enumerate(stream.seeds()) if seed.drawn}
    return {_ITERATION: iteration, _BATCH: taken, **({_READERS: readers} if readers else {}), **seeds}


def load_position(stream: Stream, state: Mapping[str, int], readers: int = 0) -> tuple[int, int, int]:
    """Local. The iteration, the number of elements taken, and the number of readers; drawn seeds get their values.

    Args:
        stream: Its drawn seeds are set.
        state: From `position_state`.
        readers: 0 where the position must not name any.

    Raises:
        ValueError: The state is that of another pipeline; nothing is changed.
    """
    seeds = {f"seed_{k}": seed for k, seed in enumerate(stream.seeds()) if seed.drawn}
    expected = {_ITERATION, _BATCH, *seeds, *([_READERS] if readers else [])}
    if set(state) != expected or any(int(state[name]) < (name == _READERS) for name in expected):
        raise ValueError(
            f"the saved position of a dataset does not fit this one: expected {sorted(expected)}, none negative, got "
            f"{dict(state)!r}. Build the pipeline as it was when the position was saved: each shuffle without a seed "
            "keeps the one it drew"
        )
    for name, seed in seeds.items():
        seed.value = int(state[name])
    return int(state[_ITERATION]), int(state[_BATCH]), int(state.get(_READERS, 0))
