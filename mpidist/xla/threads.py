"""XLA's threads: each rank has as many as its share of the node's cores."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from mpidist import launch
from mpidist.strategy.base import Strategy

# The variable of which XLA takes the number of its threads when it starts, with JAX's first array.
_VARIABLE = "NPROC"
_THREAD_NAME = "tf_XLAEigen"


def share_launched() -> None:
    """Local. Give XLA this rank's share of the cores, before JAX starts, and also before a strategy exists."""
    ranks = launch.node_size()
    if ranks is not None and ranks > 1:
        own = len(os.sched_getaffinity(0))
        # Where the launcher binds each rank to cores of its own, it has them all.
        _choose(own if own < (os.cpu_count() or own) else max(1, own // ranks))


def share_cores(strategy: Strategy) -> None:
    """Local. Give XLA `cores_per_replica` threads, unless the user chose; warn once if it has started with more."""
    if strategy.num_replicas_in_sync == 1:
        return
    cores = strategy.extended.cores_per_replica
    running = count_threads()
    if not running:
        _choose(cores)
    elif running > cores and not _is_chosen():
        _warn(running, cores)


def count_threads() -> int:
    """Local. The number of threads with which XLA computes; 0 before it starts."""
    return sum(1 for one in Path("/proc/self/task").glob("*/comm") if _name(one) == _THREAD_NAME)


_own_choice: set[str] = set()
_warned: set[int] = set()


def _is_chosen() -> bool:
    return os.environ.get(_VARIABLE, "") not in {"", *_own_choice}


def _choose(threads: int) -> None:
    if count_threads() or _is_chosen():
        return
    _own_choice.clear()
    _own_choice.add(str(threads))
    os.environ[_VARIABLE] = str(threads)


def _warn(running: int, cores: int) -> None:
    if not _warned:
        _warned.add(running)
        warnings.warn(
            f"XLA computes with {running} threads, and this rank's share of the node's cores is {cores}: the ranks of "
            "a node wait for each other. Import `mpidist.jax` or `mpidist.keras`, or make the strategy, before the "
            f"first array of JAX; or set {_VARIABLE}={cores}",
            stacklevel=4,
        )


def _name(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the thread has ended
        return ""
