"""The memory of an arena: the slabs in which a node's variables live, once per node, each at a fixed address.

Where memory cannot be shared (no /dev/shm, a full or small one, ranks in different containers, or on request) a slab
is private to each rank and holds the same values everywhere. All ranks agree on which kind it is, slab by slab.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
import weakref
from abc import ABC
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.calls.text import AT_ONCE
from mpidist.comm.choice import selection
from mpidist.comm.first_use import at_first_use
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.front.sparse import reduce_slices
from mpidist.comm.group.agreement import require_same
from mpidist.comm.group.resource import end_all
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import CommunicationImplementation, ReduceOp
from mpidist.recorder.calls import Calls
from mpidist.variables.memory import sharing
from mpidist.variables.memory.slab import Slab, SlabRange, line_elements, padded
from mpidist.variables.replicas import Replicas
from mpidist.variables.variable import Home

if TYPE_CHECKING:
    from mpidist.comm.memory.node_memory import NodeMemory
    from mpidist.variables.update.parts import initial
else:
    initial = at_first_use("mpidist.variables.update.parts", "initial")
    NodeMemory = at_first_use("mpidist.comm.memory.node_memory", "NodeMemory")

logger = logging.getLogger("mpidist")

# The advice of errors about variables that differ between ranks.
SAME_MODEL = "Build the same model on every rank: from the same options, in the same order."
FIRST_SLAB_BYTES = 1 << 20
LARGEST_SLAB_BYTES = 1 << 26


class Resident(Protocol):
    """A variable of an arena.

    Attributes:
        name: A name for display and errors.
        address: Its place in a slab.
    """

    name: str
    address: SlabRange

    def value(self) -> AnyArray:
        """Local. A live view, read-only."""
        ...


class ArenaMemory(Home, ABC):
    """Collective. The memory of one strategy's variables, and the ranks that share it.

    `Arena` adds what variables and steps are made by.

    Args:
        replicas: The strategy's ranks and their collectives. The memory is that of all of them.
        shared: True demands node memory (an error where there is none), False refuses it, None takes it where
            /dev/shm is large enough. One rank alone has private memory. An explicit `implementation`,
            `cross_device_ops` or `compression` makes memory private, too: then a collective sums the gradients, and
            not the arena.
        on_gpu: Whether variables and state are CuPy arrays, private, on the current GPU.
        collective: The collective of all ranks of the strategy, where these are not all replicas. It is closed with the
            arena.
        shard_optimizer: Whether each node keeps a part of the state of optimizers, and not all of it; where memory is
            private, each rank. The same on every rank.

    Raises:
        ValueError: Shared memory is demanded together with a collective or a GPU, or two collectives are demanded.
        NotImplementedError: Variables on GPUs are demanded together with `compression`; or the replicas are not all
            ranks of the strategy, and there is no `collective`.

    Attributes:
        replicas: The constructor's argument.
        communicator: All ranks of the strategy: they have the variables, make steps together, and save them.
        options: The options of the replicas.
        shards_state: Whether the state of optimizers is in parts, see `shard_optimizer`.
        namespace: The module of the variables' arrays: `numpy`, or `cupy`.
        calls: The record of the calls that all these ranks make together.
        collective: The collective of all ranks of the strategy.
        givers: The ranks of this rank's node that have a segment for gradients.
        gives_gradients: Whether this rank's gradients count.
        arrival: The ranks' meeting before a step under `timeout_seconds`, else None.
        lane: Between nodes: over the ranks that own the same lane, one per node; None on ranks without a lane, and
            where a collective that was asked for sums the gradients.
        lane_count: Number of lanes, which is the number of ranks of the smallest node.
        barrier: A function, Collective over the node, that waits for its ranks. In a private arena it returns at once.
        shares_memory: Whether new slabs are in node memory.
        strategy: The strategy whose variables live here, None for variables without one.
        strategy_number: Its number among those on these ranks, which its calls carry; see `CallOrder.deal`.
        plan_count: The number of plans so far, of optimizers.
        overflow_counts: The overflow counts of the node's ranks, see `step.alarm`; None before the first plan.
        is_default: Whether its variables are of no strategy.
        guard: A lock that is held while this rank is in a write: from before the first byte of any rank of the node
            until after the last one. Copies that other threads make wait for it.
    """

    is_default = False
    strategy: object | None = None
    gives_gradients = True

    def __init__(
        self, replicas: Replicas, *, shared: bool | None = None, on_gpu: bool = False,
        collective: CollectiveFront | None = None, shard_optimizer: bool = False,
    ) -> None:
        self.replicas = replicas
        self.communicator = communicator = replicas.everyone
        self.options, self.arrival = replicas.options, replicas.arrival
        self.collective = replicas.collective if collective is None else collective
        if communicator is not replicas.communicator and collective is None:
            # Its barriers and norms are over all ranks, and its sums over the replicas.
            raise NotImplementedError(
                f"an arena has its variables on every replica, which are {communicator.size} ranks here, and only "
                f"{replicas.communicator.size} of them are replicas of each other: use a home for parts of variables"
            )
        self.strategy_number = owner = replicas.number
        self.shards_state = shard_optimizer and communicator.size > 1
        self.calls: Calls = (
            replicas.calls if collective is None
            else communicator.calls.limited(self.options.timeout_seconds, replicas.number)
        )
        self.givers: Sequence[int] = range(communicator.node.size)
        self.namespace: Any = arrays.gpu_namespace() if on_gpu else np
        self.plan_count = 0
        self.overflow_counts: AnyArray | None = None
        # Reentrant: what a step calls may copy variables.
        self.guard = threading.RLock()
        self.lane_count = min(communicator.node_sizes)
        lane = communicator.open_lane()
        asked_for = selection.asked_for(self.options)
        summed_by = (
            "`compression`" if self.options.compression is not None
            else "`cross_device_ops`" if replicas.has_user_collective
            else f"the implementation {asked_for.name}" if asked_for is not CommunicationImplementation.AUTO
            else None
        )
        self.lane: CollectiveFront | None = None
        if lane is not None and summed_by is None:
            # Not rounded, as what is reduced over all ranks; a step is timed once, by `arrival`.
            exact = replace(self.options, wire_dtype=None, timeout_seconds=None)
            self.lane = selection.choose(lane, exact, owner)
        shared = sharing.wanted(shared, self.options, summed_by, on_gpu=on_gpu)
        self._demanded = shared is True
        barrier = sharing.agree(communicator, shared)
        self.shares_memory = barrier is not None
        self.barrier = barrier or sharing.return_at_once
        self._slabs: dict[np.dtype[Any], list[Slab]] = {}
        self._addresses: dict[int, SlabRange] = {}
        self._variables: weakref.WeakValueDictionary[int, Resident] = weakref.WeakValueDictionary()
        self._released: deque[int] = deque()
        self._releases: dict[int, int] = {}
        self._serial = 0

    def _is_whole(self) -> bool:
        return self.replicas.is_whole()

    def _end(self, *, is_collective: bool) -> None:
        """The memory of variables is freed with the last variable: values can be read after the end."""
        end_all([] if self.lane is None else [self.lane], is_collective=is_collective)
        self._slabs.clear()

    def set_strategy(self, strategy: object) -> None:
        """Local. See `Home.set_strategy`."""
        self.strategy = strategy

    def require_open(self) -> None:
        """Local. Raise RuntimeError if the strategy of this arena is closed."""
        self.replicas.require_open()

    def create(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, SlabRange]:
        """Collective. Find an address for a variable; its memory is zero, or what an earlier variable left.

        Args:
            name: The name of the variable, for the error.
            shape: The shape of the variable on this rank.
            dtype: The dtype of the variable on this rank.

        Returns:
            A number for `release`, and the address.

        Raises:
            MismatchError: Shape or dtype differ between ranks.
        """
        self.require_open()
        replies = self.communicator.all_gather_object(((shape, dtype.name), self.take_released()))
        self.reuse([numbers for _, numbers in replies])
        require_same([described for described, _ in replies], f"shape and dtype of variable {name!r}", SAME_MODEL)
        return self.place(shape, dtype)

    def place(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[int, SlabRange]:
        """Collective. As `create`, where the ranks have agreed on the shape and the dtype, and have called `reuse`."""
        size = math.prod(shape)
        number = self.new_number()
        self._addresses[number] = SlabRange(*self._place(dtype, _room(size, dtype)), size, number)
        return number, self._addresses[number]

    def take_released(self) -> list[int]:
        """Local. The numbers of addresses that this rank has released; all ranks must learn of them by `reuse`."""
        return [self._released.popleft() for _ in range(len(self._released))]

    def give_back_released(self, numbers: list[int]) -> None:
        """Local. Take back what `take_released` has given, where the ranks could not exchange it."""
        self._released.extend(numbers)

    def reuse(self, released: Sequence[list[int]]) -> None:
        """Local. Use memory again that all ranks have released; called on all of them at the same point.

        Args:
            released: What `take_released` has given on each rank.
        """
        for number in itertools.chain.from_iterable(released):
            self._releases[number] = self._releases.get(number, 0) + 1
            if self._releases[number] == self.communicator.size:
                address = self._addresses.pop(number)
                address.slab.give_back(address.start, _room(address.size, address.slab.dtype))
                del self._releases[number]

    def new_number(self) -> int:
        """Local. A number for a new variable, the same on every rank."""
        self._serial += 1
        return self._serial

    def register(self, number: int, variable: Resident) -> None:
        """Local. Note that a variable has the address of this number, for `variables`."""
        self._variables[number] = variable

    def variables(self) -> list[tuple[int, Resident]]:
        """Local. The variables that this rank holds now, with their numbers, which are the same on every rank."""
        return sorted(self._variables.items(), key=lambda item: item[0])

    def holds_copies(self) -> bool:
        """Local. Whether there is more than one copy of some variable; the same on every rank."""
        private = any(not slab.is_shared for slabs in self._slabs.values() for slab in slabs)
        return self.communicator.size > 1 and (private or len(self.communicator.node_sizes) > 1)

    def release(self, number: int) -> None:
        """Local. Note that this rank has no more use for an address.

        The garbage collector may call this at any time, and at another time on each rank. The memory is used again
        once a later `create` finds that every rank has released it.
        """
        self._released.append(number)

    def reserve(self, count: int, dtype: np.dtype[Any], *, shared: bool) -> Slab:
        """Collective. Make a slab of zeros for a plan's gradients.

        Raises:
            OSError: There is no room, on every rank.
        """
        memory = NodeMemory(self.communicator, max(1, count) * dtype.itemsize) if shared else None
        return Slab(dtype, count, memory, self.namespace)

    def reserve_slots(
        self, slots: Mapping[str, complex], count: int, dtype: np.dtype[Any], *, shared: bool
    ) -> dict[str, Slab]:
        """Collective. Make a slab for each slot of an optimizer, filled with the slot's initial value.

        Raises:
            OSError: There is no room, on every rank.
        """
        slabs = {name: self.reserve(count, dtype, shared=shared) for name in slots}
        for name, value in slots.items():
            if value:
                fill = functools.partial(slabs[name].writable.fill, initial(value, dtype))
                self.write(slabs[name], fill, "filling slot", name)
        return slabs

    def accept_private(self, what: str, error: OSError) -> None:
        """Local. Log on the first rank what is private since node memory ran out, or raise where it is demanded."""
        if self._demanded:
            raise error
        if self.communicator.rank == 0:
            # Not the error itself: a handler that keeps records would keep all that its traceback refers to.
            logger.warning("%s private to each rank: %s", what, str(error))

    def write(
        self, slab: Slab, function: Callable[[], object], name: str, detail: Hashable, sign: int | None = None
    ) -> None:
        """Collective. Call `function`, which writes to the slab, on exactly one rank per copy of it.

        Args:
            slab: The slab to which the function writes.
            function: The function that writes.
            name: The name of the write; with `detail` the same on all ranks, see `CallOrder.enter`.
            detail: The object that is written to.
            sign: A checksum of a write that is made once, see `CallOrder.enter`.
        """
        if self.is_closed:
            self.require_open()
        order = self.communicator.order
        with order.enter(name, detail, None, self.strategy_number, meets=slab.is_shared, sign=sign):
            if not slab.is_shared:
                # One call of NumPy, which checks before it writes.
                with self.guard:
                    function()
                return
            order.is_under_way = AT_ONCE
            # Before: another rank may still be reading the old values. After: no rank may read before they are written.
            with self.guard:
                self.barrier()
                if self.communicator.node.rank == 0:
                    function()
                self.barrier()

    def first_value(self, array: AnyArray, slab: Slab) -> AnyArray:
        """Collective. The first replica's array, on every rank whose `write` calls its function."""
        if slab.is_shared and len(self.communicator.node_sizes) == 1:
            return array
        return self.collective.broadcast(array)

    @property
    def gives_everywhere(self) -> bool:
        """Local. Whether the gradients of all ranks count; the same on every rank."""
        return self.communicator is self.replicas.communicator

    def combine(self, array: AnyArray, op: ReduceOp) -> AnyArray:
        """Collective. Combine what the replicas write to a variable; all ranks get the result."""
        return self.collective.all_reduce(array, op)

    def combine_rows(self, rows: IndexedSlices, op: ReduceOp) -> IndexedSlices:
        """Collective. Put together the rows that the replicas write to a variable; all ranks get them."""
        return reduce_slices(self.collective, op, rows)

    def _place(self, dtype: np.dtype[Any], count: int) -> tuple[Slab, int]:
        slabs = self._slabs.setdefault(dtype, [])
        for slab in slabs:
            start = slab.take(count)
            if start is not None:
                return slab, start
        byte_count = min(FIRST_SLAB_BYTES << len(slabs), LARGEST_SLAB_BYTES)
        slab = self._new_slab(dtype, max(count, byte_count // dtype.itemsize))
        slabs.append(slab)
        start = slab.take(count)
        if start is None:
            raise MemoryError(f"a new slab of {slab.writable.size} elements has no room for {count}")
        return slab, start

    def _new_slab(self, dtype: np.dtype[Any], count: int) -> Slab:
        if self.shares_memory:
            try:
                return Slab(dtype, count, NodeMemory(self.communicator, count * dtype.itemsize))
            except OSError as error:
                # Every rank is here with the same error: the next slabs are private on all of them.
                self.accept_private("variables made from now on are", error)
                self.shares_memory = False
        return Slab(dtype, count, None, self.namespace)

    def __repr__(self) -> str:
        slabs = [slab for kind in self._slabs.values() for slab in kind]
        held = sum(slab.writable.nbytes for slab in slabs)
        return f"Arena({len(self._addresses)} variables in {len(slabs)} slabs, {held} bytes, {self.communicator!r})"


def _room(size: int, dtype: np.dtype[Any]) -> int:
    """The elements that a variable takes: whole cache lines, and at least one, so that no two share an address."""
    return max(line_elements(dtype), padded(size, dtype))
