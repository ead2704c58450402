"""Capabilities: the reasons why these ranks cannot use a backend."""

from __future__ import annotations

import importlib
import os

from mpidist.comm.group.agreement import name_ranks
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import PACKAGES

# The variable that makes NCCL treat ranks of one host as ranks of several hosts.
NCCL_HOST = "NCCL_HOSTID"


def why_no_shared_memory(communicator: Communicator) -> str | None:
    """Local. The reason why these ranks cannot use shared memory, None if they can."""
    return "no two ranks share memory" if max(communicator.node_sizes) == 1 else None


def why_no_nccl(communicator: Communicator) -> str | None:
    """Collective. The reason why this rank cannot use NCCL, None if it can."""
    reason, gpu = _own_gpu(communicator.host)
    gpus = communicator.all_gather_object(gpu)
    if reason is not None:
        return reason
    without = [rank for rank, other in enumerate(gpus) if other is None]
    if without:
        return f"{name_ranks(without)} cannot use a GPU with NCCL, and every rank needs one"
    sharing = [rank for rank, other in enumerate(gpus) if other == gpu]
    if len(sharing) > 1:
        return f"{name_ranks(sharing)} share one GPU, and NCCL needs one for each rank"
    return None


def _own_gpu(host: str) -> tuple[str | None, tuple[str, str] | None]:
    """The reason why this rank has no GPU for NCCL, or the host and the place of its GPU.

    The host is the one that NCCL takes it for. Not the UUID of the GPU: instances of one GPU (MIG) have one each, and
    some versions of NCCL refuse them at their start.
    """
    try:
        cuda = importlib.import_module("mpidist.comm.gpu.cuda")
    except ImportError as error:
        return f"CuPy cannot be imported ({error}): {PACKAGES}", None
    if cuda.device_count() == 0:
        return "no GPU is visible", None
    if not getattr(cuda.load_nccl(), "available", True):
        return f"CuPy finds no NCCL: {PACKAGES}", None
    return None, (os.environ.get(NCCL_HOST, host), cuda.device_bus(cuda.current_device()))
