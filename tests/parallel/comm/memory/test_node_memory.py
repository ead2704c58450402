"""Node memory: seen by all ranks of a node and by no others, with nothing left behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from mpidist.comm.communicator import Communicator
from mpidist.comm.memory import node_memory
from mpidist.comm.memory.node_memory import NodeMemory
from tests.leftovers import files_left_behind
from tests.parallel.layouts import LAYOUTS, lay_out

pytestmark = pytest.mark.mpi


def held_files() -> int:
    """How often this process holds files of ours, also unlinked ones: by a mapping, or by a descriptor."""
    held = Path("/proc/self/maps").read_text().count("mpidist-")
    return held + sum("mpidist-" in os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_the_nodes(communicator: Communicator, layout: str) -> None:
    ranks = lay_out(communicator, layout)
    memory = NodeMemory(ranks, 8 * ranks.node.size)
    assert memory.bytes.sum() == 0
    numbers = memory.bytes.view(np.int64)
    ranks.node.barrier()
    numbers[ranks.node.rank] = ranks.rank + 1
    ranks.node.barrier()
    expected = [r + 1 for r, node in enumerate(ranks.all_gather_object(ranks.node_index)) if node == ranks.node_index]
    assert memory.readable.view(np.int64).tolist() == expected
    assert not memory.readable.flags.writeable
    ranks.barrier()
    assert files_left_behind() == []


def test_memory_goes_with_its_owner(communicator: Communicator) -> None:
    before = held_files()
    memory = NodeMemory(communicator, 1 << 16)
    assert held_files() > before
    del memory
    assert held_files() == before


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layout", ["node", "each", "pairs"])
def test_no_room_on_one_node_is_an_error_on_all(
    communicator: Communicator, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = lay_out(communicator, layout)
    leader = max(rank for rank, at in enumerate(ranks.all_gather_object(ranks.node.rank)) if at == 0)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if ranks.rank == leader:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = held_files()
    with pytest.raises(OSError, match=rf"reserving 4096 bytes.*rank {leader}.*bytes free.*shared=False") as caught:
        NodeMemory(ranks, 4096)
    assert caught.value.errno == errno.ENOSPC
    assert len(set(ranks.all_gather_object(str(caught.value)))) == 1
    assert files_left_behind() == []
    # Nodes that had room have given it back.
    assert held_files() == before


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_cannot_open_is_an_error_on_all(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if communicator.rank == 1:
        monkeypatch.setenv(node_memory.DIRECTORY_VARIABLE, "/tmp")
    before = held_files()
    with pytest.raises(FileNotFoundError, match="opening node memory failed on rank 1"):
        NodeMemory(communicator, 4096)
    assert held_files() == before
    communicator.barrier()
    assert files_left_behind() == []


@pytest.mark.parametrize("folder", ["/nonexistent/folder", "/dev/null/folder"])
def test_a_missing_directory_is_an_error_on_all(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv(node_memory.DIRECTORY_VARIABLE, folder)
    with pytest.raises(OSError, match=folder):
        NodeMemory(communicator, 4096)
