"""The pytest plugin for programs of several ranks: all ranks agree on each test's outcome, and a hang ends the run.

pytest loads it wherever mpidist is installed. It acts if a launcher started several ranks
(`mpirun -n 3 python -m pytest --with-mpi`). That option and the marker (`@pytest.mark.mpi(min_size=2)`) are those of
pytest-mpi where it is installed:

- A test that fails on any rank fails on all ranks; rank 0 prints the traceback of the rank that failed, at once.
- A rank that fails while others wait for it in a collective prints its traceback and ends the run (`--mpi-grace`).
- A test that exceeds its time limit ends the run, after each rank has printed its Python stacks. The limit is 60 s
  under several ranks; `--mpi-timeout`, the ini value `mpi_timeout` and `@pytest.mark.timeout_seconds(5)` change it, and
  set one for a single process.
- Where mpidist itself ends the run, its report says in which test, and is not captured.
- Ranks other than 0 print nothing and have no debugger, and all ranks end with the same code. If ranks collect
  different tests, that is an error.

The fixture `communicator` has all ranks of the run; `fake_nodes` makes one host look like several nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import math
import os
import re
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any, TypeVar

import pytest
from _pytest.config import create_terminal_writer

from mpidist import launch
from mpidist.arguments import number
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.opening import open_communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.observe import output
from mpidist.testing.failures import Failures
from mpidist.testing.marker import add_option, make_marker
from mpidist.testing.outcome import collection_difference, combine, outcome_of

T = TypeVar("T")

DEFAULT_TIMEOUT_SECONDS = 60.0
DEFAULT_GRACE_SECONDS = 5.0
# The ranks reach a limit at the same time. The first one to end kills the others, so each waits until all have printed.
LAST_WORDS_SECONDS = 1.0
# A C call that keeps the GIL stops this plugin's timer, too. faulthandler's thread, which needs no lock, then ends
# the process.
LAST_RESORT_SECONDS = 10.0
# Three years, which timers can wait.
MOST_SECONDS = 1e8
# The environment variable with pytest's root of the folders of `tmp_path`.
TEMPORARY_ROOT = "PYTEST_DEBUG_TEMPROOT"
_PYTEST_FRAME = re.compile(r'/_pytest/|/pluggy/|/pytest/__main__|"<frozen runpy>"')


@pytest.fixture(scope="session")
def communicator() -> Communicator:
    """All ranks of the run; one rank without MPI if no launcher started the program."""
    return open_communicator(purpose="test")


def fake_nodes(communicator: Communicator, node_size: int) -> Communicator:
    """Collective. A communicator of the same ranks where each `node_size` consecutive ranks count as a node.

    Args:
        communicator: The communicator of the fixture. A single rank stays one node.
        node_size: Number of ranks of a node; the last node may have fewer.
    """
    if isinstance(communicator, SoloCommunicator):
        return communicator
    # Made from the object's type: importing the class at the top would start MPI, also in runs of a single process.
    make: type = type(communicator)
    nodes: Communicator = make(communicator.mpi.Dup(), node_color=communicator.rank // node_size)
    return nodes


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the command line options."""
    group = parser.getgroup("mpidist", "tests of several ranks")
    group.addoption(
        "--mpi-timeout",
        type=_seconds,
        default=None,
        metavar="SECONDS",
        help="limit for each test, after which all stacks are printed and the run ends; 0: none. Default: 60 under "
        "several ranks, none otherwise",
    )
    group.addoption(
        "--mpi-grace",
        type=_seconds,
        default=DEFAULT_GRACE_SECONDS,
        metavar="SECONDS",
        help="how long a rank that failed waits for the others to finish the test before it ends the run (default: 5)",
    )
    parser.addini("mpi_timeout", "as --mpi-timeout", default=None)
    # A conftest.py has named this plugin: all others are loaded.
    if any(str(getattr(plugin, "__file__", "")).endswith("conftest.py") for plugin in pluginmanager.get_plugins()):
        add_option(parser)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(parser: pytest.Parser) -> Generator[None, object, object]:
    """Add `--with-mpi` where neither a plugin nor a conftest.py has."""
    result = yield
    add_option(parser)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the objects that this run needs."""
    config.addinivalue_line("markers", "timeout_seconds(seconds): limit for this test; 0: none")
    place = launch.read()
    size = 1 if place is None else place.size
    rank = 0 if place is None else place.rank
    watchdog = TimeLimit(config, rank, size)
    config.pluginmanager.register(watchdog, "mpidist-watchdog")
    marker = make_marker(config)
    if marker is not None:
        config.pluginmanager.register(marker, "mpidist-marker")
    if size > 1:
        _separate_temporary_folders(rank)
        ranks = RunOfRanks(config, watchdog)
        if rank > 0:
            # Only rank 0 uses the terminal, the debugger at it, and the report file.
            config.option.usepdb = config.option.trace = False
            config.option.xmlpath = None
        else:
            config.pluginmanager.register(Failures(config), "mpidist-failures")
        config.pluginmanager.register(ranks, "mpidist-ranks")


def _separate_temporary_folders(rank: int) -> None:
    """Give each rank a root of its own for `tmp_path`.

    At exit pytest deletes old folders under the root. With a common root it would delete those of other ranks.
    """
    root = os.environ.get(TEMPORARY_ROOT) or tempfile.gettempdir()
    folder = os.path.join(root, f"pytest-of-{os.getuid()}-rank-{rank}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    os.environ[TEMPORARY_ROOT] = folder


class TimeLimit:
    """Ends the run, with all Python stacks, if a test takes too long.

    Args:
        config: The run's configuration.
        rank: This process's rank.
        size: Number of ranks.
    """

    def __init__(self, config: pytest.Config, rank: int, size: int) -> None:
        self.config = config
        self.rank = rank
        self.size = size
        self.communicator: Communicator = SoloCommunicator()
        # pytest captures stderr during tests; this descriptor leads to the real one.
        self.stderr = os.dup(2)
        # What runs now, for those texts.
        self.what = "no test"
        seconds = config.getoption("--mpi-timeout")
        if seconds is None:
            ini = config.getini("mpi_timeout")
            seconds = _checked("mpi_timeout", ini) if ini else (DEFAULT_TIMEOUT_SECONDS if size > 1 else 0.0)
        self.seconds = 0.0 if _has_debugger(config) else seconds

    @contextlib.contextmanager
    def limit(self, what: str, seconds: float | None = None) -> Iterator[None]:
        """Local. End the run if the body of the `with` takes longer than a limit.

        Args:
            what: A name of the body, for the message.
            seconds: The limit; default: that of the run. 0 sets none.
        """
        seconds = self.seconds if seconds is None else seconds
        before, self.what = self.what, what
        if seconds <= 0:
            try:
                yield
            finally:
                self.what = before
            return
        timer = threading.Timer(seconds, self._expire, (what, seconds))
        timer.daemon = True
        timer.start()
        faulthandler.dump_traceback_later(seconds + LAST_RESORT_SECONDS, exit=True, file=self.stderr)
        try:
            yield
        finally:
            timer.cancel()
            faulthandler.cancel_dump_traceback_later()
            self.what = before

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Limit the time of set-up, call and tear-down of a test together."""
        marker = item.get_closest_marker("timeout_seconds")
        with self.limit(item.nodeid, None if marker is None else _seconds_of(marker)):
            return (yield)

    def heading(self) -> str:
        """Local. A line about what this rank runs, above a text of mpidist's."""
        return f"===== rank {self.rank} of {self.size} in {self.what} ====="

    def end(self, text: str) -> None:
        """Local. Print a text and end all ranks."""
        reporter: Any = self.config.pluginmanager.get_plugin("terminalreporter")
        capture: Any = self.config.pluginmanager.get_plugin("capturemanager")
        if reporter is not None:
            # A run of a single process prints them at its end, which does not come; and stdout is captured now.
            with contextlib.suppress(Exception):
                if capture is not None:
                    capture.suspend_global_capture()
                reporter.summary_errors()
                reporter.summary_failures()
            reporter.flush()
        # A single write, so that the lines of several ranks do not mix.
        os.write(self.stderr, f"\n{text.rstrip()}\n".encode(errors="replace"))
        time.sleep(LAST_WORDS_SECONDS)
        if self.communicator.mpi is not None:
            self.communicator.mpi.Abort(1)
        os._exit(1)

    def _expire(self, what: str, seconds: float) -> None:
        with tempfile.TemporaryFile("w+", errors="replace") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            # Each stack has about thirty frames of pytest, which would hide the few that matter.
            stacks = "".join(line for line in file if not _PYTEST_FRAME.search(line))
        self.end(
            f"===== time limit: rank {self.rank} of {self.size} (pid {os.getpid()}) is still in {what} after "
            f"{seconds:g} s, the run ends =====\n{stacks}"
        )


