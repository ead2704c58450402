"""The choice of a resolver where the program names none: the first row of a table that applies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from mpidist.cluster.mpi import MPIClusterResolver
from mpidist.cluster.resolver import ClusterResolver
from mpidist.cluster.tf_config import TFConfigClusterResolver, read_tf_config
from mpidist.comm.agreement import together
from mpidist.comm.communicator import Communicator

_logger = logging.getLogger(__name__)


class DetectionRow(NamedTuple):
    """One way to find out about the cluster.

    Attributes:
        name: A name for the log.
        applies: Returns whether this process's environment describes a cluster; local.
        resolve: Makes the resolver; collective.
    """

    name: str
    applies: Callable[[], bool]
    resolve: Callable[[Communicator], ClusterResolver]


RESOLVERS: tuple[DetectionRow, ...] = (
    DetectionRow("TF_CONFIG", lambda: bool(read_tf_config().cluster), lambda _: TFConfigClusterResolver()),
    DetectionRow("the ranks of the job", lambda: True, MPIClusterResolver),
)


def detect(communicator: Communicator) -> ClusterResolver:
    """Collective. Make the resolver of the first row that applies on any rank.

    Raises:
        ValueError: TF_CONFIG is malformed on some rank.
    """
    # A launcher may pass TF_CONFIG to some ranks only. If each rank chose by its own environment, their resolvers would
    # make different collective calls and wait for each other for ever.
    applies = together(communicator, "reading the cluster", lambda: [row.applies() for row in RESOLVERS])
    on_any = [any(flags) for flags in zip(*communicator.all_gather_object(applies), strict=True)]
    row = RESOLVERS[on_any.index(True)]
    if communicator.rank == 0:
        _logger.info("the cluster is described by %s", row.name)
    return row.resolve(communicator)
