"""Resources: owners of communicators, memory or threads are closed, or are freed later by all ranks.

Freeing a communicator is collective, and the garbage collector drops an object at another moment on each rank. A rank
therefore only notes what it has dropped. When ranks create a communicator, they exchange their notes, and free what
every rank of its group has dropped (`offered`, `give_back_offered`).
"""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from typing_extensions import Self

# The number of the creation on its group's first rank, and a random token: the same on all ranks of the group, and an
# order in which all ranks free them.
Identity = tuple[int, str]


class Resource(Protocol):
    """An object that is released by `close`, by `drop`, or at the end of a `with` block.

    Attributes:
        is_closed: Whether it was closed or dropped.
    """

    is_closed: bool = False

    def close(self) -> None:
        """Collective. Release everything that this object holds. A second call does nothing.

        In a group with a dead rank it is Local, and does the same as `drop`.
        """
        if not self.is_closed:
            self.is_closed = True
            self._end(is_collective=self._is_whole())

    def drop(self) -> None:
        """Local. Release this object on this rank alone.

        Parts that only all ranks together can free are freed when they next create a communicator together.
        """
        if not self.is_closed:
            self.is_closed = True
            self._end(is_collective=False)

    def _is_whole(self) -> bool:
        """Local. Whether all ranks can take part in `close`; the same on every rank."""
        return True

    def _end(self, *, is_collective: bool) -> None:
        """Collective if `is_collective`, else Local. Release everything that this object holds; called once."""
        del is_collective  # This default holds nothing.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        # Where this rank leaves with an exception, the others may be in any other call.
        if kind is None:
            self.close()
        else:
            self.drop()


_numbers = itertools.count()


def new_identity() -> Identity:
    """Local. An identity, which the first rank of a group sends to the others."""
    return next(_numbers), os.urandom(4).hex()


def end_all(resources: Iterable[Resource], *, is_collective: bool) -> None:
    """Collective if `is_collective`, else Local. Close or drop some resources, in their order."""
    for resource in resources:
        if is_collective:
            resource.close()
        else:
            resource.drop()


class _Note(NamedTuple):
    """A resource that this rank has dropped.

    Attributes:
        rank_count: The number of ranks that must have dropped it.
        give_back: A function, Collective over these ranks, that gives the resource back.
    """

    rank_count: int
    give_back: Callable[[], None]


# Written by the garbage collector too, in any thread: single operations on dictionaries and sets only.
_dropped: dict[Identity, _Note] = {}
_held: set[Identity] = set()


class Claim:
    """A resource that all ranks of a group must release collectively.

    Args:
        owner: The object with which the claim is dropped, when the garbage collector takes it, if the claim has not
            ended before.
        identity: The identity of the claim, the same on all ranks of the group.
        rank_count: The number of ranks of the group.
        give_back: A function, Collective over the group, that gives the resource back. It must not refer to `owner`.
    """

    def __init__(self, owner: object, identity: Identity, rank_count: int, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        self._identity = identity
        _held.add(identity)
        self._finalizer = weakref.finalize(owner, _note, identity, _Note(rank_count, give_back))
        # At the end of the program MPI frees everything itself.
        self._finalizer.atexit = False

    def give_back(self) -> None:
        """Collective. Give the resource back now, unless the claim has ended."""
        if self._finalizer.detach() is not None:
            _held.discard(self._identity)
            self._give_back()

    def drop(self) -> None:
        """Local. Let a later creation of a communicator give the resource back, unless the claim has ended."""
        self._finalizer()


def _note(identity: Identity, note: _Note) -> None:
    _held.discard(identity)
    _dropped[identity] = note


def offered() -> dict[Identity, int]:
    """Local. The identities that this rank has dropped, with the number of ranks that hold each."""
    return {identity: note.rank_count for identity, note in _dropped.copy().items()}


def give_back_offered(offers: Iterable[Mapping[Identity, int]]) -> None:
    """Collective. Give back the resources that every rank of their group has offered.

    Args:
        offers: The result of `offered` on each rank.
    """
    counts: Counter[Identity] = Counter()
    sizes: dict[Identity, int] = {}
    for offer in offers:
        counts.update(offer.keys())
        sizes.update(offer)
    # In one order on all ranks: two ranks that gave back two things in different orders would wait for each other.
    for identity in sorted(sizes):
        if counts[identity] == sizes[identity] and identity in _dropped:
            _dropped.pop(identity).give_back()


def held() -> frozenset[Identity]:
    """Local. The claims that have not ended."""
    return frozenset(_held)


def held_count() -> int:
    """Local. The number of claims that have not ended, with those that were dropped and not freed yet."""
    return len(_held) + len(_dropped)


class Handles:
    """Communicators of mpi4py that are freed together, in the order of creation; alive as long as one of them is used.

    Collective. Args:
        identity: See `Claim`.
        mpi: The communicators. `append` takes more, and `own` other things with a collective `Free`, which are freed
            before them.

    Attributes:
        requests: The pending requests of mpi4py on them, by their `id`; each with its buffer, which lives until it is
            complete.
    """

    def __init__(self, identity: Identity, mpi: Sequence[Any]) -> None:
        handles = list(mpi)
        owned: list[Any] = []
        self.requests: dict[int, tuple[Any, object]] = {}
        self._claim = Claim(self, identity, mpi[0].size, functools.partial(_free, handles, owned, self.requests))
        self.append = handles.append
        self.own = owned.append
        self.free = self._claim.give_back
        self.drop = self._claim.drop


def _free(handles: Sequence[Any], owned: Sequence[Any], requests: Mapping[int, tuple[Any, object]]) -> None:
    for request, _ in requests.values():
        request.Wait()
    for handle in (*owned, *handles):
        handle.Free()
