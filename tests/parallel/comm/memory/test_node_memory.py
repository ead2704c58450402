"""Node memory: seen by all ranks of a node and by no others, with nothing left behind."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.shared_file import DIRECTORY_VARIABLE, Shown, open_shared
from mpidist.comm.memory import node_memory
from mpidist.comm.memory.node_memory import NodeMemory
from mpidist.comm.memory.numa import domain_count
from tests.helpers.leftovers import files_left_behind, held_node_memory
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
    with pytest.raises(PermissionError, match=r"bytes of node memory in .* failed on rank 1"):
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
    before = held_node_memory()
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
    # At once, though the first attempt has raised an error.
    del memory
    assert held_node_memory() == before


@pytest.mark.parametrize("parent", ["missing", "/dev/null"])
def test_a_missing_directory_is_an_error_on_all(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, mpi_tmp_path: Path, parent: str
) -> None:
    folder = str(mpi_tmp_path / parent / "folder")
    monkeypatch.setenv(DIRECTORY_VARIABLE, folder)
    with pytest.raises(OSError, match=folder):
        NodeMemory(communicator, 4096)


@pytest.mark.parametrize("byte_count", [1, 4096, 4097, 1 << 20, 12345678])
def test_each_rank_allocates_its_share(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, byte_count: int
) -> None:
    """So that the pages are near its cores."""
    reserved: list[tuple[int, int]] = []
    reserve = os.posix_fallocate

    def note(descriptor: int, begin: int, count: int) -> None:
        reserved.append((begin, begin + count))
        reserve(descriptor, begin, count)

    monkeypatch.setattr(os, "posix_fallocate", note)
    memory = NodeMemory(communicator, byte_count)
    assert memory.bytes.size == byte_count
    everywhere = [share for shares in communicator.node.all_gather_object(reserved) for share in shares]
    assert [begin for begin, _ in everywhere] == [0, *(end for _, end in everywhere[:-1])], "without a gap"
    assert everywhere[-1][1] == byte_count
    sizes = [end - begin for begin, end in everywhere]
    assert max(sizes) - min(sizes) < 2 * mmap.PAGESIZE


def test_pages_of_a_share_are_counted_by_domain(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a node with one domain all are there; the system's own file of it is read."""
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this system does not say where pages lie")
    monkeypatch.setattr(node_memory, "domain_count", lambda: 2)
    size = 64 * mmap.PAGESIZE * communicator.node.size
    with caplog.at_level(logging.INFO):
        NodeMemory(communicator, size)
    (text,) = [message for message in caplog.messages if "by NUMA domain" in message]
    found = re.findall(r"(\d+): (\d+)", text)
    # Reading a page may map some of its neighbours, too.
    assert sum(int(pages) for _, pages in found) >= 64
    assert {int(domain) for domain, _ in found} <= set(range(domain_count() if domain_count() > 1 else 1))
