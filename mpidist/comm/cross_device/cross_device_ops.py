"""Cross-device operations: the algorithm by which a strategy reduces and broadcasts, chosen or written by the user.

A subclass of `CrossDeviceOps` overrides one or two hooks and inherits the rest. Bound to ranks it gives a `Collective`,
which then serves gradients, variables, `reduce` and `gather`. The algorithms with tf.distribute's names are in
`reductions`; `chosen_collective` makes the collective for a strategy's argument `cross_device_ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

from mpidist.arrays import AnyArray
from mpidist.comm.choice import selection
from mpidist.comm.collective import Collective
from mpidist.comm.cross_device.user_backend import CollectiveBackend, HookBackend, HookCollective, as_array
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import mark_shared
from mpidist.options import CommunicationOptions, ReduceOp

_METHODS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")


class CrossDeviceOps:
    """Local. Reductions and broadcasts over replicas. Subclasses override `reduce_implementation` or more hooks.

    One rank is one replica, so a "per-replica value" is this rank's array. Every rank makes the same calls and gets the
    result. An object belongs to the ranks of the strategy to which it was given.

        class LargestGradient(mpidist.CrossDeviceOps):
            def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
                return np.max(self.communicator.all_gather_object(per_replica_value), axis=0)

        strategy = mpidist.MirroredStrategy(cross_device_ops=LargestGradient())

    Hooks get contiguous arrays of native dtypes, which they must not change: half precision as float32, booleans under
    MIN and MAX as uint8, integers under MEAN as float64. Strategies pass flat arrays, and many gradients in one array.
    `collective` serves the gathers and exchanges, which have no hook.
    """

    # Whether hooks take CuPy arrays. Otherwise they get copies in host memory.
    takes_device_arrays: ClassVar[bool] = False

    # An attribute of the class, since a subclass may not call this class's constructor.
    _bound: HookCollective | None = None

    @property
    def is_of_library(self) -> bool:
        """Local. Whether these are the library's own hooks, under which no sum of integers wraps."""
        return False

    @property
    def communicator(self) -> Communicator:
        """Local. The ranks. Their mpi4py communicator is `communicator.mpi`.

        Raises:
            RuntimeError: The object was not given to a strategy, and `bind` was not called.
        """
        return self._need_bound().communicator

    @property
    def collective(self) -> Collective:
        """Local. A collective of the library over these ranks, for use in hooks."""
        return self._need_bound().hooks.default

    def bind(
        self, communicator: Communicator, options: CommunicationOptions | None = None, owner: int = 0
    ) -> CollectiveFront:
        """Collective. Give the object its ranks. Strategies call this method.

        Args:
            communicator: The ranks; in further calls the same ones.
            options: The options: `check` and `timeout_seconds` hold for every call. Hooks get all options.
            owner: The number of the strategy, which distinguishes its calls from those of other strategies.

        Returns:
            A collective that reduces and broadcasts by the hooks.

        Raises:
            ValueError: The object belongs to other ranks, or hooks cannot keep one of the options.
        """
        options = options or CommunicationOptions()
        if options.wire_dtype is not None or options.reproducible:
            raise mark_shared(ValueError(
                "only the library's own backends keep `wire_dtype` and `reproducible`, and here "
                f"{type(self).__name__} reduces: leave out the option, or `cross_device_ops`"
            ))
        if self._bound is None:
            default = selection.choose(communicator, CommunicationOptions())
            self._bound = HookCollective(HookBackend(self, default, options))
        elif self._bound.communicator is not communicator:
            raise mark_shared(ValueError(
                f"this {type(self).__name__} object belongs to {self._bound.communicator!r} and cannot be bound to "
                f"{communicator!r}: make one object for each strategy"
            ))
        return HookCollective(HookBackend(self, self._bound.hooks.default, options), owner)

    def reduce(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Collective. Combine the arrays of all ranks. Every rank gets the result, regardless of the destinations.

        Args:
            reduce_op: A member of `ReduceOp`.
            per_replica_value: This rank's array or number, of the same shape and dtype on every rank; or
                `IndexedSlices`, whose rows are gathered.
            destinations: The name of a device, a variable or an array.
            options: The options, which are passed to the hook.

        Returns:
            A new array of the same kind. The MEAN of integers is float64.

        Raises:
            ValueError: `reduce_op` is not a member, or `destinations` has another type.
            MismatchError: Shapes, dtypes or operations differ between ranks.
            RuntimeError: The object is not bound to ranks.
        """
        _check_op(reduce_op)
        _check_destinations(destinations)
        return self._need_bound().reduce_values(reduce_op, [(per_replica_value, destinations)], options, batch=False)[0]

    def batch_reduce(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Collective. Combine several values, each as `reduce` does. An algorithm may pack them.

        Args:
            reduce_op: A member of `ReduceOp`.
            value_destination_pairs: A list of tuples (value, destinations).
            options: The options, which are passed to the hook.

        Returns:
            The results, in the order of the values.

        Raises:
            ValueError: See `reduce`; also where a list element is not a pair.
            MismatchError, RuntimeError: See `reduce`.
        """
        _check_op(reduce_op)
        for pair in value_destination_pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(f"`value_destination_pairs` must hold tuples (value, destinations), got {pair!r}")
            _check_destinations(pair[1])
        return self._need_bound().reduce_values(reduce_op, value_destination_pairs, options, batch=True)

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Collective. Give the array of the first replica to every rank.

        Args:
            tensor: An array of the same shape and dtype on every rank.
            destinations: See `reduce`.

        Returns:
            On the first rank `tensor` itself, on the other ranks a new array.

        Raises:
            ValueError, MismatchError, RuntimeError: See `reduce`.
        """
        _check_destinations(destinations)
        return self._need_bound().broadcast(as_array(tensor))

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: AnyArray, destinations: Any, options: CommunicationOptions
    ) -> AnyArray:
        """Collective. The hook of `reduce`. Subclasses override it, and divide by the number of ranks under MEAN.

        Args:
            reduce_op: The operation.
            per_replica_value: This rank's array, of at least one element. The hook must not change it.
            destinations: The argument of `reduce`; the value itself if a strategy calls.
            options: The options of this call, otherwise those of the strategy.

        Returns:
            An array of the same shape, with the same bits on every rank.
        """
        del reduce_op, per_replica_value, destinations, options  # there is no default
        raise mark_shared(NotImplementedError(f"{type(self).__name__} must have a method `reduce_implementation`"))

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[AnyArray, Any]],
        options: CommunicationOptions,
    ) -> list[AnyArray]:
        """Collective. The hook of `batch_reduce`. By default it reduces one value after another."""
        return [self.reduce_implementation(reduce_op, value, to, options) for value, to in value_destination_pairs]

    def broadcast_implementation(self, tensor: AnyArray, destinations: Any) -> AnyArray:
        """Collective. The hook of `broadcast`. By default `collective` broadcasts.

        Args:
            tensor: An array of the same shape and dtype on every rank. Only the values of rank 0 are used.
            destinations: The argument of `broadcast`; the array itself if a strategy calls.

        Returns:
            An array of the same shape and dtype.
        """
        del destinations  # For subclasses only.
        return self.collective.broadcast(tensor)

    def _need_bound(self) -> HookCollective:
        if self._bound is None:
            raise RuntimeError(
                f"this {type(self).__name__} object is not bound to ranks: give it to a strategy as "
                "`cross_device_ops`, or call its `bind(communicator)`"
            )
        return self._bound


def check_chosen(chosen: object, communicator: Communicator) -> None:
    """Local. Check that an object can be a strategy's `cross_device_ops`.

    Args:
        chosen: The object.
        communicator: The strategy's ranks.

    Raises:
        TypeError, ValueError: See `chosen_collective.take_collective`.
    """
    if isinstance(chosen, CrossDeviceOps):
        return
    if isinstance(chosen, type):
        raise TypeError(
            f"`cross_device_ops` must be an object, got the class {chosen.__name__}: use {chosen.__name__}()"
        )
    missing = [name for name in _METHODS if not callable(getattr(chosen, name, None))]
    if not hasattr(chosen, "communicator"):
        missing.append("communicator")
    if missing:
        raise TypeError(
            "`cross_device_ops` must be a CrossDeviceOps object (HierarchicalCopyAllReduce(), ...) or have all members "
            f"of a Collective, got {type(chosen).__name__} without {', '.join(missing)}"
        )
    ranks = cast(Collective, chosen).communicator
    if (ranks.rank, ranks.size) != (communicator.rank, communicator.size):
        raise ValueError(
            f"`cross_device_ops` must communicate over the strategy's ranks, {communicator!r}, got {ranks!r}: make it "
            "for the strategy's ranks"
        )


def collective_of(
    chosen: object, communicator: Communicator, options: CommunicationOptions, owner: int
) -> CollectiveFront:
    """Collective. The collective that reduces as an object does that `check_chosen` has accepted.

    Args:
        chosen: The object.
        communicator: The strategy's ranks.
        options: The strategy's options.
        owner: The strategy's number.

    Raises:
        ValueError: See `chosen_collective.take_collective`.
    """
    if isinstance(chosen, CrossDeviceOps):
        return chosen.bind(communicator, options, owner)
    if options.reproducible:
        raise mark_shared(ValueError(
            "only the library's own backends keep `reproducible`, and here the object given as `cross_device_ops` "
            "reduces in an order of its own: leave one of them out"
        ))
    return CollectiveFront(CollectiveBackend(communicator, cast(Collective, chosen)), options, owner)


def with_options(collective: CollectiveFront, options: CommunicationOptions) -> CollectiveFront | None:
    """Collective. The collective of the same user's object, for calls with other options; None if it is no user's.

    Args:
        collective: The strategy's collective.
        options: The options of the call, merged over the strategy's.

    Raises:
        ValueError: The object cannot keep one of the options.
    """
    if isinstance(collective, HookCollective):
        return cast(CrossDeviceOps, collective.hooks.ops).bind(collective.communicator, options, collective.log.owner)
    # The user's own object takes no options.
    return collective if isinstance(collective.backend, CollectiveBackend) else None


def _check_op(reduce_op: object) -> None:
    if not isinstance(reduce_op, ReduceOp):
        names = ", ".join(f"ReduceOp.{op.name}" for op in ReduceOp)
        raise ValueError(f"`reduce_op` must be one of {names}, got {reduce_op!r}")


def _check_destinations(destinations: object) -> None:
    is_name = isinstance(destinations, str)
    if not is_name and not (hasattr(destinations, "shape") and hasattr(destinations, "dtype")):
        raise ValueError(
            f"destinations must be one of: the name of a device, a variable, an array; got {destinations!r}"
        )
    if is_name and not destinations:
        raise ValueError("destinations must not be empty: pass the name of a device, a variable or an array")
