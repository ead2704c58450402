"""`import mpidist.keras as keras` has every public name of Keras, and the private names that we use are there."""

from __future__ import annotations

import importlib
import os
import types
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip("keras", reason="Keras and PyTorch are in the extra 'keras'")
pytest.importorskip("torch")

import keras

import mpidist.keras as ours
from mpidist.keras import private

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_every_public_name_is_there() -> None:
    for name in dir(keras):
        if name.startswith("_"):
            continue
        theirs, mine = getattr(keras, name), getattr(ours, name)
        if isinstance(theirs, types.ModuleType) and theirs.__name__.startswith("keras."):
            assert set(dir(theirs)) <= set(dir(mine)), name
            assert importlib.import_module(f"mpidist.keras.{name}") is mine
        else:
            # A class that is made in scopes keeps its documentation.
            assert mine is theirs or mine.__doc__ == theirs.__doc__, name
    with pytest.raises(AttributeError, match="neither has keras"):
        _ = ours.Sequentiel


def test_classes_are_asked_and_derived_from_like_keras_own() -> None:
    class Net(ours.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.last = ours.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.last(inputs)

    class Named(ours.Model):  # type: ignore[misc]
        """A subclass that is made of tensors."""

    inputs = ours.Input((2,))
    functional = ours.Model(inputs, ours.layers.Dense(1)(inputs))
    named = Named(inputs, ours.layers.Dense(1)(inputs))
    sequential = ours.Sequential([inputs, ours.layers.Dense(1)])
    for model in (Net(), functional, named, sequential):
        assert isinstance(model, ours.Model)
        assert isinstance(model, keras.Model)
        assert model(np.ones((3, 2), "float32")).shape == (3, 1)
    assert isinstance(sequential, ours.Sequential)
    assert not isinstance(functional, ours.Sequential)
    assert issubclass(Net, ours.Model)
    optimizer = ours.optimizers.SGD.from_config(ours.optimizers.SGD(0.25).get_config())
    assert isinstance(optimizer, ours.optimizers.Optimizer)
    assert ours.utils.experimental.DatasetCreator is ours.DatasetCreator


def test_private_names_mean_what_they_did() -> None:
    x, y = np.arange(10.0).reshape(5, 2), np.arange(5)
    adapter = private.keras_adapter(x, y=y, batch_size=2, shuffle=False)
    assert private.is_array_adapter(adapter)
    arrays, rows, size = private.arrays_of(adapter)
    assert (rows, size) == (5, 2)
    np.testing.assert_array_equal(private.rows_of_sliceable(arrays[1], np.array([3, 0])), [3, 0])
    (training, *_), (validation, *_) = private.split_for_validation((x, y, None), 0.4)
    assert (len(training), len(validation)) == (3, 2)

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert private.get_initial_epoch(model) is None
    private.set_initial_epoch(model, 3)
    assert private.get_initial_epoch(model) == 3
    assert model.fit(x, y, epochs=3, verbose=0).history == {}
    private.set_initial_epoch(model, None)
    model.fit(x, y, verbose=0)
    assert [type(loss).__name__ for loss in private.resolved_losses(model)] == ["LossFunctionWrapper"]
    assert {layer.name for layer in private.layers_of(model)} >= {model.name, model.layers[0].name}

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return x + index, y

    batch = private.first_py_batch(private.keras_adapter(Batches(workers=2), shuffle=False))
    np.testing.assert_array_equal(batch[0], x)
    assert private.first_py_batch(adapter) is None
    embedded = keras.layers.Embedding(3, 2, mask_zero=True)(np.array([[0, 1]]))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(private.mask_of(embedded)), [[False, True]])
    table = keras.layers.Embedding(3, 2)
    unbuilt = keras.Sequential([table])
    unbuilt.compile("sgd")
    private.build_with(unbuilt, np.zeros((1, 2), "int32"))
    assert table.built
    variable = table._embeddings
    private.untrack(table, variable)
    with private.unlocked(table):
        table.added = table.add_weight(shape=())
    assert table.weights == [table.added]
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    assert private.schedule_of(keras.optimizers.SGD(schedule)) is schedule
    optimizer = keras.optimizers.SGD(0.1)
    assert private.schedule_of(optimizer) is None
    assert not private.excluded_from_decay(optimizer)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    assert private.excluded_from_decay(optimizer)
    assert [private.validates(model, epoch, 2) for epoch in range(2)] == [False, True]
    assert private.is_symbolic(keras.Input((2,)))
    assert not private.is_symbolic(embedded)
