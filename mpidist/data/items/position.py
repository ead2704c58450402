"""Position of an iteration, as a few plain integers that a checkpoint keeps.

The names and the meaning of these integers are a file format: checkpoints that exist must stay loadable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from mpidist.arguments import described
from mpidist.data.items.batching import Batch
from mpidist.data.items.groups import (
    ALONE,
    GroupPlace,
    Place,
    is_of_groups,
    places_of,
    share_of,
    sum_of,
    whole_stream,
)
from mpidist.data.items.stream import Seed, Stream

_ITERATION = "iteration"
_BATCH = "batch"
_READERS = "readers"
_BATCH_SIZE = "batch_size"
_PASSES = "passes"
# The name of an `interleave`'s seed. Its own, so that the numbers of the other seeds are those of older positions.
INNER_SEED = "inner_seed"


class Loaded(NamedTuple):
    """The place where an iteration continues.

    Attributes:
        iteration: The number of the pass.
        taken: The number of elements taken in it.
        readers: The number of readers of its files; 0 where there are none.
        passes: The number of passes that the dataset has begun.
        most: The number of elements that the first of several groups has taken: no other one has more.
        is_converted: Whether `taken` was counted in other batches, or by another number of groups.
    """

    iteration: int
    taken: int
    readers: int
    passes: int
    most: int
    is_converted: bool


def position_state(
    stream: Stream, iteration: int, taken: int, readers: int = 0, batch_size: int = 0, passes: int = 0
) -> dict[str, int]:
    """Local. The position as plain integers.

    Args:
        stream: The stream, whose drawn seeds belong to the position: without them the same order could not be made
            again.
        iteration: Number of the pass over the data.
        taken: Number of elements that the consumer has taken in this pass. Elements that a thread has only read ahead
            do not count: after a restart they must be read again.
        readers: Number of ranks that share the files of this pass; 0 where the ranks do not share files.
        batch_size: The global batch size; 0 where it is unknown or each rank has its own.
        passes: Number of passes that the dataset has begun; 0 where that does not count.

    Returns:
        `iteration`, `batch`, `readers` and `batch_size` unless they are 0, `passes` where later ones than this have
        begun, `seed_<k>` for each seed of a shuffle that was drawn, and `inner_seed_<k>` for each `interleave`.
    """
    seeds = {name: seed.value for name, seed in _drawn_seeds(stream).items()}
    facts = {_READERS: readers, _BATCH_SIZE: batch_size, _PASSES: passes if passes > iteration + 1 else 0}
    return {_ITERATION: iteration, _BATCH: taken, **{name: fact for name, fact in facts.items() if fact}, **seeds}


def load_position(
    stream: Stream, state: Mapping[str, int], readers: int = 0, batch_size: int = 0, group: GroupPlace = ALONE
) -> Loaded:
    """Local. Read a position, and give the stream's drawn seeds the values that it holds.

    Args:
        stream: The stream, whose drawn seeds are set.
        state: A result of `position_state`, with what `groups_state` gave.
        readers: The number of readers; 0 where the position must not name any.
        batch_size: See `position_state`. A position that was saved with another one is converted where that is
            possible.
        group: The group of ranks that continues. Of as many groups as before each continues where it was. Else they
            continue, one batch after the other in turn, behind as many batches as all groups had taken.

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
    of_groups = set(filter(is_of_groups, state))
    if not needed <= set(state) <= {*expected, _PASSES, *of_groups} or any(
        _as_int(state[name]) < (name in (_READERS, _BATCH_SIZE)) for name in state
    ):
        raise ValueError(
            f"the saved position of a dataset does not fit this dataset: expected {sorted(expected)}, integers and "
            f"none of them negative, got {dict(state)!r}. Build the pipeline as it was when the position was saved. "
            "Each shuffle without a seed counts, since the position holds the seed that it drew"
        )
    place, most, is_converted = _place_of(stream, state, batch_size, group)
    for name, seed in seeds.items():
        seed.value = int(state.get(name, seed.value))
    passes = max(place[0] + 1, int(state.get(_PASSES, 0)))
    return Loaded(*place, int(state.get(_READERS, 0)), passes, most, is_converted)


def _place_of(
    stream: Stream, state: Mapping[str, int], batch_size: int, group: GroupPlace
) -> tuple[Place, int, bool]:
    """The place of a group, the most that a group has taken, and whether either was counted in another way."""
    own, saved_size = (int(state[_ITERATION]), int(state[_BATCH])), int(state.get(_BATCH_SIZE, batch_size))
    places = places_of(state, own)
    if not group.in_turn or (len(places) == group.count and saved_size == batch_size):
        place = places[group.index] if group.index < len(places) else own
        return place, max(batch for _, batch in places), False
    whole = whole_stream(stream, group)
    iteration, taken = sum_of(places, own, whole)
    taken = _converted(whole, taken, saved_size, batch_size)
    return (iteration, share_of(taken, group)), share_of(taken, replace(group, index=0)), True


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
