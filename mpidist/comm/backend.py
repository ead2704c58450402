"""The backend: one way to move and combine flat arrays. The front checks and converts before it calls one.

A new backend is one module in `comm/backends/` with a class that keeps this Protocol, and one line in the table of
`choice/selection.py`; the contract tests of `mpidist.testing.contract` run over it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

from mpidist.arrays import AnyArray
from mpidist.comm.communicator import Communicator
from mpidist.options import ReduceOp


class Backend(Protocol):
    """Moves and combines arrays that are flat, contiguous and of a native dtype.

    All ranks make the same calls in the same order, with arrays of the same size and dtype, or of sizes that all ranks
    know. Nothing is checked here: the front has done it. Backends may be composed: AUTO, NODE, TREE and STAGED call
    other backends.

    Attributes:
        communicator: The ranks.
        combines_halves: float16, bfloat16 and booleans under MIN and MAX are combined as they are, with sums of halves
            in float32. Otherwise the front converts them to float32 and uint8.
        takes_device_arrays: CuPy arrays are taken as well as NumPy's.
        divides_means: MEAN is divided by the number of ranks here. Otherwise MEAN means SUM, and the front divides.
    """

    communicator: Communicator
    combines_halves: bool = False
    takes_device_arrays: bool = False
    divides_means: bool = False

    @abstractmethod
    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. Combine `source` of all ranks into every rank's `total`, which may be `source` itself."""

    @abstractmethod
    def reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        """Collective. Combine `source` of all ranks into rank `root`'s `total`; elsewhere `total` does not count."""

    @abstractmethod
    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. Combine `source` of all ranks; `mine` takes this rank's part, `counts[rank]` elements."""

    @abstractmethod
    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. Fill `data` with rank `root`'s."""

    @abstractmethod
    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        """Collective. Put `mine` of all ranks (bytes, `counts` of each) one after another into `gathered`."""

    @abstractmethod
    def all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        """Collective. Send bytes piece by piece to the ranks and receive a piece from each, in the order of ranks."""

    def allocate(self, byte_count: int) -> AnyArray | None:
        """Collective. Zeros on each rank, uint8, where this backend combines arrays with the fewest copies.

        Returns:
            The array, or None on every rank where no place is better than any other.

        Raises:
            OSError: There is no room, on every rank.
        """
        del byte_count  # only some backends have such a place
        return None

    def all_reduce_allocated(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> bool:
        """Collective. As `all_reduce`, but only if the ranks' arrays are the same piece of what `allocate` returned.

        Returns:
            Whether it was done; the same on every rank.
        """
        del source, total, op  # this default has allocated nothing
        return False
