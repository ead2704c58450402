"""Checkpoints read without the program that wrote them, without MPI, on any rank alone."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from mpidist.checkpoint.directory.latest import latest_checkpoint
from mpidist.checkpoint.directory.state import as_path, file_of, require_file
from mpidist.checkpoint.file.hdf5 import read_contents
from mpidist.checkpoint.file.metadata import decode_metadata
from mpidist.checkpoint.file.saved import SavedArray, SavedFile, arrays_in
from mpidist.checkpoint.transfer import verify as verify_arrays
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import DamagedCheckpointError

Path = str | os.PathLike[str]


def load_checkpoint(path: Path) -> CheckpointReader:
    """Local. Open a checkpoint to look at it, without the program that wrote it.

    Args:
        path: The file, or a directory, of which the latest checkpoint is taken.

    Returns:
        The reader.

    Raises:
        FileNotFoundError: There is no such file, or the directory has no checkpoint.
        DamagedCheckpointError: It is no complete checkpoint, or the directory's state file is damaged.
        CheckpointError: A later version of mpidist wrote it.
    """
    name = as_path("path", path)
    if os.path.isdir(name):
        latest = latest_checkpoint(name)
        if latest is None:
            raise FileNotFoundError(f"the directory {name!r} has no checkpoint, or no state file that names one")
        return CheckpointReader(latest)
    return CheckpointReader(name)


def list_variables(path: Path) -> list[tuple[str, list[int]]]:
    """Local. List what a checkpoint holds; only its structure is read.

    Args:
        path: See `load_checkpoint`.

    Returns:
        The path and the shape of every array, in the order of paths.

    Raises:
        FileNotFoundError, DamagedCheckpointError, CheckpointError: See `load_checkpoint`.
    """
    return sorted(load_checkpoint(path).get_variable_to_shape_map().items())


def load_variable(path: Path, name: str) -> Any:
    """Local. Read one value of a checkpoint, compared with its checksums.

    Args:
        path: See `load_checkpoint`.
        name: The value's path in the checkpoint, as `list_variables` gives it.

    Returns:
        The value; see `CheckpointReader.get_tensor`.

    Raises:
        FileNotFoundError, DamagedCheckpointError, CheckpointError: See `load_checkpoint`.
        KeyError: There is no such value.
    """
    return load_checkpoint(path).get_tensor(name)


def verify(path: Path) -> int:
    """Local. Read a whole checkpoint and compare all of it with its checksums.

    Args:
        path: See `load_checkpoint`.

    Returns:
        The number of bytes of its arrays.

    Raises:
        FileNotFoundError, CheckpointError: See `load_checkpoint`.
        DamagedCheckpointError: It is damaged; the message names the array.
    """
    return load_checkpoint(path).verify()


class CheckpointReader:
    """Local. The content of a checkpoint, by path. Use `load_checkpoint`.

    The file stays open until the reader is deleted.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        name = file_of(path)
        require_file(name)
        self._file = SavedFile(read_contents(name))

    @property
    def path(self) -> str:
        """Local. The file."""
        return self._file.contents.path

    @property
    def format(self) -> int:
        """Local. The number of the file's format; see docs/checkpoint-format.md."""
        return self._file.contents.format

    @property
    def arrays(self) -> dict[str, SavedArray]:
        """Local. The arrays by path, not read yet."""
        return self._file.arrays

    @property
    def shared(self) -> dict[str, str]:
        """Local. The further paths of objects with several paths, each with the one under which it is stored."""
        return self._file.contents.shared

    @property
    def metadata(self) -> dict[str, Any]:
        """Local. The program's notes; empty where it has written none.

        Raises:
            DamagedCheckpointError: They are damaged.
        """
        note = self._file.metadata
        if note is None:
            return {}
        verify_arrays(SoloCommunicator(), self._file, {note.name})
        try:
            return decode_metadata(str(note))
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{self.path!r}: {error}") from None

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Local. The shape of every array, by path."""
        return {name: list(array.shape) for name, array in self.arrays.items()}

    def get_variable_to_dtype_map(self) -> dict[str, np.dtype[Any]]:
        """Local. The dtype of every array, by path; that of bytes and of None is uint8, of texts a byte string's."""
        return {name: array.dtype for name, array in self.arrays.items()}

    def has_tensor(self, name: str) -> bool:
        """Local. Whether one value is stored at a path; it may lead through shared objects."""
        return isinstance(self._file.find(name), SavedArray)

    def get_tensor(self, name: str) -> Any:
        """Local. Read a value, compared with its checksums.

        Args:
            name: Its path.

        Returns:
            A new array, a NumPy number, a string, bytes or None; of a variable with one value for each replica an array
            with the replicas as its first dimension.

        Raises:
            KeyError: There is no value at this path.
            DamagedCheckpointError: It is damaged.
        """
        found = self._file.find(name)
        if not isinstance(found, SavedArray):
            below = [array.name for array in arrays_in(found)][:8] if found else []
            there = f"below that path are {', '.join(map(repr, below))}" if below else (
                f"mpidist.list_variables({self.path!r}) lists its values"
            )
            raise KeyError(f"{self.path!r} has no value {name!r}; {there}")
        verify_arrays(SoloCommunicator(), self._file, {found.name})
        return found.value()

    def verify(self) -> int:
        """Local. Compare everything with its checksums; see `mpidist.checkpoint.verify`."""
        names = [record.path for record in self._file.contents.records]
        verify_arrays(SoloCommunicator(), self._file, names)
        return sum(record.nbytes for record in self._file.contents.records)

    def checksums(self) -> dict[str, tuple[int, ...]]:
        """Local. The checksums of every array, by path, as the file has them: nothing is read."""
        contents = self._file.contents
        sums, first = {}, 0
        for record in contents.records:
            sums[record.path] = tuple(contents.checksums[first : first + record.piece_count])
            first += record.piece_count
        return sums

    def __repr__(self) -> str:
        return f"<CheckpointReader {self.path!r} of {len(self.arrays)} arrays>"
