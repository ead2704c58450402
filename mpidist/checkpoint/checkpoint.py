"""The checkpoint: named objects that are saved to one HDF5 file and restored from it, on any number of ranks."""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from typing import Any

from mpidist.checkpoint.directory.leftovers import remove_leftovers, remove_temporaries
from mpidist.checkpoint.directory.lock import DirectoryLock
from mpidist.checkpoint.directory.state import (
    SUFFIX,
    DirectoryWork,
    as_path,
    begin_state,
    file_of,
    make_latest,
    require_file,
)
from mpidist.checkpoint.file import hdf5
from mpidist.checkpoint.file.layout import SAVE_COUNTER
from mpidist.checkpoint.file.saved import SavedArray, SavedFile
from mpidist.checkpoint.restoring import Status, listed
from mpidist.checkpoint.server_snapshot import write_cut
from mpidist.checkpoint.transfer import write_checkpoint
from mpidist.checkpoint.walk.found import Found, NestedCheckpoint, Parts
from mpidist.checkpoint.walk.listing import arrays_to_write, list_together
from mpidist.checkpoint.walk.objects import can_hold_variables, walk
from mpidist.comm.calls.text import AT_ONCE, refuse_inside
from mpidist.comm.group.agreement import on_first_rank, together
from mpidist.errors import CheckpointError, MismatchError, mark_shared
from mpidist.variables.module import WATCHER

logger = logging.getLogger("mpidist")

Path = str | os.PathLike[str]

_OWN_ATTRIBUTES = {"_pending", "_root", "_saves", WATCHER}
_NO_WORK = DirectoryWork()


