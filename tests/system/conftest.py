"""What tests of whole programs share: hosts to run them on, and a Slurm to submit them to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.containers import make_image, why_no_apptainer
from tests.hosts.virtual_hosts import VirtualHosts, why_unavailable
from tests.slurm.private_slurm import PrivateSlurm, why_no_slurm


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
