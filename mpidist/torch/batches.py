"""This rank's rows of each global batch, in an order that is the same on every rank and can be resumed."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler, Sampler, SequentialSampler

from mpidist.strategy.base import Strategy
from mpidist.torch.shares import RowShare
from mpidist.torch.starting import rank_of, seed_of
from mpidist.torch.together import together


class EpochOrder:
    """Collective. The random numbers of a sampler: the same on every rank, and the same again when a job resumes.

    A sampler without a `generator` gets one for each epoch, from rank 0's seed and the epoch's number. A generator that
    the program gave is kept, with rank 0's state. A sampler that takes PyTorch's own random numbers finds those of the
    epoch there while it is asked.

    Args:
        sampler: The sampler.
        strategy: The strategy of the ranks.
        seed: Rank 0's seed.
    """

    def __init__(self, sampler: Any, strategy: Strategy, seed: int) -> None:
        self.sampler, self.seed = sampler, seed
        self.own: torch.Generator | None = getattr(sampler, "generator", None)
        if self.own is not None:
            # Bytes: a tensor would be sent as one, with its storage.
            state = together(strategy, lambda: self.own.get_state().numpy().tobytes())[0]  # type: ignore[union-attr]
            self.load(state)
        self._draws_globally = not hasattr(sampler, "generator") and not isinstance(sampler, SequentialSampler)

    def state(self) -> bytes | None:
        """Local. The state of the program's generator, None where it gave none."""
        return None if self.own is None else self.own.get_state().numpy().tobytes()

    def load(self, state: bytes) -> None:
        """Local. Set the state of the program's generator."""
        if self.own is not None:
            self.own.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def draw(self) -> None:
        """Local. Draw a number from the program's generator."""
        torch.empty((), dtype=torch.int64).random_(generator=self.own)

    def ordered(self, batches: Iterable[Any], epoch: int) -> Iterator[Any]:
        """Local. Go through the batches of an epoch, with its random numbers."""
        seed = seed_of(self.seed, epoch + 1)
        if self.own is None and hasattr(self.sampler, "generator"):
            self.sampler.generator = torch.Generator().manual_seed(seed)
        if not self._draws_globally:
            yield from batches
            return
        state = torch.Generator().manual_seed(seed).get_state()
        iterator, end = None, object()
        while True:
            with _numbers_of(state):
                iterator = iter(batches) if iterator is None else iterator
                batch = next(iterator, end)
                state = torch.get_rng_state()
            if batch is end:
                return
            yield batch


@contextmanager
def _numbers_of(state: torch.Tensor) -> Iterator[None]:
    """Inside, PyTorch's random numbers on this thread are those of `state`."""
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(before)


class GlobalBatchSampler(Sampler[list[Any]]):
    """Local. Takes this rank's rows of the batches of another batch sampler.

    Args:
        batches: The batch sampler of the program: global batches.
        strategy: The strategy of the ranks.
        order: Its random numbers.
    """

    def __init__(self, batches: Any, strategy: Strategy, order: EpochOrder) -> None:
        self.batches, self._strategy, self.order = batches, strategy, order
        self._begin = (0, 0)
        self._shares: deque[RowShare] = deque()

    def begin(self, epoch: int, skipped: int) -> deque[RowShare]:
        """Local. Say where the next pass begins.

        Args:
            epoch: The number of the epoch, for its order.
            skipped: The number of batches before the first one.

        Returns:
            The shares of the batches, in the order in which they are drawn.
        """
        self._begin, self._shares = (epoch, skipped), deque()
        return self._shares

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._pass(*self._begin, self._shares)

    def _pass(self, epoch: int, skipped: int, shares: deque[RowShare]) -> Iterator[list[Any]]:
        for number, batch in enumerate(self.order.ordered(self.batches, epoch)):
            if number >= skipped:
                rows = list(batch)
                mine = self._strategy.extended.rows(len(rows))
                shares.append(
                    RowShare(mine.stop - mine.start, len(rows), self._strategy.num_replicas_in_sync, checksum(rows))
                )
                # A rank without rows takes part with one that does not count.
                yield rows[mine] or rows[:1]


