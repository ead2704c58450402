"""The doctor on places of ranks: cores that do not suffice, versions that differ, hosts with troubles of their own."""

from __future__ import annotations

import itertools

import pytest

from mpidist.cli.doctor.finding import Finding
from mpidist.cli.doctor.places import RankPlace, find_cores, find_crowd, find_versions, look_at_hosts
from mpidist.comm.cores import Cores
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.strategy.threads import chosen_threads


def place(*allowed: int, threads: str | None = "1", **versions: str) -> RankPlace:
    return RankPlace("n1", 0, Cores(frozenset(allowed), None), threads, versions)


def can_be_dealt(allowed: tuple[frozenset[int], ...]) -> bool:
    return any(len(set(chosen)) == len(chosen) for chosen in itertools.product(*allowed))


def test_a_crowd_is_found_wherever_cores_cannot_be_dealt() -> None:
    sets = [frozenset(one) for size in (1, 2, 3) for one in itertools.combinations(range(3), size)]
    for allowed in itertools.product(sets, repeat=3):
        ranks, cores = find_crowd(dict(enumerate(allowed)))
        assert bool(ranks) != can_be_dealt(allowed), allowed
        if ranks:
            assert len(ranks) > len(cores), allowed
            assert cores == frozenset().union(*(allowed[rank] for rank in ranks))


@pytest.mark.parametrize(("here", "state", "text", "fix"), [
    ([place(0), place(1)], "ok", "2 rank(s) on 2 core(s), each bound to its own, 2 thread(s)", ""),
    ([place(0, 1), place(0, 1)], "ok", "2 rank(s) on 2 core(s), each may use 2, ", ""),
    ([place(0, 1), place(0)], "ok", "2 rank(s) on 2 core(s), each may use 1 to 2, 2 thread(s)", ""),
    ([place(0, 1)] * 3, "note", "ranks wait for each other's cores", "mpirun -n 2 on each host"),
    ([place(0), place(0), place(1, 2, 3)], "note", "ranks 0-1 have only core(s) 0 together", "mpirun --bind-to core"),
    # Without a number a strategy sets it: each of the node's ranks gets its share.
    ([place(*range(8), threads=None)] * 4, "ok", "4 rank(s) on 8 core(s), each may use 8, 8 thread(s)", ""),
    ([place(0, 1, threads=None), place(2, 3, threads=None)], "ok", "each bound to its own, 4 thread(s)", ""),
    ([place(0, 1, 2, threads=None)], "ok", "1 rank(s) on 3 core(s), each may use 3, 3 thread(s)", ""),
    ([place(*range(4), threads="4,2")] * 2, "note", "8 thread(s): threads wait", "export OMP_NUM_THREADS=2"),
    ([place(*range(4), threads="x")] * 2, "note", "8 thread(s): threads wait", "export OMP_NUM_THREADS=2"),
    ([place(0, 1, threads="4"), place(2, 3)], "note", "threads wait", "export OMP_NUM_THREADS=2"),
])
def test_cores_of_a_node(here: list[RankPlace], state: str, text: str, fix: str) -> None:
    found = find_cores(0, dict(enumerate(here)))
    assert (found.state, text in found.text, found.fix.startswith(fix)) == (state, True, True), found
    assert bool(found.fix) == bool(fix)
    cores = found.data["cores"]
    assert isinstance(cores, dict)
    assert list(cores) == list(range(len(here)))


def test_threads_are_counted_by_the_variables_that_strategies_leave_alone() -> None:
    assert chosen_threads({}) is None
    assert chosen_threads({"OMP_NUM_THREADS": "2"}) == "2"
    assert chosen_threads({"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "4"}) == "4"


def test_versions_that_differ() -> None:
    one, other = place(0, mpidist="0.1", NumPy="2.0"), place(1, mpidist="0.1", NumPy="1.26")
    assert list(find_versions([one, one])) == []
    (found,) = find_versions([one, other, one])
    assert (found.state, found.text) == ("note", "NumPy 2.0 on ranks 0, 2; 1.26 on rank 1")
    (found,) = find_versions([one, place(1, mpidist="0.2", NumPy="2.0")])
    assert found.state == "wrong"


class Hosts(SoloCommunicator):
    """One rank that is given what others tell."""

    def __init__(self, told: list[tuple[str, list[Finding]]]) -> None:
        super().__init__()
        self.told = told

    def all_gather_object(self, value: object) -> list:  # type: ignore[type-arg]
        """Local. What others tell."""
        return self.told


def test_troubles_of_other_hosts() -> None:
    fast = Finding("compiled steps", "note", "not installed", "pip")
    small = Finding("node memory", "wrong", "64 MB", "docker")
    found = list(look_at_hosts(Hosts([
        ("n1", [fast]), ("n1", []), ("n2", [fast, small, Finding("cores", "ok", "4")]), ("n3", [small]), ("n3", []),
    ]), []))
    assert found == [Finding("node memory", "wrong", "on n2, n3: 64 MB", "docker")]
