"""Threads of BLAS per rank: the ranks of a node share its cores."""

from __future__ import annotations

import logging
import os

from threadpoolctl import threadpool_limits

from mpidist.comm.communicator import Communicator

logger = logging.getLogger("mpidist")

_CHOSEN_BY_USER = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def share_cores(communicator: Communicator) -> None:
    """Local. Give each rank of a node its part of the cores, unless the environment says how many threads to use.

    Eight ranks with as many threads each as the machine has cores are many times slower than with one thread each.
    """
    node_size = communicator.node.size
    if node_size == 1 or any(name in os.environ for name in _CHOSEN_BY_USER):
        return
    allowed = len(os.sched_getaffinity(0))
    # A launcher that binds ranks has already given each its cores.
    is_bound = allowed < (os.cpu_count() or 1)
    threads = allowed if is_bound else max(1, allowed // node_size)
    threadpool_limits(limits=threads)
    logger.info("%d threads for BLAS on each of %d ranks (set OMP_NUM_THREADS to choose)", threads, node_size)
