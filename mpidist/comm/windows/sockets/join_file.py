"""The file by which processes join a job: the address at which its chief listens, and the secret of its window.

Anyone who can read it can run code in the job. Only its owner can read it, or change its directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
from pathlib import Path
from typing import Any, NamedTuple

from mpidist.comm.windows.sockets.addresses import Address, call
from mpidist.errors import LauncherError

NAME = "mpidist-join.json"
FORMAT = 1
# The time limit of a call that tests whether a chief is alive.
_CALL_SECONDS = 2.0
_MAX_BYTES = 1 << 20


class JoinFile(NamedTuple):
    """The content of the file.

    Attributes:
        version: The version of mpidist.
        host: The name of the chief's host, for display.
        process: The number of the chief's process, for display.
        rank: The rank of the chief.
        address: The address at which the chief waits.
        secret: The secret of the window.
        silence_seconds: The time without data after which a host of the job counts as lost.
        ports: See `WindowOptions`.
    """

    version: str
    host: str
    process: int
    rank: int
    address: Address
    secret: bytes
    silence_seconds: float
    ports: tuple[int, int] | None


class WrittenFile:
    """Local. The file of a running job.

    Args:
        directory: The directory of the file; made where it is missing.
        content: The content of the file.
        here: The address of a rank on this host, to call another job's chief from.

    Raises:
        OSError: The file cannot be written; the directory is another user's, or others may write there; or the job of
            an existing file is still running.
    """

    def __init__(self, directory: Path, content: JoinFile, here: Address) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(directory)
        self.path = directory / NAME
        with contextlib.suppress(LauncherError):
            _require_ended(self.path, read(directory), here)
        whole = {
            "format": FORMAT, **content._asdict(), "address": content.address.to_json(), "secret": content.secret.hex(),
        }
        # A reader gets all of it or none.
        temporary = self.path.with_name(f".{NAME}.{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                # Whatever the umask is.
                os.fchmod(file.fileno(), 0o600)
                json.dump(whole, file)
                self._inode = os.fstat(file.fileno()).st_ino
            temporary.replace(self.path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        """Local. Remove the file, unless another job's is there now."""
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()


def read(directory: Path) -> JoinFile:
    """Local. Read the file of a job.

    Args:
        directory: The directory of the file.

    Raises:
        LauncherError: There is no such file, others may read it, or its content is unknown to this version.
    """
    path = directory / NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise LauncherError(
            f"no job waits for workers in {directory}: {NAME} does not exist. A job writes it where its program has "
            f"ParameterServerStrategy(join_directory={str(directory)!r}), and removes it at its end"
        ) from None
    except OSError as error:
        raise LauncherError(f"{path} cannot be read: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise LauncherError(
                f"{path} must be a file of user {os.geteuid()} that nobody else may read or write, mode 600, got one "
                f"of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}: its author could run code here. "
                "Let the job rewrite it"
            )
        data = file.read(_MAX_BYTES)
    return _parse(path, data)


def _parse(path: Path, data: bytes) -> JoinFile:
    try:
        given: dict[str, Any] = json.loads(data)
        number = given.pop("format")
        if number != FORMAT:
            raise LauncherError(
                f"{path} has format {number!r}, and this mpidist reads format {FORMAT}: start the worker with the "
                "job's version of mpidist"
            )
        ports = given["ports"]
        return JoinFile(**{
            **given, "address": Address.from_json(given["address"]), "secret": bytes.fromhex(given["secret"]),
            "ports": None if ports is None else tuple(ports),
        })
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise LauncherError(f"{path} is no file of a job that waits for workers: {error!r}") from None


def connect(directory: Path, found: JoinFile, here: Address) -> socket.socket:
    """Local. A connection to the chief of a job.

    Args:
        directory: The directory of the file, for the text.
        found: The content of the file.
        here: The address of this process.

    Raises:
        LauncherError: The chief is not running any more, or cannot be reached.
    """
    try:
        return call(found.address, here, _CALL_SECONDS)
    except OSError as error:
        has_ended = isinstance(error, ConnectionRefusedError)
        why = "has ended" if has_ended else f"cannot be reached from {socket.gethostname()} ({error})"
        raise LauncherError(
            f"the job of {directory / NAME} {why}; its chief was process {found.process} on {found.host}. Restart the "
            "job, which rewrites the file, or remove it"
        ) from None


def _require_own(directory: Path) -> None:
    found = directory.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"`join_directory` must be a directory of user {os.geteuid()} in which nobody else may write, since its "
            f"file tells new workers which job to trust; {directory} is user {found.st_uid}'s, with mode "
            f"{stat.S_IMODE(found.st_mode):o}. Give one of its own, or chmod go-w"
        )


def _require_ended(path: Path, other: JoinFile, here: Address) -> None:
    try:
        call(other.address, here, _CALL_SECONDS).close()
    except OSError:
        return
    raise FileExistsError(
        f"{path} belongs to a running job, whose chief is process {other.process} on {other.host}: give each job a "
        "`join_directory` of its own"
    )
