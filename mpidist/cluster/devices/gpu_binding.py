"""GPU binding: each rank computes on one GPU, which is chosen before MPI starts.

The order matters, because an MPI library that knows GPUs uses the GPU that is current when it starts: first the
launcher's environment says which rank of its node this process is, then CuPy makes that rank's GPU current, then MPI
starts. Last, the ranks compare what they have. A program asks for GPUs by naming them (`devices=["GPU:0", ...]`) or by
`MPIDIST_DEVICE=gpu`.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpidist import launch
from mpidist.cluster.devices.names import (
    Device,
    node_device,
    parse_device,
    visible_gpus,
    warn_about_host_memory,
)
from mpidist.comm.first_use import at_first_use
from mpidist.comm.group.agreement import exchange, name_ranks, together
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import PACKAGES, UnavailableError

if TYPE_CHECKING:
    from mpidist.comm.gpu.transport import is_probe_wanted
else:
    is_probe_wanted = at_first_use("mpidist.comm.gpu.transport", "is_probe_wanted")

_logger = logging.getLogger("mpidist")

DEVICE = "MPIDIST_DEVICE"
SHARE = "MPIDIST_SHARE_GPU"


@dataclass(frozen=True)
class Binding:
    """The outcome of `bind` on one rank.

    Attributes:
        index: Number of the GPU that is current now, among the visible ones; None where arrays stay in host memory.
        uuid: The GPU's UUID, which is the same on all ranks that see the GPU.
        error: The error, if binding failed. It is kept, not raised: `agree` raises it when all ranks can raise it.
    """

    index: int | None = None
    uuid: str | None = None
    error: Exception | None = None


def bind(devices: Sequence[str] | str | None = None, environment: Mapping[str, str] | None = None) -> Binding:
    """Local. Make this rank's GPU current, if GPUs are asked for; call it before the first communicator opens.

    Args:
        devices: Names of devices in the order of the node's ranks, as a strategy gets them, or the name of this rank's
            own device. Names that cannot be parsed are ignored here; the strategy raises the error.
        environment: Defaults to `os.environ`. `MPIDIST_DEVICE=gpu` asks for a GPU where `devices` names none.

    Returns:
        The argument of `agree`. Nothing is bound, without an error, where nothing or a CPU is asked for. The same holds
        where `devices` names GPUs and there is no CuPy or no GPU: arrays then stay in host memory.
    """
    environment = os.environ if environment is None else environment
    try:
        wish = environment.get(DEVICE, "").strip().lower()
        if wish not in ("", "cpu", "gpu"):
            raise ValueError(f"{DEVICE} must be cpu or gpu, got {environment[DEVICE]!r}")
        place = launch.read(environment)
        node_rank = 0 if place is None or place.node_rank is None else place.node_rank
        named = _named(devices, node_rank)
        if named is not None and named.kind != "GPU":
            return Binding()
        if named is None and wish != "gpu":
            return Binding()
        missing = why_no_gpu(environment)
        if missing is not None:
            if wish != "gpu":
                return Binding()
            raise UnavailableError(f"{DEVICE}=gpu asks for a GPU, but {missing}. Unset {DEVICE} to compute on the CPU")
        cuda = importlib.import_module("mpidist.comm.gpu.cuda")
        index = choose_index(named, node_rank, cuda.device_count())
        # A child process on a GPU that takes one process at a time would take it from this one.
        if node_rank == 0 and is_probe_wanted(environment) and not cuda.is_exclusive(index):
            importlib.import_module("mpidist.comm.gpu.cuda_awareness").start_probe()
        return _use(cuda, index)
    except Exception as error:
        return Binding(error=error)


def agree(binding: Binding, communicator: Communicator, environment: Mapping[str, str] | None = None) -> int | None:
    """Collective. Raise an error of any rank on every rank, and warn where ranks of a node share a GPU.

    Args:
        binding: This rank's result of `bind`.
        communicator: The replicas.
        environment: Defaults to `os.environ`. Under `MPIDIST_SHARE_GPU=1` ranks may share a GPU without a warning.

    Returns:
        The number of this rank's GPU, None where arrays stay in host memory.

    Raises:
        UnavailableError: `MPIDIST_DEVICE=gpu` is set, and there is no CuPy or no visible GPU.
        ValueError: A named device does not exist, or some ranks have a GPU and others have none.
    """
    environment = os.environ if environment is None else environment
    uuids = exchange(communicator, "choosing this rank's GPU", binding.uuid, binding.error)
    without = [rank for rank, uuid in enumerate(uuids) if uuid is None]
    if 0 < len(without) < len(uuids):
        # All ranks have the same list, so all of them make this call.
        together(communicator, "choosing this rank's GPU", lambda: _refuse_mixture(without))
    if communicator.rank == 0 and environment.get(SHARE, "").strip().lower() not in ("1", "true", "yes", "on"):
        for uuid in dict.fromkeys(uuid for uuid in uuids if uuid is not None):
            sharing = [rank for rank, other in enumerate(uuids) if other == uuid]
            if len(sharing) > 1:
                _logger.warning(
                    "%s share one GPU (%s), its memory and its speed. Start fewer ranks per node, or make another GPU "
                    "visible to each rank. Set %s=1 if sharing is meant", name_ranks(sharing), uuid, SHARE,
                )
    return binding.index


def choose_device(
    devices: Sequence[str] | None, communicator: Communicator, *, on_gpu: bool, argument: str = "devices"
) -> Device | None:
    """Collective. This rank's device where a program names one for each rank of the node, else None.

    It warns where a GPU is named and the rank computes in host memory.

    Args:
        devices: The names, in the order of the node's ranks.
        communicator: The replicas.
        on_gpu: Whether this rank computes on a GPU.
        argument: The name under which the program gives `devices`, for the errors.

    Raises:
        TypeError, ValueError: See `names.node_device`, on every rank.
    """
    if not devices:
        return None
    node = communicator.node
    device = together(
        communicator, "choosing this rank's device", lambda: node_device(devices, node.rank, node.size, argument)
    )
    if not on_gpu:
        warn_about_host_memory(device)
    return device


def choose_index(named: Device | None, node_rank: int, visible: int) -> int:
    """Local. The number of the visible GPU that a rank takes.

    Args:
        named: The device that the program names for the rank, None where it names none.
        node_rank: Number of the rank on its node.
        visible: Number of GPUs that the rank can see, at least 1.

    Raises:
        ValueError: The named GPU is not visible.
    """
    # A launcher that shows each rank only one GPU has chosen already. That GPU is number 0 on every rank.
    if visible == 1:
        return 0
    if named is None:
        return node_rank % visible
    if named.index >= visible:
        raise ValueError(
            f"{named} is named and {visible} GPUs are visible here, GPU:0 to GPU:{visible - 1}. Name one of these, or "
            "change CUDA_VISIBLE_DEVICES"
        )
    return named.index


def why_no_gpu(environment: Mapping[str, str] | None = None) -> str | None:
    """Local. The reason why arrays cannot be on a GPU, None where they can. No CUDA context is created."""
    if not visible_gpus(environment):
        return "no GPU is visible (see nvidia-smi and CUDA_VISIBLE_DEVICES)"
    try:
        cuda: Any = importlib.import_module("mpidist.comm.gpu.cuda")
    except ImportError as error:
        return f"CuPy cannot be imported ({error}): {PACKAGES}"
    return None if cuda.device_count() else "CUDA sees no GPU, though the driver does"


def _named(devices: Sequence[str] | str | None, node_rank: int) -> Device | None:
    """The device that is named for this rank."""
    if not isinstance(devices or (), (str, list, tuple)):
        return None
    names = [devices] * (node_rank + 1) if isinstance(devices, str) else devices or ()
    if node_rank >= len(names):
        return None
    try:
        return parse_device(names[node_rank])
    except (TypeError, ValueError):
        return None


def _use(cuda: Any, index: int) -> Binding:
    cuda.use_device(index)
    return Binding(index, str(cuda.device_uuid(index)))


def _refuse_mixture(without: list[int]) -> None:
    raise ValueError(
        f"{name_ranks(without)} computes on the CPU and other ranks on GPUs: all replicas must be of one kind. Set "
        f"{DEVICE} to the same value on all ranks, and check that each of them has CuPy and sees a GPU"
    )
