"""The backend: an algorithm to move and combine flat arrays. The front checks and converts before it calls a backend.

A new backend is one module in `comm/backends/` with a class that keeps this Protocol, a member of
`CommunicationImplementation`, and one row in `comm/choice/table.py`; the contract tests then run over it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import Resource
from mpidist.options import ReduceOp


class Backend(Resource, Protocol):
    """Moves and combines arrays that are flat, contiguous and of a native dtype.

    All ranks make the same calls in the same order, with arrays of the same size and dtype, or of sizes that all ranks
    know. A backend checks nothing: the front has done so. Backends may be composed: those of AUTO, NODE and STAGED
    and under `reproducible` call other backends, and close them.

    Attributes:
        communicator: The ranks.
        combines_halves: Whether the backend combines float16 and bfloat16, and booleans under MIN and MAX, as they are,
            with sums of halves added in float32. Otherwise the front converts them to float32 and uint8.
        wraps_integers: Whether SUM and PROD of integers are left to the backend, where they may wrap: a user's own
            algorithm may be another operation. Otherwise the front lets none wrap; see `front.integer_sums`.
        takes_device_arrays: Whether the backend takes CuPy arrays as well as NumPy's.
        divides_means: Whether the backend divides by the number of ranks under MEAN. Otherwise MEAN is a SUM here, and
            the front divides.
        compares_calls: Whether the backend lets the ranks of a node compare their calls, by the barrier of the node or
            by `CallOrder.look_ahead`. Otherwise the front does.
        makes_calls: Whether it may make further calls over the same ranks, since it runs code of the program.
    """

    communicator: Communicator
    combines_halves: bool = False
    wraps_integers: bool = False
    takes_device_arrays: bool = False
    divides_means: bool = False
    compares_calls: bool = False
    makes_calls: bool = False

    def _is_whole(self) -> bool:
        return self.communicator.is_whole()

    @abstractmethod
    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. Combine `source` of all ranks into every rank's `total`, which may be `source` itself."""

    def open_small(
        self, op: ReduceOp, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> Callable[[AnyArray], AnyArray] | None:
        """Local, or Collective as `all_reduce` is. A collective function that combines small arrays of one shape.

        It gives new arrays, equal to those of `all_reduce` bit by bit. It is kept and called again and again: what does
        not change between its calls is looked up once.

        Returns:
            The function, or None if `all_reduce` is no slower. Ranks that call one and ranks that call the other meet.
        """
        del op, dtype, shape  # This default looks nothing up.
        return None

    @abstractmethod
    def reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        """Collective. Combine `source` of all ranks into rank `root`'s `total`; elsewhere `total` stays as it is."""

    @abstractmethod
    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. Combine `source` of all ranks; `mine` takes this rank's slice of `counts[rank]` elements."""

    @abstractmethod
    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. Copy rank `root`'s `data` into every other rank's."""

    @abstractmethod
    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        """Collective. Join `mine` of all ranks (bytes, `counts[rank]` of them) in `gathered`, in the order of ranks."""

    @abstractmethod
    def all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        """Collective. Send slice r of `sent` to rank r, and receive slice r of `got` from it. All counts are bytes."""

    def allocate(self, byte_count: int) -> AnyArray | None:
        """Collective. Allocate zeros on each rank, uint8, where this backend combines arrays with the fewest copies.

        Returns:
            The array. None on every rank if this backend prefers no place.

        Raises:
            OSError: There is no room; on every rank.
        """
        del byte_count  # This default prefers no place.
        return None

    def all_reduce_allocated(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> bool:
        """Collective. Do as `all_reduce` if the ranks' arrays are the same piece of arrays from `allocate`.

        Returns:
            Whether it was done; the same on every rank.
        """
        del source, total, op  # This default has allocated nothing.
        return False

    def mean_allocated(self, array: AnyArray) -> bool:
        """Collective. Replace arrays by their mean, divided, if they are the same piece of arrays from `allocate`.

        Returns:
            Whether it was done; the same on every rank.
        """
        del array  # This default has allocated nothing.
        return False
