"""Sizes measured at the start: the same on every rank, kept for later runs, and used."""

from __future__ import annotations

import json
import logging
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpidist.comm.backends.automatic import AutomaticBackend
from mpidist.comm.choice import measuring, selection
from mpidist.comm.choice.measuring import find_tuning, measure
from mpidist.comm.choice.tuning import NEVER, MachineProfile, Tuning, processor_name
from mpidist.comm.cores import node_cores
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.mpi_library import loaded_library
from mpidist.options import CommunicationImplementation, CommunicationOptions
from tests.parallel.layouts import lay_out

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def folder(mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; nothing measured so far, and nothing asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(mpi_tmp_path))
    monkeypatch.delenv(measuring.TUNE, raising=False)
    monkeypatch.setattr(measuring, "_measured", {})
    return mpi_tmp_path / "mpidist"


_OF_ANY = np.empty(0)


def opener(communicator: Communicator) -> measuring.Opener:
    return lambda kind, options, tuning: selection.open_backend(kind, communicator, options, tuning)


def find(communicator: Communicator) -> Tuning:
    return find_tuning(communicator, opener(communicator))


@pytest.mark.parametrize("layout", ["node", "each"])
def test_measured_once_and_used_by_later_runs(
    communicator: Communicator, layout: str, folder: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    laid_out = lay_out(communicator, layout)
    assert "default" in find(laid_out).source
    communicator.barrier()
    # Rank 0's environment counts.
    if communicator.rank == 0:
        monkeypatch.setenv(measuring.TUNE, "1")
    tuning = find(laid_out)
    assert communicator.all_gather_object(tuning) == [tuning] * communicator.size
    assert "measured now" in tuning.source
    assert tuning.chunk_bytes in (1 << 18, 1 << 20, 1 << 22, 1 << 24)
    kept = json.loads((folder / "tuning.json").read_text())
    assert [(sizes["node_from"], sizes["chunk_bytes"], sizes["direct_from"]) for sizes in kept.values()] == [
        (tuning.node_from, tuning.chunk_bytes, tuning.direct_from)
    ]
    # A strategy that is built later in this run measures nothing; nor does a later run, without being asked to.
    assert find(laid_out) == tuning
    monkeypatch.setattr(measuring, "_measured", {})
    monkeypatch.delenv(measuring.TUNE, raising=False)
    communicator.barrier()
    with caplog.at_level(logging.INFO, "mpidist"):
        collective = selection.choose(laid_out, CommunicationOptions())
    assert isinstance(collective.backend, AutomaticBackend)
    assert collective.backend.limit == (tuning.node_from if layout == "node" else tuning.ring_from)
    if communicator.rank == 0:
        assert f"measured before, {folder / 'tuning.json'}" in caplog.text


def test_another_place_has_sizes_of_its_own(
    communicator: Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(measuring.TUNE, "1")
    find(communicator)
    monkeypatch.delenv(measuring.TUNE)
    each = lay_out(communicator, "each")
    assert "default" in find(each).source
    assert len(json.loads((folder / "tuning.json").read_text())) == 1


def test_a_broken_cache_is_a_warning_on_one_rank_and_no_error_on_any(
    communicator: Communicator, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if communicator.rank == 0:
        folder.mkdir(parents=True)
        (folder / "tuning.json").write_text("{")
    communicator.barrier()
    with caplog.at_level(logging.WARNING, "mpidist"):
        tuning = find(communicator)
    assert "default" in tuning.source
    assert caplog.text.count("is not used") == (communicator.rank == 0)


def test_without_time_the_usual_sizes_stay(communicator: Communicator, folder: Path) -> None:
    usual = Tuning(12345, 1 << 20, NEVER, 54321)
    assert measure(communicator, opener(communicator), usual, seconds=0) == usual


def test_measuring_ends_with_its_time(
    communicator: Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which each look takes a part of the time: when it is over, a round ends, and no other begins."""
    looks = 0

    def look() -> float:
        nonlocal looks
        looks += 1
        return looks * measuring.SECONDS / 10

    monkeypatch.setattr(measuring, "time", types.SimpleNamespace(perf_counter=look))
    monkeypatch.setattr(measuring, "_CHUNKED_BYTES", 1 << 16)
    usual = Tuning(12345, 1 << 20, NEVER, 54321)
    tuning = measure(communicator, opener(communicator), usual)
    # The round in which it ends, and a look for each size for which no time is left.
    assert 10 <= looks <= 10 + 2 * len(measuring._CHUNK_SIZES) + 1 + len(measuring._CROSSING_SIZES) + 4
    assert tuning == replace(usual, chunk_bytes=tuning.chunk_bytes)


@pytest.mark.parametrize("node_from", [0, 1 << 16, NEVER])
def test_measured_sizes_decide_which_backend_is_taken(
    communicator: Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch, node_from: int
) -> None:
    place = MachineProfile(str(loaded_library()), communicator.size, 1, node_cores(communicator.node), processor_name())
    monkeypatch.setattr(measuring, "_measured", {place.key: Tuning(node_from, 1 << 18)})
    collective = selection.choose(communicator, CommunicationOptions())
    automatic = collective.backend
    assert isinstance(automatic, AutomaticBackend)
    node = selection.BACKENDS[CommunicationImplementation.NODE][1]
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
