"""A PyTorch loader whose batches are shared among the ranks."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from mpidist.strategy.base import Strategy
from mpidist.torch.batches import EpochOrder, GlobalBatchSampler, OwnBatchSampler, cut, require_own
from mpidist.torch.shares import RowShare, log_of
from mpidist.torch.starting import rank_of, seed_of
from mpidist.torch.together import require_alike

logger = logging.getLogger("mpidist")
# Where Linux lists the InfiniBand devices of a host.
INFINIBAND = Path("/sys/class/infiniband")
_KEPT = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor", "persistent_workers",
)


class DistributedLoader(DataLoader[Any]):
    """Collective. A loader that gives this rank's rows of each batch of another loader; `distribute` makes it.

    Dataset, workers and `collate_fn` stay. The order of a sampler without a generator follows from rank 0's seed and
    the number of the epoch. `mpidist.Checkpoint(loader=loader)` saves the position: after a restore the next `for`
    continues in the middle of the epoch, on any number of ranks.

    Args:
        loader: The loader of the program; its batch size is that of all ranks together.
        strategy: The strategy of the ranks.
        seed: Rank 0's seed.

    Attributes:
        strategy: The constructor's argument.
        epoch: The number of the epoch in which the loader is: the next `for` continues or begins it.
        rows: The number of rows of the last batch that are this rank's. Where it is 0 the batch has one row, so that
            the rank takes part in the step: evaluations must not count it.

    Raises:
        TypeError: The loader cannot be shared among the ranks.
        ValueError: The loader differs between ranks, or has an option that cannot be kept.
    """

    def __init__(self, loader: DataLoader[Any], strategy: Strategy, seed: int) -> None:
        require_shareable(loader)
        self._is_iterable = isinstance(loader.dataset, IterableDataset)
        require_alike(strategy, "the loader", lambda: _lines(loader, strategy), "Make the same loader on every rank")
        batches: GlobalBatchSampler | OwnBatchSampler | None = None
        if not self._is_iterable:
            batches = _sampler_of(loader, strategy, seed)
        options: dict[str, Any] = {name: getattr(loader, name) for name in _KEPT}
        options["multiprocessing_context"] = loader.multiprocessing_context if loader.num_workers else None
        if batches is None:
            options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        else:
            options["batch_sampler"] = batches
        # Workers draw their seeds from it, and not from the generator on whose numbers a resumed job depends.
        generator = torch.Generator()
        super().__init__(loader.dataset, generator=generator, **options)
        self._batches, self.strategy, self._seed, self._worker_seeds = batches, strategy, seed, generator
        self._log = log_of(strategy)
        self._order = batches.order if isinstance(batches, GlobalBatchSampler) else None
        self._draws_first = loader.generator is not None and self._order is not None and (
            loader.generator is self._order.own
        )
        self.epoch, self.rows, self._done = 0, 0, 0
        # The epoch and position at which the next pass begins, and the generator's state at the epoch's begin.
        self._resumed: tuple[int, int, bytes | None] | None = None
        self._order_at_begin: bytes | None = None
        self._has_warned = False

    def __iter__(self) -> Any:
        """Local. Begin the next epoch, or continue the one in which a checkpoint was saved."""
        self._warn_of_fork()
        skipped = 0
        if self._resumed is not None:
            (self.epoch, skipped, order), self._resumed = self._resumed, None
            if self._order is not None and order is not None:
                self._order.load(order)
        elif self._done:
            # The program has left the epoch before its end.
            self.epoch += 1
        self._done = skipped
        self._order_at_begin = None if self._order is None else self._order.state()
        shares = deque[RowShare]() if self._batches is None else self._batches.begin(self.epoch, skipped)
        if self._draws_first and self._order is not None:
            # So does DataLoader with a generator, for the seeds of its workers: the order is that of plain PyTorch.
            self._order.draw()
        self._worker_seeds.manual_seed(seed_of(seed_of(self._seed, self.epoch + 1), rank_of(self.strategy) + 1))
        return self._pass(super().__iter__(), shares, self.epoch)

    def _pass(self, iterator: Iterator[Any], shares: deque[RowShare], epoch: int) -> Iterator[Any]:
        if self._batches is None:
            iterator = itertools.islice(iterator, self._done, None)
        try:
            for batch in iterator:
                if self._batches is None:
                    mine, share = cut(batch, self.strategy)
                else:
                    mine, share = batch, shares.popleft()
                self._log.note(share, mine)
                self.rows = share.rows
                self._done += 1
                yield mine
        finally:
            # At the end, and where the program leaves the loop: the next pass begins the next epoch.
            if self.epoch == epoch:
                self.epoch, self._done = epoch + 1, 0

    def state(self) -> dict[str, Any]:
        """Local. The position: numbers, and the state of the program's own generator."""
        epoch, done, order = self._resumed or (self.epoch, self._done, self._order_at_begin)
        if not done and self._order is not None and self._resumed is None:
            order = self._order.state()
        return {"epoch": epoch, "done": done, "seed": self._seed, "order": order}

    def load_state(self, saved: Any) -> None:
        """Local. Continue at a position that `state` gave; the next `for` does."""
        self._seed = int(saved["seed"])
        if self._order is not None:
            self._order.seed = self._seed
        self._resumed = int(saved["epoch"]), int(saved["done"]), saved["order"]
        self.epoch, self._done = self._resumed[:2]

    def _warn_of_fork(self) -> None:
        if self.num_workers and not self._has_warned and forks(self.multiprocessing_context) and has_infiniband():
            self._has_warned = True
            logger.warning(
                "the loader starts workers by fork on a host with InfiniBand, whose memory a forked process must not "
                "touch: jobs were seen to crash so. Pass multiprocessing_context='forkserver' to DataLoader"
            )


