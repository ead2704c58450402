"""The resolver of code that was written for TPUs: the ranks of the job are the cores."""

from __future__ import annotations

import functools
import logging

from mpidist.cluster.resolvers.mpi import MPIClusterResolver
from mpidist.comm.group.communicator import Communicator
from mpidist.first_rank import is_chief

logger = logging.getLogger("mpidist")


class TPUClusterResolver(MPIClusterResolver):
    """Collective. Describes the ranks of the job as a cluster. The launcher chooses the ranks; an address is not used.

    Args:
        tpu: An address, for code written for TensorFlow; one line of the log says that it is not used.
        zone: Not used.
        project: Not used.
        communicator: See `MPIClusterResolver`.
    """

    def __init__(
        self, tpu: object = None, zone: object = None, project: object = None, *,
        communicator: Communicator | None = None,
    ) -> None:
        del zone, project
        if tpu:
            _say_unused(str(tpu))
        super().__init__(communicator)

    @staticmethod
    def connect(tpu: object = None, zone: object = None, project: object = None) -> TPUClusterResolver:
        """Collective. `TPUClusterResolver(tpu)`: there is nothing to connect to."""
        return TPUClusterResolver(tpu, zone, project)


@functools.cache
def _say_unused(address: str) -> None:
    if is_chief():
        logger.warning(
            "TPUClusterResolver: the address %r is not used: the ranks that the launcher has started take part", address
        )
