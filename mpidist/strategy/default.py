"""The default strategy, which distributes nothing, and the functions that ask for the current strategy."""

from __future__ import annotations

import functools
import logging
import threading
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy.typing as npt

from mpidist import context, launch
from mpidist.comm.collective import require_axis
from mpidist.context import Entry, Scope
from mpidist.errors import mark_shared
from mpidist.first_rank import is_chief
from mpidist.options import (
    CommunicationOptions,
    InputOptions,
    ReduceOp,
    RunOptions,
    VariableAggregation,
    VariableSynchronization,
    parse_enum,
)
from mpidist.strategy.base import Strategy
from mpidist.strategy.extended import StrategyExtended
from mpidist.strategy.replica import ReplicaContext, require_call
from mpidist.variables import variable as variables
from mpidist.variables.arena import current_home, solo_arena
from mpidist.variables.making.initial import ShardedInitial

if TYPE_CHECKING:
    from mpidist.data.dataset import Dataset
    from mpidist.data.distribution.distributed_dataset import DistributedDataset
    from mpidist.strategy.adapters.calls import AdapterCalls

logger = logging.getLogger("mpidist")
T = TypeVar("T")


@functools.cache
def warn_about_independent_programs(name: str) -> None:
    """Local. Warn once, on the first rank, that a strategy of one replica runs on several ranks."""
    size = launch.world_size()
    if size > 1 and is_chief():
        logger.warning(
            "%s runs %d independent programs, one on each rank: nothing is summed over the ranks, and only rank 0 "
            "writes checkpoints. To train one model on all ranks use MultiWorkerMirroredStrategy()", name, size,
        )


@functools.cache
def _warn_about_own_values(size: int) -> None:
    if is_chief():
        logger.warning(
            "a collective of get_replica_context() was called outside `run`, where there is one replica: it returns "
            "the value of its own rank, and combines nothing over the %d ranks of the job. Call it in a function that "
            "`strategy.run` calls, of a strategy of all ranks", size,
        )


def _require_alone(name: str) -> None:
    """Raise where a program that combines values means the replicas of a strategy."""
    strategy = context.open_strategy()
    if strategy is not None:
        raise RuntimeError(
            f"{name} was called outside `run`, where it would combine nothing: expected a call inside `run` of "
            f"{strategy!r}, got one in the default replica context, which has this rank alone. Call it in a function "
            "that `strategy.run(function)` calls; also in another thread, which starts outside `run`"
        )
    size = launch.world_size()
    if size > 1:
        _warn_about_own_values(size)


class _DefaultReplicaContext(ReplicaContext):
    """The context outside any strategy, where there is one replica and values are returned unchanged.

    If a strategy of several replicas is open in this process, a program that combines values means its replicas: these
    methods raise then. In a job of several ranks without one they warn once.
    """

    __slots__ = ()

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Local. Return `value`; errors as in `ReplicaContext`, and RuntimeError while a strategy is open elsewhere."""
        del options  # there is nothing to combine
        parse_enum(ReduceOp, reduce_op, "reduce_op")
        self._require_current()
        _require_alone("get_replica_context().all_reduce")
        return value

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Local. Return `value`; errors as of `all_reduce`."""
        del options
        require_axis(axis)
        self._require_current()
        _require_alone("get_replica_context().all_gather")
        return value

    def all_gather_object(self, value: T) -> list[T]:
        """Local. Return `[value]`; errors as of `all_reduce`."""
        self._require_current()
        _require_alone("get_replica_context().all_gather_object")
        return super().all_gather_object(value)

    def _require_current(self) -> None:
        if context.innermost() is not None:
            super()._require_current()


class _DefaultExtended(StrategyExtended):
    """The `extended` of the default strategy: nothing is distributed, so there are no devices to name."""

    def _adapter_calls(self) -> AdapterCalls:
        self._require_own_context()
        _require_alone("a collective of the default strategy's `extended`")
        return super()._adapter_calls()

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Local. An error, as in tf.distribute.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("worker_devices unsupported by default tf.distribute.Strategy: enter a strategy's scope")

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Local. An error, as in tf.distribute.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError("parameter_devices unsupported by default tf.distribute.Strategy: enter a strategy's scope")


class _DefaultScope(Scope[Strategy]):
    """The scope that changes nothing. Inside another strategy's it would look as if it ended that one."""

    __slots__ = ()

    def __enter__(self) -> Strategy:
        self._require_allowed()
        return self._strategy

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        """Local. Do nothing: nothing was entered."""


