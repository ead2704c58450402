"""The job directory: files in which ranks on different hosts show each other their calls, and whether they are alive.

Each rank has one file, and holds a lock on it (`man 2 fcntl`), which the kernel releases however the process ends.
The last rank to end removes the directory; after a kill its files stay.

A rank that waits repeatedly reads files of other hosts. If each of 2,000 ranks read all files, a file system would have
to open millions of files a second. So a rank of a large job reads the files of a few ranks only (`ranks_to_see`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpidist.failures.peers import STALE_SECONDS, Key, Peer
from mpidist.recorder.calls import INNER, PLACE_WORDS, STATE, Calls
from mpidist.recorder.details import tell
from mpidist.recorder.time_limits import CLOCK, TICK_SECONDS, Clock

VARIABLE = "MPIDIST_JOB_DIR"
# Seconds between two writes of a rank that waits, and of any other rank.
WRITE_SECONDS = 2 * TICK_SECONDS
IDLE_SECONDS = 20 * TICK_SECONDS
# The largest number of files that a rank reads.
MOST_SEEN = 64
# A rank reads the files of up to this many ranks of other hosts; if there are more ranks, of about this many.
_ALL_SEEN, _FEW_SEEN = MOST_SEEN, 4
# Content that has not changed for this time is old.
_OLD_SECONDS = 8 * TICK_SECONDS


def wanted() -> str:
    """Local. The directory of all jobs, which this rank's environment names; empty if it names none."""
    slurm = os.environ.get("SLURM_SUBMIT_DIR", "") if "SLURM_JOB_ID" in os.environ else ""
    return os.environ.get(VARIABLE, slurm)


def folder_of(directory: str, job: str) -> Path:
    """Local. The directory of one job.

    Args:
        directory: The directory of all jobs.
        job: A name that no other job has, the same on all ranks.
    """
    return Path(directory) / f".mpidist-{job}"


def ranks_to_see(places: Sequence[Hashable], rank: int) -> list[int]:
    """Local. The ranks of other hosts whose files a rank reads: all, or in large jobs some on the previous hosts.

    Each rank of a host reads the files of other ranks. So one rank of each of the next hosts sees a given rank, and a
    rank that waits reports whether its counterpart on the previous host waits, too. `DeathNotes` report deaths.

    Args:
        places: The host of each rank.
        rank: This rank.
    """
    ranks_of: dict[Hashable, list[int]] = {}
    for other, place in enumerate(places):
        ranks_of.setdefault(place, []).append(other)
    mine = ranks_of.pop(places[rank])
    if len(places) - len(mine) <= _ALL_SEEN:
        return [other for others in ranks_of.values() for other in others]
    order = list(dict.fromkeys(places))
    at = order.index(places[rank])
    seen: list[int] = []
    # The nearest host comes first; the last host is before the first one.
    for place in order[:at][::-1] + order[:at:-1]:
        seen += ranks_of[place][mine.index(rank) :: len(mine)]
        if len(seen) >= _FEW_SEEN:
            break
    return seen


def _name_of(key: Key) -> str:
    return f"{key.host}-{key.number}-{key.namespace.strip('pid:[]')}".replace(os.sep, "_")


class OwnFile:
    """The file of this rank.

    Args:
        folder: The folder of the job; made if it is missing.
        key: This process.
        clock: The clock for the times of writes.

    Raises:
        OSError: The file cannot be made, or its file system has no locks.
    """

    def __init__(self, folder: Path, key: Key, clock: Clock = CLOCK) -> None:
        self.folder = folder
        self._clock = clock
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _name_of(key)
        self._count = 0
        self._written = 0.0
        # The file must not be opened a second time: closing any descriptor of it would release the lock.
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise

    def write(self, content: Mapping[str, Any], *, after: float = 0.0) -> None:
        """Local. Write, unless the last time was less than `after` seconds ago; a full disk is no error."""
        now = self._clock.now()
        if now - self._written < after:
            return
        self._written = now
        self._count += 1
        text = json.dumps({**content, "count": self._count}).encode()
        with contextlib.suppress(OSError):
            # A rank that reads in between gets half a text, which is not valid, and keeps the last one.
            os.pwrite(self._descriptor, text, 0)
            os.ftruncate(self._descriptor, len(text))

    def tell(self, opened: Sequence[Calls], details: Mapping[str, Any], *, ended: bool, after: float) -> None:
        """Local. Write this rank's calls; the inner calls after the states, see `peers.elsewhere_inside`.

        Args:
            opened: The rank's calls on all communicators.
            details: See `recorder.details`.
            ended: Whether its program has ended.
            after: See `write`.
        """
        states = {str(calls.identity): int(calls.words[STATE]) for calls in opened}
        inner = {str(calls.identity): calls.words[INNER:PLACE_WORDS].tolist() for calls in opened}
        self.write({"ended": ended, "states": states, "inner": inner, "details": details}, after=after)

    def close(self) -> None:
        """Local. Remove the file, and the directory if it was the last file."""
        os.close(self._descriptor)
        with contextlib.suppress(OSError):
            self._path.unlink()
            self.folder.rmdir()


