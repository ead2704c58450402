"""Loaders that are shared out: rows, orders, positions."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is in the extra 'torch'")

from torch import nn  # noqa: E402
from torch.utils.data import (  # noqa: E402
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

import mpidist.torch  # noqa: E402
from mpidist.errors import MismatchError  # noqa: E402
from mpidist.torch import loader as loader_module  # noqa: E402
from mpidist.torch.batches import cut  # noqa: E402
from mpidist.torch.marks import are_equal, encode  # noqa: E402

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy

pytestmark = pytest.mark.mpi

ROWS, BATCH = 22, 5


def numbers(rows: int = ROWS) -> TensorDataset:
    return TensorDataset(torch.arange(float(rows)))


def shared(strategy: Strategy, *args: Any, **options: Any) -> Any:
    _, loader = mpidist.torch.distribute(nn.Linear(1, 1), DataLoader(*args, **options), strategy=strategy)
    return loader


def batches(strategy: Strategy, loader: Any) -> list[list[float]]:
    """The global batches of one pass, put together of what all ranks have got."""
    found = []
    for (x,) in loader:
        found.append(flat(strategy.gather_object(x.tolist()[: loader.rows])))
    return found


def flat(parts: list[list[float]]) -> list[float]:
    return [one for part in parts for one in part]


class Drawn(Sampler[int]):
    """A sampler of a program's own, which takes PyTorch's random numbers as it goes."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(ROWS):
            yield int(torch.randint(ROWS, ()))

    def __len__(self) -> int:
        return ROWS


def options(kind: str, rank: int) -> dict[str, Any]:
    if kind == "plain":
        return {}
    if kind == "shuffled":
        return {"shuffle": True}
    if kind == "generator":
        return {"shuffle": True, "generator": torch.Generator().manual_seed(4 + rank)}
    if kind == "drawn":
        return {"sampler": Drawn()}
    return {"shuffle": True, "num_workers": 2, "persistent_workers": True}


KINDS = ("plain", "shuffled", "generator", "drawn", "workers")


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_out_each_batch_and_continue_in_the_middle(strategy: Strategy, kind: str) -> None:
    torch.manual_seed(1 + strategy.communicator.rank)
    loader = shared(strategy, numbers(), BATCH, **options(kind, strategy.communicator.rank))
    first, second = batches(strategy, loader), batches(strategy, loader)
    assert [len(one) for one in first] == [BATCH] * 4 + [2]
    if kind != "drawn":
        assert sorted(flat(first)) == sorted(flat(second)) == list(range(ROWS))
    assert (first == second) == (kind == "plain")
    # Another program, on its third epoch.
    state = None
    for number, _ in enumerate(loader):
        if number == 2:
            state = loader.state()
            break
    assert state is not None
    other = shared(strategy, numbers(), BATCH, **options(kind, 7))
    loader.load_state(state)
    other.load_state(state)
    rest = batches(strategy, other)
    assert len(rest) == 2
    assert rest == batches(strategy, loader)
    assert other.epoch == loader.epoch == 3
    assert batches(strategy, other) == batches(strategy, loader)


