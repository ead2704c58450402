"""Positions of groups that read at their own pace: as many continue where each was, others behind all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpidist.comm.group.solo import SoloCommunicator
from mpidist.data.dataset import Dataset
from mpidist.data.distribution.distributed_dataset import DistributedDataset
from mpidist.data.distribution.distributed_iterator import DistributedIterator
from mpidist.data.items.groups import GroupPlace
from mpidist.data.items.stream import Shard, take_seeds

# Divisible by 1 to 4 groups and batches of 2 and 3.
COUNT = 144


def begin(count: int, batch_size: int = 3, rows: int = COUNT, repeats: int = 1) -> list[DistributedIterator]:
    """The iterators of groups over one dataset, whose shuffle has a seed that was drawn once for all of them."""
    made: list[DistributedIterator] = []
    seeds: list[Any] = []
    for group in range(count):
        dataset = Dataset.range(rows).shuffle(rows).repeat(repeats).batch(batch_size)
        stream = dataset.pipeline.stream
        seeds = seeds or stream.seeds()
        take_seeds(stream.seeds(), [seed.value for seed in seeds])
        if count > 1:
            dataset = dataset.with_pipeline(replace(dataset.pipeline, stream=Shard(stream, count, group)))
        made.append(iter(DistributedDataset(dataset, SoloCommunicator(), group=GroupPlace(count, group))))
    return made


def take(groups: list[DistributedIterator], steps: list[int]) -> list[int]:
    """The rows of so many steps of each group."""
    return [row for group, count in zip(groups, steps, strict=True) for _ in range(count) for row in next(group)]


def rest(groups: list[DistributedIterator]) -> list[int]:
    """The rows that are left in the pass."""
    return [row for group in groups for batch in group for row in np.asarray(batch).tolist()]


def saved(groups: list[DistributedIterator], writer: int = 0) -> dict[str, int]:
    """The position that one group saves when all have met."""
    if len(groups) > 1:
        places = {number: group.place_in_group for number, group in enumerate(groups)}
        groups[writer].note_places(places)  # type: ignore[arg-type]  # there are several groups
    return groups[writer].state()


def restored(state: dict[str, int], count: int, **arguments: Any) -> list[DistributedIterator]:
    """Groups at a position."""
    groups = begin(count, **arguments)
    for group in groups:
        group.load_state(state)
    return groups


@pytest.mark.parametrize(("earlier", "later", "last"), [(2, 4, 3), (4, 1, 2), (3, 2, 4), (1, 3, 1), (2, 3, 2)])
@pytest.mark.parametrize("later_size", [3, 2])
def test_no_example_is_lost_or_repeated_on_another_number_of_groups(
    earlier: int, later: int, last: int, later_size: int
) -> None:
    groups = begin(earlier)
    seen = take(groups, [4] * earlier)
    groups = restored(saved(groups), later, batch_size=later_size)
    # All groups make as many steps, though some may begin a batch ahead of others.
    seen += take(groups, [3] * later)
    assert {group.steps_behind for group in groups} == {-(-4 * earlier * 3 // later_size // later)}
    groups = restored(saved(groups, later - 1), last, batch_size=later_size)
    seen += rest(groups)
    assert sorted(seen) == [*range(COUNT)]
    # The next pass is another one, and whole.
    assert {group.state()["iteration"] for group in groups} == {0}


@pytest.mark.parametrize("writer", [0, 2])
def test_as_many_groups_continue_where_each_was(writer: int) -> None:
    groups = begin(3)
    seen = take(groups, [9, 2, 5])
    state = saved(groups, writer)
    groups = restored(state, 3)
    assert [group.place_in_group for group in groups] == [(0, 9), (0, 2), (0, 5)]
    assert {group.steps_behind for group in groups} == {None}
    assert sorted([*seen, *rest(groups)]) == [*range(COUNT)]
    # Also those that were in different passes.
    groups = begin(2)
    rest(groups[:1])
    groups[0].load_state({**groups[0].state(), "iteration": 1, "batch": 2})
    take(groups, [1, 7])
    groups = restored(saved(groups), 2)
    assert [group.place_in_group for group in groups] == [(1, 3), (0, 7)]


def test_of_groups_that_were_apart_as_many_batches_are_lost_as_repeated() -> None:
    groups = begin(2)
    seen = take(groups, [9, 3])
    groups = restored(saved(groups), 3)
    assert [group.place_in_group for group in groups] == [(0, 4)] * 3
    seen += rest(groups)
    assert len(seen) == COUNT
    # Of the first 12 batches the second group had not taken number 7, 9 and 11; the first one had taken 12, 14 and 16.
    assert COUNT - len(set(seen)) == 9


def test_groups_in_different_passes_continue_behind_what_they_have_taken_together() -> None:
    # Passes of 7 batches: 4 of the first group, 3 of the second.
    groups = begin(2, rows=21)
    state = {**saved(groups), "iteration": 2, "batch": 1, "group_1_iteration": 1, "group_1_batch": 2}
    # 9 and 5 batches: two passes.
    assert [group.place_in_group for group in restored(state, 3, rows=21)] == [(2, 0)] * 3
    assert restored({**state, "group_1_batch": 0}, 1, rows=21)[0].state()["batch"] == 5
    # Of an endless dataset, and of one of unknown length, there is but the position of the group that saved.
    endless = begin(2, repeats=-1)
    take(endless, [30, 29])
    assert [group.place_in_group for group in restored(saved(endless), 4, repeats=-1)] == [
        (0, 15), (0, 15), (0, 15), (0, 14),
    ]


def test_what_was_noted_at_a_save_does_not_count_later() -> None:
    groups = begin(2)
    take(groups, [3, 1])
    assert saved(groups)["group_1_batch"] == 1
    take(groups, [1, 0])
    assert groups[0].state() == {"iteration": 0, "batch": 4, "batch_size": 3, "groups": 2, "seed_0": 0} | {
        "seed_0": groups[0].state()["seed_0"]
    }
    # A dead group tells nothing: it counts as if it were where the group is that saves.
    groups[0].note_places({0: (0, 4)})
    assert restored(groups[0].state(), 1)[0].state()["batch"] == 8


def test_groups_with_datasets_of_their_own_do_not_share_positions() -> None:
    def make(count: int, group: int) -> DistributedIterator:
        dataset = Dataset.range(40).batch(2)
        place = GroupPlace(count, group)
        return iter(DistributedDataset(dataset, SoloCommunicator(), presharded=True, group=place))

    first, second = make(2, 0), make(2, 1)
    take([first, second], [3, 5])
    state = saved([first, second])
    for count, group, batch in ((2, 0, 3), (2, 1, 5), (1, 0, 3), (4, 1, 5), (4, 3, 3)):
        again = make(count, group)
        again.load_state(state)
        assert again.state()["batch"] == batch


def test_a_position_of_another_pipeline_is_refused() -> None:
    groups = begin(2)
    take(groups, [1, 1])
    with pytest.raises(ValueError, match="2 batches of 3 examples, which this dataset with batches of 4"):
        restored(saved(groups), 3, batch_size=4)
    with pytest.raises(ValueError, match="does not fit this dataset"):
        begin(2)[0].load_state({**saved(groups), "group_1": 1})