class Checkpoint(NestedCheckpoint):
    """Local. Objects that are saved and restored together.

    The keyword arguments become attributes. From them a save follows attributes, lists, tuples, deques and
    dictionaries. It stores all variables, all objects with `state` and `load_state` (optimizers, metrics, iterators),
    and the random generators of NumPy and of Python. Plain numbers as attributes are settings, which are not saved;
    `save` warns if one has changed. A writable array is an error of `save`, since training may change it, and so is a
    variable in a set. An array in an attribute of a `Module` whose name begins with `_` counts as a cache: it is not
    saved, and the first save logs that. A checkpoint inside another one is searched like any other object.

    Each variable is one dataset of the file, of its full shape, under its attribute path: in
    `Checkpoint(model=model)`, `model/layers/0/kernel` is `model.layers[0].kernel`.

    The ranks that share the variables save and restore together; if all variables are private to a rank, the ranks that
    share the distributed iterators. Rank 0 of this group manages the directory, even if it is not rank 0 of the job: an
    evaluator saves its own variables. If several ranks run without a common strategy (no strategy, or
    `OneDeviceStrategy`), only the first rank writes, and logs a warning.

    Where every replica has a value of its own (ON_READ with aggregation NONE), the dataset has the replicas as its
    first dimension. If n replicas saved and m restore, replica r takes component r % n.

    Args:
        root: Its attributes are saved without a name before them.
        **objects: The objects to save, by name.

    Raises:
        ValueError: An object cannot hold variables; a name is that of a method, or `root` has it with another value;
            two variables have the same path; or a variable is under a key that is neither string nor integer.
        CheckpointError: A variable has a dtype that HDF5 cannot hold.
    """

    def __init__(self, root: object = None, **objects: Any) -> None:
        if root is not None and not can_hold_variables(root):
            raise ValueError(f"`Checkpoint` was expecting root to be an object with variables, got {root!r}")
        self._pending: Status | None = None
        self._root = root
        self._saves = Saves()
        if root is not None:
            self._saves.begin_with(walk([((), root)], into_states=False))
        for name, value in objects.items():
            if name in dir(self):
                raise ValueError(f"{name!r} is a name of Checkpoint itself; give the object another one")
            attributes = root if isinstance(root, dict) else getattr(root, "__dict__", {})
            if attributes.get(name, value) is not value:
                raise ValueError(f"{name!r} is also an attribute of root, with another value; leave one of them out")
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this Checkpoint has no object {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OWN_ATTRIBUTES and not can_hold_variables(value):
            raise ValueError(
                f"`Checkpoint` was expecting {name} to be a variable or an object that holds variables, got "
                f"{value!r} of type {type(value).__name__}. Make it a variable: mpidist.Variable({value!r})"
            )
        super().__setattr__(name, value)
        if name in _OWN_ATTRIBUTES:
            return
        self._saves.begin_with(walk([((name,), value)], into_states=False))
        if self._pending is not None:
            self._pending.attribute_set(value)
        # Of a checkpoint that holds this one.
        watcher = vars(self).get(WATCHER)
        if watcher is not None:
            watcher.attribute_set(value)

    @property
    def save_counter(self) -> int:
        """Local. Number of saves, in this program and before the restored checkpoint."""
        return self._saves.count

    @property
    def save_seconds(self) -> float | None:
        """Local. The seconds that the last save in this program took on this rank; None before the first one."""
        return self._saves.seconds

    @property
    def pending(self) -> Status | None:
        """Local. The status of the last restore while some of its values wait for their objects, else None.

        It is also that of a restore that failed half-way: then nothing is saved until another restore has succeeded.
        """
        return self._pending

    def find_objects(self) -> Found:
        """Local. Walk over all objects; `save`, `write`, `restore` and `read` each do it once."""
        return walk(self.held_objects())

    def held_objects(self) -> list[tuple[Parts, object]]:
        """Local. The objects with their paths, in the order of names; root first."""
        objects: list[tuple[Parts, object]] = [] if self._root is None else [((), self._root)]
        for name, value in sorted(vars(self).items()):
            if name not in _OWN_ATTRIBUTES:
                objects.append(((name,), value))
        return objects

    def save(self, file_prefix: Path) -> str:
        """Collective. Save to the next numbered file and make it the directory's latest; failed saves do not count.

        Args:
            file_prefix: Path of the file up to its number; a missing directory is made.

        Returns:
            The path, `file_prefix-N.h5`.

        Raises:
            OSError: On every rank, if any rank cannot write. Earlier checkpoints do not change.
            CheckpointError: Values of an earlier `restore` still wait for an object (see `Status`), or that restore
                failed half-way; or another job, or a manager in another process, saves to the directory.
            MismatchError: The ranks hold different objects, or save to different paths.
            ValueError: Variables of several strategies, a state that cannot be stored, or a plain array or number that
                would be lost.
        """
        count = self._saves.count + 1
        prefix = as_path("file_prefix", file_prefix)
        path = f"{prefix}-{count}{SUFFIX}"
        directory, name = os.path.split(prefix)
        lock = DirectoryLock(directory)
        before = lock.acquire, partial(remove_leftovers, directory, name)
        try:
            work = DirectoryWork(before, partial(begin_state, directory), partial(make_latest, path))
            self.save_found(self.find_objects(), path, work, count)
        finally:
            lock.release()
        return path

    def save_found(
        self, found: Found, path: str, work: DirectoryWork = _NO_WORK, count: int | None = None, *,
        is_once: bool = False,
    ) -> float:
        """Collective. Save the objects that `find_objects` has returned; for a manager, which has called it already.

        Args:
            found: The objects, see `find_objects`.
            path: The file's name.
            work: Rank 0's work in the directory before and after.
            count: The number of saves with this one, which is part of the file; None does not count it.
            is_once: Whether this is the one save of all groups; see `Home.save_once`.

        Returns:
            The time at which the file was renamed to its name, in seconds since 1970; the same on every rank.

        Raises:
            OSError, CheckpointError, MismatchError, ValueError: See `save`.
            RuntimeError: This rank is in the middle of a call, and a signal handler or another thread saves.
        """
        if self._pending is not None:
            self._pending.require_restored(found)
        communicator = found.group()
        saved_at, begin = time.time(), time.monotonic()
        if communicator.order.is_under_way == AT_ONCE:
            refuse_inside("save", communicator.calls.thread)
        if found.is_written_here(communicator):
            # Only a chief has it.
            servers = found.servers() if communicator.size == 1 else None
            variable = found.variable(communicator)
            with (communicator.calls if variable is None else variable.calls).during("save"):
                if variable is not None and variable.home.saves_once and not is_once:
                    write = partial(self.save_found, found, path, work, count, is_once=True)
                    saved_at = variable.home.save_once(write)
                elif servers is not None:
                    saved_at = write_cut(servers, path, self.find_objects, count, work)
                else:
                    listing = partial(arrays_to_write, found, communicator, count)
                    arrays = list_together(communicator, f"listing what checkpoint {path!r} holds", listing, path)
                    saved_at = write_checkpoint(communicator, path, arrays, found.shared, work)
                communicator.order.last_checkpoint = path
            if communicator.rank == 0 and not is_once:
                self._saves.warn(found, path)
        if count is not None:
            self._saves.count = count
        self._saves.seconds = time.monotonic() - begin
        return saved_at

    def write(self, path: Path) -> str:
        """Collective. Write to a file, without counting; `read` is its counterpart.

        It deletes temporary files that a killed `write` to this file has left. So if two jobs write to one file at the
        same time, one of them gets an error.

        Args:
            path: The file's name; `.h5` is added where it is missing.

        Returns:
            The path.

        Raises:
            OSError, CheckpointError, MismatchError, ValueError: See `save`.
        """
        name = file_of(path)
        self.save_found(self.find_objects(), name, DirectoryWork((partial(remove_temporaries, name),)))
        return name

    def restore(self, path: Path | None) -> Status:
        """Collective. Restore the values that `save` saved, on any number of ranks.

        Values of objects that do not exist yet wait for them; see `Status`.

        Args:
            path: The path that `save` or `latest_checkpoint` returned; None restores nothing.

        Returns:
            The status, whose `assert_consumed()` raises unless everything was restored.

        Raises:
            FileNotFoundError: On every rank: there is no such file. The message lists the existing checkpoints.
            IsADirectoryError: On every rank: the path is that of a directory.
            MismatchError: The ranks pass different paths.
            DamagedCheckpointError: On every rank: the file is no complete checkpoint. Nothing was overwritten.
            CheckpointError: On every rank: shapes or dtypes do not fit, or the `load_state` of an object has failed on
                some rank. No variable was overwritten.
        """
        if path is None:
            self._end_waiting()
            return Status(self.find_objects, None, self._forget, with_counter=True)
        return self.restore_found(self.find_objects(), path)

    def restore_found(self, found: Found, path: Path) -> Status:
        """Collective. Restore the objects that `find_objects` has returned; for a manager. See `restore`."""
        status, counter = self._restore(found, path, with_counter=True)
        if counter is not None:
            self._saves.count = counter
        return status

    def read(self, path: Path) -> Status:
        """Collective. Restore what `write` wrote, as `restore` does; `save_counter` stays as it is."""
        return self._restore(self.find_objects(), path, with_counter=False)[0]

    def _restore(self, found: Found, path: Path, *, with_counter: bool) -> tuple[Status, int | None]:
        self._end_waiting()
        name = file_of(path)
        communicator = found.group()
        with found.calls(communicator).during("restore"):
            contents = on_first_rank(communicator, f"reading checkpoint {name!r}", lambda: _look_into(name))
            file = together(communicator, f"opening checkpoint {name!r}", lambda: _open(contents, name))
            counter = file.find(SAVE_COUNTER)
            is_number = isinstance(counter, SavedArray) and (counter.shape, counter.dtype.kind) == ((), "i")
            if counter is not None and not is_number:
                raise mark_shared(CheckpointError(
                    f"{name!r}: expected {SAVE_COUNTER!r} to be one integer, got {counter!r}; the file was not written "
                    "by `save`"
                ))
            count = together(
                communicator, f"reading {SAVE_COUNTER!r} of {name!r}", lambda: None if counter is None else int(counter)
            )
            status = Status(self.find_objects, file, self._forget, with_counter=with_counter)
            try:
                status.restore_into(found)
            except BaseException:
                self._pending = status if status.is_torn else None
                raise
        # A pending status keeps the file open.
        self._pending = status if status.waits() else None
        return status, count

    def _end_waiting(self) -> None:
        if self._pending is not None:
            self._pending.end_waiting()

    def _forget(self, status: Status) -> None:
        if self._pending is status:
            self._pending = None


def _look_into(path: str) -> hdf5.Contents:
    require_file(path)
    try:
        return hdf5.read_contents(path)
    except FileNotFoundError:
        # Deleted in between.
        require_file(path)
        raise


def _open(contents: hdf5.Contents, name: str) -> SavedFile:
    if contents.path != name:
        raise MismatchError(
            f"the path of a checkpoint must be the same on all ranks, got {contents.path!r} on rank 0 and {name!r}. "
            "Pass the same path on all ranks"
        )
    return SavedFile(contents)


class Saves:
    """Saves of a `Checkpoint`, as it remembers them.

    Attributes:
        count: Their number, in this program and before the restored checkpoint.
        seconds: The duration of the last save on this rank; None before the first one of this program.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds: float | None = None
        # By path, as they were when a walk first found them; None where a warning has named them.
        self._numbers: dict[str, tuple[object, ...] | None] = {}
        self._told_caches = False

    def begin_with(self, found: Found) -> None:
        """Local. Note the plain numbers of objects that the checkpoint gets."""
        self._numbers.update(found.numbers)

    def warn(self, found: Found, path: str) -> None:
        """Local. Warn of what a save has left out though the program may need it.

        Args:
            found: The objects that were saved.
            path: The path of the file.
        """
        if found.caches and not self._told_caches:
            self._told_caches = True
            logger.warning(
                "checkpoint %r does not hold %s: arrays in attributes of modules that begin with `_` count as caches",
                path, listed(found.caches),
            )
        changed = []
        for name, numbers in found.numbers.items():
            if self._numbers.setdefault(name, numbers) not in (numbers, None):
                self._numbers[name] = None
                changed.append(name)
        if changed:
            logger.warning(
                "checkpoint %r does not hold %s: plain numbers, which have changed since the Checkpoint was made. Make "
                "each number that must be restored a mpidist.Variable, or give its object `state` and `load_state`",
                path, listed(sorted(changed)),
            )
