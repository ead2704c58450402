"""What the documents take as given: a device for each replica."""

from __future__ import annotations

import pytest

from mpidist.comm.group.communicator import Communicator


@pytest.fixture
def devices(communicator: Communicator) -> list[str]:
    """Stands for the documents' `["GPU:0", "GPU:1"]`: one device per rank of this run."""
    return [f"CPU:{rank}" for rank in range(communicator.size)]
