"""`DistributedDataset`: each rank's piece of a dataset, for as many steps on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpidist.comm.agreement import together
from mpidist.comm.communicator import Communicator
from mpidist.data.dataset import Dataset
from mpidist.data.distribution.distributed_iterator import DistributedIterator
from mpidist.data.distribution.share import FROM_FUNCTION, Share, share_dataset, take_dataset
from mpidist.data.input_context import InputContext
from mpidist.options import InputOptions


class DistributedDataset:
    """What a rank iterates to get its batches.

    Under the policy DATA, and AUTO without files, rank r gets the r-th contiguous piece of every global batch; sizes
    differ by at most one (10 rows on 4 ranks: 3, 3, 2, 2), and a rank for which a small batch has no row gets an empty
    one, with dtypes and other dimensions kept. Under FILE, and AUTO with at least n files, a rank reads its files,
    under OFF all data, in batches of 1/n of the global size. The whole table is in `mpidist.data`.

    Collective. Where lengths are known and equal, iterating does not communicate.

    Args:
        dataset: Batched with the global batch size; the same on every rank.
        communicator: The ranks that share it.
        options: `experimental_per_replica_buffer_size` batches are read ahead in a thread. Without options that is
            what the dataset's `prefetch` says, else 1, or 0 where reading is only a copy in memory for NumPy's arrays.
        presharded: The dataset is this rank's own, and is neither cut nor compared with those of other ranks.
        namespace: The module whose arrays batches are: `numpy`, or `cupy`; see `mpidist.data.distribution.device`. With
            `experimental_fetch_to_device=False` they are NumPy's.

    Raises:
        TypeError: `dataset` is no dataset.
        ValueError: It has no batches, or zero rows, or its auto-shard policy cannot be followed.
        MismatchError: The ranks' datasets differ in length, batch size or seeds.
    """

    def __init__(
        self,
        dataset: Dataset,
        communicator: Communicator,
        *,
        options: InputOptions | None = None,
        presharded: bool = False,
        namespace: Any = np,
    ) -> None:
        self._communicator = communicator
        share = take_dataset(dataset, communicator) if presharded else share_dataset(dataset, communicator)
        self._share = share
        fetches = options is None or options.experimental_fetch_to_device is not False
        self._namespace = namespace if fetches else np
        self._depth = _prefetch_depth(share, options, is_copied=self._namespace is not np)
        self._iterations = 0

    @property
    def element_spec(self) -> Any:
        """Local. `ArraySpec`s of this rank's batches; reads the first example, and calls what is mapped over it."""
        return self._share.pipeline.spec(is_whole=self._communicator.size == 1)

    @property
    def cardinality(self) -> int:
        """Local. The number of steps, or `INFINITE` (-1), or `UNKNOWN` (-2); the same on every rank."""
        return self._share.steps

    def __iter__(self) -> DistributedIterator:
        """Local. A pass from the beginning; all ranks begin and end their passes together."""
        number = self._iterations
        self._iterations += 1
        return DistributedIterator(
            self._share, self._communicator, number, self._depth, self._set_iterations, self._namespace
        )

    def __repr__(self) -> str:
        rank, size = self._communicator.rank, self._communicator.size
        return f"<mpidist.DistributedDataset of rank {rank} of {size}, cardinality={self.cardinality}>"

    def _set_iterations(self, count: int) -> None:
        self._iterations = count


def distribute_datasets_from_function(
    dataset_fn: Callable[[InputContext], Dataset],
    communicator: Communicator,
    options: InputOptions | None = None,
    namespace: Any = np,
) -> DistributedDataset:
    """Collective. The dataset that `dataset_fn` makes for this rank, as it is: batching and sharding are its business.

    Args:
        dataset_fn: Called once, with `InputContext(n, rank, n)`. Lengths may differ between ranks: all make as many
            steps as the longest, with empty batches where a rank has none left.
        communicator: The ranks that step together.
        options: As for `DistributedDataset`.
        namespace: As for `DistributedDataset`.

    Returns:
        What each rank iterates.

    Raises:
        TypeError: `dataset_fn` gives no dataset.
        ValueError: No rank has any rows, or lengths differ and the datasets are not batched.
        Exception: What `dataset_fn` raised on any rank.
    """
    place = InputContext(communicator.size, communicator.rank, communicator.size)
    dataset = together(communicator, f"{FROM_FUNCTION}: dataset_fn", lambda: dataset_fn(place))
    return DistributedDataset(dataset, communicator, options=options, presharded=True, namespace=namespace)


def _prefetch_depth(share: Share, options: InputOptions | None, *, is_copied: bool) -> int:
    if options is not None:
        return options.experimental_per_replica_buffer_size
    return share.pipeline.prefetch or (0 if share.pipeline.is_cheap and not is_copied else 1)
