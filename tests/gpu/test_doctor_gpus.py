"""`mpidist doctor` with the real CuPy: children of the ranks tell their GPUs."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launching import run_program

pytestmark = [pytest.mark.gpu, pytest.mark.timeout_seconds(240)]

PROGRAM = """
import sys
from mpidist.cli.main import main
sys.argv[0] = "mpidist"
main()
"""
# In every Python of the job: the ranks, and the children that they ask.
ON_HOST = """
from tests.gpu.host_runtime import install, streams
streams.COUNT = {count}
install()
"""


@pytest.mark.host_gpus
@pytest.mark.parametrize("count", [4, 1])
def test_which_rank_takes_which_gpu(count: int, tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="needs CuPy")
    load_nccl: Any = importlib.import_module("mpidist.comm.gpu.cuda").load_nccl
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "sitecustomize.py").write_text(ON_HOST.format(count=count))
    root = str(Path(__file__).resolve().parents[2])
    result = run_program(
        2, program, "doctor", "--json", "--no-measure", timeout_seconds=200,
        PYTHONPATH=os.pathsep.join([str(tmp_path), root]),
    )
    page = json.loads(result.stdout[result.stdout.index("{") : result.stdout.rindex("}") + 1])
    found: dict[str, dict[str, Any]] = {one["subject"]: one for one in page["findings"]}
    assert [found[name]["state"] for name in ("CUDA", "NVRTC", "cuBLAS", "GPU UUIDs")] == ["ok"] * 4, result
    # The version needs no GPU.
    nccl = load_nccl()
    told = str(nccl.get_version()) if nccl.available else "ImportError: CuPy finds no library of NCCL"
    assert (found["NCCL"]["state"], found["NCCL"]["text"]) == ("ok" if nccl.available else "note", told)
    uuids = [f"GPU-{n}-{n[:4]}-{n[:4]}-{n[:4]}-{n}{n[:4]}" for n in ("01010101", "02020202")]
    assert found["GPUs of ranks"]["data"]["gpus"] == {"0": uuids[0], "1": uuids[1 % count]}
    assert ("shared GPU" in found) == (count == 1)
    if count == 1:
        assert found["shared GPU"]["text"].startswith("ranks 0-1 on")
        assert found["shared GPU"]["fix"].startswith("mpirun -n 1 on each host")
    assert "arrays on GPUs go" in found["CUDA-aware MPI"]["text"]
