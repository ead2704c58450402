"""What tests of several ranks share."""

from __future__ import annotations

import pytest

# Hypothesis draws from the constants of the modules that a process has loaded, and ranks must draw alike.
from mpidist.checkpoint import checkpoint, manager, preemption  # noqa: F401
from mpidist.comm import asynchronous, resource
from mpidist.comm.communicator import Communicator, open_communicator
from tests.leaks import KEPT


@pytest.fixture(scope="session", autouse=True)
def communicators_of_the_job(communicator: Communicator) -> None:
    """Open the communicators that stay as long as the job, so that no test seems to leave them behind."""
    for ranks in (communicator, *(open_communicator(purpose=name) for name in ("strategy", "data", "cluster"))):
        ranks.open_sibling(asynchronous.PURPOSE).open_channel()
        # On several hosts a strategy opens these, too.
        ranks.open_lane()
        ranks.open_sibling(asynchronous.PURPOSE).open_lane()
        ranks.open_sibling(preemption.PURPOSE).open_channel()
        ranks.open_channel()
    KEPT.update(resource.held())