class OwnBatchSampler(Sampler[list[Any]]):
    """Local. Takes the batches of a `DistributedSampler` as they are: each rank has its own.

    Args:
        batches: The batch sampler of the program.
        strategy: The strategy of the ranks.
    """

    def __init__(self, batches: Any, strategy: Strategy) -> None:
        self.batches, self._replicas = batches, strategy.num_replicas_in_sync
        self._skipped = 0
        self._shares: deque[RowShare] = deque()

    def begin(self, epoch: int, skipped: int) -> deque[RowShare]:
        """Local. Say where the next pass begins; see `GlobalBatchSampler.begin`. The program sets the epoch."""
        del epoch
        self._skipped, self._shares = skipped, deque()
        return self._shares

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._pass(self._skipped, self._shares)

    def _pass(self, skipped: int, shares: deque[RowShare]) -> Iterator[list[Any]]:
        for number, batch in enumerate(self.batches):
            if number >= skipped:
                rows = list(batch)
                shares.append(RowShare(len(rows), len(rows) * self._replicas, self._replicas))
                yield rows


def require_own(sampler: DistributedSampler[Any], strategy: Strategy) -> None:
    """Local. Raise where a `DistributedSampler` was made for other ranks than those of the strategy.

    Raises:
        ValueError: Its number of ranks, or its rank, is another one.
    """
    found = sampler.rank, sampler.num_replicas
    expected = rank_of(strategy), strategy.num_replicas_in_sync
    if found != expected:
        raise ValueError(
            f"the loader's DistributedSampler has rank {found[0]} of {found[1]} replicas: expected rank {expected[0]} "
            f"of {expected[1]}, as the strategy has. Make it with num_replicas=strategy.num_replicas_in_sync, "
            "rank=strategy.communicator.rank, or leave it out: the loader is shared among the ranks by distribute"
        )


def checksum(rows: Sequence[Any]) -> int:
    """Local. A checksum of the indices of a batch."""
    try:
        return zlib.crc32(np.asarray(rows, np.int64).tobytes())
    except (TypeError, ValueError, OverflowError):
        # Keys of a dataset may be anything.
        return zlib.crc32(repr(rows).encode())


def cut(batch: Any, strategy: Strategy) -> tuple[Any, RowShare]:
    """Local. Cut this rank's rows out of a global batch of an iterable dataset.

    Raises:
        TypeError: The batch has no tensor with rows.
    """
    total, mark = _measure(batch)
    if total is None:
        raise TypeError(
            f"a batch of an iterable dataset is shared out by its rows: expected tensors in it, got "
            f"{type(batch).__name__}. Give DataLoader a batch_size, and a collate_fn that returns tensors"
        )
    mine = strategy.extended.rows(total)
    taken = mine if mine.stop > mine.start else slice(0, 1)
    share = RowShare(mine.stop - mine.start, total, strategy.num_replicas_in_sync, mark)
    return _sliced(batch, taken, total), share


def _measure(batch: Any) -> tuple[int | None, int]:
    """The number of rows of the first tensor, and a checksum of its beginning."""
    if isinstance(batch, torch.Tensor):
        if batch.dim() == 0:
            return None, 0
        some = batch.detach().reshape(-1)[:256].contiguous()
        return batch.shape[0], zlib.crc32(some.view(torch.uint8).numpy().tobytes())
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, (list, tuple)) else ()
    return next((found for part in parts if (found := _measure(part))[0] is not None), (None, 0))


def _sliced(batch: Any, rows: slice, total: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[rows] if batch.dim() and batch.shape[0] == total else batch
    if isinstance(batch, dict):
        return {name: _sliced(one, rows, total) for name, one in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_sliced(one, rows, total) for one in batch))
    if isinstance(batch, (list, tuple)):
        if len(batch) == total and not any(isinstance(one, torch.Tensor) for one in batch):
            return batch[rows]
        return type(batch)(_sliced(one, rows, total) for one in batch)
    return batch
