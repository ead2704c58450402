"""The `extended` of a `ParameterServerStrategy`, which has no replicas in sync."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.strategy.extended import StrategyExtended

if TYPE_CHECKING:
    from mpidist.cluster.roles.server_roles import ServerRoles
    from mpidist.strategy.adapters.calls import AdapterCalls

_REFUSED = (
    "ParameterServerStrategy: {} has no meaning here, since workers are not in sync and each one computes for itself. "
    "Give functions to ClusterCoordinator(strategy).schedule, and let the optimizer update the served variables; or "
    "use mpidist.MultiWorkerMirroredStrategy()"
)


class ServedExtended(StrategyExtended):
    """The methods for library code under a `ParameterServerStrategy`: those of replicas in sync are refused."""

    @property
    def cores_per_replica(self) -> int:
        """Local. Number of cores, at least 1, on which a worker computes: its share of the node's."""
        roles: ServerRoles = self._owner.roles  # type: ignore[attr-defined]  # its own strategy
        return self._cores_of(roles.group)

    def rows(self, n: int) -> slice:
        """Local. An error: there is no global batch.

        Raises:
            NotImplementedError: Always.
        """
        del n
        raise NotImplementedError(_REFUSED.format("extended.rows"))

    def _adapter_calls(self) -> AdapterCalls:
        raise NotImplementedError(_REFUSED.format("a collective, or a step, of `extended`"))
