"""What tests of whole programs share: hosts to run them on, and a Slurm to submit them to."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import launching
from tests.helpers.containers import make_image, why_no_apptainer
from tests.helpers.limits import limit
from tests.helpers.second_try import STARTS
from tests.hosts.virtual_hosts import VirtualHosts, why_unavailable
from tests.slurm.private_slurm import PrivateSlurm, why_no_slurm

FOLDER = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Measure a start before the first test, and before there are workers of xdist: limits of seconds follow it."""
    if not config.option.collectonly:
        # Without an MPI each test says so itself.
        with contextlib.suppress(launching.NoLauncherError), tempfile.TemporaryDirectory() as folder:
            launching.note_slowness(Path(folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The time limit of a test ends a run: it has room for all starts and for those limits that fail one test only."""
    for item in items:
        if item.path.is_relative_to(FOLDER):
            marker = item.get_closest_marker("timeout_seconds")
            seconds = STARTS * limit(float(marker.args[0]) if marker else 60.0)
            # In front: the nearest mark counts.
            item.add_marker(pytest.mark.timeout_seconds(seconds), append=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip on MPICH, unless long tests are asked for, what MPICH itself makes hang (`comm/windows/ways.py`)."""
    is_long = item.config.getoption("--long") or item.get_closest_marker("long_on_mpich") is None
    if not is_long and not launching.is_open_mpi(launching.find_mpirun()):
        pytest.skip("one job of 150 hangs in a queue of MPICH's: run by --long; sockets are the default there")


@pytest.fixture
def virtual_hosts() -> Iterator[Callable[[int], VirtualHosts]]:
    """Opens so many hosts; they end with the test. Skips where this machine does not allow them."""
    reason = why_unavailable()
    if reason:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield lambda count: stack.enter_context(VirtualHosts(count))


@pytest.fixture(scope="session")
def slurm() -> Iterator[PrivateSlurm]:
    """A cluster of four nodes, for all tests; it ends with the last one. Skips where this machine has no Slurm."""
    reason = why_no_slurm()
    if reason:
        pytest.skip(reason)
    with PrivateSlurm() as found:
        yield found


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image for Apptainer with Python and mpidist, without MPI. Skips where this machine has no Apptainer."""
    reason = why_no_apptainer()
    if reason:
        pytest.skip(reason)
    return make_image(tmp_path_factory.mktemp("apptainer"))
