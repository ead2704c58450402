"""Devices: their names, their order on a node's ranks, and the number of GPUs."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpidist import launch
from mpidist.launch import mpirun_line

_logger = logging.getLogger("mpidist")

_DEVICE = re.compile(
    r"(?:/job:(?P<job>[A-Za-z][A-Za-z0-9_]*))?(?:/replica:(?P<replica>\d+))?(?:/task:(?P<task>\d+))?"
    r"/?(?:device:)?(?P<kind>cpu|gpu)(?::(?P<index>\d+))?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Device:
    """A device by name.

    Attributes:
        kind: "CPU" or "GPU".
        index: Index among the visible devices of the kind. All CPUs share one memory; their index only keeps names
            apart.
        job: Job of the task that has the device, None where the name does not say.
        replica: Replica in the name, which is always 0 in tf.distribute.
        task: Index of the task that has the device.
    """

    kind: str
    index: int
    job: str | None = None
    replica: int | None = None
    task: int | None = None

    def __str__(self) -> str:
        parts = (("job", self.job), ("replica", self.replica), ("task", self.task))
        place = "".join(f"/{name}:{value}" for name, value in parts if value is not None)
        return f"{place}/device:{self.kind}:{self.index}"


def parse_device(name: str) -> Device:
    """Local. Read a device's name in any of tf.distribute's spellings.

    Args:
        name: `/gpu:0`, `GPU:0`, `cpu:1`, `/device:CPU:0`, `/job:worker/replica:0/task:1/device:GPU:0`. A missing index
            means 0.

    Raises:
        TypeError: `name` is not a string.
        ValueError: `name` is not the name of a device, or of a kind that is not supported.
    """
    if not isinstance(name, str):
        raise TypeError(f"a device must be named by a string, such as 'GPU:0', got {type(name).__name__}: {name!r}")
    match = _DEVICE.fullmatch(name.strip())
    if match is None:
        raise ValueError(f"not the name of a device: {name!r}. Expected 'CPU:0', 'GPU:0' or '/job:worker/task:0/gpu:0'")
    return Device(
        kind=match["kind"].upper(),
        index=int(match["index"] or 0),
        job=match["job"],
        replica=None if match["replica"] is None else int(match["replica"]),
        task=None if match["task"] is None else int(match["task"]),
    )


def node_device(devices: Sequence[str], node_rank: int, node_size: int, argument: str = "devices") -> Device:
    """Local. This rank's device where a program names one device for each rank of the node.

    Args:
        devices: Names, in the order of the node's ranks.
        node_rank: Number of this rank on its node.
        node_size: Number of ranks on this node.
        argument: The name under which the program gives `devices`, for the errors.

    Raises:
        TypeError: `devices` is a string.
        ValueError: A name cannot be parsed, a device is named twice, or there is not one name per rank.
    """
    if isinstance(devices, str):
        raise TypeError(f"`{argument}` must be a list of device names, got the string {devices!r}. Use [{devices!r}]")
    if not isinstance(devices, Sequence):
        raise TypeError(
            f"`{argument}` must be a list of device names, for instance ['GPU:0', 'GPU:1'], got {devices!r} of type "
            f"{type(devices).__name__}"
        )
    parsed = [parse_device(name) for name in devices]
    if len(set(parsed)) < len(parsed) and not _may_share(parsed):
        twice = sorted({str(device) for device in parsed if parsed.count(device) > 1})
        raise ValueError(
            f"`{argument}` must not name a device twice, got {list(devices)!r} with {', '.join(twice)} repeated. One "
            f"rank is one replica: name {node_size} different device{'s' if node_size > 1 else ''}, or start fewer: "
            f"{mpirun_line(len(set(parsed)))}. Set MPIDIST_SHARE_GPU=1 to let ranks share a GPU"
        )
    if len(parsed) != node_size:
        raise ValueError(
            f"`{argument}` must name one device per rank of the node: expected {node_size}, got {len(parsed)}: "
            f"{list(devices)!r}. To use all of these devices, start one rank for each device of a node: "
            f"{mpirun_line(len(parsed))}"
        )
    return parsed[node_rank]


def _may_share(devices: Sequence[Device]) -> bool:
    """Whether a device may be named twice: a GPU may, if the environment says that ranks are meant to share it."""
    is_meant = os.environ.get("MPIDIST_SHARE_GPU", "").strip().lower() in ("1", "true", "yes", "on")
    return is_meant and all(device.kind == "GPU" for device in devices)


def visible_gpus(environment: Mapping[str, str] | None = None, root: Path = Path("/")) -> list[str]:
    """Local. The NVIDIA GPUs that this process may use, found without CUDA.

    A call of CUDA would create a context, which takes memory of the GPU even if the program does not use it.

    Args:
        environment: Defaults to `os.environ`; `CUDA_VISIBLE_DEVICES` limits and orders the list.
        root: The folder of /proc and /dev.

    Returns:
        Their names as in `CUDA_VISIBLE_DEVICES`: indices or UUIDs. Empty without a driver.
    """
    environment = os.environ if environment is None else environment
    count = _installed_gpus(root)
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if count == 0 or wanted is None:
        return [str(index) for index in range(count)]
    visible: list[str] = []
    for name in (part.strip() for part in wanted.split(",")):
        # CUDA's rule: the first name that fits no device ends the list. So "-1" and "" mean no GPU.
        if not (name.isdecimal() and int(name) < count) and not name.startswith(("GPU-", "MIG-")):
            break
        visible.append(name)
    return visible


def _installed_gpus(root: Path) -> int:
    for folder, pattern in ((root / "proc/driver/nvidia/gpus", "*"), (root / "dev", "nvidia[0-9]*")):
        count = sum(1 for _ in folder.glob(pattern))
        if count:
            return count
    # Windows' subsystem for Linux has one device file for all GPUs; CUDA counts them when one is bound.
    return int((root / "dev/dxg").exists() and any((root / "usr/lib/wsl/lib").glob("libcuda.so*")))


def idle_gpus_warning(gpu_count: int, node_size: int) -> str | None:
    """Local. The warning for a program with fewer ranks than the node has GPUs; None where there is no idle GPU.

    Args:
        gpu_count: Number of GPUs that the ranks of the node can see.
        node_size: Number of ranks on the node.
    """
    if gpu_count <= max(node_size, 1):
        return None
    ranks = "1 rank runs" if node_size <= 1 else f"{node_size} ranks run"
    return (
        f"{gpu_count} GPUs are visible and {ranks} on this node, so some GPUs stay idle: one rank is one replica. "
        f"Start one rank per GPU: {mpirun_line(gpu_count)}"
    )


@functools.cache
def warn_about_idle_gpus(node_size: int) -> None:
    """Local. Warn once, on the first rank, that the node has more visible GPUs than ranks."""
    text = idle_gpus_warning(len(visible_gpus()), node_size)
    if text is not None and launch.world_rank() == 0:
        _logger.warning("%s", text)


@functools.cache
def warn_about_host_memory(device: Device) -> None:
    """Local. Warn once, on the first rank, that a GPU is named but not used: `gpu_binding.bind` has bound none."""
    if device.kind == "GPU" and launch.world_rank() == 0:
        _logger.warning("%s is named, but arrays stay in host memory and the CPU computes with them", device)
