"""A Slurm step as its tasks' environment describes it: the host and the component of each task; pure.

Two kinds of variables look alike. `SLURM_STEP_*` and `SLURM_PROCID` are a task's own under `srun`. In the script of
`sbatch`, and in ranks that an `mpirun` has started there, they are missing, or they are those of mpirun's daemons.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpidist import launch
from mpidist.cluster.slurm.host_list import MOST_HOSTS, compress, expand
from mpidist.errors import LauncherError

_COUNT = re.compile(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?")
# More tasks than any machine has: such a number is a mistake, and would fill the memory.
_MOST_TASKS = 1 << 24
# Old versions and a plain `srun a : b` have the second name only.
_COMPONENT = ("HET_GROUP", "PACK_GROUP")


@dataclass(frozen=True)
class SlurmStep:
    """The tasks of a step, in the order of their ranks.

    Attributes:
        rank: The rank of this task.
        hosts: The host of each task.
        components: The component of each task's job, from 0; all 0 unless the job is heterogeneous.
        names: The name (`--job-name`) of each component of the job, "" where Slurm does not say.
    """

    rank: int
    hosts: tuple[str, ...]
    components: tuple[int, ...]
    names: tuple[str, ...]


def is_own_step(environment: Mapping[str, str]) -> bool:
    """Local. Whether the variables of a step are this process's own.

    They are its own where `srun` has started it, and on a Cray, where srun sets other launchers' variables as well.
    They are not where an inner launcher has started it, nor in the script of `sbatch` or the shell of `salloc`.
    """
    rank, size = environment.get("SLURM_PROCID", ""), environment.get("SLURM_STEP_NUM_TASKS", "")
    if not rank.isdecimal() or not size.isdecimal() or "SLURM_STEP_NODELIST" not in environment:
        return False
    place = launch.read(environment)
    return place is not None and (place.rank, place.size) == (int(rank), int(size))


def read_step(
    environment: Mapping[str, str],
    tasks_per_node: int | Mapping[str, int] | None = None,
    hosts: Sequence[str] | None = None,
) -> SlurmStep:
    """Local. Read the step to which this process belongs.

    Args:
        environment: The environment of a task.
        tasks_per_node: The number of tasks on each node, or on each node by name; default: Slurm's.
        hosts: The host of each task; default: Slurm's.

    Raises:
        LauncherError: A variable is missing, or the variables are not this process's own; they contradict one another;
            or they do not give the order of the tasks (`srun -m arbitrary`).
        ValueError: A variable is malformed.
    """
    rank = _number(environment, "SLURM_PROCID")
    _refuse_inner_launcher(environment, rank)
    if hosts is None:
        counts = _counts(environment, tasks_per_node)
        told = f"SLURM_STEP_TASKS_PER_NODE={environment.get('SLURM_STEP_TASKS_PER_NODE')}"
        _check_sum(environment, counts, told if tasks_per_node is None else "`tasks_per_node`")
        components = _component_hosts(environment, list(counts))
        laid = [_lay(part, counts, environment, len(components) > 1) for part in components]
        nodes = [node for part in components for node in part]
        all_hosts = tuple(host for part in laid for host in part)
        numbers = tuple(number for number, part in enumerate(laid) for _ in part)
        _check_own_node(environment, rank, all_hosts, nodes)
    else:
        all_hosts = tuple(hosts)
        numbers = _component_numbers(environment, len(all_hosts))
        _check_sum(environment, Counter(all_hosts), "`hosts`")
    if not 0 <= rank < len(all_hosts):
        raise LauncherError(
            f"SLURM_PROCID is {rank}, and the step has {len(all_hosts)} task(s) on "
            f"{compress(dict.fromkeys(all_hosts)) or 'no node'}. The variables are not this process's own. Start the "
            "program by srun, or use MPIClusterResolver()"
        )
    return SlurmStep(rank, all_hosts, numbers, _component_names(environment, max(numbers, default=0) + 1))


def parse_counts(text: str) -> list[int]:
    """Local. The numbers of tasks of each node: "2(x3),1" is [2, 2, 2, 1].

    Raises:
        ValueError: The text has another form, or numbers for more than `MOST_HOSTS` nodes.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"expected numbers of tasks such as '2(x3),1', got {text!r} with {part!r}")
        times = int(match[2] or 1)
        if len(counts) + times > MOST_HOSTS:
            raise ValueError(f"expected numbers of tasks of at most {MOST_HOSTS} nodes, got {text!r} with {part!r}")
        counts += [int(match[1])] * times
    return counts


