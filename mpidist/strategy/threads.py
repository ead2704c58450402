"""Threads of BLAS per rank, since the ranks of a node share its cores."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mpidist.comm.cores import count_cores, own_cores
from mpidist.comm.first_use import at_first_use
from mpidist.comm.group.communicator import Communicator

if TYPE_CHECKING:
    from threadpoolctl import threadpool_limits
else:
    threadpool_limits = at_first_use("threadpoolctl", "threadpool_limits")

logger = logging.getLogger("mpidist")

# A library's own variable counts before that of OpenMP.
_CHOSEN_BY_USER = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")


def chosen_threads(environment: Mapping[str, str] | None = None) -> str | None:
    """Local. The number of BLAS threads that the user sets, as it is written; None where strategies choose it.

    Args:
        environment: Defaults to `os.environ`.
    """
    environment = os.environ if environment is None else environment
    return next((environment[name] for name in _CHOSEN_BY_USER if name in environment), None)


def fair_threads(own: int, together: int, ranks: int) -> int:
    """Local. The number of BLAS threads that a strategy gives a rank.

    Args:
        own: Number of cores that the rank may use.
        together: The number of cores of all ranks of the node.
        ranks: Number of these ranks.
    """
    # Where the launcher has bound each rank to cores of its own, this is the number of these.
    return own if ranks == 1 else max(1, min(own, together // ranks))


def share_cores(communicator: Communicator) -> None:
    """Local. Limit the BLAS threads of each rank to its share of the node's cores, if the user sets no number.

    By default BLAS starts one thread per core in each rank. Eight ranks that do so on eight cores are many times slower
    than eight ranks with one thread each.
    """
    node_size = communicator.node.size
    if node_size == 1:
        return
    if chosen_threads() is not None:
        return
    threads = fair_threads(count_cores([own_cores()]), communicator.core_count, node_size)
    threadpool_limits(limits=threads)
    logger.info("%d threads for BLAS on each of %d ranks (set OMP_NUM_THREADS to choose)", threads, node_size)
