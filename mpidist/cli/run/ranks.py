"""The ranks of a start as `run` sees them: on its own host by their processes, on others by what they have noted."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpidist import launch
from mpidist.cli.run.sweep import processes_of
from mpidist.failures.lives import how_ended
from mpidist.failures.restart.notes import read_lines
from mpidist.failures.restart.rank import mapped_by


@dataclass
class SeenRank:
    """A rank that has signed.

    Attributes:
        path: Its file.
        begin: The first line of its file, by which it has signed.
        position: The part of its file that was read, in bytes.
        descriptor: The descriptor of its process; -1 if it is on another host, or has ended.
        mapped: The files in /dev/shm that it has mapped.
        left: Its exit code, when it has left in good order.
        ended: The time at which its process had ended, in seconds since 1970.
        how: How it has ended, as far as the kernel says it.
    """

    path: Path
    begin: dict[str, Any]
    position: int = 0
    descriptor: int = -1
    mapped: set[str] = field(default_factory=set)
    left: int | None = None
    ended: float | None = None
    how: str = ""

    @property
    def name(self) -> str:
        """Local. Its name, for people."""
        begin = self.begin
        return f"rank {begin['rank']} of {begin['size']} (process {begin['process']} on {begin['host']})"


class SeenRanks:
    """The ranks of one start.

    Args:
        folder: The folder of the start.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._host = socket.gethostname()
        self._namespace = os.readlink("/proc/self/ns/pid")
        self._poll = select.epoll()
        self._by_descriptor: dict[int, SeenRank] = {}
        self.by_number: dict[int, SeenRank] = {}

    def look(self) -> None:
        """Local. Read the files of ranks, new ones too, and what ranks of this host have mapped."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._folder):
                number = entry.name.removeprefix("rank-")
                if number.isdecimal() and int(number) not in self.by_number:
                    self._add(int(number), Path(entry.path))
        for rank in self.by_number.values():
            if rank.left is None:
                lines, rank.position = read_lines(rank.path, rank.position)
                for line in lines:
                    rank.mapped.update(line.get("mapped", ()))
                    rank.left = line.get("left", rank.left)
            # MPICH maps its file while it starts, and a rank that is killed then notes nothing.
            if rank.descriptor >= 0 and not rank.mapped:
                rank.mapped = mapped_by(rank.begin["process"])

    def _add(self, number: int, path: Path) -> None:
        lines, position = read_lines(path)
        if not lines:
            return  # It is about to sign.
        rank = self.by_number[number] = SeenRank(path, lines[0])
        del position  # The lines after the first one are read with those of other ranks.
        if (rank.begin["host"], rank.begin["namespace"]) != (self._host, self._namespace):
            return
        try:
            rank.descriptor = os.pidfd_open(rank.begin["process"])
        except ProcessLookupError:
            rank.ended = time.time()
            return
        except OSError:
            return
        self._by_descriptor[rank.descriptor] = rank
        self._poll.register(rank.descriptor, select.EPOLLIN)

    def wait(self, seconds: float) -> None:
        """Local. Wait until the process of a rank of this host ends, or for this time at most."""
        for descriptor, _ in self._poll.poll(seconds):
            rank = self._by_descriptor.pop(descriptor)
            rank.ended, rank.how = time.time(), how_ended(descriptor)
            self._poll.unregister(descriptor)
            os.close(descriptor)
            rank.descriptor = -1
            rank.left = next(
                (line["left"] for line in read_lines(rank.path)[0] if "left" in line), rank.left
            )

    def find_missing(self) -> None:
        """Local. Note as ended the ranks that have neither signed nor a process; for a job of this host alone.

        Where a rank exits before MPI has started, Hydra lets the others wait for it without end.
        """
        if not self.by_number or len(self.by_number) == (size := next(iter(self.by_number.values())).begin["size"]):
            return
        alive = set()
        for process in processes_of(self._folder):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
                place = launch.read(dict(word.split("=", 1) for word in words if "=" in word))
                alive |= {place.rank} if place is not None else set()
        self.look()
        for number in {*range(size)} - alive - self.by_number.keys():
            begin = {"rank": number, "size": size, "process": "unknown", "host": self._host, "namespace": ""}
            path = self._folder / f"rank-{number}"
            self.by_number[number] = SeenRank(path, begin, ended=time.time(), how="before it came to mpidist")

    def dead(self, since: float = 0.0) -> list[SeenRank]:
        """Local. The ranks of this host whose processes have ended though they had not left, the first one first.

        Args:
            since: The time after which they must have ended, in seconds since 1970.
        """
        found = [
            (rank.ended, number, rank) for number, rank in self.by_number.items()
            if rank.left is None and rank.ended is not None and rank.ended > since
        ]
        return [rank for _, _, rank in sorted(found, key=lambda one: one[:2])]

    def send(self, number: int) -> int:
        """Local. Send a signal to each rank of this host, once. Returns the number of ranks."""
        count = 0
        for descriptor in self._by_descriptor:
            # By the descriptor: the number may belong to another process by now.
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(descriptor, number)
                count += 1
        return count

    def hosts(self) -> set[str]:
        """Local. The names of the hosts of the ranks that have signed."""
        return {rank.begin["host"] for rank in self.by_number.values()}

    def mapped_here(self) -> set[str]:
        """Local. The files in /dev/shm that the ranks of this host have mapped."""
        own = [rank for rank in self.by_number.values() if rank.begin["host"] == self._host]
        return {name for rank in own for name in rank.mapped}

    def close(self) -> None:
        """Local. Close the descriptors."""
        for descriptor in self._by_descriptor:
            os.close(descriptor)
        self._by_descriptor.clear()
        self._poll.close()
