"""The coordinator: gives functions to workers, commits their updates, and gives functions of lost workers to others."""

from typing import TYPE_CHECKING, NoReturn

from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.coordinator.remote_value import PerWorkerValues, RemoteValue
from mpidist.coordinator.worker_side import experimental_get_current_worker_index
from mpidist.missing import no_attribute

__all__ = ["ClusterCoordinator", "PerWorkerValues", "RemoteValue", "experimental_get_current_worker_index"]


# Hidden from type checkers, which would take any name for one of the module's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        no_attribute(__name__, name)
