"""A test runs again where something outside mpidist was proved to have made it impossible, and the run says so.

By chance MPI stops to deliver messages after a death, and a launcher or Slurm does not start a job, or dies. Proofs
are where a job ends (`launching.finish`, `PrivateSlurm.wait`): they raise a `stuck.OutsideError`, or note the death of
a launcher, which may have hurt nobody. Nothing else gives a test a second try.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.helpers import stuck

# The last one's error counts. On a busy machine Slurm failed to start the ranks of one test three times in a row.
STARTS = 5
_COUNT = pytest.StashKey[int]()
_NAME = "started again"


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run a test again, in another folder."""
    stuck.DEATHS.clear()
    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as error:
        if not _may_start(pyfuncitem, error):
            raise
    folder = pyfuncitem.funcargs.get("tmp_path")
    if isinstance(folder, Path):
        pyfuncitem.funcargs["tmp_path"] = folder / "again"
        (folder / "again").mkdir()
    return pyfuncitem.ihook.pytest_pyfunc_call(pyfuncitem=pyfuncitem)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Make a fixture again: a job of its own may be what several tests look at."""
    stuck.DEATHS.clear()
    try:
        return (yield)
    except (Exception, pytest.fail.Exception) as error:
        if not _may_start(request.node, error):
            raise
    return request.node.ihook.pytest_fixture_setup(fixturedef=fixturedef, request=request)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List what ran again, and why: in time something may have to be done about it."""
    told = {
        (report.nodeid, str(value))
        for reports in terminalreporter.stats.values() for report in reports
        for name, value in getattr(report, "user_properties", ()) if name == _NAME
    }
    for node, reason in sorted(told):
        terminalreporter.write_line(f"{_NAME}: {node}: {reason}")


def _may_start(node: pytest.Item | pytest.Collector, error: BaseException) -> bool:
    reason = stuck.reason_of(error)
    if not reason:
        return False
    count = node.stash[_COUNT] = node.stash.get(_COUNT, 0) + 1
    if isinstance(node, pytest.Item):
        node.user_properties.append((_NAME, reason))
    return count < STARTS
