"""The replica context: a replica's place and its collectives, inside `run`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType, NoneType
from typing import Any, Protocol, TypeVar

from mpidist import context
from mpidist.arguments import described
from mpidist.cluster.devices.names import Device
from mpidist.cluster.resolvers.resolver import ClusterResolver
from mpidist.comm.group.communicator import Communicator
from mpidist.options import CommunicationOptions, ReduceOp, RunOptions, parse_enum
from mpidist.strategy.values import gather_nest, gather_object, reduce_nest
from mpidist.variables.replicas import Replicas
from mpidist.variables.variable import Home

T = TypeVar("T")


def mixing(current: object, other: object) -> str:
    """Local. The error text for a call of one strategy in the scope of another.

    Args:
        current: The strategy whose scope it is.
        other: The strategy whose method was called.
    """
    return (
        f"Mixing different tf.distribute.Strategy objects: {current!r} is current and a method of {other!r} was "
        "called. Call `mpidist.get_strategy()` where you need the strategy, instead of keeping its result"
    )


def require_call(fn: object, args: object, kwargs: object) -> None:
    """Local. Raise unless `fn(*args, **kwargs)` can be called.

    Raises:
        ValueError: `args` is not a list or tuple.
        TypeError: `fn` is not a function, or `kwargs` not a mapping.
    """
    if not isinstance(args, (list, tuple)):
        raise ValueError(f"positional args must be a list or tuple, got {type(args).__name__}: use args=(value,)")
    if not callable(fn):
        raise TypeError(
            f"expected a function to call, got {type(fn).__name__}: {fn!r}. Pass the function itself, `step`, and not "
            "its result, `step()`"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"keyword args must be a dict or None, got {type(kwargs).__name__}: {kwargs!r}")


def require_parts(replicas: object, home: object, resolver: object, device: object, namespace: object) -> None:
    """Local. Raise TypeError unless these are the parts of a strategy, as its constructor takes them."""
    for name, given, kinds in (
        ("replicas", replicas, (Replicas,)), ("home", home, (Home,)),
        ("cluster_resolver", resolver, (ClusterResolver, NoneType)), ("device", device, (Device, NoneType)),
        ("namespace", namespace, (ModuleType,)),
    ):
        if not isinstance(given, kinds):
            raise TypeError(
                f"Strategy: `{name}` must be a {' or '.join(kind.__name__ for kind in kinds)}, got {described(given)}. "
                "To train, make one of the strategies with a name of its own, such as mpidist.MirroredStrategy()"
            )


class Owner(Protocol):
    """The members of a strategy that its replica contexts and its `extended` use.

    Attributes:
        communicator: The replicas.
        replicas: The ranks of the strategy, and their collectives.
        device: The device that the program has named for this rank; None where it names none.
        namespace: The module of the arrays with which a replica computes.
    """

    communicator: Communicator
    replicas: Replicas
    device: Device | None
    namespace: Any

    @property
    def home(self) -> Home:
        """Local. The home of the variables that are made in its scope."""
        ...

    @property
    def num_replicas_in_sync(self) -> int:
        """Local. Number of replicas."""
        ...

    def cross_replica(self) -> AbstractContextManager[None]:
        """Local. A context manager that enters cross-replica context from any context."""
        ...

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> T:
        """Local. Call `fn` in replica context."""
        ...

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Collective. Combine `value` over all replicas."""
        ...

    def gather(self, value: Any, axis: int) -> Any:
        """Collective. Concatenate `value` over all replicas."""
        ...


