"""Examples of two optimizers, and of a file that is larger than memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.launching import run_program
from tests.helpers.markdown import ROOT

pytestmark = pytest.mark.timeout_seconds(240)

EXAMPLES = ROOT / "examples"


def run(ranks: int, name: str, *options: object) -> str:
    result = run_program(ranks, EXAMPLES / name, *options, timeout_seconds=100)
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout


def test_two_models_learn_against_each_other(tmp_path: Path) -> None:
    text = run(2, "gan.py", "--rounds", 400, "--plot", tmp_path / "a.png")
    assert "1200 and 400 steps" in text
    off, spread = map(float, re.findall(r"are ([0-9.]+) off .* spread ([0-9.]+)", text)[0])
    assert off < 0.3
    assert spread > 0.4
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_two_models_learn_alike_on_any_number_of_ranks() -> None:
    first, second = (run(ranks, "gan.py", "--rounds", 400).splitlines()[:2] for ranks in (1, 3))
    assert first == second


def test_a_file_that_is_larger_than_what_a_rank_takes_to_train(tmp_path: Path) -> None:
    text = run(2, "regression_hdf5.py", "--data", tmp_path / "rows.h5", "--plot", tmp_path / "a.png")
    size, taken = map(int, re.findall(r"(\d+) MB", text))
    assert size == 49
    # Batches, Python's modules, and what HDF5 keeps of a file.
    assert taken < size
    assert float(re.findall(r"off by ([0-9.]+)", text)[0]) < 0.01
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
