"""Wrong uses: every rank raises the same error, which says how to do it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is in the extra 'torch'")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import mpidist.torch  # noqa: E402
from mpidist.torch import backward_end  # noqa: E402

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy

pytestmark = pytest.mark.mpi

distribute: Any = mpidist.torch.distribute


def test_no_strategy_and_several(strategy: Strategy) -> None:
    model = nn.Linear(2, 2)
    assert distribute(model) is model
    with mpidist.MultiWorkerMirroredStrategy() as other:
        if strategy.num_replicas_in_sync > 1:
            with pytest.raises(ValueError, match="`strategy=`"):
                distribute(nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"is distributed under .* already"):
            distribute(model, strategy=other)
        with other.scope():
            distribute(nn.Linear(2, 2))
    with pytest.raises((ValueError, RuntimeError), match="closed"):
        distribute(nn.Linear(2, 2), strategy=other)


def test_a_closed_strategy() -> None:
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        model = distribute(nn.Linear(2, 2), strategy=strategy)
        model(torch.ones(3, 2)).sum().backward()
    gradient = model.weight.grad.clone()
    with pytest.raises(RuntimeError, match=r"the strategy of Linear is closed.*copy.deepcopy"):
        model(torch.ones(3, 2)).sum().backward()
    assert torch.isfinite(gradient).all()
    copy.deepcopy(model)(torch.ones(3, 2)).sum().backward()


def wrong_arguments() -> list[tuple[str, Any, type[Exception], str]]:
    lazy = nn.LazyLinear(2)
    return [
        ("no module", lambda: distribute([1]), TypeError, "`model` must be a torch.nn.Module, got list"),
        ("reduction", lambda: distribute(nn.Linear(1, 1), reduction="median"), ValueError, "one of 'mean', 'sum'"),
        ("shared", lambda: distribute(nn.Linear(1, 1), shared=True), NotImplementedError, "shared=True"),
        ("lazy", lambda: distribute(lazy), ValueError, "has no shape before the first batch"),
        ("complex", lambda: distribute(nn.Linear(1, 1, dtype=torch.cfloat)), TypeError, "dtype torch.complex64"),
        ("meta", lambda: distribute(nn.Linear(1, 1, device="meta")), TypeError, "is on device meta"),
        ("no_sync", lambda: mpidist.torch.no_sync(nn.Linear(1, 1)).__enter__(), ValueError, "is not distributed"),
        (
            "device_ids", lambda: mpidist.torch.DistributedDataParallel(nn.Linear(1, 1), device_ids=[0]), ValueError,
            "`device_ids` must be None",
        ),
        (
            "option", lambda: mpidist.torch.DistributedDataParallel(nn.Linear(1, 1), wrong=1), TypeError,
            "no argument 'wrong'",
        ),
        (
            "process_group", lambda: mpidist.torch.DistributedDataParallel(nn.Linear(1, 1), process_group=1),
            NotImplementedError, "process_group",
        ),
    ]


@pytest.mark.parametrize("number", range(10), ids=lambda number: wrong_arguments()[number][0])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_wrong_arguments(strategy: Strategy, number: int) -> None:
    _, call, kind, text = wrong_arguments()[number]
    with strategy.scope(), pytest.raises(kind, match=text):
        call()


def test_a_parameter_of_two_models(strategy: Strategy) -> None:
    model = distribute(nn.Sequential(nn.Linear(2, 2)), strategy=strategy)
    with pytest.raises(ValueError, match="parameter 'weight' of Linear belongs to Sequential"):
        distribute(model[0], strategy=strategy)
    with pytest.raises(ValueError, match="distributed with reduction='mean' already"):
        distribute(model, strategy=strategy, reduction="sum")


@pytest.mark.mpi(min_size=2)
def test_models_that_differ_between_ranks(strategy: Strategy) -> None:
    width = 2 + (strategy.communicator.rank == 1)
    text = r"must be the same on every rank, got weight \(2, 2\).* on rank 0, weight \(2, 3\)"
    with pytest.raises(ValueError, match=text):
        distribute(nn.Linear(width, 2), strategy=strategy)


@pytest.mark.mpi(min_size=2)
def test_an_error_of_one_rank_is_one_of_all(strategy: Strategy) -> None:
    made: Any = "no model" if strategy.communicator.rank == 1 else nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"`model` must be a torch.nn.Module, got str.*\(on rank 1\)"):
        distribute(made, strategy=strategy)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_cannot_be_combined(strategy: Strategy) -> None:
    model = distribute(nn.Linear(2, 2), strategy=strategy)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        model(torch.ones(3, 2)).square().sum().backward(create_graph=True)
    table = distribute(nn.Embedding(3, 2, sparse=True), strategy=strategy)
    with pytest.raises(NotImplementedError, match="sparse=False"):
        table(torch.tensor([1])).sum().backward()
    # A pass that failed leaves nothing behind.
    model.zero_grad()
    model(torch.ones(3, 2)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 2), 3.0))


@pytest.mark.mpi(min_size=2)
def test_rows_that_would_count_wrongly(strategy: Strategy) -> None:
    size = strategy.num_replicas_in_sync
    data = TensorDataset(torch.randn(size + 1, 2))
    model, loader = distribute(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), DataLoader(data, size + 1), strategy=strategy)
    for (x,) in loader:
        with pytest.raises(RuntimeError, match="did not enter at the output of a call"):
            model[0](x).mean().backward()
    for (x,) in loader:
        x.requires_grad_()
        with pytest.raises(NotImplementedError, match="gradients of gradients"):
            torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_an_exception_in_the_pass_does_not_end_later_reductions(strategy: Strategy) -> None:
    model = distribute(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), strategy=strategy)
    hidden = model[0](x := torch.ones(1, 2))
    hidden.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model[1](hidden).sum().backward()
    model.zero_grad()
    (model(x) * (strategy.communicator.rank + 1)).sum().backward()
    everyone = strategy.gather(model[0].weight.grad.numpy()[None], axis=0)
    assert (everyone == everyone[0]).all()


def test_pytorch_that_lacks_the_end_of_backward(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backward_end.problem() == ""
    monkeypatch.setattr(backward_end, "problem", lambda: "expected other calls")
    with pytest.raises(RuntimeError, match=r"expected other calls.*with which it was tested"):
        distribute(nn.Linear(1, 1), strategy=strategy)


def test_calls_of_data_parallel_that_are_not_supported(strategy: Strategy) -> None:
    model = mpidist.torch.DistributedDataParallel(nn.Linear(2, 2), strategy=strategy)
    for call in (model.join, lambda: model.register_comm_hook(None, None)):
        with pytest.raises(NotImplementedError, match="is not supported"):
            call()
    assert model(torch.ones(1, 2)).shape == (1, 2)
