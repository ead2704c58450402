"""Keras models under parameter servers as programs: both backends, and the death of a worker."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.amounts import turns
from tests.helpers.launching import run_program
from tests.helpers.waiting import until_exists

pytestmark = [
    pytest.mark.timeout_seconds(280),
    pytest.mark.skipif(
        find_spec("keras") is None or find_spec("torch") is None or find_spec("jax") is None,
        reason="Keras, PyTorch and JAX are in the extras of their names",
    ),
]

ROOT = Path(__file__).resolve().parents[3]
# Nothing here computes for long.
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

DEATH = """
import os, sys, time
import numpy as np
import mpidist
import mpidist.keras as keras
from mpidist.coordinator import experimental_get_current_worker_index

# Workers have imported Keras when they come here, where they serve.
resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=1)
strategy = mpidist.ParameterServerStrategy(resolver, options=mpidist.ServerOptions(heap_bytes=1 << 22))
x = np.random.default_rng(0).standard_normal((64, 4)).astype("float32")
y = x[:, :1] * 2
folder = sys.argv[1]


class Scaled(keras.layers.Layer):
    def call(self, inputs):
        return inputs * 2


def rows(context):
    def note(a, b):
        # The second worker, in its third batch, waits for the signal that ends it.
        note.calls += 1
        if context.input_pipeline_id == 1 and note.calls == 3:
            with open(folder + "/pid.new", "w") as file:
                file.write(str(os.getpid()))
            os.rename(folder + "/pid.new", folder + "/pid")
            while True:
                time.sleep(0.01)  # simulates work: that of a batch, in which the signal comes
        return a, b

    note.calls = 0
    return mpidist.data.Dataset.from_tensor_slices((x, y)).batch(16).repeat().map(note)


with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), Scaled(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
history = model.fit(
    keras.utils.experimental.DatasetCreator(rows), epochs=3, steps_per_epoch=8, verbose=0
).history
losses = history["loss"]
print("falls", losses[2] < losses[0], "steps", int(model.optimizer.iterations), flush=True)
"""


def train(folder: Path, backend: str) -> None:
    """Workers train the chief's model."""
    program = folder / "run_tests.py"
    program.write_text("import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))\n")
    tests = [ROOT / "tests/parallel/keras/test_parameter_servers.py"]
    if backend == "torch":
        tests.append(ROOT / "tests/parallel/documented_examples/test_keras_servers.py")
    # One worker.
    result = run_program(
        3, program, "-q", "--with-mpi", f"--rootdir={ROOT}", f"-c{ROOT / 'pyproject.toml'}", *map(str, tests),
        timeout_seconds=250, KERAS_BACKEND=backend, JAX_PLATFORMS="cpu", XLA_FLAGS=FAST,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout
    assert "skipped" not in result.stdout


def lose_a_worker(folder: Path) -> None:
    """The death of a worker is survived."""
    program = folder / "program.py"
    program.write_text(DEATH)

    def kill(job: subprocess.Popen[str]) -> None:
        until_exists(folder / "pid", job=job)
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)

    # The launcher's code says nothing after a death.
    result = run_program(4, program, folder, kills=True, timeout_seconds=200, meanwhile=kill, KERAS_BACKEND="torch")
    assert "falls True steps 24" in result.stdout, result.stdout + result.stderr


# Each rank imports Keras, and jax compiles most of the time.
CASES: dict[str, Callable[[Path], None]] = {
    "torch": partial(train, backend="torch"), "jax": partial(train, backend="jax"), "death": lose_a_worker,
}


@pytest.mark.parametrize("case", turns(list(CASES), 1))
def test_keras_under_parameter_servers(case: str, tmp_path: Path) -> None:
    CASES[case](tmp_path)
