"""Cross-device operations: how a user says by which algorithm a strategy reduces and broadcasts.

A subclass of `CrossDeviceOps` overrides a hook or two and inherits the rest; bound to ranks it is a `Collective`, so
that gradients, variables, `reduce` and `gather` all go its way. The algorithms of tf.distribute's names are in
`reductions`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, ClassVar, cast

from mpidist.arrays import AnyArray
from mpidist.comm.agreement import same_on_all, together
from mpidist.comm.choice import selection
from mpidist.comm.collective import Collective
from mpidist.comm.communicator import Communicator
from mpidist.comm.cross_device.user_backend import CollectiveBackend, HookBackend, HookCollective, as_array
from mpidist.comm.front.front import CollectiveFront
from mpidist.errors import mark_shared
from mpidist.options import CommunicationImplementation, CommunicationOptions, ReduceOp

logger = logging.getLogger("mpidist")

_METHODS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")


class CrossDeviceOps:
    """How arrays are reduced and broadcast over replicas. Subclasses override `reduce_implementation`, and others.

    One rank is one replica, so "per-replica value" is this rank's array, every rank makes the same calls, and every
    rank gets the result. An object belongs to the ranks of the strategy that it was given to.

        class LargestGradient(mpidist.CrossDeviceOps):
            def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
                return np.max(self.communicator.all_gather_object(per_replica_value), axis=0)

        strategy = mpidist.MirroredStrategy(cross_device_ops=LargestGradient())

    What a hook sees: contiguous arrays without changes to make in them, of native dtypes; half precision comes as
    float32, booleans under MIN and MAX as uint8, integers under MEAN as float64. Strategies pass them flat, gradients
    many at once. Gathering and exchange, which have no hook, go by `collective`.
    """

    # Whether hooks take CuPy's arrays; else they get copies in host memory.
    takes_device_arrays: ClassVar[bool] = False

    # On the class: a subclass may forget to call this one's constructor.
    _bound: HookCollective | None = None

    @property
    def communicator(self) -> Communicator:
        """Local. The ranks; their mpi4py communicator is `communicator.mpi`.

        Raises:
            RuntimeError: The object was not given to a strategy, nor to `bind`.
        """
        return self._need_bound().communicator

    @property
    def collective(self) -> Collective:
        """Local. A collective of the library over these ranks, for use in hooks."""
        return self._need_bound().hooks.default

    def bind(self, communicator: Communicator, options: CommunicationOptions | None = None) -> CollectiveFront:
        """Collective. Give the object its ranks; a strategy calls it.

        Args:
            communicator: The ranks; at further calls the same ones.
            options: `check` and `timeout_seconds` hold for every call; hooks get all of it.

        Returns:
            What reduces and broadcasts by the hooks.

        Raises:
            ValueError: The object belongs to other ranks, or the options ask for what hooks cannot know.
        """
        options = options or CommunicationOptions()
        if options.wire_dtype is not None or options.reproducible:
            raise mark_shared(ValueError(
                "`wire_dtype` and `reproducible` are kept by the library's own collectives, and here "
                f"{type(self).__name__} reduces: leave out the option, or `cross_device_ops`"
            ))
        if self._bound is None:
            default = selection.choose(communicator, CommunicationOptions())
            self._bound = HookCollective(HookBackend(self, default, options))
        elif self._bound.communicator is not communicator:
            raise mark_shared(ValueError(
                f"this {type(self).__name__} object belongs to {self._bound.communicator!r}, and cannot go to "
                f"{communicator!r}: make one object for each strategy"
            ))
        return HookCollective(HookBackend(self, self._bound.hooks.default, options))

    def reduce(
        self,
        reduce_op: ReduceOp,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Collective. Combine the arrays of all ranks; every rank gets the result, whatever the destinations.

        Args:
            reduce_op: A member of `ReduceOp`.
            per_replica_value: This rank's array or number, of the same shape and dtype on every rank; or
                `IndexedSlices`, whose rows are gathered.
            destinations: The name of a device, a variable or an array.
            options: Handed to the hook.

        Returns:
            A new array of the same kind; MEAN of integers is float64.

        Raises:
            ValueError: Another operation, or destinations of another type.
            MismatchError: Shapes, dtypes or operations differ.
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
        """Collective. `reduce` of several values, which an algorithm may pack.

        Args:
            reduce_op: A member of `ReduceOp`.
            value_destination_pairs: Tuples (value, destinations).
            options: Handed to the hook.

        Returns:
            The results, in their order.

        Raises:
            ValueError, MismatchError, RuntimeError: As `reduce`; also for something that is no pair.
        """
        _check_op(reduce_op)
        for pair in value_destination_pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ValueError(f"`value_destination_pairs` must hold tuples (value, destinations), got {pair!r}")
            _check_destinations(pair[1])
        return self._need_bound().reduce_values(reduce_op, value_destination_pairs, options, batch=True)

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Collective. The array of the first replica, on every rank.

        Args:
            tensor: Of the same shape and dtype on every rank.
            destinations: As for `reduce`.

        Returns:
            A new array on all ranks but the first, which gets `tensor` itself.

        Raises:
            ValueError, MismatchError, RuntimeError: As `reduce`.
        """
        _check_destinations(destinations)
        return self._need_bound().broadcast(as_array(tensor))

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: AnyArray, destinations: Any, options: CommunicationOptions
    ) -> AnyArray:
        """Collective. The hook of `reduce`, to be overridden; MEAN is to be divided here.

        Args:
            reduce_op: The operation.
            per_replica_value: This rank's array, at least one element; not to be changed.
            destinations: As given to `reduce`; the value itself where a strategy calls.
            options: Of this call, else of the strategy.

        Returns:
            An array of the same shape, with the same bits on every rank.
        """
        raise NotImplementedError(f"{type(self).__name__} must have a method `reduce_implementation`")

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[AnyArray, Any]],
        options: CommunicationOptions,
    ) -> list[AnyArray]:
        """Collective. The hook of `batch_reduce`; by default one value after another."""
        return [self.reduce_implementation(reduce_op, value, to, options) for value, to in value_destination_pairs]

    def broadcast_implementation(self, tensor: AnyArray, destinations: Any) -> AnyArray:
        """Collective. The hook of `broadcast`; by default the collective's.

        Args:
            tensor: Of rank 0; the values of the others do not count.
            destinations: As given to `broadcast`; the array itself where a strategy calls.

        Returns:
            An array of the same shape and dtype.
        """
        del destinations  # for subclasses
        return self.collective.broadcast(tensor)

    def _need_bound(self) -> HookCollective:
        if self._bound is None:
            raise RuntimeError(
                f"this {type(self).__name__} object belongs to no ranks yet: give it to a strategy as "
                "`cross_device_ops`, or call its `bind(communicator)`"
            )
        return self._bound


