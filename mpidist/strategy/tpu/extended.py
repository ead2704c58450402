"""The `extended` of a `TPUStrategy`: the value of a replica is that of its logical device 0."""

from __future__ import annotations

from typing import Any

from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.strategy.extended import StrategyExtended
from mpidist.variables.logical_devices import LogicalDevices


class LogicalExtended(StrategyExtended):
    """The methods for library code where a replica has several ranks.

    `all_reduce_async`, and the methods of `AdapterMethods`, combine the values of the same logical device of all
    replicas, in either context. All other methods use the value of logical device 0 as the value of its replica.
    """

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Collective. See `StrategyExtended.reduce_to`."""
        if options is None:
            return super().reduce_to(reduce_op, value, destinations)
        with self._cross_replica("reduce_to"):
            return self._devices.lead(
                "reduce_to", lambda: super(LogicalExtended, self).reduce_to(reduce_op, value, destinations, options)
            )

    def broadcast_to(self, tensor: Any, destinations: Any = None) -> Any:
        """Collective. See `StrategyExtended.broadcast_to`."""
        with self._cross_replica("broadcast_to"):
            return self._devices.lead(
                "broadcast_to", lambda: super(LogicalExtended, self).broadcast_to(tensor, destinations)
            )

    @property
    def should_checkpoint(self) -> bool:
        """Local. See `StrategyExtended.should_checkpoint`; True on one rank of all replicas."""
        return self._owner.replicas.everyone.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Local. See `StrategyExtended.should_save_summary`; True on one rank of all replicas."""
        return self._owner.replicas.everyone.rank == 0

    @property
    def _devices(self) -> LogicalDevices:
        devices: LogicalDevices = self._owner.logical_devices  # type: ignore[attr-defined]  # its own strategy
        return devices
