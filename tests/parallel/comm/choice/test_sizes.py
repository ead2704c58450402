"""Sizes decide which backend AUTO takes, and are the same on every rank."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from mpidist.comm.backends.automatic import AutomaticBackend
from mpidist.comm.choice import selection
from mpidist.comm.choice.sizes import NEVER, Sizes, find_sizes
from mpidist.comm.choice.table import BACKENDS
from mpidist.comm.group.communicator import Communicator
from mpidist.options import CommunicationImplementation, CommunicationOptions
from tests.parallel.layouts import lay_out

pytestmark = pytest.mark.mpi(min_size=2)

_OF_ANY = np.empty(0)


@pytest.mark.parametrize("layout", ["node", "each"])
def test_the_same_on_every_rank_and_in_the_log(
    communicator: Communicator, layout: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    laid_out = lay_out(communicator, layout)
    # Nodes with other numbers of cores: the first rank's counts.
    monkeypatch.setattr(laid_out, "core_count", 1 if communicator.rank == 0 else 64)
    sizes = find_sizes(laid_out)
    assert communicator.all_gather_object(sizes) == [sizes] * communicator.size
    with caplog.at_level(logging.INFO, "mpidist"):
        collective = selection.choose(laid_out, CommunicationOptions())
    assert isinstance(collective.backend, AutomaticBackend)
    assert collective.backend.limit == (sizes.node_from if layout == "node" else sizes.circulant_from)
    if communicator.rank == 0:
        assert sizes.reason in caplog.text


@pytest.mark.parametrize("node_from", [0, 1 << 16, NEVER])
def test_sizes_decide_which_backend_is_taken(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, node_from: int
) -> None:
    monkeypatch.setattr(selection, "find_sizes", lambda *_: Sizes(node_from, 1 << 18))
    collective = selection.choose(communicator, CommunicationOptions())
    automatic = collective.backend
    assert isinstance(automatic, AutomaticBackend)
    node = BACKENDS[CommunicationImplementation.NODE].kind
    for size in (4, 1 << 15, 1 << 16, 1 << 20):
        used = type(automatic.backend(_OF_ANY, size)).__name__
        assert (used == node) == (size >= node_from), size
    # What was allocated is combined where it lies, also where other arrays of its size go by MPI.
    own = collective.allocate((1 << 18,))
    own[...] = communicator.rank
    opened = automatic.backend(_OF_ANY, max(node_from, 1))
    calls: list[bool] = []
    shared = opened.all_reduce_allocated

    def noted(*arguments: Any) -> bool:
        calls.append(shared(*arguments))
        return calls[-1]

    monkeypatch.setattr(automatic, "_all_reduce_allocated", noted)
    collective.all_reduce(own, in_place=True)
    assert (own == communicator.size * (communicator.size - 1) // 2).all()
    assert calls == ([True] if own.nbytes < node_from else [])
