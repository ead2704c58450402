"""The snapshot of a checkpoint on a server: its state after one commit is saved, while later commits change it.

Variables are saved block by block. A commit that changes a block which is not saved yet copies it first. When the
copies have reached their limit it waits, and so do later ones, until enough is saved.
"""

from __future__ import annotations

import pickle
import threading
import traceback
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.parameter_server.heap.dense import HeapVariable
from mpidist.parameter_server.protocol.messages import SnapshotDone
from mpidist.parameter_server.protocol.sent_errors import portable
from mpidist.parameter_server.server.staging import Action, Apply, ApplyRound, Save
from mpidist.variables.variable import Read


class ElementRange(NamedTuple):
    """The elements [low, high) of a flattened variable."""

    variable: int
    low: int
    high: int


class TableRows(NamedTuple):
    """Some rows of a table.

    Attributes:
        variable: The number of the table.
        starts: The first elements of the rows in the flattened table, increasing.
        width: The number of elements of a row, 1 at least.
    """

    variable: int
    starts: Sequence[int]
    width: int

    def touch(self, block: ElementRange) -> bool:
        """Local. Whether one of the rows has elements in a block."""
        if block.variable != self.variable:
            return False
        return bisect_left(self.starts, block.high) > bisect_right(self.starts, block.low - self.width)


class SavedShare(Protocol):
    """The part of a snapshot that one server saves. It comes from the coordinator by pickle."""

    def blocks(self) -> Mapping[ElementRange, int]:
        """Local. The arrays that will be read, with their numbers of bytes, in that order."""
        ...

    def write(self, read: Callable[[int], Read]) -> Any:
        """Local. Save it.

        Args:
            read: A function of the number of a variable that returns a reader of its blocks, each of them once.

        Returns:
            The answer to the coordinator, picklable.
        """
        ...


class Ready(NamedTuple):
    """The next action.

    Attributes:
        action: The action.
        copies: The blocks to be copied before it, in the same moment.
    """

    action: Action
    copies: Sequence[ElementRange]


@dataclass
class Unsaved:
    """The rest of a snapshot that is to be saved, and the actions that wait for that. A pure state machine.

    Args:
        limit: The largest number of bytes of copies.

    Attributes:
        live: The blocks that are neither saved nor copied, with their bytes.
        copied: The blocks that are copied and not saved.
        waiting: The actions that are not done, in order.
    """

    limit: int
    live: dict[ElementRange, int] = field(default_factory=dict)
    copied: dict[ElementRange, int] = field(default_factory=dict)
    waiting: list[Action] = field(default_factory=list)

    def begin(self, blocks: Mapping[ElementRange, int]) -> None:
        """Local. Save the state of this moment.

        Args:
            blocks: See `SavedShare.blocks`.

        Raises:
            RuntimeError: The previous snapshot is not saved yet.
        """
        if self.live or self.copied:
            left = len(self.live) + len(self.copied)
            raise RuntimeError(f"a snapshot begins while {left} blocks of another one are not saved")
        self.live.update(blocks)

    def add(self, actions: Iterable[Action]) -> None:
        """Local. Append actions to those that wait."""
        self.waiting += actions

    def next(self, changed_by: Callable[[Apply | ApplyRound], Collection[int | TableRows]]) -> Ready | None:
        """Local. Take the first of the waiting actions; None if there is none, or if it has to wait.

        Args:
            changed_by: The numbers of the variables that an update changes; of tables the rows.
        """
        if not self.waiting:
            return None
        action, copies = self.waiting[0], []
        if isinstance(action, Apply | ApplyRound) and self.live:
            changed = changed_by(action)
            rows = [one for one in changed if isinstance(one, TableRows)]
            copies = [
                block for block in self.live if block.variable in changed or any(one.touch(block) for one in rows)
            ]
            if copies and sum(self.copied.values()) + sum(map(self.live.__getitem__, copies)) > self.limit:
                return None
            self.copied.update({block: self.live.pop(block) for block in copies})
        del self.waiting[0]
        return Ready(action, copies)

    def saved(self, block: ElementRange) -> None:
        """Local. Note that a block is saved: actions that wait for it may continue."""
        self.live.pop(block, None)
        self.copied.pop(block, None)

    def end(self) -> None:
        """Local. End the snapshot: nothing more is to be saved."""
        self.live.clear()
        self.copied.clear()


class Saver:
    """Local. Saves a snapshot in a thread of its own.

    Args:
        save: The values to save.
        variables: The variables of this server, by number.
        unsaved: The state of this server; no other code uses it before `done`.

    Attributes:
        done: The message to the coordinator, when the snapshot is saved; None before.
    """

    def __init__(self, save: Save, variables: Mapping[int, HeapVariable], unsaved: Unsaved) -> None:
        self.done: SnapshotDone | None = None
        self._number = save.number
        self._unsaved = unsaved
        self._lock = threading.Lock()
        self._live: dict[int, AnyArray] = {}
        self._copies: dict[ElementRange, AnyArray] = {}
        try:
            share: SavedShare | None = pickle.loads(save.share) if save.share else None
            blocks = {} if share is None else share.blocks()
            for block in blocks:
                self._live[block.variable] = variables[block.variable].current
        except Exception as error:  # it is the coordinator's to raise
            self.done = self._failed(error)
            return
        unsaved.begin(blocks)
        if share is None:
            self.done = SnapshotDone(self._number, pickle.dumps(None))
        else:
            threading.Thread(target=self._run, args=(share,), name="mpidist-saver", daemon=True).start()

    def next(self, changed_by: Callable[[Apply | ApplyRound], Collection[int | TableRows]]) -> Action | None:
        """Local. The next action that can be done, see `Unsaved`. The blocks that it changes have been copied."""
        with self._lock:
            ready = self._unsaved.next(changed_by)
            if ready is None:
                return None
            for block in ready.copies:
                self._copies[block] = np.array(self._live[block.variable][block.low : block.high])
        return ready.action

    def _run(self, share: SavedShare) -> None:
        try:
            done = SnapshotDone(self._number, pickle.dumps(share.write(self._reader)))
        except BaseException as error:  # as above
            done = self._failed(error)
        with self._lock:
            self._unsaved.end()
        self.done = done

    def _failed(self, error: BaseException) -> SnapshotDone:
        return SnapshotDone(self._number, portable(error), traceback.format_exc())

    def _reader(self, number: int) -> Read:
        return lambda low, high: self._read(ElementRange(number, low, high))

    def _read(self, block: ElementRange) -> AnyArray:
        with self._lock:
            copy = self._copies.pop(block, None)
            if copy is None:
                # Only now it may be changed: the disk takes longer than this copy.
                copy = np.array(self._live[block.variable][block.low : block.high])
            self._unsaved.saved(block)
        return copy
