"""The calls that adapters of frameworks make on a strategy, from either context and from any one thread at a time."""

from __future__ import annotations

import atexit
import importlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np

from mpidist.arguments import described, flag
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import named_dtype
from mpidist.comm.calls.turns import Turns, turns_of
from mpidist.comm.group.agreement import gather_together, require_same
from mpidist.comm.group.resource import Resource
from mpidist.options import ReduceOp, parse_enum
from mpidist.strategy.adapters import nests
from mpidist.strategy.adapters.ending import note_caller
from mpidist.strategy.values import gather_object
from mpidist.variables.replicas import Replicas

logger = logging.getLogger("mpidist")
T = TypeVar("T")


class AdapterCalls(Resource):
    """The calls of adapters over the replicas of one strategy.

    Args:
        replicas: The ranks of the strategy, and their collectives.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._communicator = communicator = replicas.communicator
        self._collective = replicas.collective
        self._owner = replicas.collective.log.owner
        self._turns = turns_of(communicator.order, communicator.calls)
        self._main = threading.main_thread().ident
        self._takes_threads: bool | None = None
        self._closers: list[Callable[[], object]] = []
        self._before: list[tuple[Turns, Callable[[], object]]] = []

    def all_reduce(self, reduce_op: ReduceOp | str, nest: Any, *, in_place: bool, name: str) -> Any:
        """Collective. See `AdapterMethods.all_reduce`."""
        return self._call("all_reduce of arrays", self._all_reduce, reduce_op, nest, in_place, name)

    def _all_reduce(self, reduce_op: ReduceOp | str, nest: Any, in_place: Any, name: Any) -> Any:
        op = reduce_op if type(reduce_op) is ReduceOp else self._operation("all_reduce", reduce_op)
        if type(in_place) is not bool or type(name) is not str:
            self._require_arguments(in_place, name)
        return nests.all_reduce(
            self._collective, op, nest, in_place=in_place, name=name,
            bytes_per_pack=self._replicas.options.bytes_per_pack,
        )

    def _operation(self, name: str, reduce_op: ReduceOp | str) -> ReduceOp:
        try:
            return parse_enum(ReduceOp, reduce_op, "reduce_op")
        except (TypeError, ValueError) as error:
            self._collective.log.refuse(name, error)

    def _require_arguments(self, in_place: object, name: object) -> None:
        try:
            flag("in_place", in_place, owner="all_reduce: ")
            if not isinstance(name, str):
                raise TypeError(f"all_reduce: `name` must be a string, got {described(name)}")
        except (TypeError, ValueError) as error:
            self._collective.log.refuse("all_reduce", error)

    def broadcast(self, nest: Any) -> Any:
        """Collective. See `AdapterMethods.broadcast`."""
        return self._call("broadcast of arrays", nests.broadcast, self._collective, nest)

    def all_gather(self, nest: Any, axis: int) -> Any:
        """Collective. See `AdapterMethods.all_gather`."""
        return self._call("all_gather of arrays", nests.all_gather, self._collective, nest, axis)

    def reduce_scatter(self, reduce_op: ReduceOp | str, nest: Any, axis: int) -> Any:
        """Collective. See `AdapterMethods.reduce_scatter`."""
        return self._call("reduce_scatter of arrays", self._reduce_scatter, reduce_op, nest, axis)

    def _reduce_scatter(self, reduce_op: ReduceOp | str, nest: Any, axis: int) -> Any:
        return nests.reduce_scatter(self._collective, self._operation("reduce_scatter", reduce_op), nest, axis)

    def all_gather_object(self, value: T) -> list[T]:
        """Collective. See `AdapterMethods.all_gather_object`."""
        return self._call("gather_object", gather_object, self._communicator, value)

    def allocate(self, shape: Sequence[int] | int, dtype: Any) -> AnyArray:
        """Collective. See `AdapterMethods.allocate`."""
        return self._call("allocate", self._allocate, shape, dtype)

    def _allocate(self, shape: Sequence[int] | int, dtype: Any) -> AnyArray:
        wanted = gather_together(self._communicator, "allocate", lambda: _array_facts(shape, dtype))
        require_same(wanted, "allocate: shape and dtype", "Make the same arrays on every rank.")
        sizes, name = wanted[self._communicator.rank]
        return self._collective.allocate(sizes, named_dtype(name))

    def number_dataset(self) -> int:
        """Collective. See `AdapterMethods.number_dataset`."""
        self._replicas.require_open()
        return self._communicator.order.deal("dataset")

    def note_batch(self, dataset: int, iteration: int, position: int) -> None:
        """Local. See `AdapterMethods.note_batch`."""
        if self._communicator.size > 1:
            self._communicator.order.note_batch(dataset, iteration, position)

    def _call(self, name: str, function: Callable[..., T], *args: Any) -> T:
        replicas = self._replicas
        if replicas.is_closed:
            replicas.require_open()
        if threading.get_ident() != self._main:
            self._require_threads(name)
        return self._turns.call(name, self._owner, function, *args)

    def _require_threads(self, name: str) -> None:
        """Raise where MPI may be called by the main thread only."""
        if self._takes_threads is None:
            self._takes_threads = True
            if self._communicator.mpi is not None:
                mpi: Any = importlib.import_module("mpidist.comm.group.mpi_communicator").MPI
                self._takes_threads = mpi.Query_thread() >= mpi.THREAD_SERIALIZED
        if self._communicator.size > 1:
            note_caller()
        if not self._takes_threads:
            raise RuntimeError(
                f"{name}: a thread of a framework makes a call, but MPI was started for calls of the main thread only. "
                "Start it with THREAD_MULTIPLE or THREAD_SERIALIZED: leave mpi4py.rc.thread_level as it is"
            )

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Collective. See `AdapterMethods.step`."""
        replicas = self._replicas
        replicas.require_open()
        everyone = replicas.everyone
        with ExitStack() as stack:
            if everyone is not self._communicator:
                # Its calls raise the interrupts.
                stack.enter_context(turns_of(everyone.order, everyone.calls).step(name, replicas.number))
            stack.enter_context(self._turns.step(name, self._owner))
            yield

    def on_close(self, function: Callable[[], object]) -> None:
        """Local. See `Strategy.on_close`."""
        self._replicas.require_open()
        if not callable(function):
            raise TypeError(f"on_close: expected a function without arguments, got {described(function)}")
        if not self._closers:
            atexit.register(_close, weakref.ref(self))
        self._closers.append(function)

    def before_calls(self, function: Callable[[], object]) -> None:
        """Local. See `AdapterMethods.before_calls`."""
        replicas = self._replicas
        replicas.require_open()
        if not callable(function):
            raise TypeError(f"before_calls: expected a function without arguments, got {described(function)}")
        for ranks in {id(one): one for one in (replicas.communicator, replicas.everyone, replicas.pipelines)}.values():
            turns = turns_of(ranks.order, ranks.calls)
            turns.call_before(function)
            self._before.append((turns, function))

    def run_closers(self) -> None:
        """Local. Call the functions of `on_close`, the last one first, each once."""
        while self._closers:
            function = self._closers.pop()
            try:
                function()
            except Exception:
                # All others, and what the strategy itself closes, must follow.
                logger.exception("a function that strategy.on_close had registered failed: %r", function)

    def _end(self, *, is_collective: bool) -> None:
        del is_collective
        self.run_closers()
        while self._before:
            turns, function = self._before.pop()
            turns.forget(function)


def _close(reference: weakref.ref[AdapterCalls]) -> None:
    calls = reference()
    if calls is not None:
        calls.run_closers()


def _array_facts(shape: Any, dtype: Any) -> tuple[tuple[int, ...], str]:
    sizes = (shape,) if isinstance(shape, (int, np.integer)) else shape
    if not isinstance(sizes, (list, tuple)):
        raise TypeError(f"allocate: `shape` must be a tuple of whole numbers, got {described(shape)}")
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
            raise ValueError(f"allocate: `shape` must be whole numbers of at least 0, got {shape!r}")
    try:
        made = named_dtype(dtype)
    except (TypeError, ValueError):
        made = None
    if made is None or made.hasobject or made.kind not in "biufcV":
        raise TypeError(f"allocate: `dtype` must be a dtype of numbers, got {described(dtype)}")
    return tuple(map(int, sizes)), made.name
