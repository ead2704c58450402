"""The role of the chief as the home of served variables: it makes them, and writes them outside closures."""

from __future__ import annotations

import contextlib
import functools
import gc
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist import context
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import is_half
from mpidist.comm.group.communicator import Communicator
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.parameter_server.chief.decisions import WRITE, Decisions
from mpidist.parameter_server.chief.exit_code_file import ExitCodeFile
from mpidist.parameter_server.chief.plan import ServedPlan, require_plannable
from mpidist.parameter_server.chief.shards import cells_of
from mpidist.parameter_server.heap.layout import Slots
from mpidist.parameter_server.heap.new_variables import Drawn
from mpidist.parameter_server.heap.push_slot import Pushed
from mpidist.parameter_server.heap.rows import SCATTER, pack, read_rows
from mpidist.parameter_server.heap.versioned_read import read_whole
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.queue.staleness import Versions
from mpidist.variables.kinds.served import ServedHome, ServedPlace, ServedSum, ServedVariable
from mpidist.variables.kinds.sharded import ShardedVariable, served_parts
from mpidist.variables.making.creation import traits_of
from mpidist.variables.making.partitioners import Partitioner
from mpidist.variables.update.arithmetic import slots_of
from mpidist.variables.update.halves import MASTER_COPY, state_dtype
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.variable import BaseVariable, Read, UpdatePlan

# A restored variable is read and sent in pieces of this size.
_LOAD_BYTES = 16 << 20


