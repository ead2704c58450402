"""Names of Keras that are not public and that the adapter needs; a unit test compares each of them with Keras.

Keras has no public name for: the adapter that `fit` reads its input through, the losses that `compile` has resolved,
the layers of a nested model, the mask of a tensor, and the epoch at which a restored training continues.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from keras.src import backend as _backend
from keras.src.losses.loss import squeeze_or_expand_to_same_rank as _to_same_rank
from keras.src.optimizers.schedules.learning_rate_schedule import LearningRateSchedule as _Schedule
from keras.src.trainers.compile_utils import CompileLoss as CompileLoss
from keras.src.trainers.data_adapters import array_slicing as _slicing
from keras.src.trainers.data_adapters import get_data_adapter as _get_adapter
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter as _ArrayAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter as _PyDatasetAdapter

StatelessScope = _backend.StatelessScope


def keras_adapter(x: Any, **arguments: Any) -> Any:
    """Local. Keras's own adapter of an input, which raises Keras's own errors."""
    return _get_adapter(x, **arguments)


def is_array_adapter(adapter: Any) -> bool:
    """Local. Whether an adapter reads arrays in memory."""
    return isinstance(adapter, _ArrayAdapter)


def arrays_of(adapter: Any) -> tuple[Any, int, int]:
    """Local. The arrays of an adapter of arrays, as things that can be indexed; their rows; the batch size."""
    sliceable = _slicing.convert_to_sliceable(adapter._inputs, target_backend="numpy")
    return sliceable, adapter._num_samples, adapter._batch_size


def split_for_validation(arrays: tuple[Any, Any, Any], fraction: float) -> tuple[Any, Any]:
    """Local. `(x, y, sample_weight)` cut in two as `fit(validation_split=fraction)` cuts it."""
    training, validation = _slicing.train_validation_split(arrays, validation_split=fraction)
    return training, validation


def rows_of_sliceable(sliceable: Any, indices: Any) -> Any:
    """Local. Some rows of what `arrays_of` gave, as NumPy arrays."""
    return sliceable.convert_to_numpy(sliceable[indices])


def first_py_batch(adapter: Any) -> Any:
    """Local. The first batch of a `PyDataset`, without its workers; None for other inputs.

    Read through the workers it would stay behind in their queue, and the next epoch would begin with the second batch.
    """
    if isinstance(adapter, _PyDatasetAdapter):
        return adapter._standardize_batch(adapter.py_dataset[0])
    return None


def mask_of(tensor: Any) -> Any:
    """Local. The mask that layers or losses have attached to a tensor, or None."""
    return _backend.get_keras_mask(tensor)


def to_same_rank(first: Any, second: Any) -> tuple[Any, Any]:
    """Local. Two tensors with the last dimension of one added or removed, as Keras does before it multiplies them."""
    first, second = _to_same_rank(first, second)
    return first, second


def is_symbolic(tensor: Any) -> bool:
    """Local. Whether a tensor has a shape only."""
    return isinstance(tensor, _backend.KerasTensor) or getattr(getattr(tensor, "device", None), "type", "") == "meta"


def layers_of(model: Any) -> list[Any]:
    """Local. The model and all layers in it, at any depth."""
    return list(model._flatten_layers())


def resolved_losses(model: Any) -> Iterator[Any]:
    """Local. The losses that a compiled model has made of the names and functions given to `compile`."""
    compiled = model._compile_loss
    for entry in (compiled._flat_losses if compiled is not None else None) or ():
        yield entry.loss


def get_initial_epoch(model: Any) -> int | None:
    """Local. The epoch at which a callback has told the model to begin."""
    epoch: int | None = model._initial_epoch
    return epoch


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Local. Tell the model at which epoch to begin."""
    model._initial_epoch = epoch


def build_with(model: Any, batch: Any) -> None:
    """Local. Build a model, its losses and its metrics from a batch, of which shapes and dtypes count."""
    model._symbolic_build(data_batch=batch)


@contextmanager
def unlocked(layer: Any) -> Iterator[None]:
    """Local. Inside, a layer that is built may get variables."""
    tracker = layer._tracker
    was_locked = tracker.locked
    tracker.unlock()
    try:
        yield
    finally:
        if was_locked:
            tracker.lock()


def untrack(layer: Any, variable: Any) -> None:
    """Local. Take a variable from a layer."""
    layer._untrack_variable(variable)


def schedule_of(optimizer: Any) -> Any:
    """Local. The schedule of an optimizer's learning rate, None if it has a number."""
    given = optimizer._learning_rate
    return given if isinstance(given, _Schedule) else None


def excluded_from_decay(optimizer: Any) -> bool:
    """Local. Whether some variables are excluded from the weight decay of an optimizer."""
    # Set by the method that excludes.
    names = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
    return any(getattr(optimizer, name, None) for name in names)


def validates(model: Any, epoch: int, frequency: Any) -> bool:
    """Local. Whether an epoch is one after which `fit` evaluates."""
    return bool(model._should_eval(epoch, frequency))
