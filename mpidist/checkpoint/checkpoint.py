"""The checkpoint: named objects that are saved to one HDF5 file and restored from it, on any number of ranks."""

from __future__ import annotations

import logging
import os
import time
import zlib
from typing import Any, cast

import numpy as np

from mpidist import launch
from mpidist.arrays import AnyArray
from mpidist.checkpoint import hdf5
from mpidist.checkpoint.directory import CheckpointEntry, DirectoryState, file_of, require_file, write_state
from mpidist.checkpoint.layout import SAVE_COUNTER, Record
from mpidist.checkpoint.objects import Found, Leaf, can_hold_variables, require_same_objects, walk
from mpidist.checkpoint.restoring import Status
from mpidist.checkpoint.saved import SavedFile
from mpidist.checkpoint.transfer import ArrayToWrite, write_checkpoint
from mpidist.comm.agreement import together
from mpidist.comm.communicator import Communicator
from mpidist.variables.variable import Variable

logger = logging.getLogger("mpidist")

Path = str | os.PathLike[str]

_OWN_ATTRIBUTES = {"_pending", "_root", "_save_counter"}
_has_warned: list[bool] = []


class Checkpoint:
    """Objects that are saved and restored together.

    Local. The keyword arguments become attributes, and everything reachable from them through attributes, lists,
    tuples and dictionaries is saved: variables, and objects with `state` and `load_state` (optimizers, metrics,
    iterators). Each variable is one dataset of the file, of its full shape, under its attribute path: in
    `Checkpoint(model=model)`, `model/layers/0/kernel` is `model.layers[0].kernel`.

    Saving and restoring are collective over the ranks over which the variables span, or the distributed iterators
    where there are no such variables. Where every rank has variables of its own (no strategy, or `OneDeviceStrategy`,
    under several ranks), rank 0 alone writes, and says so.

    A variable of which every replica has a value of its own (ON_READ with aggregation NONE) is a dataset with the
    replicas as its first dimension. Restored by m replicas after n saved, replica r takes component r % n.

    Args:
        root: Its attributes are saved without a name before them.
        **objects: What to save, by name.

    Raises:
        ValueError: Something that cannot hold variables, a name that is a method's, or one that `root` has with
            another value.
    """

    def __init__(self, root: object = None, **objects: Any) -> None:
        if root is not None and not can_hold_variables(root):
            raise ValueError(f"`Checkpoint` was expecting root to be an object with variables, got {root!r}")
        self._pending: Status | None = None
        self._root = root
        self._save_counter = 0
        for name, value in objects.items():
            if not can_hold_variables(value):
                raise ValueError(
                    f"`Checkpoint` was expecting {name} to be a variable or an object that holds variables, got "
                    f"{value!r} of type {type(value).__name__}. Make it a variable: mpidist.Variable({value!r})"
                )
            if name in dir(self):
                raise ValueError(f"{name!r} is a name of Checkpoint itself; give the object another one")
            attributes = root if isinstance(root, dict) else getattr(root, "__dict__", {})
            if attributes.get(name, value) is not value:
                raise ValueError(f"{name!r} is also an attribute of root, with another value; leave one of them out")
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this Checkpoint has no object {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name not in _OWN_ATTRIBUTES and self._pending is not None:
            self._pending.attribute_set(value)

    @property
    def save_counter(self) -> int:
        """Local. How often was saved, in this program and before the restored checkpoint."""
        return self._save_counter

    @property
    def communicator(self) -> Communicator:
        """Local. The ranks that save and restore together: those over which the variables, or iterators, span."""
        return self._walk().group()

    def save(self, file_prefix: Path) -> str:
        """Collective. Save to the next numbered file and make it the directory's latest.

        Args:
            file_prefix: Of the file's path; a missing directory is made.

        Returns:
            The path, `file_prefix-N.h5`.

        Raises:
            OSError: On every rank, if any rank cannot write. What was saved before is untouched.
            CheckpointError: Values of an earlier `restore` still wait for an object; see `Status`.
            MismatchError: The ranks hold different objects.
            ValueError: Variables of several strategies, or a state that cannot be stored.
        """
        path = self.save_as(f"{os.fspath(file_prefix)}-{self._save_counter + 1}")
        directory, name = os.path.split(path)
        now = time.time()
        state = DirectoryState((CheckpointEntry(name, now),), now)
        communicator = self.communicator
        together(
            communicator, f"writing the state file of {directory!r}",
            lambda: write_state(directory, state) if is_writer(communicator) else None,
        )
        return path

    def save_as(self, path: Path) -> str:
        """Collective. Count a save and write it to a file of any name, without making it the directory's latest.

        Args:
            path: Of the file; `.h5` is added where it is missing.

        Returns:
            The path.

        Raises:
            OSError, CheckpointError, MismatchError, ValueError: As `save`.
        """
        self._write(file_of(path), self._save_counter + 1)
        self._save_counter += 1
        return file_of(path)

    def write(self, path: Path) -> str:
        """Collective. Write to a file, without counting; `read` is its counterpart.

        Args:
            path: Of the file; `.h5` is added where it is missing.

        Returns:
            The path.

        Raises:
            OSError, CheckpointError, MismatchError, ValueError: As `save`.
        """
        self._write(file_of(path), None)
        return file_of(path)

    def restore(self, path: Path | None) -> Status:
        """Collective. Bring the objects back to what `save` saved, on any number of ranks.

        What does not exist yet is restored when it comes; `Status` says when.

        Args:
            path: What `save` gave, or `latest_checkpoint`; None restores nothing.

        Returns:
            The status, whose `assert_consumed()` says whether everything found its place.

        Raises:
            FileNotFoundError: On every rank; lists the checkpoints that are there.
            CheckpointError: On every rank: no whole checkpoint, or shapes or dtypes that do not fit. Nothing was
                overwritten.
        """
        status, counter = self._restore(path, with_counter=True)
        if counter is not None:
            self._save_counter = counter
        return status

    def read(self, path: Path) -> Status:
        """Collective. The same as `restore` for what `write` wrote; `save_counter` stays as it is."""
        return self._restore(path, with_counter=False)[0]

    @property
    def pending(self) -> Status | None:
        """Local. The status of the last restore while some of its values wait for their objects, else None."""
        if self._pending is not None:
            self._keep_pending(self._pending)
        return self._pending

    def require_restored(self) -> None:
        """Local. Raise where restored values still wait for an object that is there; `save` and `write` begin with it.

        Raises:
            CheckpointError: See `Status.require_restored`.
        """
        if self.pending is not None:
            self.pending.require_restored()

    def _keep_pending(self, status: Status) -> None:
        # It keeps the file open.
        self._pending = status if status.waits else None

    def _walk(self) -> Found:
        named = sorted((name, value) for name, value in vars(self).items() if name not in _OWN_ATTRIBUTES)
        roots: list[tuple[tuple[object, ...], object]] = [((name,), value) for name, value in named]
        return walk(roots if self._root is None else [((), self._root), *roots])

    def _write(self, path: str, counter: int | None) -> None:
        self.require_restored()
        found = self._walk()
        communicator = found.group()
        if _is_bystander(communicator):
            return
        sources, lines = together(
            communicator, f"listing what checkpoint {path!r} holds", lambda: _sources(found, communicator, counter)
        )
        require_same_objects(communicator, lines)
        write_checkpoint(communicator, path, sources, found.shared)

    def _restore(self, path: Path | None, *, with_counter: bool) -> tuple[Status, int | None]:
        if self._pending is not None:
            self._pending.end_waiting()
            self._pending = None
        if path is None:
            return Status(self._walk, None, with_counter=with_counter), None
        name = file_of(path)
        communicator = self.communicator
        is_root = communicator.rank == 0
        looked = together(communicator, f"reading checkpoint {name!r}", lambda: _look_into(name) if is_root else None)
        contents = cast(hdf5.Contents, communicator.broadcast_object(looked))
        file = together(communicator, f"opening checkpoint {name!r}", lambda: SavedFile(contents))
        status = Status(self._walk, file, with_counter=with_counter).restore_new()
        self._keep_pending(status)
        counter = file.find(SAVE_COUNTER)
        return status, None if counter is None else int(counter.numpy())


def is_writer(communicator: Communicator) -> bool:
    """Local. Whether this rank looks after the directory, for all ranks that save together, or that save alike."""
    return communicator.rank == 0 and not _is_bystander(communicator)


def _look_into(path: str) -> hdf5.Contents:
    require_file(path)
    return hdf5.read_contents(path)


def _is_bystander(communicator: Communicator) -> bool:
    """Whether this rank has the objects for itself, while another such rank of the job writes."""
    if communicator.size > 1 or launch.world_size() == 1:
        return False
    if launch.world_rank() == 0:
        if not _has_warned:
            _has_warned.append(True)
            logger.warning(
                "each of the %d ranks has variables of its own, so only rank 0 writes checkpoints. To train one model "
                "on all ranks, create the variables in the scope of a distributed strategy", launch.world_size()
            )
        return False
    return True


def _sources(found: Found, communicator: Communicator, counter: int | None) -> tuple[list[ArrayToWrite], list[str]]:
    """What is written, and what the ranks have to agree on about it."""
    leaves: dict[str, Leaf] = dict(found.leaves)
    if counter is not None:
        if SAVE_COUNTER in leaves:
            raise ValueError(f"{SAVE_COUNTER!r} is the checkpoint's own count of saves; rename the attribute of root")
        leaves[SAVE_COUNTER] = np.array(counter, dtype=np.int64)
    sources, lines = [], []
    for path, leaf in leaves.items():
        dtype = leaf.dtype.newbyteorder("=")
        replicas = leaf.group.size if isinstance(leaf, Variable) and leaf.is_per_replica else 0
        record = Record(path, (replicas, *leaf.shape) if replicas else leaf.shape, dtype, replicas)
        line = f"{path!r} of shape {record.shape} and dtype {record.dtype}"
        if isinstance(leaf, Variable) and leaf.group.size == communicator.size:
            sources.append(ArrayToWrite(record, leaf.state, is_component=replicas > 0))
        else:
            # Each rank has its own copy, and each writes some bytes of it: they have to be the same.
            array = (leaf.state() if isinstance(leaf, Variable) else leaf).reshape(record.shape)
            if communicator.size > 1:
                line += f" with the content of checksum {zlib.crc32(np.ascontiguousarray(array).tobytes()):08x}"
            sources.append(ArrayToWrite(record, _constant(array)))
        lines.append(line)
    return sources, lines


def _constant(array: AnyArray) -> Any:
    return lambda: array
