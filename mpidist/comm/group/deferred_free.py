"""MPI's communicators, which their ranks free together, now or when they next create one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from mpidist.comm.group.resource import Claim, Identity


class Handles:
    """Collective. Communicators of mpi4py that are freed together, in the order of creation, after the last use of any.

    Args:
        identity: See `Claim`.
        mpi: The communicators. `append` takes more, and `own` other things with a collective `Free`, which are freed
            before them.

    Attributes:
        requests: The pending requests of mpi4py on them, by `id`; each with its buffer, which must exist until the
            request is complete.
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
