"""Which resolver describes this job when the program names none: an ordered table, the first row that applies."""

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


class Row(NamedTuple):
    """One way to find out about the cluster.

    Attributes:
        name: What it goes by, for the log.
        applies: Whether this process's environment says something about it; local.
        resolve: Makes the resolver; collective.
    """

    name: str
    applies: Callable[[], bool]
    resolve: Callable[[Communicator], ClusterResolver]


RESOLVERS: tuple[Row, ...] = (
    Row("TF_CONFIG", lambda: bool(read_tf_config().cluster), lambda _: TFConfigClusterResolver()),
    Row("the ranks of the job", lambda: True, MPIClusterResolver),
)


def detect(communicator: Communicator) -> ClusterResolver:
    """Collective. The resolver of the first row that applies on any rank, so that all ranks take the same one.

    Raises:
        ValueError: TF_CONFIG is malformed on some rank.
    """
    applies = together(communicator, "reading the cluster", lambda: [row.applies() for row in RESOLVERS])
    on_any = [any(flags) for flags in zip(*communicator.all_gather_object(applies), strict=True)]
    row = RESOLVERS[on_any.index(True)]
    _logger.info("the cluster is found from %s", row.name)
    return row.resolve(communicator)
