"""The examples with Keras, as a user starts them."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.amounts import turns
from tests.helpers.launching import run_program
from tests.helpers.markdown import ROOT

pytestmark = [
    pytest.mark.timeout_seconds(240),
    pytest.mark.skipif(
        find_spec("keras") is None or find_spec("torch") is None, reason="Keras and PyTorch are in the extra 'keras'"
    ),
]


def run(ranks: int, name: str, *options: object) -> str:
    result = run_program(ranks, ROOT / "examples" / name, *options, timeout_seconds=120, KERAS_BACKEND="torch")
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout


def fit(tmp_path: Path) -> None:
    text = run(2, "keras_fit.py", "--epochs", 5, "--directory", tmp_path, "--plot", tmp_path / "a.png")
    assert re.search("^2 ranks: test loss", text, re.MULTILINE), text
    assert float(re.findall("test accuracy ([0-9.]+)", text)[-1]) >= 0.85, text
    # One rank talks.
    assert len(re.findall("^Epoch 5/5", text, re.MULTILINE)) == 1, text
    assert (tmp_path / "digits.keras").exists()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def make_steps(tmp_path: Path) -> None:
    text = run(2, "keras_custom_loop.py", "--epochs", 5, "--plot", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert len(re.findall(r"^epoch \d+: loss", text, re.MULTILINE)) == 5, text
    assert float(re.findall("test accuracy ([0-9.]+)", text)[-1]) >= 0.85, text


EXAMPLES = {"fit": fit, "a custom loop": make_steps}


@pytest.mark.parametrize("name", turns(list(EXAMPLES), 1))
def test_examples(name: str, tmp_path: Path) -> None:
    EXAMPLES[name](tmp_path)
