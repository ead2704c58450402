"""What a rank does the more of, the more ranks there are: counts, small; and the fit that says how they grow."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.launching import find_mpirun, is_open_mpi, run_program
from tests.hosts.virtual_hosts import why_unavailable

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
# 64 ranks on two busy cores.
pytestmark = [
    pytest.mark.timeout_seconds(240),
    pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler"),
]

# What MPI itself does, without mpidist.
FOREIGN = ("MPI alone", "import", "ending")
# What grows faster than log n, by phase and kind, and the most that may be extrapolated: for 1,024 ranks of one host,
# and for 65,536 ranks of hosts with one each. The comments name what it is.
ON_A_HOST = {
    ("start", "bytes received"): 450_000,  # what the ranks of a node say of themselves: processes, cores, pages
    ("start", "files opened"): 1_300,  # the page of each rank of the host, and what the interpreter opens
    ("start", "of /proc"): 1_050,  # the same, by the process that holds it
    ("start", "files mapped"): 1_050,
    ("first reduce", "bytes received"): 50_000,  # addresses for copies from rank to rank
    ("first gather", "bytes received"): 50_000,  # the same on Open MPI, which makes no copies in a small reduction
    ("first save", "bytes received"): 170_000,  # checksums of what each rank has written
    ("save", "bytes received"): 170_000,
}
ON_HOSTS = {
    ("start", "bytes received"): 28_000_000,  # the table of processes: who died, and who is waited for
    ("first gather", "bytes received"): 4_500_000,  # its result: a row of 64 bytes from each rank
    ("gather", "bytes received"): 4_500_000,
}


def counted(path: Path, *options: object) -> dict[str, Any]:
    """The record of the short form."""
    result = run_program(
        1, FOLDER / "scale_counts.py", "--short", "--json", path, *options, timeout_seconds=200,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def growing(rows: list[dict[str, Any]], ranks: int, without: str = "") -> dict[tuple[str, str], float]:
    """What grows faster than log n, and the figure for so many ranks."""
    return {
        (row["phase"], row["kind"]): row["predicted"][str(ranks)]
        for row in rows
        if row["faster than log n"] and row["phase"] not in FOREIGN and row["kind"] != without
    }


def require_within(found: dict[tuple[str, str], float], limits: dict[tuple[str, str], int]) -> None:
    assert set(found) <= set(limits), sorted(set(found) - set(limits))
    assert not {key: (figure, limits[key]) for key, figure in found.items() if figure > limits[key]}


def test_what_a_rank_does_on_a_host_of_64(tmp_path: Path) -> None:
    content = counted(tmp_path / "counts.json", "--ranks", 4, "--ranks", 16, "--ranks", 64, "--hosts", 0)
    most = {int(ranks): phases for ranks, phases in content["counts"]["one host"]["most"].items()}
    assert set(most) == {4, 16, 64}
    # Open MPI itself sums the few bytes of a reduction, which on MPICH go through node memory; and of four ranks it
    # gathers them.
    calls_of_reduce, few = (2, 16) if is_open_mpi(find_mpirun()) else (1, 4)
    for phases in most.values():
        # A step needs node memory alone, a call of `reduce` also now and then a comparison of calls.
        assert phases["step"]["MPI calls"] == phases["step"]["bytes sent"] == 0
        assert calls_of_reduce - 1 < phases["reduce"]["MPI calls"] < calls_of_reduce
        for phase in ("step", "reduce", "gather"):
            assert phases[phase]["files opened"] == phases[phase]["looks at paths"] == 0
        # The library that counts sees what it must.
        assert phases["start"]["MPI calls"] > 10
        assert phases["start"]["files opened"] > 10
        assert phases["save"]["files opened"] > 0
    require_within(growing(content["rows"]["one host"], 1024), ON_A_HOST)
    for phase, kinds in most[few].items():
        if phase not in FOREIGN:
            # All ranks make a call together, so that its number grows with none.
            assert kinds["MPI calls"] == most[16][phase]["MPI calls"] == most[64][phase]["MPI calls"], phase


def test_what_a_rank_does_among_hosts(tmp_path: Path) -> None:
    reason = why_unavailable()
    if reason:
        pytest.skip(reason)
    hosts = [word for count in (2, 3, 4) for word in ("--hosts", count)]
    content = counted(tmp_path / "counts.json", "--ranks", 0, *hosts, "--per-host", 1)
    most = {int(ranks): phases for ranks, phases in content["counts"]["hosts of 1"]["most"].items()}
    assert set(most) == {2, 3, 4}
    for phase in ("step", "reduce", "variables", "save"):
        assert 0 < most[2][phase]["MPI calls"] == most[4][phase]["MPI calls"], phase
    # Open MPI looks at its sockets by calls of its own, the more often the longer a rank waits.
    foreign = "reads and writes" if is_open_mpi(find_mpirun()) else ""
    require_within(growing(content["rows"]["hosts of 1"], 65536, without=foreign), ON_HOSTS)


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("growth")


@pytest.mark.parametrize("ranks", [(2, 3, 4), (4, 16, 64), (2, 4, 8, 16, 32, 64)])
def test_a_fit_finds_the_function_that_made_the_counts(growth: ModuleType, ranks: tuple[int, ...]) -> None:
    for name, function in growth.FUNCTIONS.items():
        found = growth.fit({one: 1000 + 30 * function(one) for one in ranks}, 1.0)
        assert found.name == name
        assert found.at(65536) == pytest.approx(1000 + 30 * function(65536))
        assert found.is_fast == (name in ("n", "n log n", "n^2"))


def test_what_differs_by_chance_or_falls_does_not_grow(growth: ModuleType) -> None:
    assert growth.fit({2: 100, 4: 101, 8: 99.5}, 2.0) == ("constant", 101, 0)
    assert growth.fit({2: 800, 4: 400, 8: 200}, 2.0) == ("constant", 800, 0)
    with pytest.raises(ValueError, match="3 numbers of ranks"):
        growth.fit({2: 1, 4: 2}, 1.0)