def take_collective(
    chosen: object | None, communicator: Communicator, options: CommunicationOptions
) -> CollectiveFront | None:
    """Collective. What a strategy's argument `cross_device_ops` stands for.

    Args:
        chosen: A `CrossDeviceOps` object, any object with the methods of `Collective`, or None.
        communicator: The strategy's ranks.
        options: The strategy's.

    Returns:
        The collective, None for the library's choice.

    Raises:
        TypeError: Something else, on every rank.
        ValueError: It belongs to other ranks, or the options do not go with it; on every rank.
    """
    together(communicator, "taking `cross_device_ops`", lambda: _check_chosen(chosen, communicator))
    same_on_all(
        communicator, "the type of `cross_device_ops`", type(chosen).__name__, "Make the same strategy on all ranks."
    )
    if chosen is None:
        return None
    if options.implementation is not CommunicationImplementation.AUTO:
        raise mark_shared(ValueError(
            f"`cross_device_ops` and the implementation {options.implementation} are both given: choose one of them"
        ))
    if options.reproducible and not isinstance(chosen, CrossDeviceOps):
        raise mark_shared(ValueError(
            "`reproducible` is kept by the library's own collectives, and here the object given as `cross_device_ops` "
            "reduces in an order of its own: leave one of them out"
        ))
    if isinstance(chosen, CrossDeviceOps):
        collective = chosen.bind(communicator, options)
    else:
        collective = CollectiveFront(CollectiveBackend(communicator, cast(Collective, chosen)), options)
    if communicator.rank == 0:
        logger.info(
            "collective %s: given as cross_device_ops; %d ranks on %d nodes", type(chosen).__name__, communicator.size,
            len(communicator.node_sizes),
        )
    return collective


def another_collective(collective: CollectiveFront, options: CommunicationOptions) -> CollectiveFront:
    """Collective. What a call goes by whose options differ from its strategy's.

    Args:
        collective: The strategy's.
        options: Of the call, merged over the strategy's.

    Raises:
        MismatchError: The options differ between ranks.
        UnavailableError: They name an implementation that cannot be had.
        ValueError: They ask for what the strategy's `cross_device_ops` cannot know.
    """
    same_on_all(
        collective.communicator, "communication options", options, "Pass the same `options` to a call on all ranks."
    )
    if options.implementation is CommunicationImplementation.AUTO:
        if isinstance(collective, HookCollective):
            return cast(CrossDeviceOps, collective.hooks.ops).bind(collective.communicator, options)
        if isinstance(collective.backend, CollectiveBackend):
            # The user's own object knows no options.
            return collective
    return selection.choose(collective.communicator, options)


def _check_chosen(chosen: object | None, communicator: Communicator) -> None:
    if chosen is None or isinstance(chosen, CrossDeviceOps):
        return
    if isinstance(chosen, type):
        raise TypeError(f"`cross_device_ops` must be an object, got the class: use {chosen.__name__}()")
    missing = [name for name in _METHODS if not callable(getattr(chosen, name, None))]
    if not hasattr(chosen, "communicator"):
        missing.append("communicator")
    if missing:
        raise TypeError(
            "`cross_device_ops` must be a CrossDeviceOps object (HierarchicalCopyAllReduce(), ...) or have what a "
            f"Collective has, got {type(chosen).__name__} without {', '.join(missing)}"
        )
    ranks = cast(Collective, chosen).communicator
    if (ranks.rank, ranks.size) != (communicator.rank, communicator.size):
        raise ValueError(
            f"`cross_device_ops` communicates over {ranks!r}, and the strategy has {communicator!r}: make it for the "
            "strategy's ranks"
        )


def _check_op(reduce_op: object) -> None:
    if not isinstance(reduce_op, ReduceOp):
        names = ", ".join(f"ReduceOp.{op.name}" for op in ReduceOp)
        raise ValueError(f"`reduce_op` must be one of {names}, got {reduce_op!r}")


def _check_destinations(destinations: object) -> None:
    is_name = isinstance(destinations, str)
    if not is_name and not (hasattr(destinations, "shape") and hasattr(destinations, "dtype")):
        raise ValueError(
            f"destinations must be one of the name of a device, a variable or an array, got {destinations!r}"
        )
    if is_name and not destinations:
        raise ValueError("destinations must not be empty")
