"""The rows of a global batch that a rank has, which decide the weight of its gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from mpidist.strategy.base import Strategy

# The attribute of a batch's tensors that says which share they are.
_TAG = "_mpidist_share"


@dataclass(frozen=True)
class RowShare:
    """The part of a global batch that is this rank's.

    Attributes:
        rows: Number of this rank's rows; 0 where the rank has got a row that does not count.
        total: Number of rows of the global batch.
        replicas: Number of ranks that share it.
        mark: A checksum of the order of the rows, 0 where ranks may differ.
    """

    rows: int
    total: int
    replicas: int
    mark: int = 0

    @property
    def is_even(self) -> bool:
        """Local. Whether all ranks have equally many rows; the same answer on every rank."""
        return self.total % self.replicas == 0 and self.total > 0

    @property
    def weight(self) -> float:
        """Local. The factor by which the mean over this rank's rows counts in the mean over the ranks."""
        return self.replicas * self.rows / self.total if self.total else 0.0

    def tag(self, batch: Any) -> None:
        """Local. Note this share on the tensors of a batch."""
        for tensor in tensors_in(batch):
            setattr(tensor, _TAG, self)


class BatchLog:
    """The batches that the loaders of a strategy have returned.

    Attributes:
        handed: The number of batches.
        handed_unevenly: The number of those of which ranks have unequal numbers of rows.
    """

    def __init__(self) -> None:
        self._last: RowShare | None = None
        self._current: RowShare | None = None
        self.handed = self.handed_unevenly = 0

    def note(self, share: RowShare, batch: Any) -> None:
        """Local. Note a batch that a loader is about to return."""
        share.tag(batch)
        self._last = share
        self.handed += 1
        self.handed_unevenly += not share.is_even

    @property
    def current(self) -> RowShare | None:
        """Local. The share that a distributed model got last."""
        return self._current

    def share_of(self, arguments: Any) -> RowShare | None:
        """Local. The share to which the arguments of a model belong, None where no loader is distributed.

        It is that of the tensors. Tensors that were made from those of a batch have none: then it is that of the last
        batch, if it has as many rows.

        Raises:
            RuntimeError: No argument has as many rows as the last batch, in which ranks have unequal numbers of rows.
        """
        self._current = self._find(list(tensors_in(arguments)))
        return self._current

    def _find(self, tensors: list[torch.Tensor]) -> RowShare | None:
        for tensor in tensors:
            share: RowShare | None = getattr(tensor, _TAG, None)
            if share is not None:
                return share
        last = self._last
        if last is None or last.is_even or not tensors:
            return last
        rows = max(1, last.rows)
        if all(tensor.dim() == 0 or tensor.shape[0] != rows for tensor in tensors):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4])
            raise RuntimeError(
                f"the ranks have unequal numbers of rows of the last batch, so the model must know whose rows it gets: "
                f"expected an argument with {rows} rows, as the last batch of the loader has, got shapes {shapes}. "
                "Call the model with the tensors of the last batch, or make all batches even: "
                "DataLoader(..., drop_last=True), and a batch size that the number of ranks divides"
            )
        return last


_logs: weakref.WeakKeyDictionary[Strategy, BatchLog] = weakref.WeakKeyDictionary()


def log_of(strategy: Strategy) -> BatchLog:
    """Local. The batches that the loaders of this strategy have returned."""
    return _logs.setdefault(strategy, BatchLog())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Local. The tensors in a nest of lists, tuples, mappings and data classes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def map_tensors(value: Any, function: Any) -> Any:
    """Local. The same nest with each tensor replaced by what `function` gives for it; data classes stay."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: map_tensors(one, function) for name, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(one, function) for one in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(one, function) for one in value)
    return value
