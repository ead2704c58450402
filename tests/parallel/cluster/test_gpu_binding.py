"""Agreement of the ranks on their GPUs; which GPU a rank has is given, so that no GPU is needed."""

from __future__ import annotations

import logging

import pytest

from mpidist.cluster.devices.gpu_binding import Binding, agree
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import UnavailableError, is_shared

pytestmark = pytest.mark.mpi(min_size=2)


def test_ranks_that_share_a_gpu_are_named(communicator: Communicator, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mpidist"):
        assert agree(Binding(0, "GPU-a"), communicator, {}) == 0
    told = [record.getMessage() for record in caplog.records]
    last = communicator.size - 1
    if communicator.rank == 0:
        assert len(told) == 1
        assert f"ranks 0-{last} share one GPU (GPU-a)" in told[0]
    else:
        assert not told


@pytest.mark.parametrize("environment", [{"MPIDIST_SHARE_GPU": "1"}, {}])
def test_no_warning_without_sharing_or_where_it_is_meant(
    communicator: Communicator, caplog: pytest.LogCaptureFixture, environment: dict[str, str]
) -> None:
    uuid = "GPU-a" if environment else f"GPU-{communicator.rank}"
    with caplog.at_level(logging.WARNING, "mpidist"):
        assert agree(Binding(1, uuid), communicator, environment) == 1
    assert not caplog.records


def test_what_is_wrong_on_one_rank_is_raised_on_all(communicator: Communicator) -> None:
    is_last = communicator.rank == communicator.size - 1
    binding = Binding(error=UnavailableError("no GPU is visible")) if is_last else Binding(0, "GPU-a")
    with pytest.raises(UnavailableError, match=f"rank {communicator.size - 1}.*no GPU is visible") as caught:
        agree(binding, communicator)
    assert is_shared(caught.value)


def test_cpus_and_gpus_are_not_mixed(communicator: Communicator) -> None:
    binding = Binding() if communicator.rank == 0 else Binding(0, f"GPU-{communicator.rank}")
    with pytest.raises(ValueError, match="rank 0 computes on the CPU and other ranks on GPUs"):
        agree(binding, communicator)
