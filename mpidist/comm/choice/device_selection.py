"""The choice of the backend for arrays in GPU memory: NCCL, a CUDA-aware MPI, or staging through the host."""

from __future__ import annotations

import importlib
import logging
from typing import Any, cast

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.backend import Backend
from mpidist.comm.choice import capabilities
from mpidist.comm.gpu.cuda_awareness import find_out
from mpidist.comm.gpu.nccl import NcclBackend
from mpidist.comm.gpu.staged import StagedBackend
from mpidist.comm.gpu.staging_copier import HostCopier, StagingCopier
from mpidist.comm.gpu.transport import TRANSPORT, Transport, asked_transport
from mpidist.comm.group.agreement import together
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import UnavailableError, is_shared, mark_shared
from mpidist.options import CommunicationOptions

logger = logging.getLogger("mpidist")

# The size of the piece of GPU memory that MPI gets in one call.
BUCKET_BYTES = 1 << 22


def open_device(communicator: Communicator, options: CommunicationOptions, host: Backend) -> Backend:
    """Collective. Open the backend for CuPy arrays. One line in the log names it and the reason.

    Args:
        communicator: The ranks.
        options: The options of the communication.
        host: The backend for arrays in host memory, through which staged arrays go.

    Returns:
        The backend that `MPIDIST_GPU_TRANSPORT` asks for. By default NCCL if every rank has a GPU of its own, otherwise
        MPI if the library takes pointers to GPU memory, otherwise staging through pinned host memory.

    Raises:
        UnavailableError: The transport that was asked for is not available; on every rank.
        ValueError: `MPIDIST_GPU_TRANSPORT` names no transport.
    """
    # Rank 0's environment counts on all ranks, since the following calls are collective.
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
                logger.info(
                    "arrays in GPU memory are combined by %s: %s; %d ranks", transport.value, why, communicator.size
                )
            try:
                return _open(transport, communicator, options, host)
            except Exception as error:
                # What some ranks have raised alone would leave the others in a call.
                if asked is not Transport.AUTO or transport is Transport.STAGED or not is_shared(error):
                    raise
                why_not = f"it did not start: {error}"
                if communicator.rank == 0:
                    logger.warning("%s did not start, another transport is used: %s", transport.value, error)
        reasons.append(f"{transport.value} is not available: {why_not}")
    raise mark_shared(UnavailableError(
        f"{TRANSPORT}={asked.value} was asked for, and {'; '.join(reasons)}. Leave it out, or set it to auto"
    ))


def open_staged(communicator: Communicator, options: CommunicationOptions, host: Backend) -> Backend:
    """Local. Open staging through host memory: pinned memory for CuPy arrays, plain memory (for tests) for others.

    Args:
        communicator: The ranks.
        options: The options, of which `bytes_per_pack` is the size of a piece.
        host: The backend that combines the pieces.
    """
    return StagedBackend(communicator, options, host, _open_host_copier)


def open_nccl(communicator: Communicator) -> Backend:
    """Collective. Open NCCL without checking whether it is available."""
    return NcclBackend(communicator, _cuda())


def _why_not(transport: Transport, communicator: Communicator) -> str | None:
    """Collective. The reason why no rank may use a transport, None if all may; the same on every rank."""
    if transport is Transport.NCCL:
        reasons = communicator.all_gather_object(capabilities.why_no_nccl(communicator))
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
    # Chunks as large as the rooms: MPI gets each piece in one call.
    inside = module.MpiBackend(communicator, CommunicationOptions(bytes_per_pack=max(size, 32 * communicator.size)))
    return StagedBackend(communicator, options, inside, _open_bucket_copier)


def _open_host_copier(like: AnyArray) -> StagingCopier:
    return cast(StagingCopier, _cuda().PinnedCopier(like)) if arrays.is_cupy(like) else HostCopier()


def _open_bucket_copier(like: AnyArray) -> StagingCopier:
    return cast(StagingCopier, _cuda().BucketCopier(like))


def _cuda() -> Any:
    return importlib.import_module("mpidist.comm.gpu.cuda")