def _variable(environment: Mapping[str, str], name: str) -> str:
    text = environment.get(name)
    if text is not None:
        return text
    job = environment.get("SLURM_JOB_ID")
    if job is None:
        where = "this process is not part of a Slurm job"
    elif "SLURM_STEP_ID" in environment:
        where = f"the variables of step {job}.{environment['SLURM_STEP_ID']} are incomplete"
    else:
        where = f"this process is in Slurm job {job}, but in no step of it: sbatch and salloc alone start no tasks"
    raise LauncherError(
        f"{name} not found in environment. Not running inside a SLURM step? Expected a task that srun has started; "
        f"{where}. Start the program by srun, or use MPIClusterResolver() under mpirun"
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = _variable(environment, name)
    if not text.isdecimal():
        raise ValueError(f"{name} must be a number from 0, got {text!r}")
    return int(text)


def _refuse_inner_launcher(environment: Mapping[str, str], rank: int) -> None:
    """An mpirun within a job passes the batch script's variables on to its ranks, or its daemons'."""
    place = launch.read(environment)
    size = environment.get("SLURM_STEP_NUM_TASKS", "")
    if place is None or (place.rank == rank and size in ("", str(place.size))):
        return
    raise LauncherError(
        f"{place.launcher} started this process as rank {place.rank} of {place.size}, and SLURM_PROCID={rank} and "
        f"SLURM_STEP_NUM_TASKS={size or '(unset)'} are not its own, but those of the script or of a daemon. Use "
        "MPIClusterResolver(), or no resolver at all; or start the program by srun"
    )


def _expanded(name: str, text: str) -> list[str]:
    try:
        return expand(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _counts(
    environment: Mapping[str, str], tasks_per_node: int | Mapping[str, int] | None
) -> dict[str, int]:
    """The number of tasks of each host, in the order of Slurm's list."""
    if isinstance(tasks_per_node, Mapping):
        return dict(tasks_per_node)
    hosts = _expanded("SLURM_STEP_NODELIST", _variable(environment, "SLURM_STEP_NODELIST"))
    if len(set(hosts)) < len(hosts):
        raise LauncherError(
            f"expected each node of the step once, got SLURM_STEP_NODELIST={environment['SLURM_STEP_NODELIST']}. Pass "
            "hosts=[...] with the host of each rank, or leave the resolver out: a strategy asks MPI"
        )
    if tasks_per_node is not None:
        return dict.fromkeys(hosts, tasks_per_node)
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = _variable(environment, name)
    try:
        counts = parse_counts(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if len(counts) != len(hosts):
        raise LauncherError(
            f"SLURM_STEP_NODELIST has {len(hosts)} node(s) ({compress(hosts)}), and {name}={text} {len(counts)}; "
            "expected one number of tasks for each node. Pass tasks_per_node={node: number}"
        )
    return dict(zip(hosts, counts, strict=True))


def _check_sum(environment: Mapping[str, str], counts: Mapping[str, int], source: str) -> None:
    """Raise unless the tasks of all nodes add up to those of the step."""
    size, name = sum(counts.values()), "SLURM_STEP_NUM_TASKS"
    if size > _MOST_TASKS:
        raise LauncherError(f"expected at most {_MOST_TASKS} tasks in a step, got {size}")
    told = environment.get(name, "")
    if told.isdecimal() and int(told) != size:
        raise LauncherError(
            f"{name} is {told}, and {source} has {size} task(s) on {compress(counts)}; expected the same number. Start "
            "the program by srun, which sets Slurm's, give a node for each task, or leave the resolver out: a strategy "
            "asks MPI"
        )


def _component_hosts(environment: Mapping[str, str], hosts: list[str]) -> list[list[str]]:
    """The hosts of each component of the job, each component's in its own order.

    Ranks count through the components. `SLURM_STEP_NODELIST` is sorted by name instead.
    """
    name = "SLURM_JOB_NODELIST"
    lists = [_expanded(name, text) for text in _of_components(environment, name)]
    if len(lists) < 2:
        return [hosts]
    parts = [[host for host in part if host in hosts] for part in lists]
    if sorted(host for part in parts for host in part) != sorted(hosts):
        raise LauncherError(
            f"expected each node of the step ({compress(hosts)}) in one component of the heterogeneous job, got "
            f"{' and '.join(map(compress, lists))} as {name} of its components. Give each component nodes of its own, "
            "or name the tasks by jobs={...} and tasks_per_node={...}"
        )
    return parts


def _of_components(environment: Mapping[str, str], name: str) -> list[str]:
    """The values of a variable of each component; empty where the job has none."""
    for word in _COMPONENT:
        found: list[str] = []
        while (text := environment.get(f"{name}_{word}_{len(found)}")) is not None:
            found.append(text)
        if found:
            return found
    return []


def _component_numbers(environment: Mapping[str, str], size: int) -> tuple[int, ...]:
    """The component of each task, where its host is known by other means."""
    if len(_of_components(environment, "SLURM_JOB_NODELIST")) < 2:
        return (0,) * size
    counts = _counts(environment, None)
    if sum(counts.values()) != size:
        raise LauncherError(
            f"expected the host of each of the step's {sum(counts.values())} tasks, by SLURM_STEP_TASKS_PER_NODE, got "
            f"{size} host(s). Pass hosts=[...] with the host of each rank"
        )
    parts = _component_hosts(environment, list(counts))
    return tuple(number for number, part in enumerate(parts) for host in part for _ in range(counts[host]))


def _component_names(environment: Mapping[str, str], components: int) -> tuple[str, ...]:
    names = _of_components(environment, "SLURM_JOB_NAME")
    return tuple(names) if len(names) >= components > 1 else ("",) * components


def _lay(hosts: list[str], counts: Mapping[str, int], environment: Mapping[str, str], is_part: bool) -> list[str]:
    """The host of each task of one component."""
    # "cyclic:block" is cyclic over nodes, and block over a node's sockets. Each component has a distribution of its
    # own, and the variable is that of one of them: Slurm's default is block, where a node has several tasks.
    kind = "block" if is_part else re.split("[:,]", environment.get("SLURM_DISTRIBUTION", "block"))[0]
    if kind == "arbitrary" and len(hosts) > 1:
        raise LauncherError(
            "SLURM_DISTRIBUTION=arbitrary: Slurm does not tell a task where the others are. Pass hosts=[...] with the "
            "host of each rank, or leave the resolver out: a strategy asks MPI"
        )
    width = {"cyclic": 1, "plane": _plane_size(environment)}.get(kind) or max(counts.values(), default=1)
    left = {host: counts[host] for host in hosts}
    laid: list[str] = []
    while any(left.values()):
        for host in hosts:
            taken = min(width, left[host])
            laid += [host] * taken
            left[host] -= taken
    return laid


def _plane_size(environment: Mapping[str, str]) -> int:
    text = environment.get("SLURM_DIST_PLANESIZE", "1")
    return int(text) if text.isdecimal() and int(text) else 1


def _check_own_node(environment: Mapping[str, str], rank: int, hosts: tuple[str, ...], nodes: list[str]) -> None:
    """A distribution that the variables do not describe puts tasks on other nodes than those derived here."""
    own = environment.get("SLURM_NODEID", "")
    if not own.isdecimal() or not 0 <= rank < len(hosts) or int(own) >= len(nodes) or hosts[rank] == nodes[int(own)]:
        return
    raise LauncherError(
        f"rank {rank} runs on node {nodes[int(own)]} (SLURM_NODEID={own}); expected {hosts[rank]} by SLURM_STEP_"
        f"NODELIST={environment.get('SLURM_STEP_NODELIST')} and SLURM_DISTRIBUTION="
        f"{environment.get('SLURM_DISTRIBUTION')}. Pass hosts=[...] with the host of each rank, or leave the resolver "
        "out: a strategy asks MPI"
    )
