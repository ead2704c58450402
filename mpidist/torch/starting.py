"""The start of training on several ranks: rank 0's values everywhere, a seed for each rank, threads."""

from __future__ import annotations

import os
import weakref

import torch

from mpidist.strategy.base import Strategy
from mpidist.torch.together import require_alike, together

_CHOSEN_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_STRIDE = 0x9E3779B97F4A7C15
_MASK = (1 << 63) - 1


def rank_of(strategy: Strategy) -> int:
    """Local. The number of this replica."""
    return strategy.communicator.rank


def broadcast_model(model: torch.nn.Module, strategy: Strategy) -> None:
    """Collective. Give every rank rank 0's parameters and buffers.

    Raises:
        ValueError: The ranks' models have different parameters or buffers.
    """
    if strategy.num_replicas_in_sync == 1:
        return
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def lines() -> list[str]:
        return [f"{name} {tuple(one.shape)} {one.dtype}" for name, one in values.items()]

    name = f"the parameters and buffers of {type(model).__name__}"
    require_alike(strategy, name, lines, "Build the same model on every rank")
    with torch.no_grad():
        sent = strategy.extended.broadcast([one.detach().contiguous() for one in values.values()])
        for one, new in zip(values.values(), sent, strict=True):
            one.copy_(new)


def seed_of(base: int, number: int) -> int:
    """Local. A seed for the number of a rank or an epoch; number 0 has the seed itself.

    >>> seed_of(7, 0), seed_of(7, 1) != seed_of(7, 2)
    (7, True)
    """
    return (base + number * _STRIDE) & _MASK


# Rank 0's seed, and this rank's.
_seeds: weakref.WeakKeyDictionary[Strategy, tuple[int, int]] = weakref.WeakKeyDictionary()


def seed_ranks(strategy: Strategy) -> int:
    """Collective. Give PyTorch's generators another seed on each rank, unless that was done since the last new seed.

    Rank 0 keeps its own.

    Returns:
        Rank 0's seed, the same on every rank.
    """
    before = _seeds.get(strategy)
    now = torch.initial_seed()
    everyone = together(strategy, lambda: (now, before is not None and before[1] == now))
    if before is not None and all(is_known for _, is_known in everyone):
        return before[0]
    base, rank = everyone[0][0], rank_of(strategy)
    if rank:
        torch.manual_seed(seed_of(base, rank))
    _seeds[strategy] = base, torch.initial_seed()
    return base


def share_cores(strategy: Strategy) -> None:
    """Local. Limit PyTorch's threads to this rank's share of the cores, unless the user has chosen their number."""
    if not any(name in os.environ for name in _CHOSEN_BY_USER):
        torch.set_num_threads(min(torch.get_num_threads(), strategy.extended.cores_per_replica))
