"""A rank that can open no file any more: every rank hears of it where a strategy is made, and no rank waits."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.opening import open_communicator
from tests.helpers.strategies import ArenaStrategy

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def _none_left(communicator: Communicator) -> Iterator[None]:
    """No descriptor is left on the last rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if communicator.rank == communicator.size - 1:
        # The next one would be the lowest number that is free.
        free = os.open("/dev/null", os.O_RDONLY)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    communicator.barrier()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    communicator.barrier()


@pytest.mark.usefixtures("_none_left")
def test_a_strategy_is_made_on_no_rank(communicator: Communicator) -> None:
    last = communicator.size - 1
    with pytest.raises(OSError, match=rf"making a strategy failed on rank {last} .*expected 16 descriptors.*ulimit -n"):
        ArenaStrategy(communicator)


@pytest.mark.usefixtures("_none_left")
def test_a_communicator_is_opened_on_no_rank(communicator: Communicator) -> None:
    mpi = communicator.mpi.Dup()
    with pytest.raises(OSError, match=rf"opening a communicator: rank {communicator.size - 1} .*expected 16 descrip"):
        open_communicator(mpi)
    mpi.Free()
