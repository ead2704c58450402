"""The introduction: the data that the ranks of a new communicator exchange, node by node.

Each rank sends its data to the ranks of its node, some hundreds at most. The first rank of each node sends the data
that the ranks of other nodes need, which are far less, to all ranks in one text.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any, NamedTuple

from mpidist.comm.cores import Cores
from mpidist.comm.group.object_exchange import gather_objects
from mpidist.comm.group.resource import Identity
from mpidist.comm.group.shared_file import SharedFile, Shown, can_open, ways
from mpidist.failures.deaths import Process

# A rank's data for other nodes: its number, host, process and namespace, the resources that it has dropped, the address
# of its page.
_Row = tuple[int, str, int, str, dict[Identity, int], "tuple[Any, ...] | None"]


class RankWords(NamedTuple):
    """The data that a rank sends to the other ranks of a new communicator.

    Attributes:
        rank: The number of the rank.
        process: The process of the rank.
        identity: The identity of the communicator, on the first rank.
        offered: The resources that it has dropped; see `mpidist.comm.group.resource`.
        page: The address of its page.
        job_directory: The directory for files of the ranks, on the first rank, if there is one.
        cores: The cores of its process.
        shares_files: Whether it can open a file of the first rank of its node.
    """

    rank: int
    process: Process
    identity: Identity
    offered: dict[Identity, int]
    page: Shown | None
    job_directory: str
    cores: Cores
    shares_files: bool = True


class _Node(NamedTuple):
    """The data that a node sends to all ranks.

    Attributes:
        identity: The identity that its first rank has sent.
        job_directory: The directory that its first rank has sent.
        shares_files: Whether all its ranks share files.
        rows: The rows of its ranks, in their order.
    """

    identity: Identity
    job_directory: str
    shares_files: bool
    rows: list[_Row]


class Introduced(NamedTuple):
    """The data of all ranks that a rank has received.

    Attributes:
        identity: The identity of the communicator.
        job_directory: The directory for files of the ranks; empty if there is none.
        processes: The process of each rank.
        leaders: The first rank of each rank's node.
        offers: The resources that ranks have dropped.
        pages: The addresses of the pages of ranks on this rank's host.
        cores: The cores of the ranks of this rank's node.
        shares_files: Whether the ranks of each node share files.
        is_node: Whether the ranks of this rank's node share files.
    """

    identity: Identity
    job_directory: str
    processes: tuple[Process, ...]
    leaders: list[int]
    offers: list[dict[Identity, int]]
    pages: dict[int, Shown]
    cores: list[Cores]
    shares_files: bool
    is_node: bool


def introduce(mpi: Any, node_color: int | None, words: RankWords) -> tuple[Any, Introduced]:
    """Collective. The communicator of this rank's node, and the data of all ranks.

    Args:
        mpi: An mpi4py intracommunicator of all ranks.
        node_color: The color of this rank's node: ranks with equal colors are one node. Default: the ranks that share
            memory according to MPI, if each of them can open a file that another has made in it.
        words: The data of this rank.
    """
    if node_color is None:
        node = mpi.Split_type(importlib.import_module("mpi4py.MPI").COMM_TYPE_SHARED, key=mpi.rank)
        leader = mpi.rank
        for folder, has_name in ways():
            file = None
            # If the file cannot be made, the other ranks cannot open it.
            with contextlib.suppress(OSError):
                file = SharedFile(folder, has_name=has_name) if node.rank == 0 else None
            leader, shown = node.bcast((mpi.rank, None if file is None else file.shown))
            told = _tell(mpi, node, words._replace(shares_files=can_open(shown, folder)))
            if file is not None:
                file.close()
            if told.shares_files:
                return node, told
        node.Free()
        node_color = leader if told.is_node else mpi.rank
    node = mpi.Split(node_color, key=mpi.rank)
    return node, _tell(mpi, node, words)


def _tell(mpi: Any, node: Any, words: RankWords) -> Introduced:
    """Collective. Exchange data with the ranks of this node, and receive the data of all other nodes."""
    near = gather_objects(node, words)
    own = _Node(
        near[0].identity, near[0].job_directory, all(one.shares_files for one in near), list(map(_row_of, near))
    )
    nodes = [own]
    if node.size < mpi.size:
        nodes = [one for one in gather_objects(mpi, own if node.rank == 0 else None) if one is not None]
    first = next(one for one in nodes if one.rows[0][0] == 0)
    processes: list[Process] = [words.process] * mpi.size
    leaders = [0] * mpi.size
    offers, pages = [], {}
    for one in nodes:
        for rank, host, number, namespace, offer, page in one.rows:
            processes[rank] = Process(host, number, namespace)
            leaders[rank] = one.rows[0][0]
            if offer:
                offers.append(offer)
            if page is not None and host == words.process.host:
                pages[rank] = Shown(*page)
    return Introduced(
        first.identity, first.job_directory, tuple(processes), leaders, offers, pages, [one.cores for one in near],
        all(one.shares_files for one in nodes), own.shares_files,
    )


def _row_of(words: RankWords) -> _Row:
    # All ranks of a host share one string: thousands of copies would take megabytes.
    host, namespace = sys.intern(words.process.host), sys.intern(words.process.namespace)
    page = None if words.page is None else tuple(words.page)
    return words.rank, host, words.process.number, namespace, words.offered, page
