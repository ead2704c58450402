"""Training on several ranks gives the parameters of one rank: plain PyTorch with the same global batches beside it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is in the extra 'torch'")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import mpidist.torch  # noqa: E402

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")]

STEPS, BATCH, FEATURES = 20, 13, 8
# No number of ranks shares a batch out evenly. The last one of an epoch has one row: all ranks but one have none.
ROWS = 4 * BATCH + 1


class Net(nn.Module):
    """Two layers, and others that few rows or nobody uses."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.last, self.seldom, self.never = nn.Linear(FEATURES, 3), nn.Linear(FEATURES, 3), nn.Linear(2, 2)
        if kind == "tied":
            self.second = self.first
        if kind == "frozen":
            self.second.requires_grad_(False)
        if kind == "sync_norm":
            self.norm = mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(FEATURES))

    def body(self, x: Any) -> Any:
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.norm(hidden) if self.kind == "sync_norm" else hidden

    def forward(self, x: Any) -> Any:
        if "reentrant" in self.kind:
            x = x.clone().requires_grad_()
            hidden = checkpoint(self.body, x, use_reentrant=self.kind == "reentrant")
        else:
            hidden = self.body(x)
        out = self.last(hidden)
        # True of one row in forty: often of none of a rank's.
        some = x[:, 0] > 1.8
        if self.kind == "unused" and bool(some.any()):
            out = out.index_add(0, some.nonzero()[:, 0], self.seldom(hidden[some]))
        return out


def data(rows: int = ROWS) -> TensorDataset:
    x = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x[:, :3].argmax(1))


def train(kind: str, strategy: Strategy | None, reduction: str = "mean") -> Any:
    """Train for some steps; returns all numbers of the model, and what is to be looked at."""
    rank = 0 if strategy is None else strategy.communicator.rank
    size = 1 if strategy is None else strategy.num_replicas_in_sync
    torch.manual_seed(5 + rank)
    model: Any = Net(kind)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS + 2)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaler", init_scale=64.0)
    loader: Any = DataLoader(
        # One rank cannot normalize one row, and of two rows nothing but rounding is left.
        data(ROWS + 2 * (kind == "sync_norm")), BATCH, shuffle=True,
        generator=torch.Generator().manual_seed(9 if rank == 0 else rank)
    )
    if strategy is not None:
        model, loader = mpidist.torch.distribute(model, loader, strategy=strategy, reduction=reduction)
    mean = nn.CrossEntropyLoss(reduction=reduction)

    def backward(x: Any, y: Any, step: int, last_rank: bool) -> None:
        out = model(x)
        loss = mean(out, y)
        if kind == "several":
            loss.backward(retain_graph=True)
            loss = out.square().mean()
        if kind == "penalty":
            loss = loss + 0.01 * sum(one.square().sum() for one in model.parameters())
        if kind == "scaler" and step == 3 and last_rank:
            loss = loss * float("inf")
        scaler.scale(loss).backward()

    step, skipped = 0, 0
    while step < STEPS:
        for x, y in loader:
            if kind == "accumulate" and step % 2 == 0 and strategy is not None:
                with mpidist.torch.no_sync(model):
                    backward(x, y, step, rank == size - 1)
            else:
                backward(x, y, step, rank == size - 1)
            step += 1
            if kind == "accumulate" and step % 2:
                continue
            scaler.unscale_(optimizer)
            if kind == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            before = model.last.weight.detach().clone()
            scaler.step(optimizer)
            skipped += int(torch.equal(before, model.last.weight))
            scaler.update()
            optimizer.zero_grad(set_to_none=kind != "zeros")
            scheduler.step()
            if step == STEPS:
                break
    del loader
    return torch.cat([one.detach().double().reshape(-1) for one in model.state_dict().values()]), model, skipped


KINDS = (
    "plain", "clip", "accumulate", "several", "tied", "reentrant", "nonreentrant", "frozen", "unused", "scaler",
    "penalty", "zeros", "sync_norm",
)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_one_rank(strategy: Strategy, kind: str) -> None:
    expected, *_, expected_skips = train(kind, None)
    found, model, skips = train(kind, strategy)
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=0)
    everyone = strategy.gather(found.numpy()[None], axis=0)
    assert (everyone == everyone[0]).all(), "ranks have other bits"
    # An optimizer must not decay what nobody uses.
    assert model.never.weight.grad is None
    assert skips == expected_skips == (kind == "scaler")


