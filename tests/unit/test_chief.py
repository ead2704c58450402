"""Who prints and writes, as far as one process can tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpidist import context, first_rank, launch
from mpidist.first_rank import is_chief


def ranks(rank: int, *, alone: bool = False) -> Any:
    return SimpleNamespace(rank=rank, mpi=None if alone else "a communicator")


@pytest.mark.parametrize("world_rank", [0, 2])
def test_without_a_group_the_launcher_decides(monkeypatch: pytest.MonkeyPatch, world_rank: int) -> None:
    monkeypatch.setattr(launch, "world_rank", lambda: world_rank)
    assert is_chief() == (world_rank == 0)
    assert is_chief(ranks(0, alone=True)) == (world_rank == 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_in_a_group_its_first_rank_does(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(launch, "world_rank", lambda: 1 - rank)
    assert is_chief(ranks(rank)) == (rank == 0)
    context.push(context.Entry("strategy", None, SimpleNamespace(communicator=ranks(rank))))
    try:
        assert is_chief() == (rank == 0)
    finally:
        context.pop()


def test_the_cluster_may_divide_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "world_rank", lambda: 3)
    first_rank.note_role(0)
    assert is_chief()
    assert is_chief(ranks(0, alone=True))
    assert not is_chief(ranks(1))
    first_rank.note_role(2)
    assert not is_chief()
    first_rank.note_role(None)
    assert not is_chief()
