"""Capabilities: which backends are available to these ranks, and why the others are not."""

from __future__ import annotations

import importlib

from mpidist.comm.agreement import name_ranks
from mpidist.comm.communicator import Communicator
from mpidist.options import CommunicationImplementation


def why_not(implementation: CommunicationImplementation, communicator: Communicator) -> str | None:
    """Collective. Why a backend cannot be had by this rank, None where it can."""
    if implementation is CommunicationImplementation.NODE and max(communicator.node_sizes) == 1:
        return "no two ranks share memory"
    if implementation is CommunicationImplementation.NCCL:
        return _why_no_nccl(communicator)
    return None


def _why_no_nccl(communicator: Communicator) -> str | None:
    reason, uuid = _own_gpu()
    gpus = communicator.all_gather_object(uuid)
    if reason is not None:
        return reason
    without = [rank for rank, other in enumerate(gpus) if other is None]
    if without:
        return f"{name_ranks(without)} cannot use a GPU with NCCL, and every rank has to"
    sharing = [rank for rank, other in enumerate(gpus) if other == uuid]
    if len(sharing) > 1:
        return f"{name_ranks(sharing)} share one GPU, and NCCL wants one for each rank"
    return None


def _own_gpu() -> tuple[str | None, str | None]:
    """Why this rank has no GPU for NCCL, or which one it has."""
    try:
        cuda = importlib.import_module("mpidist.comm.gpu.cuda")
    except ImportError as error:
        return f"CuPy cannot be imported ({error}): pip install cupy-cuda12x, or the one for your CUDA", None
    if cuda.device_count() == 0:
        return "no GPU is visible", None
    if not getattr(cuda.nccl, "available", True):
        return "this CuPy has no NCCL: pip install nvidia-nccl-cu12, or the one for your CUDA", None
    return None, cuda.device_uuid(cuda.current_device())
