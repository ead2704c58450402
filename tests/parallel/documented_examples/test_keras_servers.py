"""The blocks of `ParameterServerStrategy`'s reference that use Keras: `Model.fit`, and an embedding that is cut."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.serving.test_parameter_server import on_chief

os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip("keras", reason="Keras and PyTorch are in the extra 'keras'")
pytest.importorskip("torch")

import mpidist.keras as keras

pytestmark = [
    pytest.mark.mpi(min_size=3),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Skipping variable loading"),
]


def test_a_coordinator_with_model_fit(communicator: Communicator, mpi_tmp_path: Path) -> None:
    def program(strategy: ParameterServerStrategy, _: ClusterCoordinator) -> None:
        # A dataset function takes a `input_context` and returns a `Dataset`
        def dataset_fn(input_context: mpidist.InputContext) -> mpidist.data.Dataset:
            dataset = mpidist.data.Dataset.from_tensors((np.ones(1, "float32"), np.ones(1, "float32")))
            return dataset.repeat().shard(
                input_context.num_input_pipelines, input_context.input_pipeline_id).batch(10).prefetch(2)

        # With `Model.fit`, a `DatasetCreator` needs to be used.
        input = keras.utils.experimental.DatasetCreator(dataset_fn=dataset_fn)  # noqa: A001 - the document's

        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])  # Make sure the `Model` is created within scope.
        model.compile(optimizer="rmsprop", loss="mse", steps_per_execution=2)

        # Optional callbacks to checkpoint the model, back up the progress, etc.
        callbacks = [keras.callbacks.ModelCheckpoint(str(mpi_tmp_path / "{epoch}.keras"))]

        # `steps_per_epoch` is required with `ParameterServerStrategy`.
        history = model.fit(input, epochs=2, steps_per_epoch=10, callbacks=callbacks, verbose=0)
        assert history.history["loss"][1] < history.history["loss"][0]
        loaded: Any = keras.models.load_model(mpi_tmp_path / "2.keras")
        np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])

    on_chief(communicator, program)


def test_a_partitioner_of_an_embedding(communicator: Communicator) -> None:
    # Partition the embedding layer into 2 shards.
    variable_partitioner = (
        mpidist.experimental.partitioners.MinSizePartitioner(
            min_shard_bytes=(256 << 10),
            max_shards=2))

    def program(strategy: ParameterServerStrategy, _: ClusterCoordinator) -> None:
        with strategy.scope():
            embedding = keras.layers.Embedding(input_dim=1024, output_dim=1024)
        variables: Any = embedding.embeddings.variables
        assert len(variables) == 2
        assert isinstance(variables[0], mpidist.Variable)
        assert isinstance(variables[1], mpidist.Variable)
        assert [one.shape for one in embedding.embeddings.variables] == [(512, 1024), (512, 1024)]

    options = mpidist.ServerOptions(heap_bytes=1 << 24)
    on_chief(communicator, program, options, communicator.size - 2, partitioner=variable_partitioner)
