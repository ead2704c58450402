"""The doctor's look at the places of ranks: hosts, nodes, the cores they are bound to, and installed packages."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mpidist import launch
from mpidist.cli.doctor.finding import Finding
from mpidist.comm.cores import Cores, count_cores, own_cores
from mpidist.comm.group.agreement import name_ranks
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.mpi_library import loaded_library
from mpidist.strategy.threads import chosen_threads, fair_threads
from mpidist.version import __version__


class RankPlace(NamedTuple):
    """A rank's place.

    Attributes:
        host: Its host.
        node: The number of its node, whose ranks share memory.
        cores: The cores that it may use.
        threads: The number of BLAS threads that the user sets; None where a strategy sets it.
        versions: Versions by names.
    """

    host: str
    node: int
    cores: Cores
    threads: str | None
    versions: dict[str, str]


def look_at_places(communicator: Communicator) -> Iterator[Finding]:
    """Collective. Look at hosts, nodes, cores and versions.

    Args:
        communicator: All ranks.
    """
    told = communicator.all_gather_object(RankPlace(
        communicator.host, communicator.node_index, own_cores(), chosen_threads(), _versions()
    ))
    sizes = communicator.node_sizes
    hosts = dict.fromkeys(one.host for one in told)
    text = f"{communicator.size} on {len(sizes)} node(s), {_span(sizes)} on each, {len(hosts)} host(s)"
    data: dict[str, object] = {"ranks": len(told), "nodes": list(sizes), "hosts": list(hosts)}
    if len(sizes) > len(hosts):
        yield Finding(
            "ranks", "note", f"{text}: ranks of a host share no memory, so variables are stored more than once there",
            "give the containers of a host one /dev/shm and one PID namespace (docker run --ipc=host --pid=host)", data,
        )
    else:
        yield Finding("ranks", "ok", text, data=data)
    for node in range(len(sizes)):
        yield find_cores(node, {rank: one for rank, one in enumerate(told) if one.node == node})
    yield from find_versions(told)


def look_at_hosts(communicator: Communicator, own: Sequence[Finding]) -> Iterator[Finding]:
    """Collective. Find what is wrong on other hosts than the first rank's.

    Args:
        communicator: All ranks.
        own: The findings of `machine.look` of the first rank of each host.
    """
    told = communicator.all_gather_object((communicator.host, list(own)))
    first, known = told[0]
    shown = {(one.subject, one.state) for one in known}
    others: dict[tuple[str, str], list[tuple[str, Finding]]] = {}
    for host, findings in told:
        for one in findings:
            if host != first and one.state != "ok" and (one.subject, one.state) not in shown:
                others.setdefault((one.subject, one.state), []).append((host, one))
    for (subject, state), found in others.items():
        names = ", ".join(dict.fromkeys(host for host, _ in found))
        # Their texts differ only in numbers of each host: one is shown for all.
        yield Finding(subject, state, f"on {names}: {found[0][1].text}", found[0][1].fix, found[0][1].data)


def _span(numbers: Sequence[int]) -> str:
    return f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def find_cores(node: int, here: Mapping[int, RankPlace]) -> Finding:
    """Local. Find out whether the ranks of a node have enough cores for themselves and for their threads.

    Args:
        node: The number of the node.
        here: The ranks of the node.
    """
    claims = [one.cores for one in here.values()]
    count = count_cores(claims)
    own = [count_cores([cores]) for cores in claims]
    wanted = sum(
        fair_threads(most, count, len(here)) if one.threads is None else _number(one.threads, most)
        for one, most in zip(here.values(), own, strict=True)
    )
    is_bound = sum(len(cores.allowed) for cores in claims) == len(frozenset().union(*(one.allowed for one in claims)))
    host = next(iter(here.values())).host
    bound = "each bound to its own" if is_bound and len(here) > 1 else f"each may use {_span(own)}"
    text = f"node {node} ({host}): {len(here)} rank(s) on {count} core(s), {bound}, {wanted} thread(s)"
    data: dict[str, object] = {"host": host, "cores": {rank: _numbers(one.cores.allowed) for rank, one in here.items()}}
    crowd, place = find_crowd({rank: one.cores.allowed for rank, one in here.items()})
    if len(here) > count:
        fix = f"mpirun -n {count} on each host"
        return Finding("cores of ranks", "note", f"{text}: ranks wait for each other's cores", fix, data)
    if crowd:
        return Finding(
            "cores of ranks", "note", f"{text}: {name_ranks(crowd)} have only core(s) {_numbers(place)} together",
            "mpirun --bind-to core (Open MPI), mpirun -bind-to core (MPICH), or srun --cpu-bind=cores", data,
        )
    if wanted > count:
        fix = f"export OMP_NUM_THREADS={max(1, count // len(here))}"
        return Finding("cores of ranks", "note", f"{text}: threads wait for each other's cores", fix, data)
    return Finding("cores of ranks", "ok", text, data=data)


def find_crowd(allowed: Mapping[int, frozenset[int]]) -> tuple[list[int], frozenset[int]]:
    """Local. Find ranks that together have fewer cores than their number.

    Args:
        allowed: The cores of each rank.

    Returns:
        The ranks and their cores; nothing where each rank can have a core of its own.
    """
    owner: dict[int, int] = {}
    for rank in allowed:
        # If other ranks on the path can move to free cores, there is a core for this one, too (Hall's theorem).
        reached: dict[int, int] = {}
        waiting = [rank]
        free = None
        while waiting and free is None:
            one = waiting.pop()
            for core in allowed[one] - reached.keys():
                reached[core] = one
                if core not in owner:
                    free = core
                    break
                waiting.append(owner[core])
        if free is None:
            return sorted({rank, *(owner[core] for core in reached)}), frozenset(reached)
        while True:
            one = reached[free]
            before = next((core for core, other in owner.items() if other == one), None)
            owner[free] = one
            if before is None:
                break
            del owner[before]
            free = before
    return [], frozenset()


def find_versions(told: Sequence[RankPlace]) -> Iterator[Finding]:
    """Local. Find versions that differ between ranks.

    Args:
        told: The ranks.
    """
    for name in told[0].versions:
        by_version: dict[str, list[int]] = {}
        for rank, one in enumerate(told):
            by_version.setdefault(one.versions[name], []).append(rank)
        if len(by_version) > 1:
            text = "; ".join(f"{version} on {name_ranks(ranks)}" for version, ranks in by_version.items())
            yield Finding(
                "versions of ranks", "wrong" if name in ("mpidist", "MPI") else "note", f"{name} {text}",
                "start all ranks from one environment, on a file system of all hosts, or install the same everywhere",
            )


def _versions() -> dict[str, str]:
    return {
        "mpidist": __version__, "MPI": str(loaded_library()), "Python": platform.python_version(),
        "NumPy": str(np.__version__),
    }


def _number(threads: str, most: int) -> int:
    """The number that a library takes: the first of several numbers, as in "4,2", and all cores where it is none."""
    first = launch.number(threads.split(",")[0].strip())
    return most if first is None else first


def _numbers(cores: frozenset[int]) -> str:
    """`0-3,8`."""
    return name_ranks(sorted(cores)).partition(" ")[2].replace(" ", "")