class DeathNotes:
    """A file of the job directory in which ranks of a large job report deaths, which few ranks detect themselves.

    Args:
        folder: The folder of the job.
        me: This rank's own process.
    """

    def __init__(self, folder: Path, me: Key) -> None:
        self._path = folder / "deaths"
        self._me = me
        self._length = 0

    def add(self, key: tuple[str, int, str], name: str) -> None:
        """Local. Report the death of a process (see `Key`); a full disk is no error."""
        with contextlib.suppress(OSError):
            descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, json.dumps([*key, name]).encode() + b"\n")
            finally:
                os.close(descriptor)

    def news(self) -> list[tuple[Key, str]]:
        """Local. The processes that other ranks have reported dead since the last call of this, and their names."""
        try:
            if self._path.stat().st_size == self._length:
                return []
            data = self._path.read_bytes()[self._length :]
        except OSError:
            return []
        # A line may be half written.
        lines = data[: data.rfind(b"\n") + 1]
        self._length += len(lines)
        told = []
        for line in lines.splitlines():
            with contextlib.suppress(ValueError, TypeError):
                host, number, namespace, name = json.loads(line)
                told.append((Key(host, number, namespace), name))
        return [one for one in told if one[0] != self._me]


class FarPeer(Peer):
    """A rank of another host, which this rank sees through its file.

    Args:
        key: Its process.
        name: Its name in reports.
        order: Its place among the ranks: those of lower order report first.
        folder: The folder of the job.
        me: This rank's own process.
        clock: The clock for the times of reads.
    """

    is_far = True

    def __init__(self, key: Key, name: str, order: int, folder: Path, me: Key, clock: Clock = CLOCK) -> None:
        super().__init__(key, name, order, None, "", clock)
        self._own_file = folder / _name_of(me)
        self._path_of_file = folder / _name_of(key)
        self._content: dict[str, Any] = {}
        self._read = self._changed = 0.0

    def _look(self) -> dict[str, Any]:
        now = self._clock.now()
        if now - self._read > WRITE_SECONDS / 2:
            self._read = now
            with contextlib.suppress(OSError, ValueError):
                content = json.loads(self._path_of_file.read_text())
                if content != self._content:
                    self._content, self._changed = content, now
        return self._content

    def _age(self) -> float:
        """The seconds since the rank's last write; both times are those of the file system's clock."""
        try:
            return self._own_file.stat().st_mtime - self._path_of_file.stat().st_mtime
        except OSError:
            return 0.0

    def state(self, identity: int) -> int | None:
        """Local. See `Peer.state`."""
        state = self._look().get("states", {}).get(str(identity))
        return None if state is None else int(state)

    def inner(self, identity: int) -> list[int]:
        """Local. See `Peer.inner`."""
        return list(self._look().get("inner", {}).get(str(identity), ()))

    def is_fresh(self) -> bool:
        """Local. See `Peer.is_fresh`."""
        self._look()
        return self._clock.now() - self._changed < _OLD_SECONDS

    def details(self) -> dict[str, Any]:
        """Local. See `Peer.details`."""
        content = self._look()
        return dict(content.get("details", {})) if self.is_fresh() else {}

    def has_ended(self) -> bool:
        """Local. See `Peer.has_ended`."""
        return bool(self._look().get("ended"))

    def has_died(self) -> bool:
        """Local. Whether its process has ended before its program."""
        try:
            descriptor = os.open(self._path_of_file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        else:
            return not self.has_ended()
        finally:
            os.close(descriptor)

    def why_gone(self) -> str:
        """Local. See `Peer.why_gone`."""
        return "has ended" if self.has_ended() else "has died" if self.has_died() else ""

    def tell(self, identities: Iterable[int] = ()) -> str:
        """Local. See `Peer.tell`. A rank writes its calls while it waits."""
        del identities
        why_gone = self.why_gone()
        if why_gone:
            return f"{self.name} {why_gone}"
        if not self._content:
            return f"{self.name} has no file here yet"
        seconds = self._age()
        if seconds > IDLE_SECONDS + STALE_SECONDS:
            return (
                f"{self.name} has not updated its file for {seconds:.0f} s: it may be stopped, it may hold the "
                "interpreter lock (GIL), or its host cannot be reached"
            )
        if not self.is_fresh():
            return f"{self.name} has not waited in any call for {self._clock.now() - self._changed:.0f} s"
        return f"{self.name} {tell(self.details())}"


def deaths_seen(peers: Iterable[Peer], notes: DeathNotes | None) -> list[tuple[Key, str]]:
    """Local. The dead on other hosts: those that this rank detects among some ranks, and those of new death notes."""
    dead = [(peer.key, peer.name) for peer in peers if peer.is_far and peer.has_died()]
    return [*dead, *notes.news()] if notes is not None else dead
