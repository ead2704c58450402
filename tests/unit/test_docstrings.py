"""Examples in docstrings and the README run and give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import mpidist
from tests.launching import run_program

README = Path(__file__).resolve().parents[2] / "README.md"
# These import MPI, which would start it here.
NEEDS_MPI = {"mpidist.comm.mpi_communicator", "mpidist.comm.backends.mpi"}
# And this one imports CuPy, which is there only where a GPU is.
NEEDS_CUPY = {"mpidist.comm.gpu.cuda"}
MODULES = sorted({m.name for m in pkgutil.walk_packages(mpidist.__path__, "mpidist.")} - NEEDS_MPI - NEEDS_CUPY)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


def test_the_readmes_program_prints_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    program = tmp_path / "program.py"
    program.write_text(blocks[0])
    outputs = [run_program(ranks, program) for ranks in (1, 4)]
    for output in outputs:
        assert output.returncode == 0, output.stderr
        loss, weight, bias = re.findall(r"[0-9.e+-]+(?=[,\]\s]|$)", output.stdout)[:3]
        assert float(loss.rstrip(",")) < 1e-9
        assert float(weight) == pytest.approx(3, abs=1e-4)
        assert float(bias) == pytest.approx(1, abs=1e-4)
