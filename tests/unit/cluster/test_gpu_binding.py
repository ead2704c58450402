"""Which GPU a rank takes, and what is said where there is none."""

from __future__ import annotations

import configparser
from pathlib import Path
from typing import Any

import pytest

from mpidist.cluster.devices.gpu_binding import Binding, agree, bind, choose_index
from mpidist.cluster.devices.names import Device, node_device, visible_gpus
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import PACKAGES, UnavailableError

no_gpu = pytest.mark.skipif(bool(visible_gpus()), reason="this machine has a GPU")


@pytest.mark.parametrize(
    ("named", "node_rank", "visible", "index"),
    [
        (None, 0, 4, 0), (None, 3, 4, 3), (None, 5, 4, 1),
        # A launcher that shows each rank its own GPU has chosen: whatever is named, it is the one.
        (None, 3, 1, 0), (Device("GPU", 3), 3, 1, 0),
        (Device("GPU", 2), 0, 4, 2),
    ],
)
def test_a_rank_takes_its_gpu_among_the_visible_ones(
    named: Device | None, node_rank: int, visible: int, index: int
) -> None:
    assert choose_index(named, node_rank, visible) == index


def test_a_gpu_that_is_not_visible_is_refused() -> None:
    with pytest.raises(ValueError, match="GPU:4 is named and 2 GPUs are visible here, GPU:0 to GPU:1"):
        choose_index(Device("GPU", 4), 0, 2)


@pytest.mark.parametrize("devices", [None, [], ["cpu:0"], ["CPU:0", "CPU:1"], "cpu:0", "nonsense", [5]])
def test_nothing_is_bound_where_no_gpu_is_asked_for(devices: Any) -> None:
    assert bind(devices, {}) == Binding()


@no_gpu
def test_a_named_gpu_that_is_not_there_leaves_arrays_in_host_memory() -> None:
    binding = bind(["GPU:0"], {})
    assert binding == Binding()
    assert agree(binding, SoloCommunicator()) is None


@no_gpu
def test_asking_for_a_gpu_by_the_environment_without_one_is_an_error_with_the_reason() -> None:
    binding = bind(None, {"MPIDIST_DEVICE": "gpu"})
    with pytest.raises(UnavailableError, match=r"MPIDIST_DEVICE=gpu asks for a GPU, but no GPU is visible.*Unset"):
        agree(binding, SoloCommunicator())


def test_the_environment_takes_cpu_and_gpu_only() -> None:
    assert bind(None, {"MPIDIST_DEVICE": "CPU"}) == Binding()
    with pytest.raises(ValueError, match="must be cpu or gpu, got 'tpu'"):
        agree(bind(None, {"MPIDIST_DEVICE": "tpu"}), SoloCommunicator())


def test_ranks_share_a_gpu_where_it_is_said_to_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"twice.*MPIDIST_SHARE_GPU=1"):
        node_device(["GPU:0", "GPU:0"], 1, 2)
    monkeypatch.setenv("MPIDIST_SHARE_GPU", "1")
    assert node_device(["GPU:0", "GPU:0"], 1, 2) == Device("GPU", 0)
    with pytest.raises(ValueError, match="twice"):
        node_device(["CPU:0", "CPU:0"], 1, 2)


@pytest.mark.parametrize("extra", ["cuda12", "cuda13"])
def test_the_extras_bring_the_compiler_and_nccl(extra: str) -> None:
    configuration = configparser.ConfigParser()
    configuration.read(Path(__file__).resolve().parents[3] / "setup.cfg")
    packages = configuration["options.extras_require"][extra].split()
    version = extra.removeprefix("cuda")
    assert any(package.startswith(f"cupy-cuda{version}x[ctk]") for package in packages)
    assert f"nvidia-nccl-cu{version}" in packages
    assert f"mpidist[{extra}]" in PACKAGES
