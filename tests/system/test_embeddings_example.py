"""The example with word vectors, as a user starts it: with and without a launcher, and with an evaluator."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launching import launch_environment, run_program
from tests.helpers.markdown import ROOT

# Six ranks on two busy cores take their time.
pytestmark = pytest.mark.timeout_seconds(240)

EXAMPLE = ROOT / "examples" / "embeddings.py"


def require_learned(text: str) -> None:
    losses = [float(number) for number in re.findall(r"epoch \d+: loss ([0-9.]+)", text)]
    assert len(losses) == 2, text
    # Without any knowledge a word is told from its neighbour's five competitors at a loss of 6 ln 2.
    assert losses[1] < losses[0] < 6 * 0.69, text
    nearest = dict(re.findall(r"^(\w+): ((?:\w+, ){4}\w+)$", text, re.MULTILINE))
    assert "false" in nearest["true"].split(", "), text


def test_words_in_tables_of_two_servers(tmp_path: Path) -> None:
    result = run_program(
        6, EXAMPLE, "--epochs", 2, "--directory", tmp_path / "run", "--evaluator", timeout_seconds=200
    )
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    require_learned(text)
    assert re.search(r"evaluator: ckpt-2\.h5, int: (\w+, ){4}\w+", text), text


def test_one_process_goes_on_from_a_checkpoint_and_draws(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--directory", str(tmp_path / "run")]
    environment = {**launch_environment(), "PYTHONPATH": str(ROOT)}
    losses = []
    for epochs, others in (("2", ["--plot", str(tmp_path / "vectors.png")]), ("1", [])):
        result = subprocess.run(
            [*command, "--epochs", epochs, *others], env=environment, capture_output=True, text=True, timeout=200,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        losses += [float(number) for number in re.findall(r": loss ([0-9.]+)", result.stdout + result.stderr)]
        if epochs == "2":
            require_learned(result.stdout + result.stderr)
    assert (tmp_path / "vectors.png").stat().st_size > 10_000
    # It has gone on, and has not begun again.
    assert losses[2] < losses[1] < losses[0], losses
