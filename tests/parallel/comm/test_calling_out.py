"""Ranks that come out of what they wait in, since one has failed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpidist.checkpoint.preemption.calling_out import CallingOut
from mpidist.comm.group.communicator import Communicator
from tests.helpers.waiting import until

pytestmark = pytest.mark.mpi(min_size=2)


def test_a_rank_that_waits_for_others_to_come_out_lets_their_messages_go_on(
    communicator: Communicator, mpi_tmp_path: Path
) -> None:
    """They may wait in MPI until it takes part, and come out only behind that."""
    has_sent = mpi_tmp_path / "sent"
    with communicator.split(0) as ranks:
        calling = CallingOut(ranks, ranks)
        numbers = np.zeros(1 << 20)
        if ranks.rank == 1:
            request = ranks.mpi.Irecv(numbers, 0)
        ranks.barrier()
        if ranks.rank == 0:
            until(ranks.mpi.Issend(numbers + 3, 1).Test, "the message has come", seconds=10)
            has_sent.touch()
        elif ranks.rank == 1:
            until(lambda: calling.are_out() or has_sent.exists(), "the message has gone", seconds=10)
            request.Wait()
            assert np.all(numbers == 3)
        ranks.barrier()
