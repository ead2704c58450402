"""The checkpoint: named objects that are saved to one HDF5 file and restored from it, on any number of ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from mpidist.checkpoint.background.save import UNSEEN, BackgroundSave, wait_for_saves
from mpidist.checkpoint.directory.leftovers import remove_leftovers, remove_temporaries
from mpidist.checkpoint.directory.lock import DirectoryLock
from mpidist.checkpoint.directory.state import (
    SUFFIX,
    DirectoryWork,
    as_path,
    begin_state,
    file_of,
    make_latest,
)
from mpidist.checkpoint.file.choice import EVERYTHING, Choice, Rename
from mpidist.checkpoint.file.metadata import decode_metadata, encode_metadata
from mpidist.checkpoint.file.saved import SavedFile
from mpidist.checkpoint.opening import open_together
from mpidist.checkpoint.options import CheckpointOptions, is_in_background
from mpidist.checkpoint.restoring import Status
from mpidist.checkpoint.saves import SaveOrder, Saves
from mpidist.checkpoint.walk.found import Found, NestedCheckpoint, Parts
from mpidist.checkpoint.walk.objects import can_hold_variables, walk
from mpidist.checkpoint.writing import write_objects
from mpidist.comm.calls.text import AT_ONCE, refuse_inside
from mpidist.failures.restart.notes import note
from mpidist.variables.module import WATCHER

Path = str | os.PathLike[str]

_OWN_ATTRIBUTES = {"_pending", "_root", "_saves", WATCHER}


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
    def metadata(self) -> dict[str, Any]:
        """Local. The notes in the checkpoint that was last saved or restored; empty where it has none."""
        return self._saves.metadata

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

    @property
    def saving(self) -> BackgroundSave | None:
        """Local. The save in the background whose end no call has noted yet; None on every rank where there is none."""
        return self._saves.background

    def sync(self) -> None:
        """Collective. Wait until a save in the background is complete; nothing where there is none.

        Raises:
            OSError, CheckpointError: On every rank, if any rank could not write. Earlier checkpoints do not change.
        """
        self._saves.finish()

    def release(self) -> None:
        """Local. Wait for this rank's thread that saves in the background, and give back the memory of the copy."""
        self._saves.finish_here()
        self._saves.memory.release()

    def save(
        self, file_prefix: Path, options: CheckpointOptions | None = None, *,
        metadata: Mapping[str, Any] | None = None, background: bool = False,
    ) -> str:
        """Collective. Save to the next numbered file and make it the directory's latest; failed saves do not count.

        In the background each rank copies its share of the values, and returns: a thread writes the file. The next
        `save`, `write`, `restore`, `read` or `sync` of this checkpoint waits for that and raises its errors, on every
        rank; the end of the program waits, too, and logs them. The copy takes as much memory as the share of the rank,
        kept for the next one; where a host has not enough the save is made in the foreground, with a warning.

        Args:
            file_prefix: Path of the file up to its number; a missing directory is made.
            options: The options of tf.train; `enable_async=True` is `background=True`.
            metadata: Notes of the program's own, which the file keeps as JSON: dictionaries with strings as keys,
                lists, strings, numbers, booleans and None. The same on every rank.
            background: Whether the program continues while a thread writes.

        Returns:
            The path, `file_prefix-N.h5`; in the background there is no such file yet.

        Raises:
            OSError: On every rank, if any rank cannot write. Earlier checkpoints do not change.
            CheckpointError: Values of an earlier `restore` still wait for an object (see `Status`), or that restore
                failed half-way; or another job, or a manager in another process, saves to the directory.
            MismatchError: The ranks hold different objects or metadata, or save to different paths.
            ValueError: The variables are of several strategies, a state cannot be stored, or a plain array or number
                would be lost.
            TypeError: On every rank: JSON cannot hold the metadata.
        """
        in_background = (options is not None or background is not False) and is_in_background(options, background)
        if self._saves.background is not None:
            self._saves.finish()
        count = self._saves.count + 1
        prefix = as_path("file_prefix", file_prefix)
        path = f"{prefix}-{count}{SUFFIX}"
        directory, name = os.path.split(prefix)
        lock = DirectoryLock(directory)
        waits = (partial(wait_for_saves, directory),) if UNSEEN else ()
        before = *waits, lock.acquire, partial(remove_leftovers, directory, name)
        try:
            work = DirectoryWork(before, partial(begin_state, directory), partial(make_latest, path), lock.release)
            self.save_found(self.find_objects(), SaveOrder(path, work, count, metadata, in_background))
        finally:
            if self._saves.background is None:
                lock.release()
        return path

    def save_found(self, found: Found, order: SaveOrder, *, is_once: bool = False) -> float:
        """Collective. Save the objects that `find_objects` has returned; for a manager, which has called it already.

        Args:
            found: The objects, see `find_objects`.
            order: The settings of the save.
            is_once: Whether this is the one save of all groups; see `Home.save_once`.

        Returns:
            The time at which the file was renamed to its name, in seconds since 1970, the same on every rank; 0.0 where
            a thread writes it.

        Raises:
            OSError, CheckpointError, MismatchError, ValueError, TypeError: See `save`.
            RuntimeError: This rank is in the middle of a call, and a signal handler or another thread saves.
        """
        if self._saves.background is not None:
            self._saves.finish()
        if self._pending is not None:
            self._pending.require_restored(found)
        if self._saves.report is not None:
            self._saves.report.log()
        communicator = found.group()
        begin, written = time.monotonic(), cast("float | BackgroundSave", time.time())
        if communicator.order.is_under_way == AT_ONCE:
            refuse_inside("save", communicator.calls.thread)
        if found.is_written_here(communicator):
            save_once = None if is_once else self.save_found
            written = write_objects(communicator, found, order, self._saves, self.find_objects, save_once)
        if isinstance(written, BackgroundSave):
            self._saves.begin(order, written)
        else:
            self._saves.seconds = time.monotonic() - begin
        if order.number is not None:
            self._saves.count = order.number
        # As a restore would give it.
        self._saves.metadata = {} if order.metadata is None else decode_metadata(encode_metadata(order.metadata))
        if isinstance(written, BackgroundSave):
            return 0.0
        if order.ended is not None:
            order.ended(written)
        return written

    def write(
        self, path: Path, options: CheckpointOptions | None = None, *, metadata: Mapping[str, Any] | None = None,
        background: bool = False,
    ) -> str:
        """Collective. Write to a file, without counting; `read` is its counterpart.

        It deletes temporary files that a killed `write` to this file has left. So if two jobs write to one file at the
        same time, one of them gets an error.

        Args:
            path: The file's name; `.h5` is added where it is missing.
            options: See `save`.
            metadata: See `save`.
            background: See `save`.

        Returns:
            The path.

        Raises:
            OSError, CheckpointError, MismatchError, ValueError, TypeError: See `save`.
        """
        name, in_background = file_of(path), is_in_background(options, background)
        work = DirectoryWork((partial(wait_for_saves, os.path.dirname(name)), partial(remove_temporaries, name)))
        self.save_found(self.find_objects(), SaveOrder(name, work, None, metadata, in_background))
        return name

    def restore(
        self, path: Path | None, *, partial: bool = False, rename: Rename | None = None, cast: bool = False,
        only: str | Sequence[str] | None = None,
    ) -> Status:
        """Collective. Restore the values that `save` saved, on any number of ranks.

        Values of objects that do not exist yet wait for them; see `Status`.

        Args:
            path: The path that `save` or `latest_checkpoint` returned; None restores nothing.
            partial: Restore what fits, also of an optimizer's state, and list the rest in one warning (see `Status`).
            rename: A dictionary of paths in the file, each with the path in the program that takes its place; what is
                below moves with it, and of two the longer one counts. Or a function of a path in the file that returns
                one in the program, or None for what is left out. It is also called with paths of objects.
            cast: Convert numbers to the dtypes of the variables: to a smaller floating dtype as `astype` does, and to
                a smaller integer dtype if all values fit. Complex and floating numbers become no integers.
            only: A path in the program, such as "model", or a list of paths: values that are neither there nor below
                stay as they are, and `assert_consumed` ignores them. `save_counter` is restored only if it is named.

        Returns:
            The status, whose `assert_consumed()` raises unless everything was restored.

        Raises:
            FileNotFoundError: On every rank: there is no such file. The message lists the existing checkpoints.
            IsADirectoryError: On every rank: the path is that of a directory.
            MismatchError: The ranks pass different paths.
            DamagedCheckpointError: On every rank: the file is no complete checkpoint, and nothing was overwritten; or a
                block of a file of more than 32 MiB is damaged, and blocks before it were restored. Then nothing is
                saved until a restore succeeds.
            CheckpointError: On every rank: shapes or dtypes do not fit, the file has nothing at a path of `rename` or
                `only`, or the `load_state` of an object has failed on some rank. No variable was overwritten.
            TypeError: On every rank: an argument has a wrong type.
        """
        if path is None:
            self._saves.finish()
            self._end_waiting()
            return Status(self.find_objects, None, self._forget, with_counter=True)
        found = self.find_objects()
        status = self.restore_found(found, path, Choice(partial, rename, cast, only))
        if found.group().rank == 0:
            note("restored", path=file_of(path))
        return status

    def restore_found(self, found: Found, path: Path, choice: Choice = EVERYTHING) -> Status:
        """Collective. Restore the objects that `find_objects` has returned; for a manager. See `restore`."""
        status, counter = self._restore(found, path, choice, with_counter=True)
        if counter is not None:
            self._saves.count = counter
        return status

    def restore_opened(self, found: Found, opened: tuple[SavedFile, int | None, dict[str, Any]]) -> Status:
        """Collective. Do what `restore_found` does from what `open_together` gives; for a manager."""
        self._end_waiting()
        status, counter = self._restore_from(found, opened, with_counter=True)
        if counter is not None:
            self._saves.count = counter
        return status

    def read(
        self, path: Path, *, partial: bool = False, rename: Rename | None = None, cast: bool = False,
        only: str | Sequence[str] | None = None,
    ) -> Status:
        """Collective. Restore what `write` wrote, as `restore` does; `save_counter` stays as it is."""
        choice = Choice(partial, rename, cast, only)
        return self._restore(self.find_objects(), path, choice, with_counter=False)[0]

    def _restore(
        self, found: Found, path: Path, choice: Choice, *, with_counter: bool
    ) -> tuple[Status, int | None]:
        self._saves.finish()
        self._end_waiting()
        name = file_of(path)
        communicator = found.group()
        with found.calls(communicator).during("restore"):
            return self._restore_from(
                found, open_together(communicator, name, choice), with_counter=with_counter
            )

    def _restore_from(
        self, found: Found, opened: tuple[SavedFile, int | None, dict[str, Any]], *, with_counter: bool
    ) -> tuple[Status, int | None]:
        file, count, metadata = opened
        status = Status(self.find_objects, file, self._forget, with_counter=with_counter)
        try:
            status.restore_into(found)
        except BaseException:
            self._pending = status if status.is_torn else None
            raise
        # A pending status keeps the file open.
        self._pending = status if status.waits() else None
        self._saves.metadata, self._saves.report = metadata, status.report if file.choice.partial else None
        return status, count

    def _end_waiting(self) -> None:
        if self._saves.report is not None:
            self._saves.report.log()
        if self._pending is not None:
            self._pending.end_waiting()

    def _forget(self, status: Status) -> None:
        if self._pending is status:
            self._pending = None
