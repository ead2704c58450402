"""The replica context of a replica of several ranks: collective calls of its logical devices, inside `run`."""

from __future__ import annotations

from typing import Any

from mpidist import arrays, tree
from mpidist.options import ReduceOp, parse_enum
from mpidist.strategy.replica import ReplicaContext
from mpidist.strategy.values import as_array, gather_nest, reduce_nest, signed
from mpidist.variables.logical_devices import LogicalDevices


class LogicalReplicaContext(ReplicaContext):
    """The replica context under a `TPUStrategy`.

    `all_reduce`, `all_gather` and `all_gather_object` combine the values of the same logical device of all replicas.
    Methods that begin with `logical_` combine the values of the logical devices of this replica.
    """

    __slots__ = ()

    @property
    def logical_device_id(self) -> int:
        """Local. The number of this rank's logical device, starting at 0."""
        return self._devices.device

    @property
    def num_logical_devices(self) -> int:
        """Local. Number of logical devices of a replica."""
        return self._devices.count

    def logical_all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """Collective over the replica. Combine `value` over the logical devices; each device gets the result.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PROD, or its name in any case.
            value: See `all_reduce`.

        Raises:
            RuntimeError, ValueError, TypeError, OverflowError: See `all_reduce`.
        """
        op = parse_enum(ReduceOp, reduce_op, "reduce_op")
        self._require_current()
        return reduce_nest(self._devices.collective, op, value, None)

    def logical_all_gather(self, value: Any, axis: int) -> Any:
        """Collective over the replica. Concatenate `value` of the logical devices along `axis`, in their order.

        Args:
            value: See `all_gather`.
            axis: The dimension along which to concatenate.

        Raises:
            RuntimeError, ValueError, MismatchError: See `all_gather`.
        """
        self._require_current()
        return gather_nest(self._devices.collective, value, axis, "logical_all_gather")

    def logical_reduce_scatter(self, reduce_op: ReduceOp | str, value: Any, axis: int) -> Any:
        """Collective over the replica. Combine `value` over the logical devices; each device gets a part of the result.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PROD, or its name in any case.
            value: Any nest of arrays of at least one dimension, of the same shapes on all logical devices.
            axis: The dimension that is cut, in the order of the logical devices; it must be divisible by their number.

        Raises:
            ValueError: `value` holds a scalar, the axis is out of range, or a dimension is not divisible.
            RuntimeError, TypeError: See `all_reduce`.
        """
        op = parse_enum(ReduceOp, reduce_op, "reduce_op")
        self._require_current()
        collective, count = self._devices.collective, self._devices.count
        leaves, spec = tree.flatten(value)
        given = [as_array(leaf) for leaf in leaves]
        for array in given:
            if not -array.ndim <= axis < array.ndim or array.shape[axis] % count:
                raise ValueError(
                    f"logical_reduce_scatter: expected an axis of {-array.ndim} to {array.ndim - 1} whose size is "
                    f"divisible by the {count} logical devices, got axis {axis} of shape {array.shape}"
                )
        made = []
        with signed(collective, spec):
            for array in given:
                xp = arrays.namespace(array)
                first = xp.ascontiguousarray(xp.moveaxis(array, axis, 0))
                made.append(xp.moveaxis(collective.reduce_scatter(first, op), 0, axis))
        return tree.unflatten(spec, made)

    @property
    def _devices(self) -> LogicalDevices:
        devices: LogicalDevices = self._strategy.logical_devices  # type: ignore[attr-defined]  # its own strategy
        return devices
