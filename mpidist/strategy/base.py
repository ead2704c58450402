"""The strategy: what all of them share, that is scope, run, reduce, gather and data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, cast

import numpy as np

from mpidist import context
from mpidist.attributes import FixedAttributes
from mpidist.cluster.devices.names import Device
from mpidist.comm.group.resource import Resource, end_all
from mpidist.context import Entry, Scope
from mpidist.missing import Missing
from mpidist.options import InputOptions, ReduceOp, RunOptions, parse_enum
from mpidist.strategy import datasets
from mpidist.strategy.extended import StrategyExtended
from mpidist.strategy.replica import ReplicaContext, mixing, require_call, require_parts
from mpidist.strategy.reproducible.logical_replicas import LogicalReplicas
from mpidist.strategy.threads import share_cores
from mpidist.strategy.values import ValueContext, gather_nest, gather_object, reduce_leaf, reduce_nest
from mpidist.variables.replicas import Replicas
from mpidist.variables.variable import Home

if TYPE_CHECKING:
    from mpidist.cluster.resolvers.resolver import ClusterResolver
    from mpidist.data.dataset import Dataset
    from mpidist.data.distribution.distributed_dataset import DistributedDataset
    from mpidist.data.input_context import InputContext
    from mpidist.strategy.reproducible.numerics import NumericsRecord

T = TypeVar("T")

_REDUCE_OPS = dict(ReduceOp.__members__)
_NEEDS_CROSS_REPLICA = (
    "Method requires being in cross-replica context, use get_replica_context().merge_call() or call it outside `run`"
)


class Strategy(Resource, FixedAttributes):
    """Collective. A distribution strategy. Every rank runs the same program, and each rank is one replica.

    `close()`, or the end of `with ...Strategy() as strategy:`, releases its communicators and memory; the values of
    variables can still be read. A program that makes one strategy needs neither.

    Args:
        replicas: The strategy's ranks and their collectives. The strategy closes them, and its home.
        home: The home of the variables that are made in its scope: it stores and updates them.
        cluster_resolver: The resolver that describes the cluster.
        device: The device that the program has named for this rank.
        namespace: The module of the arrays with which a replica computes, `numpy` or `cupy`.

    Raises:
        TypeError: An argument has another type.
    """

    # A strategy with an `extended`, or with replica contexts, of its own names their classes.
    _extended_class: ClassVar[type[StrategyExtended]] = StrategyExtended
    _context_class: ClassVar[type[ReplicaContext]] = ReplicaContext

    _assignable = frozenset({"is_closed"})
    # The fixed attributes of all strategies.
    _fixed = frozenset({
        "chief", "communicator", "device", "device_assignment", "every", "group_index", "groups", "invitation",
        "logical_devices", "namespace", "options", "pace", "parameter_device", "places", "replicas", "roles", "task_id",
        "task_type",
    })

    def __init__(
        self,
        replicas: Replicas,
        home: Home,
        *,
        cluster_resolver: ClusterResolver | None = None,
        device: Device | None = None,
        namespace: Any = np,
    ) -> None:
        require_parts(replicas, home, cluster_resolver, device, namespace)
        self.replicas, self.device, self.namespace = replicas, device, namespace
        self.communicator = replicas.communicator
        # It reads a file, and the home has found out whether all ranks can.
        share_cores(replicas.everyone)
        self._cluster_resolver = cluster_resolver
        self._is_checked = replicas.options.check
        self._logical = LogicalReplicas(self)
        self._replica_context = self._context_class(self, self.communicator.rank)
        self._own_home = home
        self._set_entries(home)
        self._extended = self._extended_class(self)
        home.set_strategy(self)
        context.note_open(self)
        self._settle(Strategy)

    def _is_whole(self) -> bool:
        return self.replicas.is_whole()

    def _end(self, *, is_collective: bool) -> None:
        end_all([self._extended, self.replicas, self._own_home], is_collective=is_collective)

    def _set_entries(self, home: Home) -> None:
        self._cross_entry = Entry(self, None, home)
        self._replica_entry = Entry(self, self._replica_context, home)

    @contextmanager
    def at_home(self, home: Home) -> Iterator[None]:
        """Local. Enter cross-replica context; inside, the strategy's variables are made in another home.

        Args:
            home: The home, on this rank.
        """
        before = self.home
        self._set_entries(home)
        context.push(self._cross_entry)
        try:
            yield
        finally:
            context.pop()
            self._set_entries(before)

    @property
    def num_replicas_in_sync(self) -> int:
        """Local. Number of replicas over which gradients are summed: the number of ranks."""
        return self.communicator.size

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """Local. The resolver that describes the cluster, None for strategies of one node."""
        return self._cluster_resolver

    @property
    def extended(self) -> StrategyExtended:
        """Local. Further methods, for libraries."""
        return self._extended

    @property
    def home(self) -> Home:
        """Local. The home of the variables that are made in its scope."""
        return cast(Home, self._cross_entry.home)

    def on_close(self, function: Callable[[], object]) -> None:
        """Local. Call `function` once, when this strategy closes or the program ends; later functions are called first.

        Its communicators are open then, but other ranks may not take part in calls.
        """
        self._extended.on_close(function)

    def scope(self) -> AbstractContextManager[Strategy]:
        """Local. Make this strategy current in a `with` statement: variables made inside belong to it.

        Entering it raises RuntimeError where another strategy is current, and inside `run`.
        """
        return Scope(self, self._cross_entry, self._require_cross_replica)

    @contextmanager
    def cross_replica(self) -> Iterator[None]:
        """Local. Enter cross-replica context from any context, for the library; users call `scope`."""
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
        options: RunOptions | None = None,  # noqa: ARG002 - for code written for tf.distribute
    ) -> T:
        """Local. Call `fn` once on this rank, in replica context; Collective if `fn` is.

        Under `CommunicationOptions(check=True)` it is Collective, too: after each call it compares the ranks' copies of
        the variables.

        Args:
            fn: The program of one replica.
            args: Its arguments: this rank's components.
            kwargs: Its keyword arguments.
            options: Kept for code written for tf.distribute; it changes nothing.

        Returns:
            The value that `fn` returns: a plain value, this rank's component.

        Raises:
            RuntimeError: Inside `run`, or in another strategy's scope.
            ValueError: `args` is not a list or tuple.
            TypeError: `fn` is not a function, or `kwargs` not a mapping.
            MismatchError: Under `check`, variables have drifted apart.
        """
        if type(args) is not tuple or kwargs is not None or not callable(fn):
            require_call(fn, args, kwargs)
        self._require_cross_replica()
        context.push(self._replica_entry)
        try:
            result = fn(*args, **kwargs) if kwargs else fn(*args)
        finally:
            context.pop()
        if self._is_checked:
            self.home.after_run()
        return result

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Collective. Combine `value` over all replicas; every rank gets the result.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PROD, or the name in any case.
            value: This rank's component: any nest of arrays and numbers. With `axis=None` shapes must be the same
                on every rank; else they may differ along `axis`, and may be 0 there. The rows of `IndexedSlices`
                are put one after another in the order of the ranks, under MEAN divided by their number.
            axis: None combines element by element. One or several dimensions are reduced within the components
                first; MEAN then divides by the number of elements of all components.

        Returns:
            The same structure. MEAN of integers is float64; else the dtype stays. Python ints give int64.

        Raises:
            ValueError: The operation is unknown, or an axis is out of range.
            TypeError: The operation has another type, or a dtype cannot be combined so.
            OverflowError: A sum or product of integers does not fit their dtype; on every rank.
            MismatchError: Shapes or dtypes differ between ranks.
            RuntimeError: The call is inside `run`; use `get_replica_context().all_reduce` there.
        """
        op = _REDUCE_OPS.get(reduce_op) if type(reduce_op) is str else reduce_op
        if type(op) is not ReduceOp:
            op = parse_enum(ReduceOp, reduce_op, "reduce_op")
        if context.stack.entries:
            self._require_cross_replica()
        replicas = self.replicas
        if not isinstance(value, (list, tuple, dict)):
            return reduce_leaf(replicas.collective, op, value, axis)
        return reduce_nest(replicas.collective, op, value, axis, replicas.options.bytes_per_pack)

    def gradients(
        self, fn: Callable[[Any], Any], batch: Any, logical_replicas: int = 8, *, blas_threads: int = 1
    ) -> Any:
        """Collective. Add up the results of `fn` over micro-batches: the same bits on any number of ranks.

        The batches of all ranks, in their order, make the global batch. It is cut into `logical_replicas`
        micro-batches, whose sizes differ by at most one (as `numpy.array_split` cuts). Each rank computes a run of
        them; rows that it lacks come from other ranks. The results are added up in a binary tree over the
        micro-batches, half precision in float32 with one rounding. Micro-batches without rows are left out.

            def loss_and_gradients(batch):
                ...                                           # sums over the rows, divided by the global batch size
            loss, gradients = strategy.gradients(loss_and_gradients, batch, logical_replicas=8)
            optimizer.apply_gradients(zip(gradients, variables), skip_gradients_aggregation=True)

        With `CommunicationOptions(reproducible=True)` norms (clipping, LAMB, LARS) are measured in an order that does
        not depend on the ranks, either. `numerics` records what the bits do depend on.

        Args:
            fn: A function of a micro-batch (copies, on aligned addresses), called in replica context:
                `get_replica_context()` numbers the micro-batches, and has as many replicas as there are micro-batches
                with rows. Its result must depend on the rows and on variables alone, and not on earlier calls. Its
                collectives, optimizer steps, and writes to mirrored variables raise RuntimeError, unless there is
                exactly one micro-batch for each rank.
            batch: This rank's component: any nest of NumPy arrays with a common first dimension, that of rows, which
                may be 0; None leaves stay None.
            logical_replicas: The number of micro-batches, at least the number of ranks. The result depends on it:
                choose it once, for the largest number of ranks that the program will ever have. A multiple of the
                number of ranks shares the work evenly.
            blas_threads: The number of BLAS threads while `fn` runs; the result depends on it, so the number of cores
                does not change it.

        Returns:
            The results of `fn`, any nest of arrays and numbers, added up; the same on every rank.

        Raises:
            OverflowError: A sum of integers does not fit their dtype; on every rank.
            ValueError: There are fewer logical replicas than ranks, or no rows at all, or results have different
                shapes.
            MismatchError: Ranks pass other numbers, dtypes or row shapes, or `fn` returns other ones.
            TypeError: Results cannot be added (booleans, objects, IndexedSlices), or a number is no integer.
            RuntimeError: The call is inside `run`.
            NotImplementedError: The strategy's variables are on GPUs.
        """
        self._require_cross_replica()
        require_call(fn, (), None)
        return self._logical.gradients(fn, batch, logical_replicas, blas_threads)

    @property
    def numerics(self) -> NumericsRecord:
        """Local. A record of everything else on which the bits of `gradients` depend; a checkpoint can hold it."""
        return self._logical.numerics

    def gather(self, value: Any, axis: int) -> Any:
        """Collective. Concatenate the components of all ranks along `axis`; every rank gets the result.

        Args:
            value: This rank's component: any nest of arrays of at least one dimension. Sizes may differ between
                ranks along `axis` only.
            axis: The dimension along which to concatenate, -ndim to ndim - 1.

        Returns:
            The same structure.

        Raises:
            MismatchError: Other dimensions or dtypes differ.
            ValueError: `value` holds a scalar, or the axis is out of range.
            NotImplementedError: `value` holds IndexedSlices.
            RuntimeError: The call is inside `run`; use `get_replica_context().all_gather` there.
        """
        entry = context.innermost()
        if entry is not None and entry.replica_context is not None:
            raise RuntimeError(
                "gather requires cross-replica context, use get_replica_context().all_gather() instead"
            )
        self._require_cross_replica()
        return gather_nest(self.replicas.collective, value, axis, "gather")

    def gather_object(self, value: T) -> list[T]:
        """Collective. The picklable values of all ranks, in their order; `get_replica_context().all_gather_object` too.

        Raises:
            TypeError: A value cannot be pickled; on every rank.
            RuntimeError: The call is inside `run`.
        """
        self._require_cross_replica()
        with self.replicas.calls.during("gather_object"):
            return gather_object(self.communicator, value)

    def experimental_local_results(self, value: T) -> tuple[T, ...]:
        """Local. The components on this rank: `(value,)`, since one rank is one replica."""
        return (value,)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], T]) -> T:
        """Local. This rank's component: the result of `value_fn`, called with the number of this replica."""
        require_call(value_fn, (), None)
        return value_fn(ValueContext(self.communicator.rank, self.num_replicas_in_sync))

    def experimental_distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Collective. This rank's part of a dataset that is batched by the global batch size.

        Args:
            dataset: The dataset, the same on every rank; its last batching step makes global batches. Without one,
                elements of a generator or an iterable are global batches if their arrays have the same first dimension.
            options: The options of the input.

        Returns:
            An iterable of this rank's pieces: each global batch is split so that sizes differ by at most one. On GPUs
            they are CuPy arrays.
        """
        return datasets.distribute(dataset, self.replicas, options, self.namespace)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Collective. The dataset that `dataset_fn` makes for this rank, neither batched nor sharded here.

        Args:
            dataset_fn: A function that is called once with `InputContext(n, rank, n)`.
            options: The options of the input.

        Returns:
            An iterable that ends on all ranks together: a rank without data gets empty batches.
        """
        return datasets.distribute_from_function(dataset_fn, self.replicas, options, self.namespace)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    experimental_run = Missing()
    experimental_run_v2 = Missing()
    experimental_make_numpy_dataset = Missing()
    make_experimental_numpy_dataset = Missing()
    make_dataset_iterator = Missing()
    make_input_fn_iterator = Missing()
    unwrap = Missing()

    def _require_cross_replica(self) -> None:
        if self.is_closed:
            self.replicas.require_open()
        entries = context.stack.entries
        if not entries:
            return
        entry = entries[-1]
        if entry.strategy is not self:
            raise RuntimeError(mixing(entry.strategy, self))
        if entry.replica_context is not None:
            raise RuntimeError(_NEEDS_CROSS_REPLICA)

    def __copy__(self) -> Strategy:
        raise RuntimeError("Must only deepcopy a strategy. It owns memory and communicators: share it")

    def __deepcopy__(self, _: object) -> Strategy:
        # Objects that hold a strategy can be copied, and continue sharing it.
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled: it owns memory and communicators of this process. Make a strategy on every "
            "rank, and call `mpidist.get_strategy()` in what another process runs"
        )

    def __repr__(self) -> str:
        where = f"rank={self.communicator.rank}, num_replicas_in_sync={self.num_replicas_in_sync}"
        return f"<mpidist.{type(self).__name__} {where}>"
