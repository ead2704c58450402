"""The doctor on who takes which GPU: what binding does with what ranks see, and the line that fixes it."""

from __future__ import annotations

import pytest

from mpidist.cli.doctor.gpus import RankGpus, find_gpus

A, B, C = (f"GPU-{letter * 8}" for letter in "abc")
GPUS = ((A, "0000:01:00.0"), (B, "0000:02:00.0"))


@pytest.fixture(autouse=True)
def outside_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def rank_on(
    host: str, node_rank: int | None, seen: tuple[tuple[str, str], ...], visible: str | None = None, installed: int = 2
) -> RankGpus:
    return RankGpus(host, node_rank, installed, visible, seen)


def test_ranks_that_see_all_gpus_take_one_each() -> None:
    told = [rank_on(host, number, GPUS) for host in ("n1", "n2") for number in (0, 1)]
    first, second = find_gpus(told)
    assert (first.state, second.state) == ("ok", "ok")
    assert first.text == f"n1: rank 0 {A}, rank 1 {B}"
    assert second.data == {"host": "n2", "gpus": {2: A, 3: B}}


def test_ranks_that_see_one_gpu_each_take_it() -> None:
    found = find_gpus([rank_on("n1", 0, GPUS[:1], "0"), rank_on("n1", 1, GPUS[1:], "1")])
    assert [one.state for one in found] == ["ok"]
    # The same place on two hosts is two GPUs.
    found = find_gpus([rank_on("n1", 0, GPUS[:1]), rank_on("n2", 0, ((C, GPUS[0][1]),))])
    assert [one.state for one in found] == ["ok", "ok"]


@pytest.mark.parametrize(("told", "fix"), [
    ([rank_on("n1", number, GPUS[:1], "0") for number in (0, 1)], "unset CUDA_VISIBLE_DEVICES (it is '0')"),
    (
        [rank_on("n1", 0, GPUS, "0,1"), rank_on("n1", 1, GPUS[::-1], "1,0")],
        "unset CUDA_VISIBLE_DEVICES (it is '0,1', '1,0')",
    ),
    ([rank_on("n1", 0, GPUS), rank_on("n1", 1, GPUS[::-1])], "show the same GPUs to all ranks of a host"),
    ([rank_on("n1", number, GPUS) for number in (0, 1, 2)], "mpirun -n 2 on each host"),
    ([rank_on("n1", None, GPUS) for _ in (0, 1)], "start by mpirun or srun"),
], ids=["one shown to all", "other orders", "other orders, without the variable", "too few", "no number on the host"])
def test_ranks_that_share_a_gpu(told: list[RankGpus], fix: str) -> None:
    (found,) = [one for one in find_gpus(told) if one.subject == "shared GPU"]
    assert found.state == "note"
    assert A in found.text or B in found.text
    assert found.fix.startswith(fix)
    assert "MPIDIST_SHARE_GPU=1" in found.fix
    (meant,) = [one for one in find_gpus(told, may_share=True) if one.subject == "shared GPU"]
    assert (meant.state, meant.fix) == ("ok", "")


def test_too_few_gpus_in_a_job_of_slurms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    found = find_gpus([rank_on("n1", number, GPUS) for number in (0, 1, 2)])[-1]
    assert found.fix.startswith("srun --ntasks-per-node=2 --gpus-per-node=2")


def test_instances_of_one_gpu() -> None:
    """UUIDs differ, and the place on the bus does not: no GPU is shared, and NCCL still refuses."""
    bus = GPUS[0][1]
    found = find_gpus([rank_on("n1", 0, ((A, bus),), "MIG-1"), rank_on("n1", 1, ((B, bus),), "MIG-2")])
    assert [(one.subject, one.state) for one in found] == [("GPUs of ranks", "ok"), ("instances of a GPU", "note")]
    assert bus in found[1].text
    assert "NCCL" in found[1].text


def test_a_rank_without_a_gpu() -> None:
    told = [rank_on("n1", 0, GPUS), rank_on("n2", 0, (), "-1")]
    found = find_gpus(told)[-1]
    assert (found.subject, found.state, found.fix) == ("ranks without GPU", "note", "unset CUDA_VISIBLE_DEVICES")
    assert "rank 1 (first on n2): CUDA_VISIBLE_DEVICES='-1' shows none there" in found.text
    # A program that asks for GPUs fails there.
    assert find_gpus(told, asks=True)[-1].state == "wrong"
    told[1] = RankGpus("n2", 0, 2, None, (), "CuPy cannot be used: no driver")
    found = find_gpus(told)[-1]
    assert "no driver" in found.text
    assert "pip install 'mpidist[cuda12]'" in found.fix
    # Nobody uses them: one line.
    assert len(find_gpus([rank_on("n1", number, (), "") for number in (0, 1)])) == 1
