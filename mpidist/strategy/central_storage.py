"""`CentralStorageStrategy`: one copy of the variables on each node, and replicas that compute on CPUs or GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import cast

import numpy as np

from mpidist import arrays
from mpidist.cluster.devices.gpu_binding import agree, bind, choose_device
from mpidist.cluster.devices.names import Device, parse_device, warn_about_host_memory, warn_about_idle_gpus
from mpidist.cluster.slurm.idle_tasks import warn_about_idle_tasks
from mpidist.comm.group.agreement import require_same, together
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.opening import open_communicator
from mpidist.options import CommunicationOptions
from mpidist.strategy.base import Strategy
from mpidist.strategy.extended import StrategyExtended
from mpidist.variables.central_arena import CentralArena
from mpidist.variables.memory.device_copies import DeviceCopies
from mpidist.variables.replicas import Replicas

_CPU = Device("CPU", 0)


class CentralStorageExtended(StrategyExtended):
    """The `extended` of a `CentralStorageStrategy`."""

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Local. The name of the one device whose memory holds the variables of this node."""
        return (str(cast(CentralStorageStrategy, self._owner).parameter_device),)


class CentralStorageStrategy(Strategy):
    """Collective. Every rank is a replica. Each node stores the variables once, and applies aggregated updates.

    On CPUs it stores and updates variables as `MirroredStrategy` does, with the same bits. Where several ranks compute
    on GPUs, variables, gradients and the state of optimizers stay in host memory, and the CPUs update them: `value()`
    of a variable inside `run` is a copy on the rank's GPU, made once between two updates. A variable that replicas
    write inside `run` needs an aggregation, as in tf.distribute.

    Args:
        compute_devices: See `devices` of `MirroredStrategy`.
        parameter_device: The device that stores the variables: "cpu:0", or, for a single rank, the GPU on which it
            computes, which is then the default.
        nodes: "one" takes the ranks of one node, "all" those of any number of nodes, with one copy on each.
        communicator: An mpi4py communicator of the replicas; default: all ranks of the job.
        communication_options: Options of the communication.

    Raises:
        ValueError: The ranks are on several nodes and `nodes` is "one", `nodes` is neither "one" nor "all", a device
            does not fit, or arguments contradict the options.
        TypeError: An argument has another type.
        OSError: There is too little shared memory for the variables, when they are made.
        MismatchError: Ranks pass different arguments.
        RuntimeError: The other ranks serve a `ParameterServerStrategy` that was made before.

    Attributes:
        parameter_device: The device whose memory holds the variables of this node.
    """

    _extended_class = CentralStorageExtended

    def __init__(
        self,
        compute_devices: Sequence[str] | None = None,
        parameter_device: str | None = None,
        *,
        nodes: str = "one",
        communicator: object | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        # Before the first communicator starts MPI: an MPI library that knows GPUs uses the one that is current then.
        binding = bind(compute_devices or (parameter_device if _names_gpu(parameter_device) else None))
        ranks = open_communicator(communicator)
        gpu = agree(binding, ranks)
        device = choose_device(compute_devices, ranks, on_gpu=gpu is not None, argument="compute_devices")
        self.parameter_device = _agreed_place(ranks, nodes, parameter_device, gpu)
        warn_about_idle_gpus(ranks.node.size)
        warn_about_idle_tasks()
        replicas = Replicas(ranks, communication_options)
        on_gpu = self.parameter_device.kind == "GPU"
        copies = None
        if gpu is not None and not on_gpu:
            copies = DeviceCopies(importlib.import_module("mpidist.comm.gpu.cuda"))
        arena = CentralArena(replicas, shared=True if ranks.size > 1 else None, on_gpu=on_gpu, copies=copies)
        super().__init__(
            replicas, arena, device=device, namespace=np if gpu is None else arrays.gpu_namespace()
        )
        self._settle(CentralStorageStrategy)


def _names_gpu(name: object) -> bool:
    try:
        return parse_device(cast(str, name)).kind == "GPU"
    except (TypeError, ValueError):
        # Raised on all ranks, when they have met.
        return False


def _agreed_place(ranks: Communicator, nodes: object, parameter_device: str | None, gpu: int | None) -> Device:
    """Collective. The device of the variables, by the arguments of the strategy and this rank's GPU."""
    place = together(
        ranks, "choosing where variables are", lambda: _place(nodes, parameter_device, gpu, ranks)
    )
    require_same(
        ranks.all_gather_object((nodes, str(place))), "CentralStorageStrategy: `nodes` and the device of the variables",
        "Make the strategy the same way on every rank.",
    )
    return place


def _place(nodes: object, parameter_device: str | None, gpu: int | None, ranks: Communicator) -> Device:
    if nodes not in ("one", "all"):
        raise ValueError(f"`nodes` must be 'one' or 'all', got {nodes!r}")
    if nodes == "one" and len(ranks.node_sizes) > 1:
        raise ValueError(
            f"CentralStorageStrategy keeps variables in the memory of one node, but this job's {ranks.size} ranks are "
            f"on {len(ranks.node_sizes)} nodes with {list(ranks.node_sizes)} ranks. Pass nodes='all' for one copy on "
            "each node, or use MultiWorkerMirroredStrategy()"
        )
    is_alone = ranks.size == 1
    if parameter_device is None:
        return Device("GPU", gpu) if is_alone and gpu is not None else _CPU
    wanted = parse_device(parameter_device)
    if wanted.kind == "CPU":
        return wanted
    if not is_alone:
        raise ValueError(
            f"`parameter_device` may be a GPU where one rank computes on it, got {parameter_device!r} and {ranks.size} "
            "ranks, whose variables are in host memory. Leave it out, or use MirroredStrategy(), which has a copy on "
            "each rank's GPU"
        )
    if gpu is None:
        warn_about_host_memory(wanted)
        return _CPU
    if wanted.index != gpu:
        raise ValueError(
            f"variables are on the GPU that computes with them, which is GPU:{gpu}, or in host memory, got "
            f"parameter_device={parameter_device!r}. Use 'gpu:{gpu}' or 'cpu:0'"
        )
    return wanted
