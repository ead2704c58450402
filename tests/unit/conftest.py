"""What tests of waiting ranks share: a world of ranks, and processes in states that a rank may come into."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.helpers.watching import MakeWorld, World


@pytest.fixture
def make_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeWorld]:
    """Makes worlds (arguments as of `World`) with the patience and the limits that are so by default."""
    worlds: list[World] = []
    for name in ("MPIDIST_WARN_SECONDS", "MPIDIST_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)

    def make(size: int = 2, *, ends: bool = True, numbers: dict[int, int] | None = None) -> World:
        worlds.append(World(monkeypatch, size, ends=ends, numbers=numbers))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def dead_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


@pytest.fixture
def stopped_process() -> Iterator[int]:
    """The number of a process that stands still."""
    process = subprocess.Popen(["sleep", "600"])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    yield process.pid
    process.kill()
    process.wait()
