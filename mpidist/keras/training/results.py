"""Predictions of all replicas, in the order of the rows of the global batches."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from mpidist.keras.binding import ModelBinding


def in_order(binding: ModelBinding, own: Any, counts: list[int]) -> Any:
    """Collective. The outputs of all replicas.

    Args:
        binding: The binding of the model.
        own: This replica's outputs: arrays, batch after batch, one row for a batch without rows.
        counts: This replica's rows of each batch.

    Returns:
        NumPy arrays with the rows of batch 0 of replica 0, 1, …, then those of batch 1, …
    """
    everyone = binding.gather(counts)
    return keras.tree.map_structure(lambda array: _in_order(binding, np.asarray(array), counts, everyone), own)


def _in_order(binding: ModelBinding, array: Any, counts: list[int], everyone: list[list[int]]) -> Any:
    # Without the rows of ranks that had none.
    is_real = np.concatenate([np.full(max(count, 1), count > 0) for count in counts])
    gathered = np.asarray(binding.strategy.gather(np.ascontiguousarray(array[is_real]), axis=0))
    starts = np.concatenate([[0], np.cumsum([count for rank in everyone for count in rank])])
    batches = len(counts)
    order = [
        np.arange(starts[rank * batches + batch], starts[rank * batches + batch + 1])
        for batch in range(batches) for rank in range(len(everyone))
    ]
    return gathered[np.concatenate(order)]
