"""The automatic backend: it passes each call to the backend that is fastest for the array's size and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.backend import Backend
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import end_all
from mpidist.options import ReduceOp


class AutomaticBackend(Backend):
    """One backend for small arrays, one for large arrays, and one for arrays in GPU memory.

    Args:
        communicator: The ranks.
        small: The backend for arrays below `limit` bytes.
        open_large: A Collective function that makes the backend for larger arrays, when the first of them comes.
        open_device: A Collective function that makes the backend for CuPy arrays, when the first of them comes.
        limit: A size of one rank's array in bytes, the same on every rank.
    """

    takes_device_arrays = True
    compares_calls = True

    def __init__(
        self,
        communicator: Communicator,
        small: Backend,
        open_large: Callable[[], Backend],
        open_device: Callable[[], Backend],
        limit: int,
    ) -> None:
        self.communicator = communicator
        self.limit = limit
        self._small = small
        self._opened: dict[str, Backend] = {}
        self._open = {"large": open_large, "device": open_device}
        # Bound once: looking up attributes takes most of the time of a small all-reduce.
        self._small_all_reduce = small.all_reduce
        self._large_all_reduce: Callable[[AnyArray, AnyArray, ReduceOp], None] | None = None
        self._all_reduce_allocated: Callable[[AnyArray, AnyArray, ReduceOp], bool] | None = None
        self._mean_allocated: Callable[[AnyArray], bool] | None = None

    def backend(self, array: AnyArray, byte_count: int) -> Backend:
        """Collective at the first large array and at the first one in GPU memory, else Local. The backend for a call.

        Args:
            array: This rank's array, in host memory or in GPU memory.
            byte_count: The size that decides. It must be the same on every rank: ranks that chose different backends
                would wait for each other forever.
        """
        is_device = arrays.is_cupy(array)
        if byte_count < self.limit and not is_device:
            return self._small
        if is_device:
            self.communicator.order.show_call()
        kind = "device" if is_device else "large"
        if kind not in self._opened:
            self._opened[kind] = self._open[kind]()
            if kind == "large":
                self._large_all_reduce = self._opened[kind].all_reduce
        return self._opened[kind]

    def allocate(self, byte_count: int) -> AnyArray | None:
        """Collective. See `Backend.allocate`."""
        large = self.backend(np.empty(0), self.limit)
        self._all_reduce_allocated, self._mean_allocated = large.all_reduce_allocated, large.mean_allocated
        return large.allocate(byte_count)

    def mean_allocated(self, array: AnyArray) -> bool:
        """Collective. See `Backend.mean_allocated`."""
        return self._mean_allocated is not None and type(array) is np.ndarray and self._mean_allocated(array)

    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. See `Backend.all_reduce`."""
        if type(source) is np.ndarray:
            if source.nbytes < self.limit:
                # Allocated arrays are combined fastest in place, at any size.
                if self._all_reduce_allocated is None or not self._all_reduce_allocated(source, total, op):
                    self._small_all_reduce(source, total, op)
                return
            if self._large_all_reduce is not None:
                self._large_all_reduce(source, total, op)
                return
        self.backend(source, source.nbytes).all_reduce(source, total, op)

    def open_small(
        self, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> Callable[[AnyArray], AnyArray] | None:
        """Collective at the first large array, else Local. See `Backend.open_small`."""
        chosen = self.backend(np.empty(0), math.prod(shape) * dtype.itemsize)
        return chosen.open_small(op, dtype, shape)

    def reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        """Collective. See `Backend.reduce`."""
        self.backend(source, source.nbytes).reduce(source, total, op, root)

    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. See `Backend.reduce_scatter`."""
        self.backend(source, source.nbytes).reduce_scatter(source, mine, counts, op)

    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. See `Backend.broadcast`."""
        self.backend(data, data.nbytes).broadcast(data, root)

    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        """Collective. See `Backend.all_gather`."""
        self.backend(gathered, gathered.nbytes).all_gather(mine, gathered, counts)

    def all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        """Collective. See `Backend.all_to_all`."""
        # Ranks send different numbers of bytes, so the size cannot decide.
        self.backend(sent, 0).all_to_all(sent, sent_counts, got, got_counts)

    def _end(self, *, is_collective: bool) -> None:
        end_all((self._small, *self._opened.values()), is_collective=is_collective)

    def __repr__(self) -> str:
        backends = {f"below {self.limit} bytes": self._small, **self._opened}
        listed = ", ".join(f"{when}: {type(backend).__name__}" for when, backend in backends.items())
        return f"AutomaticBackend({self.communicator!r}, {listed})"