def require_shareable(loader: Any) -> None:
    """Local. Raise where a loader cannot be shared among the ranks.

    Raises:
        TypeError: It is no DataLoader, or has an iteration of its own.
        ValueError: It has an option that cannot be kept.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"`loader` must be a torch.utils.data.DataLoader, got {type(loader).__name__}: {loader!r}. Other data are "
            "shared out by strategy.experimental_distribute_dataset"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise TypeError(
            f"the loader's class {type(loader).__name__} has an `__iter__` of its own, which cannot be shared out: "
            "expected that of torch.utils.data.DataLoader. Pass a plain DataLoader, and change its batches in the loop"
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        raise ValueError(
            "the loader has batch_size=None, so it has no batches to share out: expected a batch size of all ranks "
            "together. Give DataLoader a batch_size or a batch_sampler"
        )
    if not getattr(loader, "in_order", True):
        raise ValueError(
            "the loader has in_order=False, so ranks could get rows of different batches. Leave the option out"
        )


def has_infiniband(folder: Path = INFINIBAND) -> bool:
    """Local. Whether this host has InfiniBand devices."""
    return folder.is_dir() and any(folder.iterdir())


def forks(context: Any) -> bool:
    """Local. Whether workers of a loader with this `multiprocessing_context` are forked."""
    return (multiprocessing.get_start_method() if context is None else context.get_start_method()) == "fork"


def _sampler_of(loader: DataLoader[Any], strategy: Strategy, seed: int) -> GlobalBatchSampler | OwnBatchSampler:
    batches: Any = loader.batch_sampler
    sampler = getattr(batches, "sampler", batches)
    if isinstance(sampler, DistributedSampler):
        return OwnBatchSampler(batches, strategy)
    return GlobalBatchSampler(batches, strategy, EpochOrder(sampler, strategy, seed))


def _lines(loader: DataLoader[Any], strategy: Strategy) -> list[str]:
    """Describe what must be the same on every rank."""
    sampler = getattr(loader.batch_sampler, "sampler", loader.batch_sampler)
    if isinstance(sampler, DistributedSampler):
        require_own(sampler, strategy)
    lines = [f"dataset {type(loader.dataset).__name__}", f"batch size {loader.batch_size}"]
    own = "with" if getattr(sampler, "generator", None) is not None else "without"
    lines += [f"sampler {type(sampler).__name__} {own} a generator", f"drop_last {loader.drop_last}"]
    for what, value in (("dataset", loader.dataset), ("batches", loader.batch_sampler)):
        try:
            lines.append(f"{what} of length {len(value)}")  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            lines.append(f"{what} without a length")
    return lines