def _seconds_of(marker: pytest.Mark) -> float:
    """The limit of `timeout_seconds(5)`, or `timeout_seconds(seconds=5)`."""
    given = [*marker.args, *marker.kwargs.values()]
    if len(given) != 1 or set(marker.kwargs) - {"seconds"}:
        raise pytest.UsageError(f"expected @pytest.mark.timeout_seconds(5), got {marker.args} and {marker.kwargs}")
    return _checked("timeout_seconds", given[0])


def _seconds(text: str) -> float:
    """A number of seconds on the command line."""
    try:
        return number("seconds", float(text), least=0, most=MOST_SECONDS)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _checked(name: str, given: str | float) -> float:
    """A number of seconds from a marker or the configuration file."""
    try:
        return number(name, float(given), least=0, most=MOST_SECONDS)
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(f"{name}: expected a number of seconds, got {given!r}: {error}") from None


def _has_debugger(config: pytest.Config) -> bool:
    """Whether rank 0 may stop in a debugger, where a person may take any time."""
    return bool(config.getoption("usepdb", False) or config.getoption("trace", False))


class RunOfRanks:
    """Turns the pytest runs of the ranks into one run.

    pytest calls the hooks below on every rank in the same order, and most synchronize the ranks. A hook that ran
    on some ranks only would leave these waiting.

    Args:
        config: The run's configuration.
        watchdog: Limits the time that a rank waits for others, and can end the run.
    """

    def __init__(self, config: pytest.Config, watchdog: TimeLimit) -> None:
        self.grace: float = math.inf if _has_debugger(config) else config.getoption("--mpi-grace")
        self.watchdog = watchdog
        self.communicator: Communicator = SoloCommunicator()
        self.collection_errors: dict[str, str] = {}
        self.nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until the end of the run

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Start MPI, and silence the ranks other than 0."""
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        # A report of mpidist's that ends the job would be lost with what pytest has captured.
        output.say_also_to(output.Beside(self.watchdog.stderr, self.watchdog.heading))
        if self.watchdog.rank > 0 and reporter is not None:
            # Without a reporter options such as --setup-show fail. This one has written nothing yet.
            reporter._tw = create_terminal_writer(session.config, self.nowhere)  # noqa: SLF001  # pytest has no public name
        with self.watchdog.limit("the start of MPI"):
            self.communicator = open_communicator(purpose="testing")
        self.watchdog.communicator = self.communicator

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Limit the time of the collection: a module that communicates when it is imported may hang."""
        # Longer than a test, since all ranks may have to import large packages from one slow disk.
        with self.watchdog.limit("the collection of tests", 5 * self.watchdog.seconds):
            return (yield)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the errors of collection on this rank."""
        if report.failed:
            self.collection_errors[report.nodeid] = report.longreprtext

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """End the run with an error on all ranks unless they collected the same tests."""
        names = [item.nodeid for item in session.items]
        tests = "\n".join([*names, "errors:", *self.collection_errors])
        digest = hashlib.sha256(tests.encode()).hexdigest()
        if len(set(self.meet("collection", digest))) == 1:
            return
        lists = self.meet("difference of collections", (names, list(self.collection_errors.values())))
        text = collection_difference([names for names, _ in lists], [errors for _, errors in lists])
        pytest.exit(text, returncode=pytest.ExitCode.USAGE_ERROR)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Agree with the other ranks on the outcome of a phase of a test."""
        report = yield
        mine = outcome_of(report)
        outcomes = self.meet(f"{item.nodeid} ({call.when})", mine, mine.text if mine.outcome == "failed" else "")
        combine(report, outcomes, self.communicator.rank)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Agree with the other ranks on the exit code."""
        broken = exitstatus in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.INTERRUPTED)
        with self.watchdog.limit("the end of the run"):
            failure = f"pytest ended with {exitstatus!r} here" if broken else ""
            session.exitstatus = max(self.meet("end of the run", int(exitstatus), failure))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Wait until rank 0 has printed its last line: a launcher may kill it when another rank ends with an error."""
        # Into a file or a pipe, too: the process that ends the job at its exit flushes its own buffers only.
        output.flush()
        if self.communicator.size > 1:
            self.meet("exit", None)
        output.say_also_to(None)
        self.nowhere.close()

    def meet(self, where: str, value: T, failure: str = "") -> list[T]:
        """Collective. The values of all ranks; ends the run if the ranks are not at the same place.

        Args:
            where: A name of the place in the run. Ranks at different places would exchange values of other meanings.
            value: A value that can be pickled.
            failure: The text of this rank's failure, if it failed. It then waits for a short time only, since the
                others may be waiting for it in a collective of the test.
        """
        # A barrier that can be polled: a blocking one could not be left after the grace period.
        request = self.communicator.mpi.Ibarrier()
        begin = time.monotonic()
        pause = 1e-5
        while not request.Test():
            time.sleep(pause)
            # A barrier takes several messages, and each of them waits for such a test.
            pause = min(pause * 2, 1e-4 if time.monotonic() - begin < 0.1 else 2e-3)
            if failure and time.monotonic() - begin > self.grace:
                self.watchdog.end(
                    f"===== {where}: failed on rank {self.communicator.rank} of {self.communicator.size}, the others "
                    f"did not finish within {self.grace:g} s, the run ends =====\n{failure}"
                )
        heard = self.communicator.all_gather_object((where, value, failure))
        places = [place for place, _, _ in heard]
        if any(place != where for place in places):
            failures = "".join(f"\nrank {rank}: {text}" for rank, (_, _, text) in enumerate(heard) if text)
            self.watchdog.end(f"===== the ranks are at different places of the run: {places!r} ====={failures}")
        return [other for _, other, _ in heard]
