"""Names of devices, one device per rank, and GPUs found without CUDA."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from mpidist.cluster.devices.names import (
    Device,
    idle_gpus_warning,
    node_device,
    parse_device,
    visible_gpus,
    warn_about_idle_gpus,
)
from mpidist.strategy.base import Strategy
from mpidist.strategy.mirrored import MirroredStrategy
from mpidist.strategy.multi_worker import MultiWorkerMirroredStrategy


@pytest.mark.parametrize(
    ("name", "device", "canonical"),
    [
        ("/gpu:0", Device("GPU", 0), "/device:GPU:0"),
        ("GPU:1", Device("GPU", 1), "/device:GPU:1"),
        ("cpu:0", Device("CPU", 0), "/device:CPU:0"),
        ("/cpu:3", Device("CPU", 3), "/device:CPU:3"),
        ("/device:CPU:0", Device("CPU", 0), "/device:CPU:0"),
        ("gpu", Device("GPU", 0), "/device:GPU:0"),
        (
            "/job:worker/replica:0/task:1/device:GPU:2",
            Device("GPU", 2, "worker", 0, 1),
            "/job:worker/replica:0/task:1/device:GPU:2",
        ),
        ("/job:ps/task:4/cpu:0", Device("CPU", 0, "ps", None, 4), "/job:ps/task:4/device:CPU:0"),
    ],
)
def test_names_are_read_and_written(name: str, device: Device, canonical: str) -> None:
    assert parse_device(name) == device
    assert str(device) == canonical
    assert parse_device(canonical) == device


@pytest.mark.parametrize("name", ["", "tpu:0", "gpu:x", "gpu:-1", "/job:worker", "cpu:0:1", "GPU:0,GPU:1"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a device"):
        parse_device(name)


def test_each_rank_of_the_node_gets_its_device() -> None:
    assert node_device(["gpu:0", "/gpu:1"], 1, 2) == Device("GPU", 1)
    assert node_device(["cpu:0", "cpu:1", "cpu:2"], 2, 3) == Device("CPU", 2)


@pytest.mark.parametrize(
    ("devices", "node_size", "text"),
    [
        (["gpu:0", "gpu:1"], 1, r"expected 1, got 2.*mpirun -n 2 python"),
        (["gpu:0", "gpu:1"], 4, r"expected 4, got 2.*mpirun -n 2 python"),
        (["gpu:0", "/device:GPU:0"], 2, r"twice.*/device:GPU:0 repeated.*mpirun -n 1 python"),
    ],
)
def test_a_wrong_count_or_duplicates_give_the_command(devices: list[str], node_size: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        node_device(devices, 0, node_size)


def test_devices_as_a_string_are_refused() -> None:
    with pytest.raises(TypeError, match="must be a list"):
        node_device("gpu:0", 0, 1)


@pytest.mark.parametrize(
    ("variable", "gpus"),
    [
        (None, ["0", "1", "2", "3"]),
        ("", []),
        ("-1", []),
        ("2,0", ["2", "0"]),
        ("0,-1,1", ["0"]),
        ("1,9", ["1"]),
        ("GPU-8932f937,1", ["GPU-8932f937", "1"]),
    ],
)
def test_visible_gpus_follow_cudas_rule(tmp_path: Path, variable: str | None, gpus: list[str]) -> None:
    for index in range(4):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{index}:00.0").mkdir(parents=True)
    environment = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_gpus(environment, tmp_path) == gpus


def test_visible_gpus_from_device_files(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]


def test_the_gpus_of_windows_have_no_device_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    # Without NVIDIA's library it is a GPU of another vendor.
    assert visible_gpus({}, tmp_path) == []
    (tmp_path / "usr/lib/wsl/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/wsl/lib/libcuda.so.1").touch()
    assert visible_gpus({}, tmp_path) == ["0"]


def test_no_driver_is_no_gpu(tmp_path: Path) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == []


def test_idle_gpus_are_told_with_the_command() -> None:
    assert idle_gpus_warning(0, 1) is None
    assert idle_gpus_warning(1, 1) is None
    assert idle_gpus_warning(4, 4) is None
    text = idle_gpus_warning(4, 1)
    assert text is not None
    assert "4 GPUs are visible and 1 rank runs" in text
    assert "mpirun -n 4 python" in text


@pytest.mark.parametrize("kind", [MirroredStrategy, MultiWorkerMirroredStrategy])
def test_a_strategy_tells_of_idle_gpus_once(
    kind: Callable[[], Strategy], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mpidist.cluster.devices.names.visible_gpus", lambda: ["0", "1", "2"])
    warn_about_idle_gpus.cache_clear()
    with caplog.at_level(logging.WARNING, "mpidist"):
        kind()
        kind()
    warn_about_idle_gpus.cache_clear()
    (told,) = [record.getMessage() for record in caplog.records]
    assert "3 GPUs are visible and 1 rank runs on this node" in told
    assert "mpirun -n 3 python" in told
