"""The example of JAX, as a user starts it: killed and started again; and jobs that are interrupted or fail."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.launching import run_code, run_program, start_program
from tests.helpers.markdown import ROOT
from tests.system.test_example import kill_all_ranks, until_saved

# An import would take each process that runs programs a second.
pytestmark = [
    pytest.mark.timeout_seconds(240),
    pytest.mark.skipif(find_spec("optax") is None, reason="JAX and optax are in the extra 'jax'"),
]

EXAMPLE = ROOT / "examples" / "jax_train.py"


def train(ranks: int, *options: object) -> str:
    """The output of the example, which must end well."""
    result = run_program(ranks, EXAMPLE, *options, timeout_seconds=100)
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout


def test_a_killed_run_continues_also_on_another_number_of_ranks(tmp_path: Path) -> None:
    """To the same bits, as `tests/parallel/jax/test_training.py` shows on one number of ranks."""
    process = start_program(2, EXAMPLE, "--steps", 100000, "--checkpoints", tmp_path)
    until_saved(tmp_path, 1, process)
    kill_all_ranks(process)
    saved = 100 * max(int(path.stem.partition("-")[2]) for path in tmp_path.glob("ckpt-*.h5"))
    output = train(1, "--steps", saved + 100, "--checkpoints", tmp_path, "--plot", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert f"continues after step {saved}" in output
    assert f"step {saved + 100}: loss" in output
    assert float(re.findall("accuracy ([0-9.]+)", output)[-1]) > 0.85


# A program with `heavy` runs on threads of XLA, one without on that of its caller.
HEAD = """
import os, signal
import jax, jax.numpy as jnp, mpidist, mpidist.jax
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.communicator.rank

@jax.jit
def step(x):
    heavy = jnp.ones((200, 200)) * x[0]
    return mpidist.jax.all_reduce("MEAN", x + (heavy @ heavy)[0, 0] * 0)

x = jnp.ones(3)
for number in range(100000):
    x = step(x)
    if number == 20 and rank == 1:
        FAULT
"""


@pytest.mark.long
@pytest.mark.parametrize("has_threads", [True, False], ids=["threads", "inline"])
@pytest.mark.parametrize(("fault", "said"), [
    ("os.kill(os.getpid(), signal.SIGINT)", "mpidist: interrupted"),
    ("os.kill(os.getpid(), signal.SIGTERM)", ""),
    ("raise ValueError('a loss that is wrong')", "ValueError: a loss that is wrong"),
    ("break", "step"),
], ids=["interrupt", "terminate", "raise", "leave"])
def test_a_job_of_jax_ends_with_its_rank(tmp_path: Path, fault: str, said: str, has_threads: bool) -> None:
    program = HEAD.replace("FAULT", fault)
    if not has_threads:
        program = program.replace(" + (heavy @ heavy)[0, 0] * 0", "")
    result, text = run_code(tmp_path, program, ranks=2)
    assert result.returncode != 0
    assert said in text
