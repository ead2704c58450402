"""A rank that breaks off a step of Keras's `fit`, while the other one waits in MPI, ends the job with its traceback."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.launching import run_code

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout_seconds(240),
    pytest.mark.skipif(
        find_spec("keras") is None or find_spec("torch") is None or find_spec("jax") is None,
        reason="Keras, PyTorch and JAX are in the extras of their names",
    ),
]

PROGRAM = """
import os, signal
import numpy as np
import keras, mpidist, mpidist.keras
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.communicator.rank
torn = {"steps": 0}

def note(place):
    if rank == 1 and place == PLACE and torn["steps"] == 3:
        FAULT

class Counting(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        torn["steps"] += 1
        note("callback")

def loss(y_true, y_pred):
    note("loss")
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)

class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 500
    def __getitem__(self, number):
        note("input")
        return np.ones((8, 4), "float32"), np.ones((8, 1), "float32")

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
# Steps of the backend jax are traced once.
model.compile("sgd", loss, run_eagerly=keras.backend.backend() == "jax")
mpidist.keras.distribute(model)
model.fit(Batches(), verbose=0, callbacks=[Counting()])
"""


@pytest.mark.parametrize(("backend", "place"), [
    ("torch", "callback"), ("torch", "loss"), ("torch", "input"), ("jax", "callback"), ("jax", "loss"),
])
@pytest.mark.parametrize(("fault", "said"), [
    ("raise ValueError('rank 1 cannot continue')", "ValueError: rank 1 cannot continue"),
    ("os.kill(os.getpid(), signal.SIGINT)", "mpidist: interrupted"), ("os.kill(os.getpid(), signal.SIGTERM)", ""),
], ids=["raise", "interrupt", "terminate"])
def test_the_job_ends(tmp_path: Path, backend: str, place: str, fault: str, said: str) -> None:
    program = PROGRAM.replace("PLACE", repr(place)).replace("FAULT", fault)
    result, text = run_code(
        tmp_path, program, ranks=2, timeout_seconds=120, KERAS_BACKEND=backend, JAX_PLATFORMS="cpu"
    )
    assert result.returncode != 0
    assert said in text
