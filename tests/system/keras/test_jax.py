"""Keras's backend jax: a process has one backend, so its tests run in a program of their own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers import amounts, selection
from tests.helpers.launching import run_program

# It compiles most of the time. Keras itself cannot be imported here: it would take a backend.
pytestmark = [
    pytest.mark.timeout_seconds(300),
    pytest.mark.skipif(
        find_spec("keras") is None or find_spec("jax") is None, reason="Keras and JAX are in the extras of their names"
    ),
]

TESTS = Path(__file__).resolve().parents[2] / "parallel" / "keras"
FITS = ("plain", "subclass", "py_dataset", "dataset", "class_weight", "recompile")
# Nothing here computes for long.
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
LONG = (
    "test_fit.py", "test_losses.py", "test_callbacks.py", "test_refusals.py", "test_custom_loop.py",
    "test_gradients.py",
)


def chosen() -> list[str]:
    """The tests of this commit."""
    if amounts.amount(0, 1):
        return [str(TESTS / name) for name in LONG]
    fit = FITS[selection.seed() % len(FITS)]
    return [str(TESTS / name) for name in amounts.turns((
        f"test_fit.py::test_weights_history_and_predictions_are_those_of_one_rank[{fit}]",
        "test_losses.py::test_an_update_of_two_masked_outputs_is_that_of_one_rank",
        "test_callbacks.py::test_all_ranks_stop_after_the_same_step[after0-3]",
        "test_custom_loop.py",
        "test_gradients.py::test_large_gradients_pass_one_after_the_other",
    ), 3)]


def test_the_backend_jax(tmp_path: Path) -> None:
    program = tmp_path / "run_tests.py"
    program.write_text("import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))\n")
    options = ["--long"] if amounts.amount(0, 1) else []
    result = run_program(
        2, program, "-q", "--with-mpi", f"--rootdir={TESTS.parents[2]}", f"-c{TESTS.parents[2] / 'pyproject.toml'}",
        *options, *chosen(), timeout_seconds=250, KERAS_BACKEND="jax", JAX_PLATFORMS="cpu", XLA_FLAGS=FAST,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout
    assert options or "skipped" not in result.stdout
