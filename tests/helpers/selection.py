"""Which tests a run takes: all, or by `--select NAME,...` some of them, of which a seed chooses.

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

TESTS = Path(__file__).resolve().parents[1]
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
    "test_parameter_server_hosts", "test_preempted_servers", "test_preemption", "test_restart", "test_slurm",
    "test_slurm_preempted_servers", "test_slurm_preemption", "test_slurm_restart", "test_slurm_traps", "test_start",
    "test_virtual_hosts", "test_window_deaths", "test_windows", "test_worker_deaths",
)
# Programs that a stranger's first run takes: those of the pages. The example is run by the README's first command.
PAGES = ("test_documentation",)
# The folders of tests of adapters: frameworks may be installed in one stage only.
ADAPTERS = ("torch", "keras", "jax")
# What stands in a file of which such a selection keeps something; others need not be imported.
TEXTS: Mapping[str, re.Pattern[str]] = {
    "many": re.compile(r"min_size=([5-9]|\d\d|[A-Z])"),
    # Of their page, and of a class in another module, tests know when they are made.
    "frameworks": re.compile("torch|jax|keras|Contract|all_pages"),
}
WAITING = re.compile(r"^(import time|from tests\.helpers(\.| import .*)(limits|waiting|launching))\b", re.MULTILINE)
# A function with fewer cases is taken as it is.
WIDE = 16
# What needs more ranks than the run of the other half has is not divided.
OTHER_RANKS = 3

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


def needs_file(name: str, path: Path) -> bool:
    """Whether a selection may keep a test of a file, by what stands in it."""
    pattern, folder = TEXTS.get(name), SELECTIONS[name][0] if name in SELECTIONS else ""
    if pattern is None or not path.is_relative_to(TESTS / folder) or not path.name.startswith("test_"):
        return True
    return path.parent.name in ADAPTERS or pattern.search(path.read_text(encoding="utf-8")) is not None


def cover(items: Items, _: random.Random) -> Iterable[pytest.Item]:
    """Of each function with many cases those that have every pair of values of two of its parameters at least once."""
    for name, cases in _functions(items).items():
        yield from cases if len(cases) < WIDE else _covering(cases, _chance(name), _pairs)


def values(items: Items, _: random.Random) -> Iterable[pytest.Item]:
    """Of each function as few cases as have every value of each of its parameters."""
    for name, cases in _functions(items).items():
        yield from _covering(cases, _chance(name), _values)


def half(items: Items, _: random.Random) -> Iterable[pytest.Item]:
    """Of what two runs take, half of the cases of each function, and all functions with one case."""
    for name, cases in _functions(items).items():
        yield from _half(name, cases)


def other_half(items: Items, _: random.Random) -> Iterable[pytest.Item]:
    """The other half, and all functions with one case."""
    for name, cases in _functions(items).items():
        others = _half(name, cases)
        yield from cases if others is cases else [case for case in cases if case not in others]


def quarter(items: Items, random: random.Random) -> Iterable[pytest.Item]:
    """A quarter of all, and at least one of each file."""
    kept = [item for item in items if random.random() < 0.25]
    return [*kept, *some(items, random)]


def some(items: Items, random: random.Random) -> Iterable[pytest.Item]:
    """One of each file."""
    files: dict[Path, Items] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    return [random.choice(cases) for cases in files.values()]


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
    """Tests that use PyTorch, JAX or Keras, those of the adapters, and pages with blocks that require a package."""
    for item in items:
        if item.path.parent.name in ADAPTERS:
            yield item
            continue
        call = getattr(item, "callspec", None)
        page = None if call is None else call.params.get("page")
        if isinstance(page, Path):
            text = page.read_text(encoding="utf-8") if "prints" in item.name else ""
        else:
            text = inspect.getsource(item.function) if isinstance(item, pytest.Function) else ""
        if re.search("^```python requires" if isinstance(page, Path) else "torch|jax|keras", text, re.MULTILINE):
            yield item


def waiting(items: Items, _: random.Random) -> Iterable[pytest.Item]:
    """Tests of files that wait for something, or start what does."""
    found = {path: WAITING.search(path.read_text(encoding="utf-8")) for path in {item.path for item in items}}
    return [item for item in items if found[item.path]]


def three(items: Items, _: random.Random) -> Iterable[pytest.Item]:
    """Tests that want 3 ranks or 4."""
    return [item for item in items if _ranks_of(item) in (3, 4)]


def many(items: Items, _: random.Random) -> Iterable[pytest.Item]:
    """What needs more ranks than other runs have."""
    return [item for item in items if _ranks_of(item) > 4]


# What it keeps of a folder of tests, or of all; other folders stay whole.
SELECTIONS: Mapping[str, tuple[str, Callable[[Items, random.Random], Iterable[pytest.Item]]]] = {
    "unit-quarter": ("unit", quarter),
    "unit-some": ("unit", some),
    "dependent": ("unit", dependent),
    "cover": ("parallel", cover),
    "unit-values": ("unit", values),
    "values": ("parallel", values),
    "program-values": ("system", values),
    "half": ("", half),
    "other-half": ("", other_half),
    "quarter": ("parallel", quarter),
    "some": ("parallel", some),
    "three": ("parallel", three),
    "many": ("parallel", many),
    "launcher": ("system", launcher),
    "pages": ("system", pages),
    "frameworks": ("", frameworks),
    "waiting": ("", waiting),
}
# Several at once, on two ranks: for who wants to see soon that all is well, and to show that the tests run at all.
TOGETHER = {"quick": ("unit-quarter", "quarter", "pages"), "glance": ("unit-some", "some", "pages")}


def _is_below(item: pytest.Item, folder: str) -> bool:
    return not folder or item.nodeid.startswith(f"tests/{folder}/")


def _functions(items: Items) -> dict[str, Items]:
    """The cases of each function, by its name."""
    functions: dict[str, Items] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return functions


def _chance(name: str) -> random.Random:
    """Chance for a function alone: runs that take other functions choose alike."""
    return random.Random(f"{seed()} {name}")


def _half(name: str, cases: Items) -> Items:
    first = cases[0]
    both_run_it = _is_below(first, "parallel") or (_is_below(first, "system") and first.path.stem in LAUNCHER)
    if len(cases) == 1 or not both_run_it or _ranks_of(first) > OTHER_RANKS:
        return cases
    chance = _chance(name)
    # MPICH, which runs this half, skips the others at a landing.
    run = [case for case in cases if case.get_closest_marker("long_on_mpich") is None]
    return chance.sample(run, (len(run) + chance.randrange(2)) // 2)


def _ranks_of(item: pytest.Item) -> int:
    """The smallest number of ranks that a test wants."""
    marker = item.get_closest_marker("mpi")
    return 0 if marker is None else int(marker.kwargs.get("min_size", 0))


def _covering(cases: Items, random: random.Random, parts: Callable[[pytest.Item], set[object]]) -> Items:
    """Cases that have all parts that any has, few of them: always the one next that adds most."""
    missing = {case: parts(case) for case in random.sample(cases, len(cases))}
    kept: Items = []
    while missing:
        best = max(missing, key=lambda case: len(missing[case]))
        new = missing.pop(best)
        if kept and not new:
            break
        kept.append(best)
        for others in missing.values():
            others.difference_update(new)
    return kept


def _values(case: pytest.Item) -> set[object]:
    """The values of a case's parameters."""
    call = getattr(case, "callspec", None)
    return set() if call is None else {(name, _text(value)) for name, value in call.params.items()}


def _text(value: object) -> str:
    """What tells a value from others: pytest's own indices count cases where one line gives several parameters."""
    try:
        return repr(value)
    except Exception:
        # A test may be about objects that have no text.
        return f"{type(value)} {id(value)}"


def _pairs(case: pytest.Item) -> set[object]:
    """The values of a case's parameters, and all pairs of them."""
    found = sorted(_values(case), key=str)
    return {*found, *itertools.combinations(found, 2)}
