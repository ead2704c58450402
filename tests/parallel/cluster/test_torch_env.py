"""torch.distributed over the ranks of the job."""

from __future__ import annotations

import os

import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")


def test_all_ranks_have_one_address(communicator: Communicator) -> None:
    found = mpidist.export_torch_env()
    assert [found[name] for name in NAMES[:4]] == [
        str(communicator.rank), str(communicator.size), str(communicator.node.rank), str(communicator.node.size)
    ]
    assert {name: os.environ[name] for name in NAMES} == found
    assert len(set(communicator.all_gather_object((found["MASTER_ADDR"], found["MASTER_PORT"])))) == 1


@pytest.mark.mpi(min_size=2)
def test_a_wrong_port_of_rank_0_is_an_error_of_all(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    if communicator.rank == 0:
        monkeypatch.setenv("MASTER_PORT", "70000")
    with pytest.raises(ValueError, match=r"rank 0 .*MASTER_PORT must be a port from 1 to 65535, got '70000'"):
        mpidist.export_torch_env()


def test_torch_meets_all_ranks(communicator: Communicator) -> None:
    torch = pytest.importorskip("torch")
    distributed = pytest.importorskip("torch.distributed")
    mpidist.export_torch_env()
    distributed.init_process_group("gloo")
    try:
        total = torch.full((3,), float(communicator.rank))
        distributed.all_reduce(total)
        assert total.tolist() == [communicator.size * (communicator.size - 1) / 2] * 3
    finally:
        distributed.destroy_process_group()
