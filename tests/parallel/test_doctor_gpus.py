"""The doctor on ranks that see a GPU and have no CuPy that works: findings on all of them, and nobody waits."""

from __future__ import annotations

import pytest

from mpidist.cli.doctor import gpus
from mpidist.cli.doctor.gpus import look_at_gpus
from mpidist.comm.gpu import cuda_awareness
from mpidist.comm.group.communicator import Communicator

# What a child of a rank finds first.
BROKEN = "raise ImportError('libcuda.so.1: cannot open shared object file')\n"


@pytest.mark.mpi(min_size=2)
def test_gpus_without_cupy(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "cupy.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(gpus, "visible_gpus", lambda *_: ["0"])
    # A library that does not say has to be tried, by CuPy.
    monkeypatch.setattr(cuda_awareness, "query", lambda: None)
    monkeypatch.setattr(cuda_awareness, "device_limit", lambda _: None)
    found = {one.subject: one for one in look_at_gpus(communicator)}
    assert found["ranks without GPU"].state == "note"
    assert "CuPy cannot be used: ImportError: libcuda.so.1" in found["ranks without GPU"].text
    assert found["CUDA-aware MPI"].state == "note"
    assert "libcuda.so.1" in found["CUDA-aware MPI"].text
    assert "pip install 'mpidist[cuda12]'" in found["CUDA-aware MPI"].fix
