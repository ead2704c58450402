"""Names that one process of a host's ranks holds: the first one to bind a name does the work for all.

A name is that of a socket without a file (`man 7 unix`). The kernel frees it however its process ends, and gives the
others the number of that process.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable

from mpidist.failures.looks import FEW
from mpidist.failures.peers import Peer
from mpidist.recorder.rank_page import Page

# The process, its user and its group.
_CREDENTIALS = struct.Struct("3i")


def name_of(purpose: str, *parts: object) -> str:
    """Local. A name of this user's.

    Args:
        purpose: The task of its holder.
        *parts: Texts that no other job of this host has.
    """
    return "-".join(map(str, ("\0mpidist", purpose, os.getuid(), *parts)))


def bind(name: str) -> socket.socket:
    """Local. Hold a name until the socket is closed.

    Raises:
        OSError: Another process holds the name, or no socket can be made.
    """
    one = socket.socket(socket.AF_UNIX)
    try:
        one.bind(name)
        one.listen(socket.SOMAXCONN)
        one.setblocking(False)
    except OSError:
        one.close()
        raise
    return one


def holder(name: str) -> int:
    """Local. The process of this user that holds a name; 0 if there is none."""
    try:
        with socket.socket(socket.AF_UNIX) as one:
            # The other process need not accept the connection: it is enough that it listens.
            one.setblocking(False)
            one.connect(name)
            data = one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return 0
    process, user, _ = _CREDENTIALS.unpack(data)
    return process if user == os.getuid() else 0


class Speaker:
    """The rank that reports what all ranks of its host would report: the first one that asks. In a small job all do.

    Args:
        purpose: What is reported.
        size: Number of ranks of the job.
    """

    def __init__(self, purpose: str, size: int) -> None:
        self._purpose, self._size = purpose, size
        self._name: socket.socket | None = None

    def is_here(self, page: Page | None, others: Iterable[Peer]) -> bool:
        """Local. Whether this rank reports.

        Args:
            page: This rank's page.
            others: The other ranks, the dead ones too: all ranks of a host know the same.
        """
        if self._size <= FEW or self._name is not None or page is None:
            return True
        near = [peer for peer in others if not peer.is_far]
        # One that has reported may have ended, and its name is free then.
        if any(peer.page is not None and peer.page.reported for peer in near):
            return False
        try:
            # The launcher's process would not do: Hydra may start each rank by a process of its own.
            self._name = bind(name_of(self._purpose, min((os.getpid(), *(peer.key.number for peer in near)))))
        except OSError as error:
            # Where no name can be made, more than one report is better than none.
            return error.errno != errno.EADDRINUSE
        page.reported = True
        return True