def test_losses_that_add_up_rows(strategy: Strategy) -> None:
    expected, *_ = train("plain", None, "sum")
    found, *_ = train("plain", strategy, "sum")
    torch.testing.assert_close(found, expected, atol=5e-6, rtol=0)


def gradients(model: Any) -> list[Any]:
    return [None if one.grad is None else one.grad.clone() for one in model.parameters()]


def own_rows(strategy: Strategy) -> Any:
    return torch.randn(6, FEATURES, generator=torch.Generator().manual_seed(strategy.communicator.rank))


def mean_over_ranks(strategy: Strategy, model: Any) -> list[Any]:
    """The mean over ranks of the gradients that each has by itself."""
    return [
        None if one is None else torch.from_numpy(strategy.reduce("MEAN", one.numpy(), axis=None))
        for one in gradients(model)
    ]


def make(strategy: Strategy, kind: str = "plain") -> tuple[Any, Any]:
    """A model, and one that is distributed, with the same parameters."""
    torch.manual_seed(0)
    plain = Net(kind)
    return plain, mpidist.torch.distribute(copy.deepcopy(plain), strategy=strategy)


def check_next(strategy: Strategy, plain: Any, ours: Any, use: Callable[[Any], Any] = lambda model: model) -> None:
    """Compare the gradients of one more backward pass."""
    x = own_rows(strategy)
    for model, called in ((plain, plain), (ours, use(ours))):
        model.zero_grad()
        called(x.to(next(model.parameters()).dtype)).float().square().mean().backward()
    for want, got in zip(mean_over_ranks(strategy, plain), gradients(ours), strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_parameters_that_are_trained_later_are_taken_in(strategy: Strategy) -> None:
    torch.manual_seed(0)
    plain = Net("frozen")
    ours = mpidist.torch.distribute(copy.deepcopy(plain), strategy=strategy)
    check_next(strategy, plain, ours)
    for model in (plain, ours):
        model.second.requires_grad_(True)
    check_next(strategy, plain, ours)


def test_a_model_whose_parameters_were_all_frozen(strategy: Strategy) -> None:
    torch.manual_seed(0)
    plain = Net("plain").requires_grad_(False)
    ours = mpidist.torch.distribute(copy.deepcopy(plain), strategy=strategy)
    for model in (plain, ours):
        model.last.requires_grad_(True)
    check_next(strategy, plain, ours)


@pytest.mark.parametrize("change", ["assign", "double", "half", "replaced"])
def test_parameters_that_are_replaced_are_taken_in(strategy: Strategy, change: str) -> None:
    plain, ours = make(strategy)
    check_next(strategy, plain, ours)
    for model in (plain, ours):
        if change == "assign":
            model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        elif change == "double":
            model.double()
        elif change == "half":
            model.bfloat16()
        else:
            torch.manual_seed(7)
            model.last = nn.Linear(FEATURES, 3)
    if change == "half":
        x = own_rows(strategy)
        ours(x.bfloat16()).float().square().mean().backward()
        everyone = strategy.gather(ours.first.weight.grad.float().numpy()[None], axis=0)
        assert (everyone == everyone[0]).all()
        assert ours.first.weight.grad.dtype == torch.bfloat16
        return
    check_next(strategy, plain, ours)
    check_next(strategy, plain, ours)


def test_a_replacement_that_differs_between_ranks_is_an_error_of_all(strategy: Strategy) -> None:
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("needs two ranks")
    _, ours = make(strategy)
    torch.manual_seed(strategy.communicator.rank)
    ours.last = nn.Linear(FEATURES, 3)
    with pytest.raises(ValueError, match=r"must be the same on every rank, got parameter last.weight"):
        ours(own_rows(strategy)).sum().backward()


def test_gradients_that_the_program_keeps_stay(strategy: Strategy) -> None:
    """`.grad` is a view of memory that the next pass uses."""
    _, ours = make(strategy)
    x = own_rows(strategy)
    ours(x).square().mean().backward()
    kept, copied = ours.first.weight.grad, ours.first.weight.grad.clone()
    ours.zero_grad()
    ours(2 * x).square().mean().backward()
    assert not torch.equal(ours.first.weight.grad, copied)
    assert torch.equal(kept, copied)


def test_large_gradients_of_all_kinds(strategy: Strategy) -> None:
    """They are copied in another way; one is not contiguous."""
    torch.manual_seed(0)
    last = nn.Linear(700, 520)
    last.weight = nn.Parameter(last.weight.detach().t().contiguous().t())
    plain: Any = nn.Sequential(nn.Linear(520, 700), nn.Tanh(), last)
    ours = mpidist.torch.distribute(copy.deepcopy(plain), strategy=strategy)
    x = torch.randn(3, 520, generator=torch.Generator().manual_seed(strategy.communicator.rank))
    for scale in (1, 2):
        for model in (plain, ours):
            model.zero_grad()
            model(scale * x).square().mean().backward()
        for want, got in zip(mean_over_ranks(strategy, plain), gradients(ours), strict=True):
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.long
def test_compiled_models(strategy: Strategy) -> None:
    plain, ours = make(strategy)
    check_next(strategy, plain, ours, lambda model: torch.compile(model, backend="aot_eager"))


def test_autocast(strategy: Strategy) -> None:
    plain, ours = make(strategy)
    x = own_rows(strategy)
    for model in (plain, ours):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
    for want, got in zip(mean_over_ranks(strategy, plain), gradients(ours), strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, atol=1e-7, rtol=1e-6)


def test_two_models_one_behind_the_other(strategy: Strategy) -> None:
    """The gradient enters one model through the other: rows must not be weighted twice."""

    def step(distributed: bool) -> Any:
        torch.manual_seed(1)
        front: Any = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
        back: Any = Net("plain")
        # One row more than the ranks can share out evenly.
        rows = 2 * strategy.num_replicas_in_sync + 1
        loader: Any = DataLoader(TensorDataset(*data()[:rows]), rows)
        if distributed:
            front, loader = mpidist.torch.distribute(front, loader, strategy=strategy)
            back = mpidist.torch.distribute(back, strategy=strategy)
        for x, y in loader:
            hidden = front(x)
            (nn.functional.cross_entropy(back(hidden), y) + hidden.square().mean()).backward()
        return gradients(front) + gradients(back)

    for got, want in zip(step(True), step(False), strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, atol=1e-7, rtol=1e-5)


def test_statistics_of_batch_norm_are_averaged(strategy: Strategy) -> None:
    ours = mpidist.torch.distribute(nn.Sequential(nn.BatchNorm1d(FEATURES, momentum=1.0)), strategy=strategy)
    x = own_rows(strategy)
    ours(x).sum().backward()
    for got, want in ((ours[0].running_mean, x.mean(0)), (ours[0].running_var, x.var(0))):
        expected = torch.from_numpy(strategy.reduce("MEAN", want.numpy(), axis=None))
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 4])
def test_sync_batch_norm_is_that_of_one_rank(strategy: Strategy, rows: int) -> None:
    """Also where some ranks have no rows."""
    x = torch.randn(rows, 2, 5, generator=torch.Generator().manual_seed(2)) + 100
    found = []
    for kind in (nn.BatchNorm1d, mpidist.torch.SyncBatchNorm):
        torch.manual_seed(1)
        model: Any = nn.Sequential(nn.Conv1d(2, 3, 1), kind(3), nn.Conv1d(3, 2, 1))
        loader: Any = DataLoader(TensorDataset(x), rows)
        if kind is not nn.BatchNorm1d:
            model, loader = mpidist.torch.distribute(model, loader, strategy=strategy)
        for (batch,) in loader:
            model(batch).square().sum((1, 2)).mean().backward()
        found.append([*gradients(model), model[1].running_mean, model[1].running_var, model[1].num_batches_tracked])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=2e-3, rtol=1e-4)


def test_gradients_by_autograd_grad_stay_with_the_rank(strategy: Strategy) -> None:
    """So one rank may draw a picture of a gradient."""
    _, ours = make(strategy)
    if strategy.communicator.rank == 0:
        x = own_rows(strategy).requires_grad_()
        (found,) = torch.autograd.grad(ours(x).sum(), x)
        assert found.shape == x.shape
        assert ours.first.weight.grad is None
    assert strategy.reduce("SUM", 1, axis=None) == strategy.num_replicas_in_sync


def test_no_sync_of_data_parallel(strategy: Strategy) -> None:
    plain, _ = make(strategy)
    ours = mpidist.torch.DistributedDataParallel(copy.deepcopy(plain), strategy=strategy, find_unused_parameters=True)
    assert next(name for name, _ in ours.named_parameters()) == "module.first.weight"
    x = own_rows(strategy)
    for model, quiet in ((plain, contextlib.nullcontext()), (ours, ours.no_sync())):
        with quiet:
            model(x).square().mean().backward()
        model(2 * x).square().mean().backward()
    for want, got in zip(mean_over_ranks(strategy, plain), gradients(ours), strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
