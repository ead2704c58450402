"""The chief prints and writes for all: rank 0 of a group, which need not be rank 0 of the job.

A job may have several groups: chief and workers train together, an evaluator is alone, several programs have
communicators of their own. Each group has its own chief.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from mpidist import context, launch


class Ranks(Protocol):
    """The part of a communicator that this module uses.

    Attributes:
        rank: This process's rank.
        mpi: The communicator of mpi4py; None where the process runs alone, without a group.
    """

    rank: int
    mpi: Any


class _Home(Protocol):
    communicator: Ranks


class _Role:
    """This process's rank in the group that the cluster gives it; None where the whole job is one group."""

    rank: int | None = None
    training_has_ended: Callable[[], bool] | None = None


_role = _Role()


def note_role(rank: int | None, training_has_ended: Callable[[], bool] | None = None) -> None:
    """Local. Note that the cluster divides the job into groups, or gives its ranks another order.

    Args:
        rank: This process's rank in its group. None: the job is one group, in the launcher's order.
        training_has_ended: On an evaluator's rank: whether the program of the chief has ended.
    """
    _role.rank = rank
    _role.training_has_ended = training_has_ended


def training_has_ended() -> bool:
    """Local. On an evaluator's rank: whether the chief that trains has ended; False on any other."""
    return _role.training_has_ended is not None and _role.training_has_ended()


def role_rank() -> int | None:
    """Local. The rank in the last call of `note_role`."""
    return _role.rank


def is_chief(ranks: Ranks | None = None) -> bool:
    """Local. Whether this process prints and writes for its group.

    Args:
        ranks: The group. Default: that of the current strategy; outside any scope the one that the cluster gives this
            process, which is the whole job unless it has evaluators.

    Returns:
        True on rank 0 of the group. Processes that run alone side by side (no strategy, or `OneDeviceStrategy`, under
        several ranks) count as one group: all of them would print the same lines, and write the same files.
    """
    if ranks is None:
        entry = context.innermost()
        ranks = None if entry is None else cast(_Home, entry.home).communicator
    if ranks is not None and ranks.mpi is not None:
        return ranks.rank == 0
    return (launch.world_rank() if _role.rank is None else _role.rank) == 0
