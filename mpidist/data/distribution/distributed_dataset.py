"""`DistributedDataset`: each rank's share of a dataset, with the same number of steps on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from mpidist.arguments import described
from mpidist.attributes import FixedAttributes
from mpidist.comm.group.agreement import together
from mpidist.comm.group.communicator import Communicator
from mpidist.data.dataset import Dataset
from mpidist.data.distribution.distributed_iterator import DistributedIterator, Numbered, Passes
from mpidist.data.distribution.share import FROM_DATASET, FROM_FUNCTION, RankShare, share_dataset, take_dataset
from mpidist.data.input_context import InputContext
from mpidist.data.items.groups import ALONE, GroupPlace
from mpidist.options import InputOptions


class DistributedDataset(FixedAttributes):
    """Collective. An iterable over the batches of a rank.

    Under the policy DATA, and under AUTO without files, rank r gets the r-th contiguous piece of every global batch.
    The sizes of pieces differ by at most one (10 rows on 4 ranks: 3, 3, 2, 2). Where a small batch has no row for a
    rank, the rank gets an empty batch with the same dtypes and other dimensions. Under FILE, and under AUTO with at
    least n files and nothing else, a rank reads its own files; under OFF it reads all data. Its batches then have 1/n
    of the global size. The docstring of `mpidist.data` has the whole table.

    Where lengths are known and equal, iterating does not communicate.

    Args:
        dataset: A dataset batched with the global batch size, the same on every rank. Elements of an iterable or a
            generator without `batch` are global batches if their arrays all have the same first dimension, as in TF.
        communicator: The ranks that share the dataset.
        options: The options of the input: a thread reads `experimental_per_replica_buffer_size` batches ahead. Without
            options the number is that of the dataset's `prefetch`; without that, it is 0 where reading is only a copy
            in host memory, else 1.
        presharded: Whether the dataset is this rank's own. It is then neither sharded nor compared between ranks.
        namespace: The module of the batches' arrays, `numpy` or `cupy`; see `mpidist.data.distribution.device`. With
            `experimental_fetch_to_device=False` batches are NumPy arrays.
        everyone: The ranks that take the same seeds. Default: those that share the dataset.
        group: The group of these ranks, if several groups go through the data at their own pace.

    Raises:
        TypeError: `dataset` is not a `Dataset`, or `options` are no `InputOptions`.
        ValueError: The dataset has no batches, or its auto-shard policy cannot be followed. While iterating: an element
            of an iterable has no rows.
        MismatchError: The ranks' datasets differ in length, batch size or seeds.
    """

    _is_settled = True

    def __init__(
        self,
        dataset: Dataset,
        communicator: Communicator,
        *,
        options: InputOptions | None = None,
        presharded: bool = False,
        namespace: Any = np,
        everyone: Communicator | None = None,
        group: GroupPlace = ALONE,
    ) -> None:
        if options is not None and not isinstance(options, InputOptions):
            raise TypeError(f"`options` must be mpidist.InputOptions or None, got {described(options)}")
        self._communicator = communicator
        self._share = share = (take_dataset if presharded else share_dataset)(
            dataset, communicator, communicator if everyone is None else everyone
        )
        # Ranks with datasets of their own share no position, nor do groups of them.
        place = dataclasses.replace(group, in_turn=group.in_turn and not presharded)
        self._numbered = Numbered(communicator.order.deal("dataset"), presharded, place)
        fetches = options is None or options.experimental_fetch_to_device is not False
        self._namespace = namespace if fetches else np
        self._depth = _prefetch_depth(share, options, is_copied=self._namespace is not np)
        self._passes = Passes()

    @property
    def element_spec(self) -> Any:
        """Local. The `ArraySpec`s of this rank's batches.

        It reads the first example, and calls the functions mapped over it, though it is a property, as in tf.data.
        """
        return self._share.pipeline.spec(is_whole=self._communicator.size == 1)

    @property
    def cardinality(self) -> int:
        """Local. The number of steps, `INFINITE` (-1) or `UNKNOWN` (-2); the same on every rank."""
        return self._share.steps

    def __iter__(self) -> DistributedIterator:
        """Local. Begin a pass. All ranks must begin and end their passes together.

        Ranks that share a dataset must take the same number of batches between two collective calls. If one rank takes
        one more, for instance to print it, the next collective call raises `MismatchError`.
        """
        number = self._passes.count
        self._passes.count += 1
        return DistributedIterator(
            self._share, self._communicator, number, self._depth, self._passes, self._namespace,
            self._numbered,
        )

    def __repr__(self) -> str:
        rank, size = self._communicator.rank, self._communicator.size
        return f"<mpidist.DistributedDataset of rank {rank} of {size}, cardinality={self.cardinality}>"


def distribute_datasets_from_function(
    dataset_fn: Callable[[InputContext], Dataset],
    communicator: Communicator,
    options: InputOptions | None = None,
    namespace: Any = np,
    *,
    everyone: Communicator | None = None,
    replica_count: int | None = None,
    group: GroupPlace = ALONE,
) -> DistributedDataset:
    """Collective. The dataset that `dataset_fn` makes for this rank, unchanged; the function batches and shards it.

    Args:
        dataset_fn: A function that is called once, with `InputContext(n, rank, replica_count)`. Lengths may differ
            between ranks: all ranks make as many steps as the longest dataset has, and a rank without data gets empty
            batches.
        communicator: The ranks that step together.
        options: See `DistributedDataset`.
        namespace: See `DistributedDataset`.
        everyone: See `DistributedDataset`.
        replica_count: The number of replicas. Default: that of the ranks.
        group: See `DistributedDataset`.

    Returns:
        An iterable of this rank's batches.

    Raises:
        TypeError: `dataset_fn` is not a function, or does not return a dataset.
        ValueError: Lengths differ and the datasets are not batched.
        Exception: The error of `dataset_fn` on any rank; on every rank.
    """
    input_context = InputContext(communicator.size, communicator.rank, replica_count or communicator.size)

    def call() -> Dataset:
        if not callable(dataset_fn):
            raise TypeError(
                f"{FROM_FUNCTION}: expected a function that makes a dataset of an InputContext, got "
                f"{described(dataset_fn)}. Give a dataset to {FROM_DATASET}"
            )
        return dataset_fn(input_context)

    dataset = together(communicator if everyone is None else everyone, f"{FROM_FUNCTION}: dataset_fn", call)
    return DistributedDataset(
        dataset, communicator, options=options, presharded=True, namespace=namespace, everyone=everyone, group=group
    )


def _prefetch_depth(share: RankShare, options: InputOptions | None, *, is_copied: bool) -> int:
    if options is not None:
        return options.experimental_per_replica_buffer_size
    if share.pipeline.prefetch is not None:
        return share.pipeline.prefetch
    return 0 if share.pipeline.is_cheap and not is_copied else 1
