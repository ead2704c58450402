"""Input: an adapter through which Keras reads this replica's rows of each global batch, with their number."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from mpidist.keras.binding import ModelBinding
from mpidist.keras.private import DataAdapter, arrays_of, first_py_batch, rows_of_sliceable
from mpidist.keras.step import wrap
from mpidist.options import ReduceOp


def leaves_of(batch: Any) -> list[Any]:
    """Local. The arrays of a batch."""
    return [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]


def map_batch(function: Any, batch: Any) -> Any:
    """Local. A batch with a function applied to each array."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), batch)


def count_rows(batch: Any) -> int:
    """Local. The number of rows of a batch.

    Raises:
        ValueError: There is no array in it, or the arrays have different numbers.
    """
    counts = {int(leaf.shape[0]) if len(leaf.shape) else -1 for leaf in leaves_of(batch)}
    if len(counts) != 1 or -1 in counts:
        raise ValueError(
            "expected arrays with the same number of rows in a batch, got shapes "
            f"{[tuple(leaf.shape) for leaf in leaves_of(batch)]}"
        )
    return counts.pop()


def cut(binding: ModelBinding, batch: Any) -> tuple[int, Any]:
    """Local. This replica's rows of a global batch, and their number; with number 0 one row that counts nothing."""
    count = count_rows(batch)
    mine = binding.extended.rows(count)
    rows = mine.stop - mine.start
    taken = mine if rows else slice(0, 1)
    return rows, map_batch(lambda leaf: leaf[taken], batch)


class RowsAdapter(DataAdapter):  # type: ignore[misc]
    """Collective. The input that `fit`, `evaluate` and `predict` of a distributed model read.

    Args:
        binding: The binding of the model.

    Attributes:
        counts: The rows of each batch that was read in the last pass.
    """

    def __init__(self, binding: ModelBinding) -> None:
        super().__init__()
        self.binding = binding
        self.counts: list[int] = []
        self._number: int | None = None
        self._pass = -1

    def read(self) -> Iterator[tuple[int, Any]]:
        """Collective. A pass: for each batch the number of this replica's rows, and the rows as NumPy arrays."""
        raise NotImplementedError

    def first(self) -> Any:
        """Collective. Read a batch for its shapes; the next pass still contains it."""
        for _, batch in self.read():
            return batch
        raise ValueError("expected at least one batch, got an input without any")

    def _noted(self) -> Iterator[tuple[int, Any]]:
        # A list of its own for each pass: a pass that was given up may be read on.
        self.counts = counts = []
        self._pass += 1
        for rows, batch in self.read():
            counts.append(rows)
            self._note(len(counts))
            yield rows, batch

    def _note(self, position: int) -> None:
        """Collective at the first batch, else Local. Let ranks that read another batch raise in their next call."""
        extended = self.binding.extended
        if self._number is None:
            self._number = extended.number_dataset()
        extended.note_batch(self._number, self._pass, position)

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Collective. A pass of wrapped batches."""
        return (wrap(np.int32(rows), batch) for rows, batch in self._noted())

    def get_jax_iterator(self) -> Iterator[Any]:
        """Collective. A pass of wrapped batches."""
        return self.get_numpy_iterator()

    def get_torch_dataloader(self) -> Iterable[Any]:
        """Collective. A pass of wrapped batches."""
        return (wrap(rows, map_batch(keras.ops.convert_to_tensor, batch)) for rows, batch in self._noted())

    @property
    def num_batches(self) -> int | None:
        """Local. The number of batches, None if unknown."""
        raise NotImplementedError

    @property
    def batch_size(self) -> int | None:
        """Local. The global batch size, None if unknown."""
        return None

    @property
    def has_partial_batch(self) -> bool:
        """Local. Whether the last batch may be smaller."""
        return True

    @property
    def partial_batch_size(self) -> int | None:
        """Local. Its size, None if unknown."""
        return None


class ArrayRows(RowsAdapter):
    """Arrays in memory. They are shuffled in an order that the seed and the pass give, which is the same on all ranks.

    Args:
        binding: The binding of the model.
        adapter: Keras's adapter of the arrays.
        shuffle: The argument of `fit`.
        seed: The seed of the order, the same on all ranks.
    """

    def __init__(self, binding: ModelBinding, adapter: Any, *, shuffle: bool | str, seed: int) -> None:
        super().__init__(binding)
        self._arrays, self._count, self._size = arrays_of(adapter)
        self._shuffle, self._seed, self._passes = shuffle, seed, 0

    def signature(self) -> Any:
        """Local. The facts that must be the same on all ranks."""
        return self._count, self._size, str(keras.tree.map_structure(lambda _: None, self._arrays))

    def _take(self, indices: Any) -> Any:
        return keras.tree.map_structure(
            lambda one: rows_of_sliceable(one, indices), self._arrays, none_is_leaf=False
        )

    def read(self) -> Iterator[tuple[int, Any]]:
        """Local. A pass."""
        random = np.random.default_rng((self._seed, self._passes))
        self._passes += 1
        order = random.permutation(self._count) if self._shuffle and self._shuffle != "batch" else None
        for start in range(0, self._count, self._size):
            stop = min(start + self._size, self._count)
            mine = self.binding.extended.rows(stop - start)
            rows = mine.stop - mine.start
            first, last = (start + mine.start, start + mine.stop) if rows else (start, start + 1)
            if self._shuffle == "batch":
                indices: Any = (start + random.permutation(stop - start))[first - start:last - start]
            else:
                indices = slice(first, last) if order is None else order[first:last]
            yield rows, self._take(indices)

    def first(self) -> Any:
        """Local. The first rows."""
        return self._take(slice(0, min(self._size, self._count)))

    @property
    def num_batches(self) -> int:
        """Local. The number of batches."""
        return -(-self._count // self._size)

    @property
    def batch_size(self) -> int:
        """Local. The global batch size."""
        return self._size


class CutRows(RowsAdapter):
    """Global batches of any input that Keras reads: `PyDataset`, `DataLoader`, generator.

    Every rank reads whole batches and keeps its rows. Before each batch the ranks compare its number of rows and a
    checksum of its targets, so that inputs of other lengths or in other orders raise instead of mixing rows.

    Args:
        binding: The binding of the model.
        adapter: Keras's adapter of the input.
    """

    def __init__(self, binding: ModelBinding, adapter: Any) -> None:
        super().__init__(binding)
        self._adapter = adapter

    def signature(self) -> Any:
        """Local. The facts that must be the same on all ranks."""
        return type(self._adapter).__name__, self._adapter.num_batches

    def read(self) -> Iterator[tuple[int, Any]]:
        """Collective. A pass."""
        batches, number = iter(self._adapter.get_numpy_iterator()), 0
        while True:
            batch, failed = None, None
            try:
                batch = next(batches, None)
                facts = _facts(batch)
            except Exception as error:
                failed, facts = error, (-2, 0)
            self._compare(facts, number, failed)
            if batch is None:
                return
            yield cut(self.binding, batch)
            number += 1

    def _compare(self, facts: tuple[int, int], number: int, failed: Exception | None) -> None:
        binding = self.binding
        if binding.size == 1:
            if failed is not None:
                raise failed
            return
        pairs = np.array([*facts, *(-fact for fact in facts)], np.int64)
        most = binding.extended.all_reduce(ReduceOp.MAX, pairs, name="a batch of the input")
        if most[0] == -most[2] and most[1] == -most[3] and failed is None:
            return

        def check() -> tuple[int, int]:
            if failed is not None:
                raise failed
            return facts

        names = {-1: "the end of the input", -2: "an error"}
        answers = binding.gather(facts)
        if all(other[0] != -2 for other in answers):
            what = [names.get(rows, f"{rows} rows, targets with the checksum {crc}") for rows, crc in answers]
            raise ValueError(
                f"batch {number} of the input: all ranks must read the same global batches, got "
                + "; ".join(f"{one} on rank {rank}" for rank, one in enumerate(what))
                + ". Give all ranks the same data in the same order, for instance by a seed: "
                "DataLoader(..., generator=torch.Generator().manual_seed(1))"
            )
        binding.together(f"batch {number} of the input", check)

    def first(self) -> Any:
        """Collective. The first batch."""
        batch = first_py_batch(self._adapter)
        return super().first() if batch is None else batch

    @property
    def num_batches(self) -> int | None:
        """Local. The number of batches, None if unknown."""
        count: int | None = self._adapter.num_batches
        return count

    def on_epoch_begin(self) -> None:
        """Local. Tell the input."""
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Local. Tell the input."""
        self._adapter.on_epoch_end()


