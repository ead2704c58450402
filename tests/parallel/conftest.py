"""What tests of several ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import mpidist

# Hypothesis draws from the constants of the modules that a process has loaded, and ranks must draw alike.
from mpidist.checkpoint import checkpoint, manager  # noqa: F401
from mpidist.checkpoint.preemption import handler
from mpidist.comm.cross_device import asynchronous
from mpidist.comm.group import resource
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.opening import open_communicator
from tests.helpers.leaks import KEPT

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy


@pytest.fixture(scope="session", autouse=True)
def communicators_of_the_job(communicator: Communicator) -> None:
    """Open the communicators that stay as long as the job, so that no test seems to leave them behind."""
    for ranks in (communicator, *(open_communicator(purpose=name) for name in ("strategy", "data", "cluster"))):
        ranks.open_sibling(asynchronous.PURPOSE).open_channel()
        # On several hosts a strategy opens these, too.
        ranks.open_lane()
        ranks.open_sibling(asynchronous.PURPOSE).open_lane()
        ranks.open_sibling(handler.PURPOSE).open_channel()
        ranks.open_channel()
    KEPT.update(resource.held())


@pytest.fixture
def strategy(communicator: Communicator) -> Iterator[Strategy]:
    """The strategy of a test, which it closes: it would be one of several that are open in the next."""
    with mpidist.MultiWorkerMirroredStrategy() as made:
        yield made