def test_the_order_of_a_generator_is_that_of_plain_pytorch(strategy: Strategy) -> None:
    plain = DataLoader(numbers(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(4))
    loader = shared(
        strategy, numbers(), BATCH, shuffle=True,
        generator=torch.Generator().manual_seed(4 + strategy.communicator.rank),
    )
    for _ in range(2):
        assert batches(strategy, loader) == [x.tolist() for (x,) in plain]


def test_an_epoch_that_is_left_is_over(strategy: Strategy) -> None:
    loader = shared(strategy, numbers(), BATCH)
    for _ in loader:
        break
    assert loader.epoch == 1
    assert loader.state()["done"] == 0
    assert len(batches(strategy, loader)) == 5
    assert loader.epoch == 2


def test_a_distributed_sampler_stays(strategy: Strategy) -> None:
    size, rank = strategy.num_replicas_in_sync, strategy.communicator.rank

    def sampler(rank: int) -> Any:
        return DistributedSampler(numbers(), num_replicas=size, rank=rank, shuffle=False)

    loader = shared(strategy, numbers(), 3, sampler=sampler(rank))
    plain = DataLoader(numbers(), 3, sampler=sampler(rank))
    assert [x.tolist() for (x,) in loader] == [x.tolist() for (x,) in plain]
    if size > 1:
        with pytest.raises(ValueError, match="DistributedSampler has rank 0 of"):
            shared(strategy, numbers(), 3, sampler=sampler(0))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ({"x": torch.tensor(float(one)), "name": str(one)} for one in range(7))


def test_iterable_datasets_are_cut_by_rows(strategy: Strategy) -> None:
    loader = shared(strategy, Stream(), 4)
    found: list[list[float]] = []
    for batch in loader:
        assert [str(int(one)) for one in batch["x"]] == batch["name"]
        found.append(flat(strategy.gather_object(batch["x"].tolist()[: loader.rows])))
    assert found == [[0, 1, 2, 3], [4, 5, 6]]
    loader.load_state({**loader.state(), "epoch": 0, "done": 1})
    assert [len(batch["name"]) for batch in loader] == [
        max(1, len(np.array_split(np.arange(3), strategy.num_replicas_in_sync)[strategy.communicator.rank]))
    ]
    with pytest.raises(TypeError, match="expected tensors in it, got list"):
        cut(["a", "b"], strategy)


class Own(Sampler[int]):
    """A sampler whose order differs between ranks."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[int]:
        return iter([(self.first + one) % ROWS for one in range(ROWS)])

    def __len__(self) -> int:
        return ROWS


@pytest.mark.mpi(min_size=2)
def test_orders_that_differ_are_an_error_of_all(strategy: Strategy) -> None:
    model, loader = mpidist.torch.distribute(
        nn.Linear(1, 1), DataLoader(numbers(), 6, sampler=Own(strategy.communicator.rank)), strategy=strategy
    )
    x = next(iter(loader))[0]
    loss = model(x[:, None]).mean()
    with pytest.raises(MismatchError, match="order of rows"):
        loss.backward()
    assert model.weight.grad is None


@pytest.mark.parametrize("replicas", [2, 3, 7, 1000, 65536])
def test_one_rank_of_another_order_is_seen(replicas: int) -> None:
    for mark, other in ((5, 5), (5, 6), (0xFFFFFF, 0xFFFFFE), (0xABCDEF, 0)):
        means = [
            float(np.float32(np.float32(own * (replicas - 1) + one) / np.float32(replicas)))
            for own, one in zip(encode(mark, replicas), encode(other, replicas), strict=True)
        ]
        assert are_equal(means, replicas) == (mark == other)


def test_loaders_that_cannot_be_shared_out(strategy: Strategy) -> None:
    class Other(DataLoader[Any]):
        def __iter__(self) -> Any:
            return super().__iter__()

    model = nn.Linear(1, 1)
    cases: Any = (
        ([1, 2], TypeError, "`loader` must be a torch.utils.data.DataLoader, got list"),
        (Other(numbers(), 2), TypeError, "has an `__iter__` of its own"),
        (DataLoader(numbers(), batch_size=None), ValueError, "batch_size=None"),
    )
    for wrong, kind, text in cases:
        with pytest.raises(kind, match=text):
            mpidist.torch.distribute(model, wrong, strategy=strategy)


@pytest.mark.mpi(min_size=2)
def test_loaders_that_differ_between_ranks(strategy: Strategy) -> None:
    with pytest.raises(ValueError, match="the loader must be the same on every rank, got dataset of length 22 on rank"):
        shared(strategy, numbers(ROWS + (strategy.communicator.rank == 1)), BATCH)


def test_batches_that_are_changed_need_as_many_rows(strategy: Strategy) -> None:
    model, loader = mpidist.torch.distribute(nn.Linear(1, 1), DataLoader(numbers(3), 3), strategy=strategy)
    uneven = 3 % strategy.num_replicas_in_sync != 0
    for (x,) in loader:
        model((x + 1)[:, None])
        with pytest.raises(RuntimeError, match=r"expected an argument with . rows") if uneven else (
            contextlib.nullcontext()
        ):
            model(torch.zeros(9, 1))


def test_generators_of_ranks_differ(strategy: Strategy) -> None:
    model = nn.Linear(1, 1)
    torch.manual_seed(3)
    mpidist.torch.distribute(model, strategy=strategy)
    drawn = strategy.gather_object(torch.rand(3).tolist())
    assert len(set(map(tuple, drawn))) == strategy.num_replicas_in_sync
    assert drawn[0] == torch.rand(3, generator=torch.Generator().manual_seed(3)).tolist()


def test_copies_of_a_model_do_nothing(strategy: Strategy) -> None:
    model = mpidist.torch.distribute(nn.Sequential(nn.Linear(2, 2)), strategy=strategy)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    saved = file.getvalue()
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        if strategy.communicator.rank == 0:
            # Alone: other ranks would have to take part.
            other(torch.ones(3, 2)).sum().backward()
            assert other[0].weight.grad is not None
    # It loads where mpidist is not installed.
    assert b"mpidist" not in saved


def test_forked_workers_beside_infiniband(
    strategy: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not loader_module.has_infiniband(tmp_path / "missing")
    assert not loader_module.has_infiniband(tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(loader_module, "has_infiniband", lambda: tmp_path == loader_module.INFINIBAND)
    monkeypatch.setattr(loader_module, "INFINIBAND", tmp_path)
    fork, other = (multiprocessing.get_context(way) for way in ("fork", "forkserver"))
    assert loader_module.forks(fork)
    assert not loader_module.forks(other)
    loader = shared(strategy, numbers(), BATCH, num_workers=1, multiprocessing_context="fork")
    with caplog.at_level(logging.WARNING, "mpidist"):
        for _ in range(2):
            list(loader)
    assert [one.message for one in caplog.records if "forkserver" in one.message] == [caplog.records[0].message]


def test_one_loader_is_shared_out_once(strategy: Strategy) -> None:
    model = nn.Linear(1, 1)
    same, loader = mpidist.torch.distribute(model, DataLoader(numbers(), BATCH), strategy=strategy)
    again, other = mpidist.torch.distribute(model, loader, strategy=strategy)
    assert same is again is model
    assert other is loader
    assert isinstance(loader, DataLoader)
    assert len(loader) == 5
    assert RandomSampler(numbers()).generator is None
