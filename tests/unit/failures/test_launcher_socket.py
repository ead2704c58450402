"""The socket between a rank and Hydra, with a launcher of the test's at its other end."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpidist import launch
from mpidist.failures import launcher_socket
from mpidist.failures.launcher_socket import LauncherSocket
from tests.unit.failures.settable_clock import Clock


class Hydra:
    """A launcher that started this process, as far as the environment and a socket tell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launcher, mine = socket.socketpair()
        self.launcher.setblocking(False)
        self.number = mine.detach()
        self.clock = Clock()
        self.clock.put_into(monkeypatch, launcher_socket)
        for variable in {name for one in launch.LAUNCHERS for name in (one.rank, *one.size, one.node_rank, one.mark)}:
            monkeypatch.delenv(variable, raising=False)
        for name, value in {"PMI_RANK": 0, "PMI_SIZE": 2, "MPI_LOCALRANKID": 0, "PMI_FD": self.number}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(launch, "hydra_lets_live", lambda: False)

    def sees_the_end(self) -> bool:
        """Whether the rank has closed the socket."""
        try:
            return self.launcher.recv(1) == b""
        except BlockingIOError:
            return False


@pytest.fixture
def hydra(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hydra]:
    hydra = Hydra(monkeypatch)
    yield hydra
    hydra.launcher.close()
    os.close(hydra.number)


def test_the_launcher_has_time_to_see_the_end(hydra: Hydra) -> None:
    one = LauncherSocket()
    one.close(lets_live=True)
    assert hydra.sees_the_end()
    assert len(hydra.clock.slept) == 1
    # MPICH takes leave by the same number, and reads an answer.
    assert os.read(hydra.number, 100) == b"cmd=finalize_ack\n"
    one.close(lets_live=True)
    assert len(hydra.clock.slept) == 1


@pytest.mark.parametrize("sees", [False, True, None])
def test_it_stays_open_unless_the_launcher_lets_ranks_live(
    hydra: Hydra, monkeypatch: pytest.MonkeyPatch, sees: bool | None
) -> None:
    monkeypatch.setattr(launch, "hydra_lets_live", lambda: sees)
    LauncherSocket().close(lets_live=False)
    assert hydra.sees_the_end() == bool(sees)


def test_a_file_that_has_its_number_by_now_is_left_alone(hydra: Hydra, tmp_path: Path) -> None:
    """MPI has closed the socket; what the program writes to a file of its own would be lost."""
    one = LauncherSocket()
    with (tmp_path / "own").open("wb") as file:
        os.dup2(file.fileno(), hydra.number)
    one.close(lets_live=True)
    os.write(hydra.number, b"of the program")
    assert (tmp_path / "own").read_bytes() == b"of the program"
    assert hydra.clock.slept == []


def test_another_socket_that_has_its_number_by_now_is_left_alone(hydra: Hydra) -> None:
    one = LauncherSocket()
    other, mine = socket.socketpair()
    with other, mine:
        os.dup2(mine.fileno(), hydra.number)
        one.close(lets_live=True)
        os.write(hydra.number, b"of the program")
        assert other.recv(100) == b"of the program"
    assert hydra.sees_the_end()


@pytest.mark.parametrize(("name", "value"), [("PMI_SIZE", "1"), ("PMI_FD", ""), ("PMI_FD", "-1"), ("PMI_FD", "x")])
def test_without_other_ranks_or_a_socket_nothing_happens(
    hydra: Hydra, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    LauncherSocket().close(lets_live=True)
    assert not hydra.sees_the_end()
    assert hydra.clock.slept == []