class Chief(Decisions, ServedHome):
    """The coordinator's home of variables.

    Args:
        station: The station of this process.
        servers: The ranks of the servers.
        slots: The slots of each heap.
        versions: See `Decisions`.
        partitioner: A function that returns the numbers of shards of a variable; None: no variable is cut.
        worker: The home of variables as functions see it, where they run in this process.

    Attributes:
        strategy: The strategy whose home this is, once that is made.
        partitioner: The constructor's argument.
        exit_code_file: The file with the exit code, beside the first checkpoint of its variables.
        variables: The variables by the kind and the number of their handles.
    """

    def __init__(
        self, station: Station, servers: Sequence[int], slots: Slots, versions: Versions, *,
        partitioner: Partitioner | None = None, worker: ServedHome | None = None,
    ) -> None:
        super().__init__(station, servers, slots, versions)
        self.exit_code_file = ExitCodeFile()
        self.communicator: Communicator = self.exit_code_file
        self.strategy: Any = None
        self.partitioner = partitioner
        self.variables: weakref.WeakValueDictionary[tuple[str, int], BaseVariable] = weakref.WeakValueDictionary()
        self._worker = worker
        self._slots = slots
        self._beside: int | None = None
        self._plans = 0

    def create_variable(
        self,
        initial_value: npt.ArrayLike | BaseVariable | Callable[[], npt.ArrayLike],
        *,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        trainable: bool | None = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
        sparse_gradient: bool = False,
    ) -> BaseVariable:
        """Local. See `Home.create_variable`.

        Raises:
            HeapFullError: No server has room for it.
        """
        name = "Variable" if name is None else name
        traits = traits_of(f"variable {name!r}: ", trainable, synchronization, aggregation, sparse_gradient)
        chosen, is_sum, sparse_gradient = traits.aggregation, traits.is_on_read, traits.sparse_gradient
        cut = None if is_sum or self._beside is not None else self.partitioner
        cells = cells_of(initial_value, dtype, name, chosen, cut, has_rows=sparse_gradient, is_on_read=is_sum)
        made: list[ServedVariable] = []
        with self.lock:
            for cell in cells:
                initial = cell.make()
                made.append(self._make(
                    initial.shape, cell.dtype, cell.name, kind=ServedSum if is_sum else ServedVariable,
                    buffers=1 if sparse_gradient else 2, server=self._beside, value=initial, is_table=sparse_gradient,
                    beside=Counter(one.place.server for one in made), trainable=traits.trainable, aggregation=chosen,
                ))
                # Not beside the next one: it may be large.
                del initial
            return made[0] if len(made) == 1 else self._join(made, name)

    def _join(self, shards: Sequence[ServedVariable], name: str) -> ShardedVariable:
        """One variable of several shards."""
        whole = ShardedVariable(shards, name)
        self.variables["sharded", whole.key] = whole
        self.dropped.note(whole, "sharded", whole.key)
        return whole

    def variable_of(self, kind: str, number: int) -> BaseVariable | None:
        """Local. The variable of a handle; None where the program has dropped it."""
        return self.variables.get((kind, number))

    @contextlib.contextmanager
    def colocated(self, variable: BaseVariable) -> Iterator[None]:
        """Local. See `Home.colocated`."""
        first = variable.parts[0]
        before, self._beside = self._beside, first.place.server if isinstance(first, ServedVariable) else None
        try:
            yield
        finally:
            self._beside = before

    def _make(  # noqa: PLR0913  # so much tells one variable from another
        self, shape: tuple[int, ...], dtype: np.dtype[Any], name: str, *, kind: type[ServedVariable] = ServedVariable,
        buffers: int = 1, server: int | None = None, fill: complex = 0.0, value: AnyArray | Drawn | None = None,
        is_table: bool = False, beside: Mapping[int, int] | None = None, **described: Any,
    ) -> ServedVariable:
        """Make a variable with a value, or with one number for all elements."""
        self.dropped.let_go()
        take = functools.partial(
            self._heaps.take, shape, dtype, buffers=buffers, server=server, is_table=is_table, beside=beside
        )
        place = take()
        if place is None:
            # What is in circles of references, or in functions that are kept for their next use.
            self._scheduler.forget_unused()
            gc.collect()
            self.wait_for_snapshot()
            self.dropped.let_go()
            place = take()
        if place is None:
            raise self._heaps.full(shape, dtype, name, buffers=buffers, is_table=is_table)
        # Behind all that was sent before, which may still change what was there.
        self._maker.make(place, name, value, fill)
        variable = kind(self, place, name=name, **described)
        self.variables["variable", place.number] = variable
        self.dropped.note(variable, "variable", place.number, place)
        return variable

    def plan(
        self, variables: Sequence[BaseVariable], kernel: Kernel | LayerKernel, options: OptimizerOptions
    ) -> UpdatePlan:
        """Local. See `Home.plan`.

        Raises:
            NotImplementedError: Servers do not support an option.
            HeapFullError: A server has no room for the state.
        """
        require_plannable(variables, options)
        names = slots_of(kernel, options)
        with self.lock:
            self._plans += 1
            state: dict[str, dict[int, BaseVariable]] = {name: {} for name in names}
            numbers: dict[int, dict[int, list[int]]] = {server: {} for server in self.commits.servers}
            for number, variable in enumerate(variables):
                shards = served_parts(variable)
                master = {MASTER_COPY: 0.0} if options.master_copy and is_half(variable.dtype) else {}
                # Only its server changes a slot, so that it needs no second buffer.
                made = {
                    name: [
                        self._make(one.shape, state_dtype(one.dtype), f"{variable.name}/{name}",
                                   server=one.place.server, fill=fill, trainable=False)
                        for one in shards
                    ] for name, fill in {**names, **master}.items()
                }
                for name, slots in made.items():
                    one_slot = slots[0] if len(slots) == 1 else self._join(slots, f"{variable.name}/{name}")
                    state.setdefault(name, {})[number] = one_slot
                for at, one in enumerate(shards):
                    numbers[one.place.server][one.place.number] = [slots[at].place.number for slots in made.values()]
            self._maker.finish()
            for server, by_number in numbers.items():
                self.station.call(server, "plan", self._plans, kernel, options, by_number)
            plan = ServedPlan(self._plans, variables, state, kernel, options)
            self.dropped.note(plan, "optimizer", plan.number)
        return plan

    def here(self) -> ServedHome:
        """Local. See `ServedHome.here`: functions may refer to this home's variables through a class or a module."""
        entry = context.innermost()
        return self if self._worker is None or entry is None or entry.home is not self._worker else self._worker

    def pull(self, place: ServedPlace) -> AnyArray:
        """Local. See `ServedHome.pull`; it includes all writes of this process."""
        with self.lock:
            self._wait_for_writes((place.server,))
            return read_whole(self.station, place).array

    def push(self, kind: str, place: ServedPlace, array: AnyArray) -> None:
        """Local. See `ServedHome.push`."""
        with self.lock:
            self.require_decided()
            self._maker.finish()
            while self.is_one_process and self.station.step():
                pass  # its own worker uses the same slots
            with self.station.awaited([*filter(self.commits.unwritten, self.commits.servers)], WRITE):
                while (slot := self.commits.free_slot()) is None:
                    self.station.step(0.05)
            offset = self._slots.offset(self.commits.rank, slot)
            pushed = Pushed(self.station, place.server, offset, self._slots.slot_bytes)
            pushed.add(kind, place.number, array)
            pushed.close()
            with self.station.whole:
                for send in self.commits.write(slot, [place.server]):
                    self.station.send(send)
                write = self.commits.number
            if kind != "assign" and np.dtype(place.dtype).kind in "iu":
                # The server may find that the sum does not fit.
                self._wait_for_writes((place.server,))
                if write in self.commits.refused:
                    raise pickle.loads(self.commits.refused.pop(write))

    def pull_rows(self, place: ServedPlace, rows: AnyArray) -> AnyArray:
        """Local. See `ServedHome.pull_rows`; it includes all writes of this process."""
        if not place.block_rows:
            return np.asarray(self.pull(place).reshape(place.shape[0], place.width)[rows])
        with self.lock:
            self._wait_for_writes((place.server,))
            return read_rows(self.station, place, rows)

    def push_rows(self, kind: str, place: ServedPlace, rows: IndexedSlices) -> None:
        """Local. See `ServedHome.push_rows`."""
        self.push(SCATTER + kind, place, pack(rows))

    def load(self, place: ServedPlace, read: Read) -> None:
        """Local. See `ServedHome.load`. It is written one-sidedly into the buffer that is not read."""
        with self.pause():
            self.wait_for_snapshot()
            self._maker.finish()
            buffer = self.station.call(place.server, "begin", place.number)
            dtype = np.dtype(place.dtype)
            length = max(1, _LOAD_BYTES // dtype.itemsize)
            for low in range(0, place.size, length):
                piece = np.ascontiguousarray(read(low, min(low + length, place.size)), dtype)
                with self.station.awaited((place.server,), "take a restored value"):
                    self.station.window.put(place.server, place.buffers[buffer] + low * dtype.itemsize, piece)
                    self.station.window.flush(place.server)
            self.station.call(place.server, "show", place.number)

    def begin_snapshot(self, shares: Mapping[int, Any]) -> Callable[[], dict[int, Any] | None]:
        """Local. See `ServedHome.begin_snapshot`."""
        with self.lock:
            self.wait_for_snapshot()
            self._maker.finish()
            for send in self.commits.snapshot({server: pickle.dumps(share) for server, share in shares.items()}):
                self.station.send(send)
            saving, saved = self.commits.saving, self.commits.saved

        def outcomes() -> dict[int, Any] | None:
            if saving:
                return None
            of = {server: self.station.value_of(server, done.outcome, done.traceback) for server, done in saved.items()}
            # A server without a share has nothing to say.
            return {server: outcome for server, outcome in of.items() if outcome is not None}

        return outcomes

    def look_at_snapshot(self) -> None:
        """Local. See `ServedHome.look_at_snapshot`."""
        while self.commits.saving:
            with self.lock:
                if not self.station.step():
                    return

    def device_of(self, place: ServedPlace) -> str:
        """Local. See `ServedHome.device_of`."""
        return f"/job:ps/replica:0/task:{self.commits.servers.index(place.server)}/device:CPU:0"

    def _is_whole(self) -> bool:
        return True

    def _end(self, *, is_collective: bool) -> None:
        """Local. Do nothing: the strategy ends the window."""
