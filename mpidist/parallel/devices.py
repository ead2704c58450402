"""The logical devices of the replica in whose `run` a layer is called, and the sums over them."""

from __future__ import annotations

from typing import cast

import numpy.typing as npt

from mpidist import arrays
from mpidist.arguments import described
from mpidist.arrays import AnyArray
from mpidist.options import ReduceOp
from mpidist.strategy.default import get_replica_context
from mpidist.strategy.tpu.context import LogicalReplicaContext


class Devices:
    """Local. The logical devices of this replica; one device if the current strategy has no logical devices.

    Args:
        layer: The name of the layer, for errors.

    Raises:
        RuntimeError: The call is in cross-replica context.

    Attributes:
        device: The number of this rank's logical device.
        count: Number of logical devices.
    """

    def __init__(self, layer: str) -> None:
        context = get_replica_context()
        if context is None:
            raise RuntimeError(
                f"{layer} was called in cross-replica context, where replicas have no values of their own: call it in "
                "a function that `strategy.run(function)` calls"
            )
        self._context = context if isinstance(context, LogicalReplicaContext) else None
        self.device = 0 if self._context is None else self._context.logical_device_id
        self.count = 1 if self._context is None else self._context.num_logical_devices

    def sum(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM) -> AnyArray:
        """Collective over the replica. Combine an array over the logical devices."""
        if self._context is None or self.count == 1:
            return array
        return cast(AnyArray, self._context.logical_all_reduce(op, array))


def matrix(given: npt.ArrayLike, name: str, layer: str, *, least: int = 2, most: int | None = None) -> AnyArray:
    """Local. An argument as an array of floats.

    Args:
        given: The argument.
        name: The name of the argument, for errors.
        layer: The name of the layer, for errors.
        least: The smallest number of dimensions.
        most: The largest number of dimensions; default: no limit.

    Raises:
        ValueError: The array has another number of dimensions.
        TypeError: The argument is no array of floats.
    """
    array = arrays.as_array(given)
    if array.dtype.kind not in "fcV":
        raise TypeError(f"{layer}: `{name}` must be an array of floats, got {described(given)}")
    if array.ndim < least or (most is not None and array.ndim > most):
        wanted = str(least) if most == least else f"{least} or more"
        raise ValueError(f"{layer}: `{name}` must have {wanted} dimensions, got shape {array.shape}")
    return array