class ReplicaContext:
    """Local. The result of `get_replica_context()` inside `run`: this replica's number, and its collectives.

    Args:
        strategy: The strategy whose `run` is called.
        replica_id_in_sync_group: 0 to `num_replicas_in_sync` - 1, in the order of the ranks.
        replica_count: Number of replicas if they are logical ones. Default: that of the strategy.

    Raises:
        ValueError: The id is not an int.
    """

    __slots__ = ("_replica_count", "_replica_id", "_strategy")

    def __init__(
        self, strategy: Owner, replica_id_in_sync_group: int, replica_count: int | None = None
    ) -> None:
        if isinstance(replica_id_in_sync_group, bool) or not isinstance(replica_id_in_sync_group, int):
            raise ValueError(f"`replica_id_in_sync_group` must be an int, got {replica_id_in_sync_group!r}")
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group
        self._replica_count = replica_count

    @property
    def strategy(self) -> Owner:
        """Local. The strategy whose `run` is called."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """Local. This replica's number over all nodes."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Local. Number of replicas over all nodes. Inside `Strategy.gradients`: number of micro-batches with rows."""
        return self._strategy.num_replicas_in_sync if self._replica_count is None else self._replica_count

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Collective. Combine `value` over all replicas; every replica gets the result.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PROD, or its name in any case.
            value: Any nest of arrays and numbers, of the same structure, shapes and dtypes on every replica; or, under
                SUM or MEAN, of `IndexedSlices`, whose rows are concatenated in the order of the replicas.
            options: Options of this call, the same on every replica. Fields with default values are the strategy's.

        Returns:
            The same structure. The MEAN of integers is float64.

        Raises:
            OverflowError: A sum or product of integers does not fit their dtype; on every replica.
            RuntimeError: This context is not the current one, or the call is inside `Strategy.gradients`, where a rank
                has several replicas.
        """
        op = parse_enum(ReduceOp, reduce_op, "reduce_op")
        self._require_current()
        collective = self._strategy.replicas.collective_for(options)
        packed = (options.bytes_per_pack if options else 0) or self._strategy.replicas.options.bytes_per_pack
        return reduce_nest(collective, op, value, None, packed)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Collective. Concatenate `value` over all replicas along `axis`, in their order.

        Args:
            value: Any nest of arrays of at least one dimension. Sizes may differ between replicas along `axis` only.
            axis: The dimension along which to concatenate.
            options: See `all_reduce`.

        Returns:
            The same structure.

        Raises:
            MismatchError: Other sizes or dtypes differ between replicas.
            ValueError: `value` holds a scalar, or `axis` is out of range.
            NotImplementedError: `value` holds IndexedSlices.
            RuntimeError: This context is not the current one.
        """
        self._require_current()
        return gather_nest(self._strategy.replicas.collective_for(options), value, axis, "all_gather")

    def all_gather_object(self, value: T) -> list[T]:
        """Collective. The picklable values of all replicas, in their order.

        Raises:
            RuntimeError: This context is not the current one.
            TypeError: A value cannot be pickled; on every rank.
        """
        self._require_current()
        with self._strategy.replicas.calls.during("gather_object"):
            return gather_object(self._strategy.communicator, value)

    def merge_call(
        self, merge_fn: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> T:
        """Collective. Call `merge_fn(strategy, *args)` in cross-replica context, once on every rank.

        Args:
            merge_fn: A function that gets this replica's values, and may combine those of all replicas.
            args: Further arguments of `merge_fn`.
            kwargs: Keyword arguments of `merge_fn`.

        Returns:
            The value that `merge_fn` returns on this rank.

        Raises:
            RuntimeError: This context is not the current one.
            TypeError, ValueError: See `Strategy.run`.
        """
        self._require_current()
        require_call(merge_fn, args, kwargs)
        with self._strategy.cross_replica():
            return merge_fn(self._strategy, *args, **(kwargs or {}))

    def _require_current(self) -> None:
        entry = context.innermost()
        if entry is not None and entry.replica_context is self:
            context.require_collectives()
            return
        way_out = "is not the current one: call `get_replica_context()` inside `run` and use its result there"
        if entry is None or entry.replica_context is None:
            raise RuntimeError(f"Need to be inside `call_for_each_replica()`, that is `run`: {self!r} {way_out}")
        if entry.strategy is not self._strategy:
            raise RuntimeError(
                f"Mismatching tf.distribute.Strategy objects: {entry.strategy!r} runs, and {self!r} {way_out}"
            )
        raise RuntimeError(f"Mismatching ReplicaContext. {self!r} {way_out}")

    def __repr__(self) -> str:
        return f"<mpidist.ReplicaContext {self._replica_id} of {self.num_replicas_in_sync} of {self._strategy!r}>"
