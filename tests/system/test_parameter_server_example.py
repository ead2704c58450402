"""The example with parameter servers, as a user starts it: with and without a launcher, and with a death."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.launching import run_program
from tests.helpers.markdown import ROOT

# Seven ranks on two busy cores take their time.
pytestmark = pytest.mark.timeout_seconds(240)

EXAMPLE = ROOT / "examples" / "parameter_server.py"
# Of seven ranks, which are dealt these tasks in this order.
CLUSTER = {"chief": ["a:1"], "worker": ["a:2", "a:3", "a:4"], "ps": ["a:5", "a:6"], "evaluator": ["a:7"]}


def accuracies(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"test accuracy ([0-9.]+)", text)]


@pytest.mark.parametrize(("ranks", "counts"), [(6, "workers: 3, servers: 2"), (1, "workers: 1, servers: 1")])
def test_it_trains_with_servers(ranks: int, counts: str, tmp_path: Path) -> None:
    result = run_program(ranks, EXAMPLE, "--epochs", 5, "--plot", tmp_path / "a.png", timeout_seconds=200)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    assert f"{counts}\n" in text
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "training: 110/110 loss=" in text
    losses = [float(number) for number in re.findall(r": loss ([0-9.]+), test", text)]
    assert len(losses) == 5, text
    assert losses[4] < losses[1] < losses[0], text
    assert accuracies(text)[-1] > 0.9, text


def test_a_worker_is_killed_and_the_evaluator_ends_with_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # The launcher's exit code says nothing after a death, but for one: its own death was seen to end the evaluator
    # before its last checkpoint.
    result = run_program(
        7, EXAMPLE, "--epochs", 5, "--kill-one", "--evaluator", "--directory", folder, kills=True, timeout_seconds=200,
        TF_CONFIG=json.dumps({"cluster": CLUSTER}),
    )
    text = result.stdout + result.stderr
    assert "its work goes to the other 2 workers" in text, text
    # The step in whose middle the worker died was executed twice, and counts once.
    assert "scheduled 110, executed 111, applied 110\n" in text, text
    found = re.findall(r"evaluator: ckpt-(\d)\.h5, step (\d+), test accuracy ([0-9.]+)", text)
    assert [int(step) for _, step, _ in found] == [22 * int(number) for number, _, _ in found], text
    assert found[-1][0] == "5", text
    assert float(found[-1][2]) > 0.9, text
    for wrong in ("cannot continue", "variables of its own"):
        assert wrong not in text, text
    assert "without other ranks" not in text, text
    # The chief ends first, as all know.
    assert "lost its connection to rank 0" not in text, text
    # One process goes on from there.
    again = run_program(1, EXAMPLE, "--epochs", 6, "--directory", folder, timeout_seconds=100)
    text = again.stdout + again.stderr
    assert again.returncode == 0, text
    assert "continues after step 110\n" in text
    assert (folder / "ckpt-6.h5").exists()
    assert accuracies(text)[-1] > 0.9, text


@pytest.mark.parametrize(("option", "reason"), [("--evaluator", "--directory"), ("--kill-one", "another worker")])
def test_options_that_do_not_fit(option: str, reason: str) -> None:
    result = run_program(1, EXAMPLE, option)
    assert result.returncode == 2
    assert reason in result.stderr
