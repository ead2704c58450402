"""What happens when a rank takes its GPU, before MPI starts."""

from __future__ import annotations

from typing import Any

import pytest

from mpidist.cluster.devices.gpu_binding import bind
from mpidist.comm.gpu import cuda_awareness

# Ranks on GPUs that take one process at a time could not all take the same one.
pytestmark = [pytest.mark.host_gpus, pytest.mark.mpi]


@pytest.mark.parametrize("mode", [0, 1, 3])
def test_no_child_takes_the_gpu_that_takes_one_process(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    started = []
    monkeypatch.setattr(cuda_awareness, "start_probe", lambda: started.append(mode))
    monkeypatch.setattr("mpidist.launch.world_size", lambda: 2)
    monkeypatch.setattr(cupy.cuda.runtime, "deviceGetAttribute", lambda attribute, _: mode * (attribute == 20))
    binding = bind(None, {"MPIDIST_DEVICE": "gpu", "MPICH_GPU_SUPPORT_ENABLED": "1"})
    assert binding.error is None
    assert binding.index == 0
    assert started == ([0] if mode == 0 else [])
