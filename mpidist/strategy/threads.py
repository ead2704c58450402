"""Threads of BLAS per rank, since the ranks of a node share its cores."""

from __future__ import annotations

import logging
import os

from threadpoolctl import threadpool_limits

from mpidist.comm.communicator import Communicator
from mpidist.comm.cores import count_cores, own_cores

logger = logging.getLogger("mpidist")

_CHOSEN_BY_USER = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def share_cores(communicator: Communicator) -> None:
    """Local. Limit the BLAS threads of each rank to its share of the node's cores, if the user sets no number.

    By default BLAS starts one thread per core in each rank. Eight ranks that do so on eight cores are many times slower
    than eight ranks with one thread each.
    """
    node_size = communicator.node.size
    if node_size == 1:
        return
    if any(name in os.environ for name in _CHOSEN_BY_USER):
        return
    # Where the launcher has bound each rank to cores of its own, this is the number of these.
    threads = max(1, min(count_cores([own_cores()]), communicator.core_count // node_size))
    threadpool_limits(limits=threads)
    logger.info("%d threads for BLAS on each of %d ranks (set OMP_NUM_THREADS to choose)", threads, node_size)
