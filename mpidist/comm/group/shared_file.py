"""Shared files: a file that one process makes and other processes of its node open.

The file has no name where the system allows that (`O_TMPFILE`, `man 2 open`), and the others open it through the
process that has made it: no file is left, whenever a kill comes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path
from typing import NamedTuple

DIRECTORY_VARIABLE = "MPIDIST_SHARED_MEMORY"
# A strategy has fewer open at a time: memory, pages, modules and settings that are read.
_LEAST_DESCRIPTORS = 16

# The answers of file systems and kernels that have no files without a name.
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


def directory() -> Path:
    """Local. The directory in which node memory is made: /dev/shm, or the one that `MPIDIST_SHARED_MEMORY` names."""
    return Path(os.environ.get(DIRECTORY_VARIABLE, "") or "/dev/shm")


def require_directory() -> None:
    """Local. Raise OSError if `MPIDIST_SHARED_MEMORY` names a directory in which no file can be made."""
    if not os.environ.get(DIRECTORY_VARIABLE):
        return
    try:
        SharedFile(directory()).close()
    except OSError as error:
        raise OSError(
            error.errno,
            f"{DIRECTORY_VARIABLE} must name a directory in memory (tmpfs) in which this user can create files, got "
            f"{directory()}: {error.strerror}. Make it, or leave the variable out to use /dev/shm",
        ) from error


class Shown(NamedTuple):
    """The address of a file for other processes.

    Attributes:
        name: The name of the file in its folder; empty if it has none.
        through: The descriptor of the process that has made it.
        identity: Device and inode. In another container another process may have the same number.
    """

    name: str
    through: str
    identity: tuple[int, int]


class SharedFile:
    """A new empty file, open for reading and writing. `close` also removes its name.

    Args:
        folder: The directory of the file; None for memory without one (`man 2 memfd_create`).
        has_name: Whether it has to have a name; it has one if no other address is possible.

    Attributes:
        descriptor: The descriptor of the open file.
        shown: The address for `open_shared` in other processes, as long as this process has not called `close`.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, folder: Path | None, *, has_name: bool = False) -> None:
        self._path: Path | None = None
        if folder is None:
            self.descriptor = os.memfd_create("mpidist")
        else:
            self.descriptor = -1 if has_name else _open_nameless(folder)
        if folder is not None and self.descriptor < 0:
            self._path = folder / f"mpidist-{os.urandom(8).hex()}"
            # Exclusive: never a file or a link that another user has put into a directory to which all may write.
            self.descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        status = os.fstat(self.descriptor)
        through = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        self.shown = Shown(self._path.name if self._path else "", through, (status.st_dev, status.st_ino))

    def close(self) -> None:
        """Local. Close the file; processes that have it open keep it."""
        os.close(self.descriptor)
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


def descriptors_missing() -> str:
    """Local. The reason why this process cannot open as many files as a strategy needs; empty if it can."""
    opened: list[int] = []
    try:
        while len(opened) < _LEAST_DESCRIPTORS:
            opened.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return (
            f"expected {_LEAST_DESCRIPTORS} descriptors for files, got {len(opened)}: {error.strerror}. Close files, "
            "or raise the limit (ulimit -n)"
        )
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return ""


def open_shared(shown: Shown, folder: Path | None) -> int:
    """Local. Open a file that another process of this node has made.

    Args:
        shown: The address that the process has sent.
        folder: The directory of a file with a name, None where it has none.

    Returns:
        A descriptor for reading and writing.

    Raises:
        OSError: It cannot be opened; FileNotFoundError if it is another file here.
    """
    descriptor = os.open(folder / shown.name if folder and shown.name else shown.through, os.O_RDWR)
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) != shown.identity:
        os.close(descriptor)
        raise FileNotFoundError(
            errno.ENOENT, f"{shown.name or shown.through} is a different file here than on the rank that created it "
            "(different containers?)"
        )
    return descriptor


def map_to_the_end(descriptor: int, size: int) -> memoryview:
    """Local. The memory of a shared file, mapped until this process ends.

    Not by `mmap`, which keeps a descriptor for each mapping: with a page of each of 256 ranks the usual limit of 1,024
    comes near.

    Args:
        descriptor: The descriptor of the file, which is not needed any more afterwards.
        size: The number of bytes.

    Raises:
        OSError: It cannot be mapped, or is shorter.
    """
    if os.fstat(descriptor).st_size < size:
        raise OSError(errno.EINVAL, f"expected a file of {size} bytes, got {os.fstat(descriptor).st_size}")
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong
    )
    address = library.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def _open_nameless(folder: Path) -> int:
    """A descriptor, -1 where files have names."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return -1
        raise


def ways() -> tuple[tuple[Path | None, bool], ...]:
    """Local. The arguments of `SharedFile` by which ranks may share memory, the best first."""
    # The last one needs no directory: where none can be written to, variables are private, and nodes are still nodes.
    return (directory(), False), (directory(), True), (None, False)


def can_open(shown: Shown | None, folder: Path | None) -> bool:
    """Local. Whether this process can open the file that another one has made; None if that one could make none."""
    if shown is None:
        return False
    try:
        os.close(open_shared(shown, folder))
    except OSError:
        return False
    return True
