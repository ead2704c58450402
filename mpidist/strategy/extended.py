"""`strategy.extended`: the methods of a strategy for library code, besides scope, run, reduce and gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from mpidist import context, tree
from mpidist.arguments import flag
from mpidist.comm.cross_device.user_backend import HookCollective
from mpidist.comm.first_use import at_first_use
from mpidist.comm.group.agreement import exchange, require_same
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import end_all
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import CommunicationOptions, ReduceOp, RunOptions, VariableAggregation, parse_enum
from mpidist.strategy.adapter_methods import AdapterMethods
from mpidist.strategy.replica import Owner, require_call
from mpidist.strategy.values import as_array, reduce_leaf, signed
from mpidist.variables.kinds.sync_on_read import SyncOnReadVariable
from mpidist.variables.variable import BaseVariable

if TYPE_CHECKING:
    from mpidist.comm.cross_device.asynchronous import AsyncCollective, open_asynchronous
    from mpidist.comm.group.communication_thread import Handle
else:
    open_asynchronous = at_first_use("mpidist.comm.cross_device.asynchronous", "open_asynchronous")

T = TypeVar("T")


class StrategyExtended(AdapterMethods):
    """Local. The methods of a strategy for library code; each strategy has one object, its `extended`, and closes it.

    Args:
        container_strategy: The strategy.
    """

    _asynchronous: AsyncCollective | None = None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Owner, str]]:
        # A copy shares it, as one of the strategy does.
        return getattr, (self._owner, "extended")

    def _end(self, *, is_collective: bool) -> None:
        opened = (self._calls, self._asynchronous)
        end_all([one for one in opened if one is not None], is_collective=is_collective)

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Collective. Combine a value over all replicas as `strategy.reduce` does with `axis=None`; all get the result.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PROD, or the name in any case.
            value: This rank's component: any nest of arrays, numbers and IndexedSlices.
            destinations: A device, a variable or a value. Kept for code written for tf.distribute: the result is a new
                value on every rank, and a variable is not changed.
            options: Options of this call, the same on every rank. Fields with default values are the strategy's.

        Returns:
            The same structure.

        Raises:
            TypeError: `destinations` is a list, or the operation is a VariableAggregation.
            RuntimeError: The call is inside `run`.
        """
        _refuse_list(destinations)
        if isinstance(reduce_op, VariableAggregation):
            raise TypeError(
                f"Expected `reduce_op` to be a `mpidist.ReduceOp` or its name, got {reduce_op!r}. Convert it with "
                "ReduceOp.from_variable_aggregation"
            )
        if options is None:
            return self._owner.reduce(reduce_op, value, axis=None)
        op = parse_enum(ReduceOp, reduce_op, "reduce_op")
        with self._cross_replica("reduce_to"):
            collective = self._owner.replicas.collective_for(options)
            return tree.map_leaves(lambda leaf: reduce_leaf(collective, op, leaf, None), value)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Collective. Call `reduce_to` for each pair (value, destinations), in their order.

        Under a strategy with `CrossDeviceOps` one call of their `batch_reduce` reduces all arrays.

        Raises:
            ValueError: An element is not a pair.
            TypeError: `value_destination_pairs` is no list.
        """
        if not isinstance(value_destination_pairs, (list, tuple)):
            raise TypeError(
                "`value_destination_pairs` must be a list of tuples (value, destinations), got "
                f"{value_destination_pairs!r}"
            )
        for pair in value_destination_pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(f"`value_destination_pairs` must hold tuples (value, destinations), got {pair!r}")
            _refuse_list(pair[1])
        collective = self._owner.replicas.collective_for(options)
        if not isinstance(collective, HookCollective):
            return [self.reduce_to(reduce_op, value, where, options) for value, where in value_destination_pairs]
        op = parse_enum(ReduceOp, reduce_op, "reduce_op")
        with self._cross_replica("batch_reduce_to"):
            leaves, spec = tree.flatten([value for value, _ in value_destination_pairs])
            given = [leaf if isinstance(leaf, IndexedSlices) else as_array(leaf) for leaf in leaves]
            made = collective.reduce_values(op, [(one, one) for one in given], None, batch=True)
            results = [one if isinstance(one, IndexedSlices) else one[()] for one in made]
            return cast("list[Any]", tree.unflatten(spec, results))

    def all_reduce_async(self, reduce_op: ReduceOp | str, array: Any, *, in_place: bool = True) -> Handle:
        """Collective. Begin to combine an array over all replicas, and let the program continue; from either context.

            handles = [strategy.extended.all_reduce_async("SUM", bucket) for bucket in buckets]
            for handle in handles:
                handle.wait()

        The first call opens a communicator and a thread for it. The docstring of
        `mpidist.comm.cross_device.asynchronous` says when this is faster.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PROD, or the name in any case.
            array: See `Collective.all_reduce`. Until `wait` has returned, do not change it; with `in_place` do not
                read it, either.
            in_place: Whether to write the result into `array`, which must be C-contiguous; not for `MEAN` of integers.

        Returns:
            A handle. Every replica must call its `wait()`, which returns the result. Any number of calls may be
            pending; they are performed in the order in which they began, which must be the same on all replicas.

        Raises:
            TypeError, ValueError: See `Collective.all_reduce`.
            RuntimeError: Another strategy is current, or several replicas run on this rank.
        """
        self._require_own_context()
        context.require_collectives()
        if self._asynchronous is None:
            replicas = self._owner.replicas
            replicas.require_open()
            replicas.communicator.require_whole("opening asynchronous reductions")
            self._asynchronous = open_asynchronous(replicas.collective, replace(replicas.options, wire_dtype=None))
        try:
            op, in_place = parse_enum(ReduceOp, reduce_op, "reduce_op"), flag("in_place", in_place)
        except (TypeError, ValueError) as error:
            self._asynchronous.refuse(error)
            raise
        return self._asynchronous.all_reduce_async(array, op, in_place=in_place)

    def broadcast_to(self, tensor: Any, destinations: Any = None) -> Any:
        """Collective. Give every rank the first replica's value.

        Args:
            tensor: Any nest of arrays, numbers and variables, with the same structure, shapes and dtypes on all ranks.
            destinations: Kept for code written for tf.distribute; it changes nothing.

        Returns:
            The same structure: new arrays, and Python numbers where Python numbers were given.

        Raises:
            MismatchError: Shapes, dtypes or numbers of values differ between ranks.
            TypeError: A leaf does not hold numbers.
            ValueError: A Python int needs more than 64 bits.
            RuntimeError: The call is inside `run`, or in another strategy's scope.
        """
        _refuse_list(destinations)
        with self._cross_replica("broadcast_to"):
            leaves, spec = tree.flatten(tensor)
            with self._owner.replicas.calls.during("broadcast_to"):
                arrays = _agreed(self._owner.communicator, leaves)
            collective = self._owner.replicas.collective
            with signed(collective, spec):
                sent = [collective.broadcast(array) for array in arrays]
            return tree.unflatten(spec, [_like(leaf, array) for leaf, array in zip(leaves, sent, strict=True)])

    def update(
        self,
        var: BaseVariable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Collective. Call `fn(var, *args)` on every rank to change a variable; from either context.

        An ON_WRITE variable is written in cross-replica context, where the first replica's value counts. So the copies
        of a variable stay the same, even if replicas pass different values. Of an ON_READ variable each replica writes
        its own component.

        Args:
            var: A variable of this strategy.
            fn: The function that changes it.
            args: Further arguments.
            kwargs: Keyword arguments.
            group: False returns a tuple of the results for the components on this rank; there is one.

        Returns:
            The result of `fn`.

        Raises:
            ValueError: `var` is not a variable of this strategy, or `args` is not a list or tuple.
            TypeError: `fn` is not a function, or `kwargs` not a mapping.
        """
        require_call(fn, args, kwargs)
        flag("group", group, owner="update: ")
        if not self.variable_created_in_scope(var):
            raise ValueError(f"`update` expects a variable made in the scope of {self._owner!r}, got {var!r}")
        keywords = kwargs or {}
        entry = context.innermost()
        inside_run = entry is not None and entry.strategy is self._owner and entry.replica_context is not None
        # Inside `run` this is the same as a merge_call.
        with self._owner.cross_replica() if inside_run else self._cross_replica("update"):
            if isinstance(var, SyncOnReadVariable):
                result = self._owner.run(fn, (var, *args), keywords)
            else:
                result = fn(var, *args, **keywords)
        return result if group else (result,)

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: BaseVariable) -> Iterator[None]:
        """Local. A context that puts new variables on the server of another variable; without servers it does nothing.

        Raises:
            RuntimeError: The call is outside the strategy's scope.
            ValueError: `colocate_with_variable` is not a variable of this strategy.
        """
        entry = context.innermost()
        if entry is None or entry.strategy is not self._owner:
            raise RuntimeError('Need to be inside "with strategy.scope()" for ' + repr(self._owner))
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(
                "`colocate_vars_with` must only be passed a variable created in this "
                f"tf.distribute.Strategy.scope(), got {colocate_with_variable!r}"
            )
        with colocate_with_variable.home.colocated(colocate_with_variable):
            yield

    def variable_created_in_scope(self, v: object) -> bool:
        """Local. Whether `v` is a variable made under this strategy."""
        return isinstance(v, BaseVariable) and v.home is self._owner.home

    def value_container(self, value: T) -> T:
        """Local. The value itself. One rank is one replica, so a component and its container are the same."""
        return value

    def call_for_each_replica(
        self, fn: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> T:
        """Local. `strategy.run(fn, args, kwargs)`."""
        return self._owner.run(fn, args, kwargs, RunOptions())

    def read_var(self, v: BaseVariable) -> Any:
        """Collective for an ON_READ variable, which it aggregates; else Local. A copy of the variable's value.

        Raises:
            TypeError: `v` is no variable.
        """
        if not isinstance(v, BaseVariable):
            raise TypeError(f"`read_var` expects a variable, got {v!r} of type {type(v).__name__}")
        return v.aggregate() if isinstance(v, SyncOnReadVariable) else v.numpy()

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Local. The name of the device on which this rank computes."""
        return (str(self._owner.device or "/device:CPU:0"),)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Local. The name of the device whose memory holds the variables for this rank."""
        return self.worker_devices

    @property
    def should_checkpoint(self) -> bool:
        """Local. Whether this rank is the first replica, which writes checkpoints.

        Do not put `Checkpoint.save` under this condition: all ranks must call it.
        """
        return self._owner.communicator.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Local. Whether this rank is the first replica, which writes summaries."""
        return self._owner.communicator.rank == 0

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Local. False: shapes may change from step to step."""
        return False

    @contextmanager
    def _cross_replica(self, method: str) -> Iterator[None]:
        """Enter cross-replica context for a method that must not be called inside `run`."""
        entry = self._require_own_context()
        if entry is not None and entry.replica_context is not None:
            raise RuntimeError(
                f"Method requires being in cross-replica context, use get_replica_context().merge_call() or call "
                f"`{method}` outside `run`"
            )
        with self._owner.cross_replica():
            yield


def _refuse_list(destinations: Any) -> None:
    """Refuse a list of destinations. Other values are ignored, unlike in `CrossDeviceOps`, whose hooks get them."""
    if isinstance(destinations, (list, tuple)):
        raise TypeError(f"`destinations` must be one device, variable or value, not a list, got {destinations!r}")


def _agreed(communicator: Communicator, leaves: Sequence[Any]) -> list[Any]:
    """Collective. The leaves as arrays; Python ints in the first replica's dtype, on whose size it depends."""
    error: Exception | None = None
    made: list[Any] = []
    try:
        made = [_broadcastable(leaf) for leaf in leaves]
    except Exception as caught:
        error = caught
    kinds = [array.dtype.char if type(leaf) is int else "" for leaf, array in zip(leaves, made, strict=False)]
    everyones = exchange(communicator, "broadcast_to", kinds, error)
    require_same(
        list(map(len, everyones)), "broadcast_to: the number of values", "Pass the same structure on every rank."
    )
    first = everyones[0]
    for number, (kind, own) in enumerate(zip(first, kinds, strict=True)):
        if kind and own and kind != own:
            # The values of this rank do not count.
            made[number] = np.zeros((), kind)
    return made


def _broadcastable(leaf: Any) -> Any:
    if isinstance(leaf, IndexedSlices):
        raise TypeError("broadcast_to does not support IndexedSlices. Make them dense with `to_dense()`")
    if not isinstance(leaf, (bool, int, float, complex)):
        return as_array(leaf).copy()
    # Python numbers keep all their digits: `as_array` would make float32 of floats.
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        raise ValueError(
            f"expected a Python int of at most 64 bits, got one of {cast(int, leaf).bit_length()} bits. Use "
            "`gather_object(value)[0]`"
        )
    return array


def _like(leaf: Any, array: Any) -> Any:
    # By type, not by isinstance: NumPy's float64 is a subclass of Python's float.
    return array.item() if type(leaf) in (bool, int, float, complex) else array[()]
