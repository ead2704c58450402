"""Ranks in different calls: the job ends with an error or a report that names both, and nobody gets a wrong number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.amounts import amount
from tests.helpers.launching import run_program
from tests.system.comm.different_calls import plan_of, signature

pytestmark = pytest.mark.timeout_seconds(120)

PROGRAM = Path(__file__).with_name("different_calls.py")
# Other causes than that the calls differ.
WRONG_CAUSES = ("is stopped", "cable", "its messages went", "has died", "holds the interpreter")
# Each party is named with its call.
ERROR = re.compile(r"MismatchError: .* on ranks? .*; .* on ranks? ")


def seeds(count: int) -> list[int]:
    """Seeds whose calls differ; neighbours have another layout, and another number of calls before."""
    return [seed for seed in range(2 * count) if len(set(map(signature, plan_of(seed, 2).calls))) == 2][:count]


@pytest.mark.parametrize("seed", seeds(amount(6, 500)))
def test_ranks_in_different_calls(tmp_path: Path, seed: int) -> None:
    ranks = 2 + seed // 2 % 3
    plan = plan_of(seed, ranks)
    result = run_program(ranks, PROGRAM, seed, tmp_path)
    text = f"{plan}, {ranks} ranks\n{result.stdout}\n{result.stderr}"
    assert result.returncode != 0, text
    assert "SAVED" not in text, text
    assert not [cause for cause in WRONG_CAUSES if cause in text], text
    if "number" in result.stdout:
        # Between nodes calls that look alike may pass, and nothing wrong is saved.
        assert plan.layout != "node", text
        assert re.search(r"MismatchError|different calls", text), text
        return
    assert all(f"{name}.py:" in text for name in ("one", "other")) or ERROR.search(text), text
