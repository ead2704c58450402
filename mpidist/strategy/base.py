"""The strategy: what all of them share, that is scope, run, reduce, gather and data; and the replica context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

from mpidist import context, tree
from mpidist.cluster.resolver import ClusterResolver
from mpidist.comm.communicator import Communicator
from mpidist.context import Entry
from mpidist.data.dataset import Dataset
from mpidist.data.distributed import DistributedDataset, distribute_datasets_from_function
from mpidist.data.input_context import InputContext
from mpidist.options import CommunicationOptions, InputOptions, ReduceOp, RunOptions, parse_enum
from mpidist.strategy.threads import share_cores
from mpidist.strategy.values import ValueContext, as_array, reduce_leaf
from mpidist.variables.arena import Arena

T = TypeVar("T")

_MIXING = "Mixing different tf.distribute.Strategy objects"
_NEEDS_CROSS_REPLICA = (
    "Method requires being in cross-replica context, use get_replica_context().merge_call() or call it outside `run`"
)


class ReplicaContext:
    """What `get_replica_context()` gives inside `run`: this replica's place, and collectives.

    Args:
        strategy: The strategy that runs.
        replica_id_in_sync_group: 0 to `num_replicas_in_sync` - 1, in the order of the ranks.

    Raises:
        ValueError: The id is no int.
    """

    __slots__ = ("_replica_id", "_strategy")

    def __init__(self, strategy: Strategy, replica_id_in_sync_group: int) -> None:
        if isinstance(replica_id_in_sync_group, bool) or not isinstance(replica_id_in_sync_group, int):
            raise ValueError(f"`replica_id_in_sync_group` must be an int, got {replica_id_in_sync_group!r}")
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group

    @property
    def strategy(self) -> Strategy:
        """Local. The strategy that runs."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """Local. This replica's number over all nodes."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Local. Number of replicas over all nodes."""
        return self._strategy.num_replicas_in_sync

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Collective. Combine `value` over all replicas; every replica gets the result.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PROD, or the name in any case.
            value: Any nest of arrays and numbers, of the same structure, shapes and dtypes on every replica.
            options: Kept for code written for tf.distribute; the strategy's options hold.

        Returns:
            The same structure. MEAN of integers is float64.
        """
        op = parse_enum(ReduceOp, reduce_op, "reduce_op")
        collective = self._strategy.arena.collective
        return tree.map_leaves(lambda leaf: reduce_leaf(collective, op, leaf, None), value)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Collective. Concatenate `value` over all replicas along `axis`, in their order.

        Args:
            value: Any nest of arrays of at least one dimension; sizes may differ along `axis` only.
            axis: Along which to concatenate.
            options: Kept for code written for tf.distribute.

        Returns:
            The same structure.

        Raises:
            MismatchError: Other dimensions or dtypes differ.
            ValueError: A scalar, or an axis out of range.
        """
        collective = self._strategy.arena.collective
        return tree.map_leaves(lambda leaf: collective.all_gather(as_array(leaf), axis), value)

    def merge_call(
        self, merge_fn: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> T:
        """Collective. Call `merge_fn(strategy, *args)` in cross-replica context, once on every rank.

        Args:
            merge_fn: Sees this replica's values and, through collectives, all the others'.
            args: Further arguments.
            kwargs: Keyword arguments.

        Returns:
            What `merge_fn` returns on this rank.

        Raises:
            RuntimeError: This context is not the current one.
        """
        entry = context.innermost()
        if entry is not None and entry.replica_context is not self:
            raise RuntimeError("merge_call belongs into the `run` whose context this is; it is not the current one")
        with self._strategy.cross_replica():
            return merge_fn(self._strategy, *args, **(kwargs or {}))

    def __repr__(self) -> str:
        return f"<mpidist.ReplicaContext {self._replica_id} of {self.num_replicas_in_sync} of {self._strategy!r}>"


class Scope:
    """Makes a strategy current while it is entered, which may be any number of times.

    Args:
        strategy: The strategy.
    """

    __slots__ = ("_strategy",)

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def __enter__(self) -> Strategy:
        self._strategy._require_cross_replica()
        context.push(self._strategy._cross_entry)
        return self._strategy

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        context.pop()


class Strategy:
    """How a program is distributed. Every rank runs the same program, and each rank is one replica.

    Collective. Args:
        communicator: The replicas, one per rank.
        options: How they communicate.
        shared: Whether variables live once per node in shared memory: True, False, or None for "where it can be".
        cluster_resolver: What describes the cluster.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        options: CommunicationOptions | None = None,
        shared: bool | None = None,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        share_cores(communicator)
        self.communicator = communicator
        self.arena = Arena(communicator, options, shared=shared)
        self._cluster_resolver = cluster_resolver
        self._replica_context = ReplicaContext(self, communicator.rank)
        self._cross_entry = Entry(self, None, self.arena)
        self._replica_entry = Entry(self, self._replica_context, self.arena)

    @property
    def num_replicas_in_sync(self) -> int:
        """Local. Number of replicas over which gradients are summed: of ranks."""
        return self.communicator.size

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """Local. What describes the cluster, None for strategies of one node."""
        return self._cluster_resolver

    def scope(self) -> AbstractContextManager[Strategy]:
        """Local. Make this strategy current in a `with` statement: variables made inside belong to it.

        Entering it raises RuntimeError where another strategy is current, and inside `run`.
        """
        return Scope(self)

    @contextmanager
    def cross_replica(self) -> Iterator[None]:
        """Local. Enter cross-replica context without asking where from; users call `scope`."""
        context.push(self._cross_entry)
        try:
            yield
        finally:
            context.pop()

    def run(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> T:
        """Local. Call `fn` once on this rank, in replica context; collectives inside make it Collective.

        Args:
            fn: The program of one replica.
            args: Its arguments: this rank's components.
            kwargs: Its keyword arguments.
            options: Kept for code written for tf.distribute.

        Returns:
            What `fn` returns: a plain value, this rank's component.

        Raises:
            RuntimeError: Inside `run`, or in another strategy's scope.
            ValueError: `args` is no list or tuple.
        """
        if not isinstance(args, (list, tuple)):
            raise ValueError(f"positional args must be a list or tuple, got {type(args).__name__}: use args=(value,)")
        self._require_cross_replica()
        context.push(self._replica_entry)
        try:
            return fn(*args, **kwargs) if kwargs else fn(*args)
        finally:
            context.pop()

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Collective. Combine `value` over all replicas; every rank gets the result.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PROD, or the name in any case.
            value: This rank's component: any nest of arrays and numbers. With `axis=None` shapes must be the same
                on every rank; else they may differ along `axis`, and may be 0 there.
            axis: None combines element by element. One or several dimensions are reduced within the components
                first; MEAN then divides by the number of elements that there really are.

        Returns:
            The same structure. MEAN of integers is float64; else the dtype stays.

        Raises:
            ValueError: Unknown operation, or an axis out of range.
            TypeError: An operation of another type, or a dtype that cannot be combined so.
            MismatchError: Shapes or dtypes differ between ranks.
            RuntimeError: Inside `run`, where `get_replica_context().all_reduce` is the way.
        """
        op = parse_enum(ReduceOp, reduce_op, "reduce_op")
        self._require_cross_replica()
        collective = self.arena.collective
        if not isinstance(value, (list, tuple, dict)):
            return reduce_leaf(collective, op, value, axis)
        return tree.map_leaves(lambda leaf: reduce_leaf(collective, op, leaf, axis), value)

    def gather(self, value: Any, axis: int) -> Any:
        """Collective. Concatenate the components of all ranks along `axis`; every rank gets the result.

        Args:
            value: This rank's component: any nest of arrays of at least one dimension. Sizes may differ between
                ranks along `axis` only.
            axis: Along which to concatenate, -ndim to ndim - 1.

        Returns:
            The same structure.

        Raises:
            MismatchError: Other dimensions or dtypes differ.
            ValueError: A scalar, or an axis out of range.
            RuntimeError: Inside `run`, where `get_replica_context().all_gather` is the way.
        """
        entry = context.innermost()
        if entry is not None and entry.replica_context is not None:
            raise RuntimeError(
                "gather requires cross-replica context, use get_replica_context().all_gather() instead"
            )
        self._require_cross_replica()
        return self._replica_context.all_gather(value, axis)

    def experimental_local_results(self, value: T) -> tuple[T, ...]:
        """Local. The components on this rank: `(value,)`, since one rank is one replica."""
        return (value,)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], T]) -> T:
        """Local. This rank's component: `value_fn` called with the place of this replica."""
        return value_fn(ValueContext(self.communicator.rank, self.num_replicas_in_sync))

    def experimental_distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Collective. This rank's part of a dataset that is batched by the global batch size.

        Args:
            dataset: The same on every rank; its last batching step makes global batches.
            options: Of the input.

        Returns:
            An iterable of this rank's pieces: each global batch is split so that sizes differ by at most one.
        """
        return DistributedDataset(dataset, self.communicator, options=options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Collective. The dataset that `dataset_fn` makes for this rank, neither batched nor sharded here.

        Args:
            dataset_fn: Called once with `InputContext(n, rank, n)`.
            options: Of the input.

        Returns:
            An iterable that ends on all ranks together: a rank without data gets empty batches.
        """
        return distribute_datasets_from_function(dataset_fn, self.communicator, options=options)

    def _require_cross_replica(self) -> None:
        entry = context.innermost()
        if entry is None:
            return
        if entry.strategy is not self:
            raise RuntimeError(f"{_MIXING}: {entry.strategy!r} is current and a method of {self!r} was called")
        if entry.replica_context is not None:
            raise RuntimeError(_NEEDS_CROSS_REPLICA)

    def __repr__(self) -> str:
        where = f"rank={self.communicator.rank}, num_replicas_in_sync={self.num_replicas_in_sync}"
        return f"<mpidist.{type(self).__name__} {where}>"
