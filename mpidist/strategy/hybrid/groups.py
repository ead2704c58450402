"""The groups of a hybrid strategy: which ranks are in sync with each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpidist.arguments import described
from mpidist.comm.group.agreement import name_ranks, require_same, together
from mpidist.comm.group.communicator import Communicator
from mpidist.launch import mpirun_line


@dataclass(frozen=True)
class HybridGroups:
    """The groups, and the communicators of this rank.

    Attributes:
        ranks: The ranks of each group.
        index: The number of this rank's group.
        everyone: All ranks of the strategy.
        own: The ranks of this rank's group. Its first rank is the leader of the group.
        leaders: On a leader, the leaders in the order of their groups; None on other ranks.
        opened: The resources that were opened for the strategy, which closes them.
    """

    ranks: tuple[tuple[int, ...], ...]
    index: int
    everyone: Communicator
    own: Communicator
    leaders: Communicator | None
    opened: tuple[Communicator, ...]

    @property
    def count(self) -> int:
        """Local. The number of groups."""
        return len(self.ranks)


def divide(groups: object, nodes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Local. The ranks of each group.

    Args:
        groups: The number of groups, or a list of lists of ranks.
        nodes: The number of each rank's node.

    Raises:
        ValueError: The number does not divide that of the ranks, or a rank is in no group or in two.
        TypeError: `groups` is neither an integer nor a list of lists of integers.
    """
    size = len(nodes)
    if isinstance(groups, int) and not isinstance(groups, bool):
        return _equal(groups, nodes)
    if isinstance(groups, (str, bytes)) or not isinstance(groups, Iterable):
        raise TypeError(
            f"`groups` must be the number of groups, or a list of lists of ranks, got {described(groups)}. For example "
            f"groups=2, or groups=[[0], {list(range(1, max(2, size)))}]"
        )
    lists: list[tuple[int, ...]] = []
    for group in groups:
        if isinstance(group, (str, bytes)) or not isinstance(group, Iterable):
            raise TypeError(f"`groups` must be a list of lists of ranks, got the element {described(group)}")
        ranks = tuple(group)
        wrong = [rank for rank in ranks if isinstance(rank, bool) or not isinstance(rank, int)]
        if wrong:
            raise TypeError(f"`groups` must be lists of ranks, which are integers, got {described(wrong[0])}")
        if not ranks:
            raise ValueError(f"`groups` must be lists of at least one rank each, got an empty list in {groups!r}")
        lists.append(ranks)
    given = [rank for group in lists for rank in group]
    twice = sorted({rank for rank in given if given.count(rank) > 1})
    unknown = sorted(set(given) - set(range(size)))
    missing = sorted(set(range(size)) - set(given))
    for what, ranks_of_it in (("twice", twice), ("that do not exist", unknown), ("that are in no group", missing)):
        if ranks_of_it:
            raise ValueError(
                f"`groups` must have each of the {size} ranks once, got {[list(group) for group in lists]} with "
                f"{name_ranks(ranks_of_it)} {what}. Name the ranks 0 to {size - 1}, or start as many as the groups "
                f"have: {mpirun_line(max(1, len(set(given))))}"
            )
    return tuple(lists)


def _equal(count: int, nodes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Equal groups; each has whole nodes where it has as many ranks as they have."""
    size = len(nodes)
    if size == 1 and count > 0:
        # The program runs without a launcher.
        return ((0,),)
    if count < 1 or size % count:
        fitting = [number for number in range(1, size + 1) if size % number == 0]
        raise ValueError(
            f"`groups` must divide the number of ranks, {size}, into equal groups, got {count!r}. Here {fitting} fit, "
            f"or a list of lists of ranks; or start another number of ranks: {mpirun_line(max(1, count) * 2)}"
        )
    # Sorting keeps the order of a node's ranks.
    order = sorted(range(size), key=nodes.__getitem__)
    share = size // count
    return tuple(tuple(order[first : first + share]) for first in range(0, size, share))


def open_groups(ranks: Communicator, groups: object, settings: Any) -> HybridGroups:
    """Collective. Divide the ranks, and open the communicators.

    Args:
        ranks: All ranks.
        groups: See `divide`.
        settings: Further values that must be the same on every rank: picklable, comparable and readable.

    Raises:
        ValueError, TypeError: See `divide`; on every rank.
        MismatchError: Groups or settings differ between ranks.
    """
    divided = together(ranks, "HybridStrategy", lambda: divide(groups, ranks.nodes))
    require_same(
        ranks.all_gather_object((divided, settings)), "HybridStrategy: (groups, settings)",
        "Make the strategy the same way on every rank.",
    )
    index = next(number for number, group in enumerate(divided) if ranks.rank in group)
    own = ranks.split(index, divided[index].index(ranks.rank))
    # Ranks that lead no group share a color, since all ranks must take part in Split.
    leads = own.rank == 0
    leaders = ranks.split(int(not leads), index, is_part=True)
    return HybridGroups(divided, index, ranks, own, leaders if leads else None, (leaders, own))
