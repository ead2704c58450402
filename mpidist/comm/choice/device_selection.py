"""Which collective is used for arrays in GPU memory: NCCL, a CUDA-aware MPI, or staging through the host."""

from __future__ import annotations

import importlib
import logging
from typing import Any, cast

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.agreement import together
from mpidist.comm.backend import Backend
from mpidist.comm.choice import capabilities
from mpidist.comm.communicator import Communicator
from mpidist.comm.gpu.cuda_awareness import TRANSPORT, Transport, asked_transport, find_out
from mpidist.comm.gpu.nccl import NcclBackend
from mpidist.comm.gpu.staged import StagedBackend
from mpidist.comm.gpu.staging_copier import HostCopier, StagingCopier
from mpidist.errors import UnavailableError, mark_shared
from mpidist.options import CommunicationImplementation, CommunicationOptions

logger = logging.getLogger("mpidist")

# What an MPI gets of GPU memory in one call; the rooms in which it lies are used for ever.
BUCKET_BYTES = 1 << 22


def open_device(communicator: Communicator, options: CommunicationOptions, host: Backend) -> Backend:
    """Collective. The backend for CuPy arrays; one line in the log says which one, and why. Untested on a GPU.

    Args:
        communicator: The ranks.
        options: Of the communication.
        host: The collective for arrays in host memory; staging ends in it.

    Returns:
        NCCL where every rank has a GPU of its own, else MPI where the library takes pointers to GPU memory, else
        staging through pinned host memory; or what `MPIDIST_GPU_TRANSPORT` asks for.

    Raises:
        UnavailableError: What was asked for cannot be had, on every rank.
        ValueError: `MPIDIST_GPU_TRANSPORT` names no transport.
    """
    # Rank 0's environment counts: what follows is collective.
    own = together(communicator, "choosing how GPU memory is combined", asked_transport)
    asked = Transport(communicator.broadcast_object(own.value))
    reasons: list[str] = []
    for transport in Transport:
        if transport is Transport.AUTO or asked not in (Transport.AUTO, transport):
            continue
        why_not = _why_not(transport, communicator)
        if why_not is None:
            why = f"{TRANSPORT}={asked.value}" if asked is not Transport.AUTO else "; ".join(reasons) or "all have one"
            if communicator.rank == 0:
                logger.info("arrays in GPU memory go by %s: %s; %d ranks", transport.value, why, communicator.size)
            return _open(transport, communicator, options, host)
        reasons.append(f"not by {transport.value}: {why_not}")
    raise mark_shared(UnavailableError(
        f"{TRANSPORT}={asked.value} cannot be had: {'; '.join(reasons)}. Leave it out, or ask for auto"
    ))


def open_staged(communicator: Communicator, options: CommunicationOptions, host: Backend) -> Backend:
    """Local. Staging through host memory; pinned for CuPy arrays, and rather a test for those in host memory.

    Args:
        communicator: The ranks.
        options: `bytes_per_pack` is the piece.
        host: What combines the pieces.
    """
    return StagedBackend(communicator, options, host, _open_host_copier)


def open_nccl(communicator: Communicator) -> Backend:
    """Collective. NCCL, without asking whether it can be had."""
    return NcclBackend(communicator, _cuda())


def _why_not(transport: Transport, communicator: Communicator) -> str | None:
    """Collective. Why no rank may use a transport, the same on every rank."""
    if transport is Transport.NCCL:
        reasons = communicator.all_gather_object(
            capabilities.why_not(CommunicationImplementation.NCCL, communicator)
        )
        return next((reason for reason in reasons if reason is not None), None)
    if transport is Transport.CUDA_AWARE:
        answer = find_out(communicator)
        return None if answer.is_aware else answer.why
    return None


def _open(
    transport: Transport, communicator: Communicator, options: CommunicationOptions, host: Backend
) -> Backend:
    if transport is Transport.STAGED:
        return open_staged(communicator, options, host)
    if transport is Transport.NCCL:
        return open_nccl(communicator)
    size = options.bytes_per_pack or BUCKET_BYTES
    module = importlib.import_module("mpidist.comm.backends.mpi")
    # One call of MPI for each bucket.
    inside = module.MpiBackend(communicator, CommunicationOptions(bytes_per_pack=max(size, 32 * communicator.size)))
    return StagedBackend(communicator, options, inside, _open_bucket_copier)


def _open_host_copier(like: AnyArray) -> StagingCopier:
    return cast(StagingCopier, _cuda().PinnedCopier(like)) if arrays.is_cupy(like) else HostCopier()


def _open_bucket_copier(like: AnyArray) -> StagingCopier:
    return cast(StagingCopier, _cuda().BucketCopier(like))


def _cuda() -> Any:
    return importlib.import_module("mpidist.comm.gpu.cuda")
