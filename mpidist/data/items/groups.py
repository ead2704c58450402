"""Positions of groups of ranks that go through the data at their own pace, and what another number of them makes of it.

Group g of n takes the batches g, g + n, g + 2 n, and so on. If all groups have taken k batches, these are the first n k
of the dataset, and another number of groups continues right behind them: no example is lost or repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpidist.data.items.stream import Shard, Stream

_GROUPS = "groups"
_GROUP = "group"
# The number of a pass, and that of the batches that were taken in it.
Place = tuple[int, int]


@dataclass(frozen=True)
class GroupPlace:
    """The place of a group among those that divide the data.

    Attributes:
        count: The number of groups.
        index: The number of this one.
        in_turn: Whether they take the batches of one dataset in turn; else each has a dataset of its own.
    """

    count: int = 1
    index: int = 0
    in_turn: bool = True


ALONE = GroupPlace()


def groups_state(group: GroupPlace, own: Place, others: Mapping[int, Place]) -> dict[str, int]:
    """Local. The part of a position that says how far other groups are; empty where there is one group.

    Args:
        group: This group.
        own: Its place.
        others: The places of the groups of which they are known; of others it is taken to be the own one.

    Returns:
        `groups`, their number; `group_<g>_iteration` and `group_<g>_batch` for each group g that is elsewhere.
    """
    if group.count == 1:
        return {}
    elsewhere = {number: place for number, place in others.items() if place != own and number != group.index}
    named = {_GROUPS: group.count}
    for number, (iteration, batch) in sorted(elsewhere.items()):
        named[f"{_GROUP}_{number}_iteration"], named[f"{_GROUP}_{number}_batch"] = iteration, batch
    return named


def is_of_groups(name: str) -> bool:
    """Local. Whether `groups_state` gives an entry of this name."""
    first, *rest = name.split("_")
    return name == _GROUPS or (first == _GROUP and len(rest) == 2 and rest[0].isdigit() and rest[1] in _ENTRIES)


_ENTRIES = ("iteration", "batch")


def places_of(state: Mapping[str, int], own: Place) -> list[Place]:
    """Local. The places of all groups that a position tells of; of one group where it tells of none.

    Args:
        state: The position.
        own: The place of the group that saved it.
    """
    first, second = _ENTRIES
    return [
        (int(state.get(f"{_GROUP}_{number}_{first}", own[0])), int(state.get(f"{_GROUP}_{number}_{second}", own[1])))
        for number in range(int(state.get(_GROUPS, 1)))
    ]


def whole_stream(stream: Stream, group: GroupPlace) -> Stream:
    """Local. The batches of all groups, of which a group's are every n-th."""
    return stream.parent if group.count > 1 and group.in_turn and isinstance(stream, Shard) else stream


def sum_of(places: Sequence[Place], own: Place, whole: Stream) -> Place:
    """Local. The pass in which groups are, and the number of batches that all of them have taken in it.

    Groups that are in different passes have together taken some whole passes, and a rest.

    Args:
        places: The places of the groups.
        own: That of the group that saved.
        whole: The batches of all groups.
    """
    if len({iteration for iteration, _ in places}) == 1:
        return own[0], sum(batch for _, batch in places)
    cardinality = whole.cardinality()
    if cardinality <= 0:
        return own[0], own[1] * len(places)
    count = len(places)
    # A group's passes are as long as its share of them.
    taken = sum(
        iteration * len(range(number, cardinality, count)) + batch for number, (iteration, batch) in enumerate(places)
    )
    return divmod(taken, cardinality)


def share_of(taken: int, group: GroupPlace) -> int:
    """Local. The number of a group's batches among the first `taken` ones."""
    return len(range(group.index, taken, group.count))