class DefaultStrategy(Strategy):
    """The strategy outside any scope: `run` calls the function, `reduce` and `gather` return their input.

    There is only one object, which `get_strategy()` returns outside any scope. In the scope of another strategy its
    methods raise RuntimeError: they would give each rank its own value, where the program expects that of all.
    """

    _extended_class = _DefaultExtended
    _context_class = _DefaultReplicaContext

    def __init__(self) -> None:
        # All variables made outside a scope live in one arena, also those made before this object existed.
        arena = solo_arena()
        super().__init__(arena.replicas, arena)
        self._settle(DefaultStrategy)

    @property
    def replica_context(self) -> ReplicaContext:
        """Local. The replica context at program start."""
        return self._replica_context

    def close(self) -> None:
        """Local. Do nothing: the default strategy holds nothing, and exists as long as the program."""

    def drop(self) -> None:
        """Local. Do nothing, as `close`."""

    def scope(self) -> AbstractContextManager[Strategy]:
        """Local. A scope that changes nothing: code behaves as without any strategy."""
        return _DefaultScope(self, self._cross_entry, self._require_cross_replica)

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> T:
        """Local. Call `fn(*args, **kwargs)`; errors as of `Strategy.run`."""
        del options  # it changes nothing under any strategy
        require_call(fn, args, kwargs)
        self._require_cross_replica()
        warn_about_independent_programs("the default strategy")
        return fn(*args, **(kwargs or {}))

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Local. Return `value`, with `axis` reduced as under any strategy; errors as of `Strategy.reduce`."""
        if axis is not None:
            return super().reduce(reduce_op, value, axis)
        self._require_cross_replica()
        return value

    def gather(self, value: Any, axis: int) -> Any:
        """Local. Return `value`; errors as of `Strategy.gather`."""
        require_axis(axis)
        self._require_cross_replica()
        return value

    def experimental_distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Local. The whole dataset."""
        warn_about_independent_programs("the default strategy")
        return super().experimental_distribute_dataset(dataset, options)

    def __copy__(self) -> Strategy:
        raise RuntimeError("there is one default strategy; get_strategy() gives it")

    def __deepcopy__(self, _: object) -> Strategy:
        raise RuntimeError("there is one default strategy; get_strategy() gives it")


@functools.cache
def default_strategy() -> DefaultStrategy:
    """Local. The one default strategy."""
    return DefaultStrategy()


def get_strategy() -> Strategy:
    """Local. The current strategy of this thread: that of the innermost scope or `run`, else the default strategy."""
    entry = context.innermost()
    return default_strategy() if entry is None else cast(Strategy, entry.strategy)


class _Chosen(threading.local):
    """The entry that `experimental_set_strategy` has pushed on this thread."""

    entry: Entry | None = None

    def leave(self) -> None:
        """Local. Leave the scope of the strategy that was chosen, if there is one."""
        if self.entry is not None:
            context.pop()
            self.entry = None

    def enter(self, strategy: Strategy) -> None:
        """Local. Enter the scope of a strategy."""
        # A new entry, not the strategy's own: it must differ from those of `with strategy.scope()` entered later.
        self.entry = Entry(strategy, None, strategy.home)
        context.push(self.entry)


_chosen = _Chosen()


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Local. Enter a strategy's scope for the rest of the program, for notebooks; a second call replaces the first.

    Args:
        strategy: The strategy. None and the default strategy leave the scope.

    Raises:
        RuntimeError: The call is inside `with strategy.scope()` or `run`.
        TypeError: `strategy` is no strategy.
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise TypeError(
            "`strategy` must be a strategy, for instance mpidist.MirroredStrategy(), or None to leave the scope, got "
            f"{type(strategy).__name__}: {strategy!r}"
        )
    if context.innermost() is not _chosen.entry:
        raise RuntimeError(
            "Must not be called inside a `tf.distribute.Strategy` scope. Leave it first, or use "
            "`with strategy.scope():` alone"
        )
    _chosen.leave()
    if strategy is not None and not isinstance(strategy, DefaultStrategy):
        _chosen.enter(strategy)


def has_strategy() -> bool:
    """Local. Whether a strategy other than the default one is current."""
    entry = context.innermost()
    # Inside a `merge_call` of the default context the default strategy itself is on the stack.
    return entry is not None and not isinstance(entry.strategy, DefaultStrategy)


