"""The role of a worker: it runs closures, whose changes count when the coordinator commits them."""

from __future__ import annotations

import contextlib
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.data.dataset import Dataset
from mpidist.data.input_context import InputContext
from mpidist.indexed_slices import IndexedSlices
from mpidist.parameter_server.heap.layout import Slots
from mpidist.parameter_server.heap.push_slot import Pushed
from mpidist.parameter_server.heap.rows import SCATTER, RowChanges, pack, read_rows
from mpidist.parameter_server.heap.versioned_read import READ, read_whole
from mpidist.parameter_server.protocol import references
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import (
    NAMED,
    Began,
    Build,
    Built,
    Define,
    Discard,
    Do,
    Failed,
    Fence,
    Finished,
    Message,
    Push,
    Send,
    Timed,
)
from mpidist.parameter_server.protocol.sent_errors import portable
from mpidist.parameter_server.protocol.thread_guard import OwnThreads, one_at_a_time
from mpidist.parameter_server.worker.dataset_iterator import NotMade, OwnIterator, ended
from mpidist.parameter_server.worker.optimizer import Builder
from mpidist.parameter_server.worker.prefetch import Ahead
from mpidist.parameter_server.worker.running_closure import Added, OwnUpdates, Reads, RunningClosure
from mpidist.parameter_server.worker.sent_function import SentFunction
from mpidist.recorder.recorder import RECORDER
from mpidist.variables.kinds.served import ServedHome, ServedPlace, ServedVariable
from mpidist.variables.kinds.sharded import ShardedVariable
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.variable import BaseVariable, Read, UpdatePlan
from mpidist.variables.whole_numbers import METHODS, changed


