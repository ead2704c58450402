"""The role of a parameter server: it holds variables, and applies the updates that the coordinator commits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half, named_dtype
from mpidist.parameter_server.heap.dense import VERSION, HeapVariable, Updates
from mpidist.parameter_server.heap.layout import FIRST_BYTES, HeapFullError, Slots
from mpidist.parameter_server.heap.new_variables import Drawn, NewVariable, end_of
from mpidist.parameter_server.heap.pages import HeapMemory
from mpidist.parameter_server.heap.push_slot import Change, free_slot, read_pushed
from mpidist.parameter_server.heap.rows import SCATTER
from mpidist.parameter_server.heap.table import HeapTable, TableUpdates, heap_variable, rows_of, scatter
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import (
    SLOTS,
    Applied,
    Call,
    Commit,
    CommitPart,
    CommitStep,
    Discard,
    Drop,
    Fence,
    Message,
    Ping,
    Pong,
    Push,
    Round,
    Send,
    SnapshotRequest,
)
from mpidist.parameter_server.protocol.sent_errors import portable
from mpidist.parameter_server.server.mean_of_round import mean
from mpidist.parameter_server.server.snapshot import Saver, TableRows, Unsaved
from mpidist.parameter_server.server.staging import Action, Apply, ApplyRound, Free, Staging
from mpidist.variables.making.initial import fill_in_pieces
from mpidist.variables.update.compiled import TABLE_SHARE
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.update.parts import initial
from mpidist.variables.whole_numbers import METHODS, changed


class VariableServer:
    """The variables of one server, and their updates.

    Args:
        station: The station of this process.
        coordinator: The rank of the coordinator.
        slots: The slots of the heap.
        copy_bytes: The number of bytes that it copies at most while a checkpoint is saved.

    Raises:
        HeapFullError: There is no memory for the slots.
    """

    def __init__(self, station: Station, coordinator: int, slots: Slots, copy_bytes: int) -> None:
        self._station = station
        self._coordinator = coordinator
        self._slots = slots
        self._memory = HeapMemory(station.window.memory)
        first = min(FIRST_BYTES, slots.slot_bytes)
        for begin in range(0, len(slots.ranks) * SLOTS * slots.slot_bytes, slots.slot_bytes):
            self._reserve(begin, first, first)
        self._staging = Staging(coordinator)
        self._unsaved = Unsaved(copy_bytes)
        self._saver: Saver | None = None
        self._variables: dict[int, HeapVariable] = {}
        self._updates: dict[int, Updates] = {}
        # The pickled errors of updates that are being applied, by closure and attempt.
        self._refused: dict[tuple[int, int], bytes] = {}
        self._calls: dict[str, Callable[..., Any]] = {
            "create": self._create_all, "plan": self._plan, "copy": self._copy, "begin": self._begin,
            "show": self._show, "rows": self._rows, "reserve": self._reserve, "several": self._several,
        }
        self._dropped: dict[str, dict[int, Any]] = {"memory": self._variables, "plan": self._updates}
        station.route((Push, Drop, Commit, Round, Fence, SnapshotRequest), self.take)
        station.route([(Call, name) for name in self._calls], self.take_other)
        station.route([Ping, *((Discard, kind) for kind in self._dropped)], self.take_other)

    def take(self, sender: int, message: Message) -> None:
        """Local. Process a message about updates."""
        actions = self._staging.take(sender, message)
        if self._saver is None:
            for action in actions or ():
                self._do(action)
        elif actions is not None:
            # All in their order: an update that must wait for the snapshot also delays later ones.
            self._unsaved.add(actions)
            self._go_on(self._saver)

    def take_other(self, sender: int, message: Message) -> None:
        """Local. Process a question, or a message about a dropped object."""
        if isinstance(message, Call):
            self._station.answer(sender, message, self._calls[message.name])
        elif isinstance(message, Ping):
            self._station.send(Send(sender, Pong(message.number)))
        elif isinstance(message, Discard):
            del self._dropped[message.kind][message.number]

    def _do(self, action: Action) -> None:
        if isinstance(action, Send):
            message = action.message
            if self._refused and isinstance(message, Applied):
                message = message._replace(error=self._refused.pop(message[:2], b""))
            self._station.send(Send(action.rank, message))
        elif isinstance(action, Apply):
            self._apply(action)
            self._free(action.commit.worker, action.slot)
        elif isinstance(action, ApplyRound):
            self._apply_round(action)
            for part, slot in zip(action.round.parts, action.slots, strict=True):
                self._free(part.worker, slot)
        elif isinstance(action, Free):
            self._free(action.worker, action.slot)
        else:
            self._saver = saver = Saver(action, self._variables, self._unsaved)
            self._station.go_on_with(lambda: self._go_on(saver))

    def _go_on(self, saver: Saver) -> None:
        """Do waiting actions as far as the copies for the snapshot allow it; report when it is saved."""
        # Looked at first: nothing waits any more for a snapshot that is over.
        done = saver.done
        while (action := saver.next(self._changed_by)) is not None:
            self._do(action)
        if done is not None:
            self._saver = None
            self._station.go_on_with(None)
            self._station.send(Send(self._coordinator, done))

    def _changed_by(self, action: Apply | ApplyRound) -> list[int | TableRows]:
        """The extent of an update: the numbers of variables, and of the state of optimizers; of tables the rows."""
        changed: list[int | TableRows] = []
        for _, change, array, step in self._changes(action):
            numbers = [change.variable]
            if step is not None:
                numbers += self._updates[step.optimizer].state_of(change.variable)
            rows = rows_of(self._variables[change.variable], change.kind, array)
            changed += numbers if rows is None else [TableRows(number, *rows) for number in numbers]
        return changed

    def _changes(
        self, action: Apply | ApplyRound
    ) -> Iterator[tuple[Commit | CommitPart, Change, AnyArray, CommitStep | None]]:
        """The changes that an update makes, with their variables, their arrays, and their steps if they have some."""
        parts: list[tuple[Commit | CommitPart, int, tuple[CommitStep, ...]]]
        if isinstance(action, ApplyRound):
            parts = [
                (part, slot, tuple(action.round.steps[at] for at in part.steps))
                for part, slot in zip(action.round.parts, action.slots, strict=True)
            ]
        else:
            parts = [(action.commit, action.slot, action.commit.steps)]
        for part, slot, steps in parts:
            for change, array in read_pushed(self._station.window.memory, self._slots.offset(part.worker, slot)):
                if change.kind != "step":
                    yield part, change, array, None
                elif steps:
                    # A commit that comes too late has none.
                    yield part, change, array, steps[change.step]

    # As in compiled loops, whatever the program's `np.seterr`: an error in the middle of an update would end the job.
    @np.errstate(all="ignore")
    def _apply(self, apply: Apply) -> None:
        for part, change, array, step in self._changes(apply):
            if step is None:
                self._change(part, change, array)
            else:
                self._updates[step.optimizer].apply(self._variables[change.variable], array, step, change.factor)

    @np.errstate(all="ignore")
    def _apply_round(self, action: ApplyRound) -> None:
        """Apply the functions' other changes, in their order, and then the means of their gradients."""
        gradients: dict[tuple[CommitStep, int], list[tuple[AnyArray, float]]] = {}
        for part, change, array, step in self._changes(action):
            if step is None:
                self._change(part, change, array)
            else:
                gradients.setdefault((step, change.variable), []).append((array, change.factor))
        counts = dict(zip(action.round.steps, action.round.counts, strict=True))
        for step in action.round.steps:
            for number in [number for one, number in gradients if one == step]:
                variable = self._variables[number]
                gradient = mean(variable.place, gradients[step, number], counts[step])
                self._updates[step.optimizer].apply(variable, gradient, step, 1.0)

    def _change(self, part: Commit | CommitPart, change: Change, array: AnyArray) -> None:
        variable = self._variables[change.variable]
        try:
            if change.kind.startswith(SCATTER):
                scatter(variable, change.kind, array)
            elif change.kind == "assign" or variable.current.dtype.kind not in "iu":
                variable.change(_CHANGES[change.kind](array))
            else:
                variable.change(_assign(changed(variable.name, variable.current, array, METHODS[change.kind])))
        except OverflowError as error:
            # The update is decided, and others may have seen a part of it: this variable alone stays as it is.
            self._refused.setdefault((part.closure, part.attempt), portable(error))

    def _free(self, worker: int, slot: int) -> None:
        free_slot(self._station.window.memory, self._slots.offset(worker, slot))

    def _create_all(self, new: Sequence[NewVariable]) -> None:
        for one in new:
            self._create(one)

    def _create(self, new: NewVariable) -> None:
        place, name, fill, value = new
        # A program may import a module with a dtype after the line at which this process serves.
        named_dtype(place.dtype)
        # All of its pages are touched now, so that missing memory is an error before training begins. The earlier
        # content is overwritten: its versions, too, are 0.
        what = f"a variable of shape {place.shape} and dtype {place.dtype}"
        self._memory.reserve(place.header, end_of(place) - place.header, what)
        variable = heap_variable(self._station.window.memory, place, name)
        if fill:
            for buffer in variable.buffers:
                buffer[...] = initial(fill, buffer.dtype)
        if isinstance(value, Drawn):
            fill_in_pieces(value.function, value.offset, variable.buffers[0].reshape(place.shape))
        elif value is not None:
            variable.buffers[0].view(np.uint8)[:] = np.frombuffer(value, np.uint8)
        self._variables[place.number] = variable

    def _reserve(
        self, begin: int, least: int, most: int, what: str = "a larger push of a function, or of the coordinator,"
    ) -> int:
        """Allocate memory for an unused part of the heap; returns the number of bytes."""
        if most > least:
            with contextlib.suppress(HeapFullError):
                self._memory.reserve(begin, most, what)
                return most
        self._memory.reserve(begin, least, what)
        return least

    def _plan(
        self, optimizer: int, kernel: Kernel | LayerKernel, options: OptimizerOptions,
        slots: Mapping[int, Sequence[int]],
    ) -> None:
        """Take an optimizer, with the numbers of the state for the number of each variable."""
        states = {number: [self._variables[slot] for slot in of] for number, of in slots.items()}
        places = [self._variables[number].place for number in slots]
        largest = max((place.bytes // (TABLE_SHARE if place.block_rows else 1) for place in places), default=0)
        has_halves = any(is_half(np.dtype(place.dtype)) for place in places)
        kind = TableUpdates if any(place.block_rows for place in places) else Updates
        self._updates[optimizer] = kind(kernel, options, states, largest, has_halves=has_halves)

    def _begin(self, number: int) -> int:
        """Begin a version that the coordinator writes one-sidedly; the number of its buffer."""
        return self._variables[number].begin()

    def _show(self, number: int) -> None:
        self._variables[number].show()

    def _copy(self, number: int) -> AnyArray | None:
        """A version of a variable that changes too fast for others to read it; None while it is restored in place."""
        variable = self._variables[number]
        return None if isinstance(variable, HeapTable) and variable.is_open else np.array(variable.current)

    def _several(self, asked: Sequence[tuple[int, int]]) -> tuple[list[int], bytes]:
        """The versions of several variables between two updates, and the bytes of those whose known version is another.

        Variables that are not here any more have version -1.
        """
        found = [(self._variables.get(number), known) for number, known in asked]
        versions = [-1 if variable is None else int(variable.words[VERSION]) for variable, _ in found]
        changed = [
            variable.current.tobytes() for (variable, known), version in zip(found, versions, strict=True)
            if variable is not None and version != known
        ]
        return versions, b"".join(changed)

    def _rows(self, number: int, rows: AnyArray) -> AnyArray | None:
        """Rows of a table that change too fast for others to read them; None while it is restored."""
        table = self._variables[number]
        return table.give(rows) if isinstance(table, HeapTable) else None


def _assign(array: AnyArray) -> Callable[[AnyArray, AnyArray], None]:
    return lambda _, new: np.copyto(new, array)


def _add(array: AnyArray) -> Callable[[AnyArray, AnyArray], None]:
    def make(current: AnyArray, new: AnyArray) -> None:
        np.add(current, array, out=new)

    return make


_CHANGES = {"assign": _assign, "add": _add}
