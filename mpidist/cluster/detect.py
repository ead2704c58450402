"""The choice of a resolver where the program names none: the first row of a table that applies."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import NamedTuple

from mpidist.cluster.resolvers.mpi import MPIClusterResolver
from mpidist.cluster.resolvers.resolver import ClusterResolver
from mpidist.cluster.resolvers.slurm import DEFAULT_COMPONENTS, SlurmClusterResolver, named_components
from mpidist.cluster.resolvers.tf_config import TFConfigClusterResolver, read_tf_config
from mpidist.cluster.slurm.step import is_own_step, read_step
from mpidist.comm.group.agreement import gather_together, together
from mpidist.comm.group.communicator import Communicator

_logger = logging.getLogger(__name__)


class DetectionRow(NamedTuple):
    """One source that describes the cluster.

    Attributes:
        name: A name for the log.
        applies: A function that returns whether this process's environment describes a cluster of these ranks; local.
        enough: `any` or `all`: whether one rank is enough to which it applies.
        resolve: A function that makes the resolver for the ranks; the second argument says whether they take servers;
            collective.
    """

    name: str
    applies: Callable[[Communicator], bool]
    enough: Callable[[list[bool]], bool]
    resolve: Callable[[Communicator, bool], ClusterResolver]


def _is_slurm_step(communicator: Communicator) -> bool:
    """Whether the ranks are the tasks of this process's Slurm step, in their order."""
    place = (str(communicator.rank), str(communicator.size))
    # A process alone is all roles at once, as everywhere.
    if communicator.size == 1 or not is_own_step(os.environ):
        return False
    return place == (os.environ["SLURM_PROCID"], os.environ["SLURM_STEP_NUM_TASKS"])


def _resolve_slurm(communicator: Communicator, takes_servers: bool) -> ClusterResolver:
    # MPI has the host of each rank; Slurm's variables give it for some distributions only.
    hosts = [process.host for process in communicator.processes]

    def resolve() -> ClusterResolver:
        names = named_components(read_step(os.environ, hosts=hosts))
        return SlurmClusterResolver(
            components=names or (DEFAULT_COMPONENTS if takes_servers else ("worker",)), hosts=hosts
        )

    return together(communicator, "reading Slurm's variables", resolve)


RESOLVERS: tuple[DetectionRow, ...] = (
    # A launcher may pass TF_CONFIG to some ranks only.
    DetectionRow("TF_CONFIG", lambda _: bool(read_tf_config().cluster), any, lambda *_: TFConfigClusterResolver()),
    DetectionRow("the step of a Slurm job", _is_slurm_step, all, _resolve_slurm),
    DetectionRow("the ranks of the job", lambda _: True, all, lambda ranks, _: MPIClusterResolver(ranks)),
)


def detect(communicator: Communicator, *, takes_servers: bool = False) -> ClusterResolver:
    """Collective. Make the resolver of the first row that applies.

    Args:
        communicator: The ranks that take part.
        takes_servers: Whether unnamed components of a heterogeneous Slurm job are servers and workers; otherwise all
            are workers.

    Raises:
        ValueError: TF_CONFIG or a variable of Slurm is malformed on some rank.
        LauncherError: Slurm's variables contradict one another.
    """
    # If each rank chose by its own environment, their resolvers would make different collective calls and wait for
    # each other without end.
    applies = gather_together(
        communicator, "reading the cluster", lambda: [row.applies(communicator) for row in RESOLVERS]
    )
    flags = zip(*applies, strict=True)
    row = next(row for row, of_ranks in zip(RESOLVERS, flags, strict=True) if row.enough(list(of_ranks)))
    if communicator.rank == 0:
        _logger.info("the cluster is described by %s", row.name)
    return row.resolve(communicator, takes_servers)
