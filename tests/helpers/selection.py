"""Which tests a run takes: all, or by `--selection NAME,...` some of them, of which a seed chooses.

The seed is `MPIDIST_TEST_SEED`; `tests/run_all.py` takes it from the commit, so that each commit runs other tests, and
Hypothesis draws other examples. All ranks of a run choose alike.
"""

from __future__ import annotations

import inspect
import itertools
import os
import random
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

SEED = "MPIDIST_TEST_SEED"
# Tests of `tests/unit` whose outcome no dependency can change: they read texts, or go through models in plain Python.
ONCE = (
    "test_ahead_model", "test_docstrings", "test_documented_errors", "test_host_list", "test_launch_line",
    "test_layers", "test_lint", "test_missing", "test_mutation", "test_protocol", "test_sbatch", "test_selection",
    "test_slurm", "test_texts", "test_timing_rule",
)
# Programs of `tests/system` whose subject is the launcher or MPI: how jobs start, die and end, how hosts, windows and
# newcomers reach each other, and Slurm. The others ask for the same of every MPI.
LAUNCHER = (
    "test_apptainer", "test_containers", "test_coupled", "test_cut_cables", "test_deaths", "test_deaths_at_work",
    "test_ending", "test_example", "test_forked_children", "test_full_memory", "test_host_deaths",
    "test_host_strategies", "test_host_traffic", "test_interrupts", "test_joining", "test_joining_alone",
    "test_joining_attacks", "test_joining_hosts", "test_joining_pace", "test_launch_lines",
    "test_parameter_server_hosts", "test_preempted_servers", "test_preemption", "test_slurm",
    "test_slurm_preempted_servers", "test_slurm_preemption", "test_slurm_traps", "test_start", "test_virtual_hosts",
    "test_window_deaths", "test_windows", "test_worker_deaths",
)
# Programs that a stranger's first run takes: those of the pages. The example is run by the README's first command.
PAGES = ("test_documentation",)
WAITING = re.compile(r"^(import time|from tests\.helpers(\.| import .*)(limits|waiting|launching))\b", re.MULTILINE)
# A function with fewer cases is taken as it is.
WIDE = 16

Items = list[pytest.Item]


def seed() -> int:
    """The seed of this run; 0 where none is given."""
    return int(os.environ.get(SEED, "0"))


def select(names: Iterable[str], items: Items) -> Items:
    """The items that all selections of these names keep, in their order.

    Raises:
        pytest.UsageError: There is no selection of a name.
    """
    for name in names:
        if name not in SELECTIONS:
            raise pytest.UsageError(f"--select: expected names out of {', '.join(SELECTIONS)}, got {name!r}")
        folder, keep = SELECTIONS[name]
        kept = set(keep([item for item in items if _is_below(item, folder)], random.Random(f"{seed()} {name}")))
        items = [item for item in items if item in kept or not _is_below(item, folder)]
    return items


def cover(items: Items, random: random.Random) -> Iterable[pytest.Item]:
    """Of each function with many cases those that have every pair of values of two of its parameters at least once."""
    functions: dict[str, Items] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in functions.values():
        yield from cases if len(cases) < WIDE else _pairwise(cases, random)


def quarter(items: Items, random: random.Random) -> Iterable[pytest.Item]:
    """A quarter of all, and at least one of each file."""
    kept = [item for item in items if random.random() < 0.25]
    files: dict[Path, Items] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    return [*kept, *(random.choice(cases) for cases in files.values())]


def dependent(items: Items, _: random.Random) -> Iterable[pytest.Item]:
    """What a dependency may change."""
    return [item for item in items if item.path.stem not in ONCE]


def launcher(items: Items, _: random.Random) -> Iterable[pytest.Item]:
    """What the launcher or MPI may change."""
    return [item for item in items if item.path.stem in LAUNCHER]


def pages(items: Items, _: random.Random) -> Iterable[pytest.Item]:
    """The programs of the pages."""
    return [item for item in items if item.path.stem in PAGES]


def frameworks(items: Items, _: random.Random) -> Iterable[pytest.Item]:
    """Tests that use PyTorch or JAX, and pages with blocks that require a package."""
    for item in items:
        call = getattr(item, "callspec", None)
        page = None if call is None else call.params.get("page")
        if isinstance(page, Path):
            text = page.read_text(encoding="utf-8") if "prints" in item.name else ""
        else:
            text = inspect.getsource(item.function) if isinstance(item, pytest.Function) else ""
        if re.search("^```python requires" if isinstance(page, Path) else "torch|jax", text, re.MULTILINE):
            yield item


def waiting(items: Items, _: random.Random) -> Iterable[pytest.Item]:
    """Tests of files that wait for something, or start what does."""
    found = {path: WAITING.search(path.read_text(encoding="utf-8")) for path in {item.path for item in items}}
    return [item for item in items if found[item.path]]


def many(items: Items, _: random.Random) -> Iterable[pytest.Item]:
    """What needs more ranks than other runs have."""
    return [item for item in items if _ranks_of(item) > 4]


# What it keeps of a folder of tests, or of all; other folders stay whole.
SELECTIONS: Mapping[str, tuple[str, Callable[[Items, random.Random], Iterable[pytest.Item]]]] = {
    "unit-quarter": ("unit", quarter),
    "dependent": ("unit", dependent),
    "cover": ("parallel", cover),
    "quarter": ("parallel", quarter),
    "many": ("parallel", many),
    "launcher": ("system", launcher),
    "pages": ("system", pages),
    "frameworks": ("", frameworks),
    "waiting": ("", waiting),
}
# What a person gets who wants to see soon that all is well.
QUICK = ("unit-quarter", "quarter", "pages")


def _is_below(item: pytest.Item, folder: str) -> bool:
    return not folder or item.nodeid.startswith(f"tests/{folder}/")


def _ranks_of(item: pytest.Item) -> int:
    """The smallest number of ranks that a test wants."""
    marker = item.get_closest_marker("mpi")
    return 0 if marker is None else int(marker.kwargs.get("min_size", 0))


def _pairwise(cases: Items, random: random.Random) -> Items:
    """Cases that have all pairs of values, few of them: always the one next that adds most pairs."""
    missing = {case: _pairs(case) for case in random.sample(cases, len(cases))}
    kept = []
    while missing:
        best = max(missing, key=lambda case: len(missing[case]))
        new = missing.pop(best)
        if not new:
            break
        kept.append(best)
        for pairs in missing.values():
            pairs.difference_update(new)
    return kept


def _pairs(case: pytest.Item) -> set[object]:
    """The values of a case's parameters, and all pairs of them."""
    call = getattr(case, "callspec", None)
    # By their texts: pytest's own indices count cases where one line gives several parameters.
    values = [] if call is None else [(name, repr(value)) for name, value in sorted(call.params.items())]
    return {*values, *itertools.combinations(values, 2)}
