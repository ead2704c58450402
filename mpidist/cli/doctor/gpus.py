"""The doctor's look at the GPUs of a job: which rank takes which GPU, by its UUID, and which ranks share one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpidist import launch
from mpidist.cli.doctor.child import NoAnswerError, ask
from mpidist.cli.doctor.finding import Finding
from mpidist.cluster.devices.gpu_binding import DEVICE, SHARE, choose_index
from mpidist.cluster.devices.names import visible_gpus
from mpidist.comm.gpu.cuda_awareness import find_out
from mpidist.comm.group.agreement import name_ranks
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import PACKAGES

# In a process of its own: CUDA takes memory of a GPU, and a library that does not fit the driver may end the process.
_ASK = """
import json
from cupy.cuda import runtime

told = []
for index in range(runtime.getDeviceCount()):
    text = bytes(runtime.getDeviceProperties(index).get("uuid") or b"").hex()
    uuid = text and f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
    told.append([uuid, str(runtime.deviceGetPCIBusId(index))])
print(json.dumps(told), flush=True)
"""


class RankGpus(NamedTuple):
    """The GPUs of a rank.

    Attributes:
        host: The name of its host.
        node_rank: Its number on the host by the launcher's variables, by which it takes a GPU; None without them.
        installed: Number of GPUs of the host that its files show.
        visible: `CUDA_VISIBLE_DEVICES`, None where it is not set.
        seen: UUID and place on the bus of each GPU that CUDA shows to it. A UUID may be empty with an old driver.
        why: The reason why CUDA shows none.
    """

    host: str
    node_rank: int | None
    installed: int
    visible: str | None
    seen: tuple[tuple[str, str], ...]
    why: str = ""

    @property
    def taken(self) -> tuple[str, str] | None:
        """Local. UUID and place of the GPU that the rank binds where the program names none."""
        return self.seen[choose_index(None, self.node_rank or 0, len(self.seen))] if self.seen else None


def look_at_gpus(communicator: Communicator) -> list[Finding]:
    """Collective. Look at the GPUs of all ranks, and at MPI's support of them; without GPUs there is no finding.

    Args:
        communicator: All ranks.
    """
    told = communicator.all_gather_object(_own_gpus(communicator.host))
    if not any(one.installed for one in told):
        return []
    findings = find_gpus(told, may_share=_is_on(SHARE), asks=os.environ.get(DEVICE, "").strip().lower() == "gpu")
    if not any(one.seen or one.why for one in told):
        return findings
    try:
        answer = find_out(communicator)
    except Exception as error:
        # Raised on all ranks, or on none.
        return [*findings, Finding("CUDA-aware MPI", "note", f"it cannot be tested: {error}", PACKAGES)]
    text = f"{answer.why}; arrays on GPUs go " + ("as they are" if answer.is_aware else "by NCCL, or by host memory")
    return [*findings, Finding("CUDA-aware MPI", "ok" if answer.is_aware else "note", text)]


def _own_gpus(host: str) -> RankGpus:
    place = launch.read()
    node_rank = 0 if place is None else place.node_rank
    installed, visible = len(visible_gpus({})), os.environ.get("CUDA_VISIBLE_DEVICES")
    if not visible_gpus():
        return RankGpus(host, node_rank, installed, visible, ())
    try:
        seen = tuple((str(uuid), str(bus)) for uuid, bus in json.loads(ask(_ASK).strip().rpartition("\n")[2]))
    except (NoAnswerError, ValueError) as error:
        return RankGpus(host, node_rank, installed, visible, (), f"CuPy cannot be used: {error}")
    return RankGpus(host, node_rank, installed, visible, seen)


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").strip().lower() in ("1", "true", "yes", "on")


def find_gpus(told: Sequence[RankGpus], *, may_share: bool = False, asks: bool = False) -> list[Finding]:
    """Local. Find out which rank takes which GPU.

    Args:
        told: The GPUs of each rank, in the order of ranks.
        may_share: Whether `MPIDIST_SHARE_GPU` says that ranks are meant to share GPUs.
        asks: Whether `MPIDIST_DEVICE` asks for GPUs, so that a program fails where a rank has none.
    """
    findings = []
    for host in dict.fromkeys(one.host for one in told):
        here = {rank: one for rank, one in enumerate(told) if one.host == host}
        names = {rank: _name(one) for rank, one in here.items()}
        text = f"{host}: " + ", ".join(f"rank {rank} {name}" for rank, name in names.items())
        findings.append(Finding("GPUs of ranks", "ok", text, data={"host": host, "gpus": names}))
        findings += _shared(host, here, may_share=may_share)
    findings += _without(told, asks=asks)
    return findings


def _name(one: RankGpus) -> str:
    return "none" if one.taken is None else one.taken[0] or f"the GPU at {one.taken[1]}"


def _shared(host: str, here: dict[int, RankGpus], *, may_share: bool) -> Iterator[Finding]:
    by_gpu: dict[tuple[str, str], list[int]] = {}
    for rank, one in here.items():
        if one.taken is not None:
            by_gpu.setdefault(one.taken, []).append(rank)
    for gpu, ranks in by_gpu.items():
        if len(ranks) > 1:
            text = f"{name_ranks(ranks)} on {host} take one GPU ({gpu[0] or gpu[1]}), its memory and its speed"
            if may_share:
                yield Finding("shared GPU", "ok", f"{text}, as {SHARE} says")
            else:
                yield Finding("shared GPU", "note", text, _fix_sharing(here))
    # Instances of one GPU have a UUID each, and one place.
    by_bus: dict[str, list[tuple[str, str]]] = {}
    for gpu in by_gpu:
        by_bus.setdefault(gpu[1], []).append(gpu)
    for bus, gpus in by_bus.items():
        if len(gpus) > 1:
            ranks = sorted(rank for gpu in gpus for rank in by_gpu[gpu])
            yield Finding(
                "instances of a GPU", "note",
                f"{name_ranks(ranks)} on {host} have instances (MIG) of one GPU ({bus}): NCCL needs a whole GPU for "
                "each rank, so arrays go by MPI", "ask for whole GPUs, or nvidia-smi -mig 0",
            )


def _fix_sharing(here: dict[int, RankGpus]) -> str:
    """The line that gives each rank of a host a GPU of its own."""
    ranks, seen = len(here), {gpu for one in here.values() for gpu in one.seen}
    installed = max(one.installed for one in here.values())
    is_meant = f"; export {SHARE}=1 if it is meant"
    if any(one.node_rank is None for one in here.values()):
        return (
            "start by mpirun or srun: this launcher does not number the ranks of a host, so each takes the first GPU; "
            f"or give each its own CUDA_VISIBLE_DEVICES{is_meant}"
        )
    if len(seen) >= ranks or installed >= ranks:
        # There are enough GPUs: the wrong ones are visible to the ranks.
        if any(one.visible is not None for one in here.values()):
            values = ", ".join(dict.fromkeys(repr(one.visible) for one in here.values()))
            return (
                f"unset CUDA_VISIBLE_DEVICES (it is {values}): each rank then takes one of its own, or show each "
                f"rank one GPU{is_meant}"
            )
        return f"show the same GPUs to all ranks of a host, or to each rank one of its own{is_meant}"
    count = max(len(seen), 1)
    if "SLURM_JOB_ID" in os.environ:
        return f"srun --ntasks-per-node={count} --gpus-per-node={count}{is_meant}"
    return f"mpirun -n {count} on each host, one rank for each GPU{is_meant}"


def _without(told: Sequence[RankGpus], *, asks: bool) -> Iterator[Finding]:
    without = [rank for rank, one in enumerate(told) if not one.seen]
    if not without or (len(without) == len(told) and not any(one.why for one in told) and not asks):
        return
    one = told[without[0]]
    if one.why:
        why, fix = one.why, f"{PACKAGES}; nvidia-smi shows the driver"
    elif one.visible is not None:
        why, fix = f"CUDA_VISIBLE_DEVICES={one.visible!r} shows none there", "unset CUDA_VISIBLE_DEVICES"
    else:
        why, fix = "no GPU is visible there", "start ranks on hosts with GPUs only, or see nvidia-smi there"
    wish = f", and {DEVICE}=gpu asks for one" if asks else ""
    yield Finding(
        "ranks without GPU", "wrong" if asks else "note", f"{name_ranks(without)} (first on {one.host}): {why}{wish}",
        fix,
    )
