"""What all tests share: the plugin where mpidist is not installed, GPUs, long forms, and repeatable random examples."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import hypothesis
import pytest

from mpidist.cluster.devices.names import visible_gpus
from mpidist.first_rank import note_role
from tests.gpu import host_runtime
from tests.helpers import amounts, leaks, selection, times

# An installed mpidist has its plugin loaded by pytest itself; a checkout on PYTHONPATH has not.
_INSTALLED = any(point.value == "mpidist.testing.plugin" for point in entry_points(group="pytest11"))
pytest_plugins = ["tests.helpers.second_try", *([] if _INSTALLED else ["mpidist.testing.plugin"])]

# All ranks must draw the same examples: always the same, or those of `--hypothesis-seed`. Machines that run tests are
# slow at times.
hypothesis.settings.register_profile("mpidist", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("mpidist-seed", hypothesis.settings.get_profile("mpidist"), derandomize=False)
hypothesis.settings.register_profile("mpidist-long", hypothesis.settings.get_profile("mpidist"), max_examples=2000)
hypothesis.settings.load_profile("mpidist")

# What a script starts in the background ignores SIGINT, and so would the programs of tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_REPORT = pytest.StashKey[pytest.TestReport]()
_CHECK = pytest.StashKey[leaks.LeakCheck]()

# Long forms may take so many times as long as others.
LONG_TIMES = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--long`."""
    parser.addoption("--long", action="store_true", help="run the long forms of tests, and tests marked `long`")
    parser.addoption(
        "--select", default="", metavar="NAME,...", help=f"run only what these keep: {', '.join(selection.SELECTIONS)}"
    )
    parser.addoption("--repeat", type=int, default=1, metavar="N", help="run every test so many times")
    parser.addoption(
        "--host-gpus", action="store_true", help="run tests of GPUs with the real CuPy on two GPUs in host memory"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the long forms before the first test is imported."""
    config.addinivalue_line("markers", "keeps_memory: the test makes a strategy that later tests use, too")
    if config.getoption("--host-gpus"):
        host_runtime.install()
    if config.getoption("hypothesis_seed", None) is not None:
        hypothesis.settings.load_profile("mpidist-seed")
    if config.getoption("--long"):
        amounts.run_long()
        hypothesis.settings.load_profile("mpidist-long")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of which nothing is selected: each rank would import them."""
    names = filter(None, config.getoption("--select").split(","))
    return None if all(selection.needs_file(name, collection_path) for name in names) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take what is selected, and give long forms time."""
    if names := config.getoption("--select"):
        kept = selection.select(names.split(","), items)
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept
    if config.getoption("--long"):
        for item in items:
            marker = item.get_closest_marker("timeout_seconds")
            limit = LONG_TIMES * (float(marker.args[0]) if marker else 60.0)
            # In front: the nearest mark counts.
            item.add_marker(pytest.mark.timeout_seconds(limit), append=False)


@pytest.fixture(autouse=True)
def _forget_roles() -> Iterator[None]:
    """A cluster divides a job for good; here jobs come one after another."""
    yield
    note_role(None)


@pytest.fixture(autouse=True)
def leaks_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves communicators, threads, open files or node memory behind."""
    check = request.config.stash[_CHECK]
    check.begin()
    yield
    if request.node.funcargs is None:
        # The test was interrupted, and pytest ends: it has put the fixtures away, and the traceback holds the rest.
        return
    broken = leaks.clear_broken_calls()
    # pytest keeps what other fixtures have made until the end of the test.
    request.node.funcargs.clear()
    report = request.node.stash.get(_REPORT, None)
    # The traceback of a failure holds whatever the test held.
    if report is None or report.passed:
        keeps = request.node.get_closest_marker("keeps_memory") is not None
        more = check.end(request.node.nodeid, keeps_memory=keeps)
        assert not more + broken, f"left behind: {'; '.join(more + broken)}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the report of each test for `leaks_nothing`, with what the test has cost."""
    report = yield
    times.measure(report)
    if report.when == "call":
        item.stash[_REPORT] = report
    return report


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a case of each repetition."""
    if metafunc.config.getoption("--repeat") > 1:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(metafunc.config.getoption("--repeat")))


def pytest_report_header(config: pytest.Config) -> str:
    """What is selected, and by which seed."""
    return f"selected: {config.getoption('--select') or 'all'}, seed {selection.seed()}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how long a test took."""
    times.note(report)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Look at what is held, and what was used, before the first test."""
    # At its first example Hypothesis looks for who holds NumPy's generator, and would not see what is frozen by then.
    hypothesis.find(hypothesis.strategies.none(), lambda _: True)
    session.config.stash[_CHECK] = leaks.LeakCheck()
    times.begin()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests where there is no GPU, and long tests unless they are asked for."""
    if item.get_closest_marker("gpu") and not visible_gpus():
        pytest.skip("needs a visible GPU, this machine has none")
    if item.get_closest_marker("host_gpus") and not item.config.getoption("--host-gpus"):
        pytest.skip("looks into simulated GPUs: run by --host-gpus")
    if item.get_closest_marker("long") and not item.config.getoption("--long"):
        pytest.skip("takes long: run by --long")
