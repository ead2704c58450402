"""`distribute`: a model and a loader of PyTorch that are trained by all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch.utils.data import DataLoader

from mpidist.strategy.base import Strategy
from mpidist.strategy.chosen import chosen_strategy
from mpidist.torch import backward_end
from mpidist.torch.batch_norm import SyncBatchNorm
from mpidist.torch.loader import DistributedLoader, require_shareable
from mpidist.torch.memory import require_kinds
from mpidist.torch.reduction import GradientReduction
from mpidist.torch.starting import broadcast_model, seed_ranks, share_cores
from mpidist.torch.together import together

_REDUCTIONS = ("mean", "sum")
_made: weakref.WeakKeyDictionary[torch.nn.Module, GradientReduction] = weakref.WeakKeyDictionary()


@overload
def distribute(
    model: torch.nn.Module, *, strategy: Strategy | None = None, reduction: str = "mean", shared: bool = False
) -> Any: ...
@overload
def distribute(
    model: torch.nn.Module,
    loader: DataLoader[Any],
    *,
    strategy: Strategy | None = None,
    reduction: str = "mean",
    shared: bool = False,
) -> tuple[Any, DistributedLoader]: ...


def distribute(
    model: torch.nn.Module,
    loader: DataLoader[Any] | None = None,
    *,
    strategy: Strategy | None = None,
    reduction: str = "mean",
    shared: bool = False,
) -> Any:
    """Collective. Train a model on all ranks: after `backward()`, `.grad` is the mean over the ranks.

        strategy = mpidist.MultiWorkerMirroredStrategy()
        model, loader = mpidist.torch.distribute(model, loader)

    The model stays the object that it is, with rank 0's parameters and buffers on every rank; optimizers, clipping,
    schedulers and `GradScaler` stay, too. The loader is replaced by one that gives each rank its rows of each batch, so
    the batch size is that of all ranks together. Where ranks have unequal numbers of rows, gradients are scaled where
    they enter at the model's output: the update is that of one rank with the whole batch. A second call adds the new
    parts of a model, and distributes another loader.

    PyTorch's generators get another seed on each rank, for dropout, after each `torch.manual_seed` once, and PyTorch's
    threads are limited to this rank's share of the cores, unless OMP_NUM_THREADS or MKL_NUM_THREADS is set.

    Args:
        model: The model, in host memory. The loss must come from calls of the model itself, `model(...)`, not of its
            parts.
        loader: A loader of global batches. That of a `DistributedSampler` stays as it is: its batches are per rank.
        strategy: The strategy. Default: that of the scope, else the only open one of this process.
        reduction: "mean" for losses that average the rows of a batch, "sum" for those that add them up.
        shared: Parameters in memory that ranks share; not supported.

    Returns:
        The model; with a loader `(model, loader)`.

    Raises:
        TypeError: An argument has another type; a parameter has a dtype or device that cannot be combined.
        ValueError: No strategy or several; the model is distributed already under another strategy or reduction, or
            has parameters of another distributed model; models or loaders differ between ranks.
        RuntimeError: This version of PyTorch lacks what is needed.
        NotImplementedError: `shared`, or a strategy whose replicas are not single ranks in sync.
    """
    strategy = chosen_strategy(strategy, "mpidist.torch.distribute")
    own = module_of(model)

    def check() -> None:
        _require_arguments(own, strategy, reduction, shared=shared)
        if loader is not None and not isinstance(loader, DistributedLoader):
            require_shareable(loader)
        backward_end.require()

    together(strategy, check)
    if own not in _made:
        share_cores(strategy)
    seed = seed_ranks(strategy)
    broadcast_model(own, strategy)
    for module in own.modules():
        if isinstance(module, SyncBatchNorm):
            module.join(strategy)
    if own in _made:
        _made[own].take_in()
    else:
        _made[own] = GradientReduction(own, strategy, sums=reduction == "sum")
    if loader is None:
        return model
    return model, loader if isinstance(loader, DistributedLoader) else DistributedLoader(loader, strategy, seed)


@contextmanager
def no_sync(model: torch.nn.Module) -> Iterator[None]:
    """Local. Inside, gradients add up on each rank; the first `backward()` after it combines their sums.

    Args:
        model: A model that is distributed.

    Raises:
        ValueError: The model is not distributed.
    """
    reduction = _made.get(module_of(model))
    if reduction is None:
        raise ValueError(
            f"no_sync: {type(model).__name__} is not distributed. Call mpidist.torch.distribute(model) first"
        )
    with reduction.unsynchronized():
        yield


def strategy_of(model: torch.nn.Module) -> Strategy | None:
    """Local. The strategy of a distributed model; None for another model."""
    reduction = _made.get(module_of(model))
    return None if reduction is None else reduction.strategy


def module_of(model: Any) -> Any:
    """Local. The model itself: the module inside a result of `torch.compile` or a `DistributedDataParallel`."""
    while isinstance(model, torch.nn.Module):
        inner = vars(model).get("_modules", {}).get("_orig_mod")
        if inner is None:
            inner = model.module if getattr(model, "is_data_parallel", False) is True else None
        if inner is None:
            break
        model = inner
    return model


def _require_arguments(model: Any, strategy: Strategy, reduction: str, *, shared: bool) -> None:
    """Raise where arguments are wrong."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}: {model!r}")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"`reduction` must be one of {', '.join(map(repr, _REDUCTIONS))}, got {reduction!r}")
    if shared:
        raise NotImplementedError(
            "distribute(shared=True) is not supported: PyTorch's optimizers would write memory that ranks share from "
            "all of them. Leave it out: each rank then has parameters of its own"
        )
    if strategy.num_replicas_in_sync != strategy.communicator.size or type(strategy).__name__ in (
        "HybridStrategy", "ParameterServerStrategy",
    ):
        raise NotImplementedError(
            f"mpidist.torch trains replicas of one rank each, all in sync, got {type(strategy).__name__} with "
            f"{strategy.num_replicas_in_sync} replicas on {strategy.communicator.size} ranks. Use "
            "mpidist.MultiWorkerMirroredStrategy"
        )
    require_kinds({name: one for name, one in model.named_parameters() if one.requires_grad})
    _require_free(model, strategy, sums=reduction == "sum")


def _require_free(model: torch.nn.Module, strategy: Strategy, *, sums: bool) -> None:
    """Raise where the model, or a parameter of it, is distributed already in another way."""
    made = _made.get(model)
    if made is not None and made.strategy is not strategy:
        raise ValueError(
            f"{type(model).__name__} is distributed under {made.strategy!r} already, got {strategy!r}. A model has one "
            "strategy: make another one, or train a copy.deepcopy(model) under the other strategy"
        )
    if made is not None and made.sums != sums:
        before = "sum" if made.sums else "mean"
        raise ValueError(
            f"{type(model).__name__} is distributed with reduction={before!r} already. Pass reduction={before!r}"
        )
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    for other, reduction in list(_made.items()):
        common = next((own[one] for one in reduction.parameters() if one in own), None)
        if other is not model and common is not None:
            raise ValueError(
                f"parameter {common!r} of {type(model).__name__} belongs to {type(other).__name__}, which is "
                "distributed already, so its gradient would be combined twice. Distribute one module that has both"
            )
