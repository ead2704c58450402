"""Position of an iteration, as a few plain integers that a checkpoint keeps.

The names and the meaning of these integers are a file format: checkpoints that exist must stay loadable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpidist.arguments import described
from mpidist.data.items.batching import Batch
from mpidist.data.items.stream import Seed, Stream

_ITERATION = "iteration"
_BATCH = "batch"
_READERS = "readers"
_BATCH_SIZE = "batch_size"
_PASSES = "passes"
# The name of an `interleave`'s seed. Its own, so that the numbers of the other seeds are those of older positions.
INNER_SEED = "inner_seed"


def position_state(
    stream: Stream, iteration: int, taken: int, readers: int = 0, batch_size: int = 0, passes: int = 0
) -> dict[str, int]:
    """Local. The position as plain integers.

    Args:
        stream: Its drawn seeds belong to the position: without them the same order could not be made again.
        iteration: Number of the pass over the data.
        taken: Number of elements that the consumer has taken in this pass. Elements that a thread has only read ahead
            do not count: after a restart they must be read again.
        readers: Number of ranks that share the files of this pass; 0 where the ranks do not share files.
        batch_size: The global batch size; 0 where it is unknown or each rank has its own.
        passes: Number of passes that the dataset has begun; 0 where that is of no account.

    Returns:
        `iteration`, `batch`, `readers` and `batch_size` unless they are 0, `passes` where later ones than this have
        begun, `seed_<k>` for each seed of a shuffle that
        was drawn, and `inner_seed_<k>` for each `interleave`.
    """
    seeds = {name: seed.value for name, seed in _drawn_seeds(stream).items()}
    facts = {_READERS: readers, _BATCH_SIZE: batch_size, _PASSES: passes if passes > iteration + 1 else 0}
    return {_ITERATION: iteration, _BATCH: taken, **{name: fact for name, fact in facts.items() if fact}, **seeds}


def load_position(
    stream: Stream, state: Mapping[str, int], readers: int = 0, batch_size: int = 0
) -> tuple[int, int, int, int]:
    """Local. Read a position, and give the stream's drawn seeds the values that it holds.

    Args:
        stream: Its drawn seeds are set.
        state: A result of `position_state`.
        readers: 0 where the position must not name any.
        batch_size: See `position_state`. A position that was saved with another one is converted where that is
            possible.

    Returns:
        The iteration, the number of elements taken, the number of readers, and that of the passes that the dataset has
        begun.

    Raises:
        TypeError: The state is no result of `position_state`.
        ValueError: The state belongs to another pipeline. Nothing is changed then.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"load_state: expected what state() has returned, a dictionary, got {described(state)}")
    seeds = _drawn_seeds(stream)
    needed = {_ITERATION, _BATCH, *([_READERS] if readers else [])}
    needed |= {name for name in seeds if not name.startswith(INNER_SEED)}
    # Older positions have neither inner seeds nor a batch size.
    expected = {*needed, *seeds, *([_BATCH_SIZE] if batch_size else [])}
    if not needed <= set(state) <= {*expected, _PASSES} or any(
        _as_int(state[name]) < (name in (_READERS, _BATCH_SIZE)) for name in state
    ):
        raise ValueError(
            f"the saved position of a dataset does not fit this dataset: expected {sorted(expected)}, integers and "
            f"none of them negative, got {dict(state)!r}. Build the pipeline as it was when the position was saved. "
            "Each shuffle without a seed counts, since the position holds the seed that it drew"
        )
    taken = _converted(stream, int(state[_BATCH]), int(state.get(_BATCH_SIZE, batch_size)), batch_size)
    for name, seed in seeds.items():
        seed.value = int(state.get(name, seed.value))
    iteration = int(state[_ITERATION])
    return iteration, taken, int(state.get(_READERS, 0)), max(iteration + 1, int(state.get(_PASSES, 0)))


def _converted(stream: Stream, taken: int, saved_size: int, batch_size: int) -> int:
    """The number of batches that hold the examples of `taken` batches of another size."""
    if saved_size == batch_size or taken == 0:
        return taken
    found = stream.groups_after(taken, saved_size) if isinstance(stream, Batch) else None
    if found is None:
        raise ValueError(
            f"the saved position of a dataset is {taken} batches of {saved_size} examples, which this dataset with "
            f"batches of {batch_size} cannot express. Use a global batch size that divides {taken * saved_size} and "
            "make no step but map and prefetch after `batch`, keep the batch size, or begin a new pass"
        )
    return found


def _as_int(value: Any) -> int:
    """The value as an int; -1, which no position has, for what is none."""
    array = np.asarray(value)
    return int(array) if array.ndim == 0 and array.dtype.kind in "iu" else -1


def _drawn_seeds(stream: Stream) -> dict[str, Seed]:
    seeds = stream.seeds()
    kinds = dict.fromkeys(seed.name for seed in seeds)
    by_kind = {kind: [seed for seed in seeds if seed.name == kind] for kind in kinds}
    return {
        f"{kind}_{k}": seed for kind, those in by_kind.items() for k, seed in enumerate(those) if seed.drawn
    }
