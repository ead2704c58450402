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
from mpidist.comm.shared_file import Shown, open_shared
from tests.leftovers import files_left_behind, held_node_memory
from tests.parallel.layouts import LAYOUTS, lay_out

pytestmark = pytest.mark.mpi


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
    before = held_node_memory()
    memory = NodeMemory(communicator, 1 << 16)
    assert held_node_memory() > before
    del memory
    assert held_node_memory() == before


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
    before = held_node_memory()
    with pytest.raises(OSError, match=rf"reserving 4096 bytes.*rank {leader}.*bytes free.*shared=False") as caught:
        NodeMemory(ranks, 4096)
    assert caught.value.errno == errno.ENOSPC
    assert len(set(ranks.all_gather_object(str(caught.value)))) == 1
    assert files_left_behind() == []
    # Nodes that had room have given it back.
    assert held_node_memory() == before


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_cannot_open_is_an_error_on_all(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    if communicator.rank == 1:
        monkeypatch.setattr(node_memory, "open_shared", refuse)
    before = held_node_memory()
    with pytest.raises(PermissionError, match="opening node memory failed on rank 1"):
        NodeMemory(communicator, 4096)
    assert held_node_memory() == before
    communicator.barrier()
    assert files_left_behind() == []


@pytest.mark.mpi(min_size=2)
def test_ranks_that_do_not_see_each_others_processes_share_a_file_with_a_name(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def look(shown: Shown, folder: Path) -> int:
        names.append(shown.name)
        if not shown.name and communicator.rank == 1:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return open_shared(shown, folder)

    monkeypatch.setattr(node_memory, "open_shared", look)
    memory = NodeMemory(communicator, 8)
    assert names[0] == ""
    assert names[1].startswith("mpidist-")
    communicator.barrier()
    if communicator.rank == 1:
        memory.bytes[3] = 7
    communicator.barrier()
    assert memory.readable[3] == 7
    communicator.barrier()
    assert files_left_behind() == []


@pytest.mark.parametrize("folder", ["/nonexistent/folder", "/dev/null/folder"])
def test_a_missing_directory_is_an_error_on_all(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv(node_memory.DIRECTORY_VARIABLE, folder)
    with pytest.raises(OSError, match=folder):
        NodeMemory(communicator, 4096)