class Worker(ServedHome, OwnThreads):
    """The closures of one worker. It is also the home of variables for these closures.

    Args:
        station: The station of this process.
        coordinator: The rank of the coordinator.
        slots: The slots of each heap.
        servers: The ranks of the servers.
        context: The index of this worker, and the number of workers.
        is_relaxed: Whether a read in a closure may mix two versions of a variable.

    Attributes:
        index: The index of this worker.
        is_fenced: Whether the coordinator counts this worker as lost.
    """

    def __init__(
        self, station: Station, coordinator: int, slots: Slots, servers: Sequence[int], context: InputContext,
        *, is_relaxed: bool = False,
    ) -> None:
        self.communicator: Communicator = SoloCommunicator()
        self.strategy: Any = None
        self.index = context.input_pipeline_id
        self.context = context
        self.is_fenced = self._is_timed = False
        self._station = station
        self._coordinator = coordinator
        self._slots = slots
        self._servers = list(servers)
        self._rank = station.window.rank
        self._waiting: deque[Do | Build | Discard] = deque()
        # Objects that the coordinator names by kind and number: as they were sent, and as they are used.
        self._codes: dict[tuple[str, int], bytes] = {}
        self._named: dict[tuple[str, int], Any] = {}
        # The iterators among these over own data, by number.
        self._own: dict[int, OwnIterator] = {}
        self._builder = Builder(self, station, coordinator, self._find)
        self._closure: RunningClosure | None = None
        self._reads = Reads(station, is_relaxed=is_relaxed)
        self._own_updates = OwnUpdates(station, servers, lambda: self.is_fenced)
        self._ahead = Ahead(
            station, self._reads.known, lambda: next((one for one in self._waiting if isinstance(one, Do)), None)
        )
        OwnThreads.__init__(self, self._ahead.lock)
        station.route((Do, Build, Define, Timed, *((Discard, kind) for kind in NAMED)), self.take)
        if station.window.size > 1:
            # A process that is alone loses no worker, and its server takes what there is.
            station.route([Fence], self.take)

    def take(self, _: int, message: Message) -> None:
        """Local. Process a message of the coordinator. Closures wait for `work`: one may be running now."""
        if isinstance(message, (Do, Build, Discard)):
            self._waiting.append(message)
        elif isinstance(message, Define):
            self._codes[message.kind, message.number] = message.code
        elif isinstance(message, Timed):
            self._is_timed = True
        elif isinstance(message, Fence) and message.worker == self._rank:
            self.is_fenced = True
            self._ahead.stop()

    def work(self) -> bool:
        """Local. Do the next work, such as a closure; return False if there is none."""
        if not self._waiting:
            return False
        self.server = get_ident()
        message = self._waiting.popleft()
        if isinstance(message, Do):
            self._send(self._run(message))
        elif isinstance(message, Build):
            self._send(self._build(message))
        else:
            self._codes.pop((message.kind, message.number), None)
            self._named.pop((message.kind, message.number), None)
            if message.kind == "resource":
                self._own.pop(message.number, None)
            self._reads.forget(message.kind, message.number)
            self._ahead.forget(message.kind, message.number)
        return True

    def stop(self) -> None:
        """Local. End the work beside closures; there are no more of them."""
        self._ahead.end()

    def _send(self, message: Message) -> None:
        self._station.send(Send(self._coordinator, message))

    def _run(self, do: Do) -> Message:
        closure = self._closure = RunningClosure(do)
        slot = self._slots.offset(self._rank, do.slot)
        self._own_updates.begin(slot)
        self._reads.begin(do.function)
        try:
            if self._is_timed:
                self._tell(do, is_loaded=False)
            with RECORDER.during_closure(do.closure, do.attempt, lambda: self._named.get(("function", do.function))):
                with self._ahead.during(do) if do.is_followed else contextlib.nullcontext(), self.during_function():
                    data = references.dump_result(self._call(do.function, do.arguments, do))
                for pushed in closure.pushed.values():
                    pushed.close()
        except BaseException as error:  # whatever it is, it is the program's on the coordinator
            return Failed(do.closure, do.attempt, portable(error), traceback.format_exc(), ended(error))
        finally:
            self._closure = None
            self._reads.end()
        for server in closure.pushed:
            self._own_updates.note(server, slot)
            self._station.send(Send(server, Push(do.closure, do.attempt, do.slot, 0, True)))
        read = tuple([news for one in self._own.values() if (news := one.news()) is not None])
        return Finished(do.closure, do.attempt, tuple(closure.pushed), tuple(closure.optimizers), data, read)

    def _build(self, build: Build) -> Message:
        try:
            made = self._call(build.function, build.arguments)
        except BaseException as error:  # as above
            self._named["resource", build.resource] = NotMade(error)
            if build.resource in self._own:
                # Functions have captured it.
                self._own[build.resource].fail(error)
            return Built(build.resource, portable(error), traceback.format_exc())
        if not isinstance(made, OwnIterator):
            self._named["resource", build.resource] = made
            return Built(build.resource)
        made.be_resource(build.resource)
        own = self._own.setdefault(build.resource, made)
        if own is not made:
            own.take_over(made)
        self._named["resource", build.resource] = own
        return Built(build.resource, begun=own.begun)

    def _tell(self, do: Do, *, is_loaded: bool) -> None:
        # With the lock: the thread that pulls ahead may use the window.
        with self.lock:
            self._send(Began(do.closure, do.attempt, is_loaded))

    def _call(self, function: int, pickled: bytes, do: Do | None = None) -> Any:
        with self.strategy.inside(), self.in_this_process():
            arguments, named = references.load(pickled, self._find)
            called = self._find(("function", function))
            if do is not None and self._is_timed:
                self._tell(do, is_loaded=True)
            return called(*arguments, **named)

    def _find(self, handle: tuple[Any, ...]) -> Any:
        kind, *rest = handle
        if kind in ("strategy", "context"):
            return getattr(self, kind)
        if kind == "value":
            return rest[0]
        if kind == "class":
            return references.class_of(rest[0])
        name = kind, rest[0]
        if name not in self._named:
            # A result of another worker describes its variables.
            described = rest[1:] if rest[1:] else references.load(self._codes.pop(name), self._find)
            self._named[name] = self._make(*name, described)
        found = self._named[name]
        if isinstance(found, NotMade):
            # A function that uses what could not be made fails with the error of the making.
            raise found.error
        if kind == "dataset":
            # A dataset counts its passes: those of another function do not count.
            return Dataset(*found)
        return found

    def _make(self, kind: str, number: int, described: Any) -> Any:
        """Make a function, a variable or an optimizer from the coordinator's description."""
        if kind == "variable":
            return references.variable_of(self, *described)
        if kind == "function":
            return SentFunction(described, [one for (kind, _), one in self._named.items() if kind == "resource"])
        if kind == "sharded":
            whole = ShardedVariable(*described)
            self._ahead.note_shards([one.place.number for one in whole.variables])
            return whole
        if kind in ("optimizer", "unbuilt"):
            return self._builder.make(number, described, is_built=kind == "optimizer")
        return described

    def create_variable(self, *_: Any, **__: Any) -> BaseVariable:
        """Local. Refuse.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "a variable cannot be made inside a function that runs on a worker: make it in `with strategy.scope():` "
            "on the coordinator, and use it in the function"
        )

    def plan(
        self, variables: Sequence[BaseVariable], kernel: Kernel | LayerKernel, options: OptimizerOptions
    ) -> UpdatePlan:
        """Local. See `Home.plan`."""
        del kernel
        return self._builder.plan(variables, options)

    @one_at_a_time
    def pull(self, place: ServedPlace) -> AnyArray:
        """Local. See `ServedHome.pull`."""
        closure = self._closure
        if closure is None:
            return read_whole(self._station, place).array
        if place.number in closure.stepped:
            raise RuntimeError(
                f"this closure has applied gradients of optimizer {closure.stepped[place.number]!r} to a variable, and "
                "reads it afterwards: its new value is on the server when the closure is done. Read it before, or in "
                "the next closure"
            )
        if place.number not in closure.values:
            is_followed = closure.do.is_followed
            value = self._ahead.take(place) if is_followed else None
            if value is None:
                self._own_updates.wait(place.server)
                had = closure.values, closure.stepped
                found = self._reads.read(place, had, is_alone=is_followed and self._ahead.is_pulling)
            else:
                self._reads.known[place.number] = value
                found = {place.number: value}
            closure.values.update((number, one.array) for number, one in found.items())
        self._reads.note(place)
        for change in closure.added.pop(place.number, ()):
            before = closure.values[place.number]
            if isinstance(change, RowChanges):
                closure.values[place.number] = change.applied(before)
                continue
            closure.pushed[place.server].write()
            delta = np.empty(place.shape, place.dtype)
            with self._station.awaited((place.server,), READ):
                self._station.window.get(place.server, change.place, delta.reshape(-1))
                self._station.window.flush(place.server)
            is_whole = delta.dtype.kind in "iu"
            closure.values[place.number] = np.asarray(
                changed(self._name_of(place), before, delta, METHODS[change.kind]) if is_whole else before + delta
            )
        return closure.values[place.number]

    @one_at_a_time
    def pull_rows(self, place: ServedPlace, rows: AnyArray) -> AnyArray:
        """Local. See `ServedHome.pull_rows`."""
        closure = self._closure
        changes = [] if closure is None else closure.added.get(place.number, [])
        is_here = closure is not None and (place.number in closure.values or place.number in closure.stepped)
        if not place.block_rows or is_here or any(isinstance(change, Added) for change in changes):
            return np.asarray(self.pull(place).reshape(place.shape[0], place.width)[rows])
        if closure is not None:
            self._own_updates.wait(place.server)
        found = read_rows(self._station, place, rows)
        for change in changes:
            if isinstance(change, RowChanges):
                change.overlay(rows, found)
        return found

    @one_at_a_time
    def push_rows(self, kind: str, place: ServedPlace, rows: IndexedSlices) -> None:
        """Local. See `ServedHome.push_rows`."""
        closure = self._require_closure("a variable is written")
        self._ahead.note_change(place.number)
        self._pushed(closure, place.server).add(SCATTER + kind, place.number, pack(rows))
        values = rows.values.reshape(len(rows.indices), place.width)
        closure.add_rows(kind, place.number, self._name_of(place), rows.indices, np.array(values))

    @one_at_a_time
    def push(self, kind: str, place: ServedPlace, array: AnyArray) -> None:
        """Local. See `ServedHome.push`."""
        closure = self._require_closure("a variable is written")
        self._ahead.note_change(place.number)
        offset = self._pushed(closure, place.server).add(kind, place.number, array)
        if kind == "assign":
            closure.values[place.number] = np.array(array)
            closure.added.pop(place.number, None)
            closure.stepped.pop(place.number, None)
        else:
            closure.added.setdefault(place.number, []).append(Added(kind, offset))

    def _name_of(self, place: ServedPlace) -> str:
        """The name of a variable, for errors."""
        return getattr(self._named.get(("variable", place.number)), "name", f"number {place.number}")

    def load(self, place: ServedPlace, read: Read) -> None:
        """Local. See `ServedHome.load`."""
        self.push("assign", place, read(0, place.size).reshape(place.shape))

    def pause(self) -> contextlib.AbstractContextManager[None]:
        """Local. Do nothing: a closure counts as one anyway."""
        return contextlib.nullcontext()

    def begin_snapshot(self, shares: Mapping[int, Any]) -> Callable[[], dict[int, Any] | None]:
        """Local. Refuse.

        Raises:
            RuntimeError: Always.
        """
        del shares
        raise RuntimeError("a function that runs on a worker cannot save a checkpoint: save it on the coordinator")

    def look_at_snapshot(self) -> None:
        """Local. Do nothing."""

    def wait_for_snapshot(self) -> None:
        """Local. Do nothing."""

    def device_of(self, place: ServedPlace) -> str:
        """Local. See `ServedHome.device_of`."""
        return f"/job:ps/replica:0/task:{self._servers.index(place.server)}/device:CPU:0"

    @one_at_a_time
    def apply(self, optimizer: int, name: str, gradients: Sequence[tuple[ServedVariable, AnyArray, float]]) -> None:
        """Local. Let the servers make a step of an optimizer when this closure is applied.

        Args:
            optimizer: The number of the optimizer.
            name: The name of the optimizer.
            gradients: The gradients of variables, with factors.
        """
        closure = self._require_closure("gradients are applied")
        step = len(closure.optimizers)
        closure.optimizers.append(optimizer)
        for variable, gradient, factor in gradients:
            place = variable.place
            self._pushed(closure, place.server).add("step", place.number, gradient, step=step, factor=factor)
            closure.stepped[place.number] = name

    def _require_closure(self, what: str) -> RunningClosure:
        if self._closure is None:
            raise RuntimeError(f"{what} outside a closure, where a value or a dataset of a worker is made")
        return self._closure

    def _pushed(self, closure: RunningClosure, server: int) -> Pushed:
        if server not in closure.pushed:
            offset = self._slots.offset(self._rank, closure.do.slot)
            closure.pushed[server] = Pushed(self._station, server, offset, self._slots.slot_bytes)
        return closure.pushed[server]

    def _is_whole(self) -> bool:
        return True

    def _end(self, *, is_collective: bool) -> None:
        """Local. Do nothing: the strategy ends the window."""