def _facts(batch: Any) -> tuple[int, int]:
    if batch is None:
        return -1, 0
    # Inputs may be augmented at random on each rank; targets are not.
    told = batch[1] if isinstance(batch, (list, tuple)) and len(batch) > 1 and batch[1] is not None else batch
    crc = 0
    if told is not batch:
        for leaf in leaves_of(told):
            crc = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), crc)
    return count_rows(batch), crc


class DatasetRows(RowsAdapter):
    """A distributed dataset: its batches are this replica's rows already.

    Args:
        binding: The binding of the model.
        dataset: A `DistributedDataset`.
    """

    def __init__(self, binding: ModelBinding, dataset: Any) -> None:
        super().__init__(binding)
        self._dataset = dataset

    def _note(self, position: int) -> None:
        """Local. The dataset notes its batches itself, where ranks have equally many."""

    def signature(self) -> Any:
        """Local. The facts that must be the same on all ranks."""
        return "dataset", self.num_batches

    def read(self) -> Iterator[tuple[int, Any]]:
        """Collective. A pass."""
        for given in self._dataset:
            batch = map_batch(np.asarray, given)
            rows = count_rows(batch)
            yield rows, batch if rows else map_batch(lambda leaf: np.zeros((1, *leaf.shape[1:]), leaf.dtype), batch)

    @property
    def num_batches(self) -> int | None:
        """Local. The number of batches, None if unknown or without end."""
        count: int = self._dataset.cardinality
        return count if count >= 0 else None


class OrderedPyDataset(keras.utils.PyDataset):  # type: ignore[misc]
    """A `PyDataset` whose batches come in an order that is the same on all ranks, and another in each epoch.

    Keras draws the order from Python's random numbers, which differ between the ranks.

    Args:
        inner: The user's `PyDataset`.
        seed: The seed of the order, the same on all ranks.
    """

    def __init__(self, inner: Any, seed: int) -> None:
        super().__init__(inner.workers, inner.use_multiprocessing, inner.max_queue_size)
        self._inner, self._seed, self._epoch = inner, seed, 0
        self._order = self._draw()

    def _draw(self) -> Any:
        return np.random.default_rng((self._seed, self._epoch)).permutation(self._inner.num_batches)

    @property
    def num_batches(self) -> int:
        """Local. The number of batches."""
        count: int = self._inner.num_batches
        return count

    def __getitem__(self, index: int) -> Any:
        return self._inner[int(self._order[index])]

    def on_epoch_begin(self) -> None:
        """Local. Call the method of the user's `PyDataset`."""
        self._inner.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Local. Draw the order of the next epoch: workers of that one start before it begins."""
        self._inner.on_epoch_end()
        self._epoch += 1
        self._order = self._draw()
