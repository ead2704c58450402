"""The choice of the adapter that reads an input."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from mpidist.data.dataset import Dataset
from mpidist.data.distribution.distributed_dataset import DistributedDataset
from mpidist.keras.binding import ModelBinding
from mpidist.keras.input.creator import DatasetCreator
from mpidist.keras.input.rows import ArrayRows, CutRows, DatasetRows, OrderedPyDataset, RowsAdapter
from mpidist.keras.private import is_array_adapter, keras_adapter


def draw_seed(binding: ModelBinding) -> int:
    """Collective. A seed for the order of rows, drawn on the first rank from NumPy's global random numbers."""
    mine = int(np.random.randint(1 << 31))
    return int(binding.gather(mine)[0])


def choose_input(
    binding: ModelBinding, x: Any, y: Any = None, sample_weight: Any = None, **options: Any
) -> RowsAdapter:
    """Collective. The adapter of an input.

    Args:
        binding: The binding of the model.
        x: The argument of `fit`, also a dataset of mpidist or a `DatasetCreator`.
        y: The argument of `fit`.
        sample_weight: The argument of `fit`.
        options: `batch_size`, `steps_per_epoch`, `class_weight`, `shuffle`; and `seed`, which all ranks share.

    Raises:
        ValueError: Keras cannot read it, or the ranks have other inputs; on every rank.
    """
    if isinstance(x, RowsAdapter):
        return x
    defaults = {"batch_size": None, "steps_per_epoch": None, "class_weight": None, "shuffle": False, "seed": 0}
    options = {**defaults, **options}
    if isinstance(x, (Dataset, DistributedDataset, DatasetCreator)):
        binding.together("the input", lambda: _require_only(x, y, sample_weight, options), lambda _: type(x).__name__)
        if isinstance(x, DatasetCreator):
            x = binding.strategy.distribute_datasets_from_function(x.dataset_fn, x.input_options)
        elif isinstance(x, Dataset):
            x = binding.strategy.experimental_distribute_dataset(x)
        return DatasetRows(binding, x)
    made: RowsAdapter = binding.together(
        "the input", lambda: _choose(binding, x, y, sample_weight, options), lambda adapter: adapter.signature()
    )
    return made


def _require_only(x: Any, y: Any, sample_weight: Any, options: dict[str, Any]) -> None:
    given = {"y": y, "sample_weight": sample_weight, "class_weight": options["class_weight"]}
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise ValueError(
            f"expected no {' and '.join(f'`{name}`' for name in wrong)} beside a {type(x).__name__}. Let the dataset "
            "give (inputs, targets) or (inputs, targets, sample_weights)"
        )
    if isinstance(x, DatasetCreator) and options["steps_per_epoch"] is None:
        raise ValueError("a DatasetCreator needs `steps_per_epoch=` (or `steps=`): nothing says where its data ends")


def _choose(binding: ModelBinding, x: Any, y: Any, sample_weight: Any, options: dict[str, Any]) -> Any:
    shuffle, seed = options["shuffle"], options["seed"]
    if isinstance(x, keras.utils.PyDataset) and shuffle and x.num_batches is not None:
        x = OrderedPyDataset(x, seed)
    adapter = keras_adapter(
        x, y=y, sample_weight=sample_weight, batch_size=options["batch_size"], shuffle=False,
        steps_per_epoch=options["steps_per_epoch"], class_weight=options["class_weight"],
    )
    if is_array_adapter(adapter):
        return ArrayRows(binding, adapter, shuffle=shuffle, seed=seed)
    return CutRows(binding, adapter)