def in_cross_replica_context() -> bool:
    """Local. True in a scope and in `merge_call`, False in `run` and at program start."""
    entry = context.innermost()
    return entry is not None and entry.replica_context is None


def get_replica_context() -> ReplicaContext | None:
    """Local. The replica context inside `run` and at program start, None in cross-replica context."""
    entry = context.innermost()
    if entry is None:
        return default_strategy().replica_context
    return cast("ReplicaContext | None", entry.replica_context)


class Variable(ABC):  # noqa: B024  # for `register`
    """Collective in a strategy's scope, else Local. An array that all replicas of the current strategy share.

    Every rank must make the same variables in the same order. The value is the first replica's. Outside any scope the
    variable belongs to this process alone. All variables are instances of this class;
    `mpidist.variables.variable.BaseVariable` documents their methods.

    Args:
        initial_value: An array, a number, nested lists, or a function without arguments that returns one of them.
        trainable: Whether the variable is trainable; default True. ON_READ variables are not.
        name: A name for display, which must be the same on every rank if it is given.
        dtype: The dtype. Default: the array's own dtype; Python floats become float32, ints int32.
        synchronization: ON_WRITE (or AUTO): one value for all replicas. ON_READ: each replica has its own value.
        aggregation: The way to combine the replicas' values.
        sparse_gradient: Whether its gradients are `IndexedSlices`, rows of it, like those of an embedding. An optimizer
            then exchanges and updates only the rows that some replica names, so the time of a step does not depend on
            the number of rows. Other rows keep their value and state: momentum and decay of a row stop while it has no
            gradient, as in PyTorch's `SparseAdam`. Plain SGD and Adagrad give the same results as with dense gradients.
            tf.Variable has no such argument.
        partition_dimensions: Under a `TPUStrategy` whose replicas have several ranks: the number of parts of each
            dimension. Each logical device then has a tile, which `value()` returns; `shape`, `assign` and `numpy()` are
            of the whole. Gradients are those of tiles. tf.Variable has no such argument.
        shape: The shape of the variable. With it a function that makes the initial value may make it shard by shard,
            where a `ParameterServerStrategy` cuts the variable: a function with a parameter `shard_info` gets the
            shard's `shape` and `offset`, one with `partition_shape` and `partition_offset` gets these. Give the
            `dtype`, too.

    Raises:
        MismatchError: The shape, the dtype, a given name, or another argument except the value differs between ranks.
        ValueError: The arguments do not fit together.
        TypeError: The initial value does not hold numbers.

    Example:
        >>> import mpidist
        >>> v = mpidist.Variable(1.0)
        >>> v.assign_add(2.0)
        <mpidist.MirroredVariable 'Variable' shape=() dtype=float32, numpy=3.0>
    """

    # By design it gives a variable of the kind that the strategy wants; the arguments are tf.Variable's.
    def __new__(  # type: ignore[misc]  # noqa: PLR0913
        cls,
        initial_value: npt.ArrayLike | variables.BaseVariable | Callable[..., npt.ArrayLike],
        trainable: bool | None = None,
        *,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
        sparse_gradient: bool = False,
        shape: Sequence[int] | None = None,
        partition_dimensions: Sequence[int] | None = None,
    ) -> variables.BaseVariable:
        """Collective. See the class."""
        if shape is not None:
            make = initial_value if callable(initial_value) else functools.partial(_itself, initial_value)
            initial_value = ShardedInitial(make, shape, dtype, "Variable" if name is None else name)
        home: Any = current_home()
        further: dict[str, Any] = {}
        if partition_dimensions is not None:
            if not getattr(home, "takes_partition_dimensions", False):
                raise mark_shared(ValueError(
                    f"variable {name or 'Variable'!r}: `partition_dimensions` cuts a variable over the logical devices "
                    f"of a replica, which a TPUStrategy has, got {partition_dimensions!r} under "
                    f"{get_strategy()!r}. Leave it out, or make the variable in the scope of a mpidist.TPUStrategy"
                ))
            further["partition_dimensions"] = partition_dimensions
        made = home.create_variable(
            initial_value, name=name, dtype=dtype, trainable=trainable,
            synchronization=synchronization, aggregation=aggregation, sparse_gradient=sparse_gradient, **further,
        )
        return cast(variables.BaseVariable, made)


def _itself(value: npt.ArrayLike) -> npt.ArrayLike:
    return value


Variable.register(variables.BaseVariable)  # type: ignore[type-abstract]  # register takes abstract classes, too
