"""The variables of torchrun: those of a process alone, wrong ports, and the network that hosts share."""

from __future__ import annotations

import os

import pytest

import mpidist
from mpidist.cluster.torch_env import reached_by_all


def test_a_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        # What is set here goes with the test.
        monkeypatch.setenv(name, "")
    found = mpidist.export_torch_env()
    assert found.items() <= os.environ.items()
    port = int(found.pop("MASTER_PORT"))
    assert 0 < port < 1 << 16
    assert found == {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    }


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("MASTER_PORT", "29500")
    found = mpidist.export_torch_env()
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("node7", "29500")


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", "29500.0", " 1"])
def test_a_wrong_port_is_an_error(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ValueError, match="MASTER_PORT must be a port from 1 to 65535, got"):
        mpidist.export_torch_env()


def test_what_is_no_communicator_is_an_error() -> None:
    with pytest.raises(TypeError, match="communicator"):
        mpidist.export_torch_env(3)


def test_the_network_that_hosts_share_is_taken() -> None:
    own = ["192.168.1.5/24", "10.0.0.1/16", "172.16.0.1/12"]
    assert reached_by_all(own, [["10.0.7.2/16"], ["10.0.3.9/16", "192.168.2.4/24"]]) == "10.0.0.1"
    assert reached_by_all(own, [["8.8.8.8/8"]]) == "192.168.1.5"
    assert reached_by_all([], [["10.0.7.2/16"]])
