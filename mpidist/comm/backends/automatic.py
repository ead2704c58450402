"""The automatic collective: each call goes by the backend that is best for its size and its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.communicator import Communicator
from mpidist.comm.front.front import ArrayCollective
from mpidist.options import CommunicationOptions, ReduceOp


class AutomaticCollective(ArrayCollective):
    """Small arrays by one backend, large ones by another, those in GPU memory by a third.

    Args:
        communicator: The ranks.
        options: Of the communication.
        small: For arrays below `limit` bytes.
        open_large: Makes the backend for the others at the first one; every rank is there. Collective.
        open_device: Makes that for CuPy arrays, likewise.
        limit: In bytes, as seen by this rank's array; the same on every rank.
    """

    takes_device_arrays = True

    def __init__(
        self,
        communicator: Communicator,
        options: CommunicationOptions,
        small: ArrayCollective,
        open_large: Callable[[], ArrayCollective],
        open_device: Callable[[], ArrayCollective],
        limit: int,
    ) -> None:
        super().__init__(communicator, options)
        self.limit = limit
        self._small = small
        self._opened: dict[str, ArrayCollective] = {}
        self._open = {"large": open_large, "device": open_device}
        # Bound once: what a small all-reduce costs is mostly Python.
        self._small_all_reduce = small._all_reduce
        self._large_all_reduce: Callable[[AnyArray, AnyArray, ReduceOp], None] | None = None
        self._all_reduce_shared: Callable[[AnyArray, AnyArray, ReduceOp], bool] | None = None

    def backend(self, array: AnyArray, byte_count: int) -> ArrayCollective:
        """Collective at the first large array and at the first in GPU memory, else Local. What a call goes by.

        Args:
            array: This rank's.
            byte_count: What decides, the same on every rank.
        """
        is_device = arrays.is_cupy(array)
        if byte_count < self.limit and not is_device:
            return self._small
        kind = "device" if is_device else "large"
        if kind not in self._opened:
            self._opened[kind] = self._open[kind]()
            if kind == "large":
                self._large_all_reduce = self._opened[kind]._all_reduce
        return self._opened[kind]

    def allocate(self, shape: Sequence[int], dtype: Any = np.float32) -> AnyArray:
        """Collective. See `ArrayCollective.allocate`."""
        large = self.backend(np.empty(0), self.limit)
        self._all_reduce_shared = large.all_reduce_shared
        return large.allocate(shape, dtype)

    def _all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        if type(source) is np.ndarray:
            if source.nbytes < self.limit:
                # Also where any other array had better go by MPI.
                if self._all_reduce_shared is None or not self._all_reduce_shared(source, total, op):
                    self._small_all_reduce(source, total, op)
                return
            if self._large_all_reduce is not None:
                self._large_all_reduce(source, total, op)
                return
        self.backend(source, source.nbytes)._all_reduce(source, total, op)

    def _reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        self.backend(source, source.nbytes)._reduce(source, total, op, root)

    def _reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        self.backend(source, source.nbytes)._reduce_scatter(source, mine, counts, op)

    def _broadcast(self, data: AnyArray, root: int) -> None:
        self.backend(data, data.nbytes)._broadcast(data, root)

    def _all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        self.backend(gathered, gathered.nbytes)._all_gather(mine, gathered, counts)

    def _all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        # How much goes differs from rank to rank: size cannot decide.
        self.backend(sent, 0)._all_to_all(sent, sent_counts, got, got_counts)

    def __repr__(self) -> str:
        backends = {f"below {self.limit} bytes": self._small, **self._opened}
        listed = ", ".join(f"{when}: {type(backend).__name__}" for when, backend in backends.items())
        return f"AutomaticCollective({self.communicator!r}, {listed})"
