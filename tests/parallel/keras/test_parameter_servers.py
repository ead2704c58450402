"""`fit` under `ParameterServerStrategy`: the chief's model is trained by workers, whose updates count on servers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is in the extra 'keras'")

import keras

import mpidist.keras
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = [
    pytest.mark.mpi(min_size=3),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Skipping variable loading"),
]

layers = keras.layers
DatasetCreator = mpidist.keras.utils.experimental.DatasetCreator
RANDOM = np.random.default_rng(3)
X = RANDOM.standard_normal((48, 4)).astype("float32")
IDS = RANDOM.integers(0, 9, (48, 3)).astype("int32")
Y = (X[:, 0] + 0.1 * IDS[:, 0] > 0.4).astype("int32")


def data(context: mpidist.InputContext) -> mpidist.data.Dataset:
    dataset = mpidist.data.Dataset.from_tensor_slices((((X, IDS)), Y))
    return dataset.shard(context.num_input_pipelines, context.input_pipeline_id).batch(8).repeat()


def compiled(model: Any) -> Any:
    model.compile(keras.optimizers.SGD(0.3), keras.losses.SparseCategoricalCrossentropy(True), metrics=["accuracy"])
    return model


def make_model() -> Any:
    """A table beside a dense layer, and two inputs."""
    keras.utils.set_random_seed(2)
    x, ids = keras.Input((4,)), keras.Input((3,), dtype="int32")
    found = layers.GlobalAveragePooling1D()(layers.Embedding(64, 4, name="table")(ids))
    both = layers.Concatenate()([layers.Dense(4, activation="tanh")(x), found])
    return compiled(keras.Model([x, ids], layers.Dense(2)(both)))


def test_workers_train_the_chiefs_model(communicator: Communicator) -> None:
    """With one worker the values are those of plain Keras; with several the loss falls."""
    servers = 1
    workers = communicator.size - 1 - servers

    def program(strategy: ParameterServerStrategy, _: ClusterCoordinator) -> None:
        plain, model = make_model(), make_model()
        mpidist.keras.distribute(model, strategy)
        history = model.fit(
            DatasetCreator(data), epochs=3, steps_per_epoch=12, verbose=0, validation_data=DatasetCreator(data),
            validation_steps=6,
        ).history
        assert history["loss"][0] > history["loss"][1] > history["loss"][2]
        assert history["val_loss"][2] < history["val_loss"][0]
        assert int(model.optimizer.iterations) == 36
        table = model.get_layer("table").embeddings
        assert [one.shape for one in table.variables] == [(32, 4), (32, 4)]
        if workers == 1:
            expected = plain.fit((X, IDS), Y, batch_size=8, epochs=6, shuffle=False, verbose=0).history
            np.testing.assert_allclose(history["loss"], np.reshape(expected["loss"], (3, 2)).mean(axis=1), rtol=1e-5)
            np.testing.assert_allclose(table.numpy(), plain.get_layer("table").get_weights()[0], atol=1e-6)
            dense = [one for one in plain.get_weights() if one.shape != (64, 4)]
            for mine, other in zip(model.get_weights(), dense, strict=True):
                np.testing.assert_allclose(mine, other, atol=1e-6)
        else:
            assert model.evaluate((X, IDS), Y, verbose=0, return_dict=True)["loss"] < history["loss"][0]

    on_chief(
        communicator, program, servers=servers,
        partitioner=mpidist.experimental.partitioners.MinSizePartitioner(min_shard_bytes=512, max_shards=2),
    )
