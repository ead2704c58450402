"""What killed jobs have left, as the doctor sees it, and what it removes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mpidist.cli.doctor.leftovers import look_at_leftovers

NOW = 1_000_000.0
OLD, YOUNG = NOW - 601, NOW - 599


class Machine:
    """A folder for node memory, and what /proc shows of processes."""

    def __init__(self, folder: Path) -> None:
        self.shared, self.processes = folder / "shm", folder / "proc"
        self.shared.mkdir()
        (self.processes / "self/ns").mkdir(parents=True)
        (self.processes / "self/ns/pid").symlink_to("pid:[4026531836]")

    def leave(self, name: str, modified: float = OLD) -> Path:
        path = self.shared / name
        path.write_bytes(bytes(10))
        os.utime(path, (modified, modified))
        return path

    def show(self, process: int, *lines: str) -> None:
        (self.processes / str(process)).mkdir()
        text = "".join(f"7f00-7f01 rw-s 0 00:01 9 {one}\n" for one in lines)
        (self.processes / str(process) / "maps").write_text(text)

    def look(self, *, clean: bool = False) -> tuple[str, str, Any]:
        found = list(look_at_leftovers(self.shared, self.processes, clean=clean, now=NOW))
        return (found[0].state, found[0].text, found[0].data) if found else ("", "", {})


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_where_nothing_is_left_nothing_is_said(machine: Machine) -> None:
    machine.leave("sem.another")
    machine.leave("mpich_shm_of_mine")
    assert machine.look(clean=True) == ("", "", {})
    assert len(list(machine.shared.iterdir())) == 2


def test_what_nobody_uses_is_listed_and_removed_when_asked(machine: Machine) -> None:
    old, young = machine.leave("mpich_shm_10ab_0"), machine.leave("mpich_shm_10ab_1", YOUNG)
    mapped, unmapped = machine.leave("mpich_shm_20ab_0"), machine.leave("mpich_shm_30ab_12")
    machine.show(7, "/lib/libc.so", str(mapped))
    machine.show(8, f"{unmapped} (deleted)")
    state, text, data = machine.look()
    assert (state, data["left"]) == ("note", [old.name, unmapped.name])
    assert "2 file(s) (mpich_shm_10ab_0, mpich_shm_30ab_12)" in text
    assert data["kept"] == {"younger than 10 minutes": [young.name], "in use": [mapped.name]}
    assert old.exists()
    state, text, data = machine.look(clean=True)
    assert (state, data["removed"], data["left"]) == ("ok", [old.name, unmapped.name], [])
    assert "not removed: 1 file(s) (mpich_shm_10ab_1): younger than 10 minutes" in text
    assert sorted(machine.shared.iterdir()) == [young, mapped]


def test_of_others_nothing_is_removed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    path = machine.leave("mpich_shm_10ab_0")
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    state, text, data = machine.look(clean=True)
    assert (state, data["kept"], path.exists()) == ("note", {"of another user": [path.name]}, True)
    assert "1 file(s) (mpich_shm_10ab_0): of another user" in text


def test_a_link_is_no_file(machine: Machine) -> None:
    (machine.shared / "mpich_shm_10ab_0").symlink_to(machine.leave("mine"))
    assert machine.look(clean=True)[2]["kept"] == {"not a plain file": ["mpich_shm_10ab_0"]}


def test_in_a_namespace_of_its_own_nothing_is_removed(machine: Machine) -> None:
    path = machine.leave("mpich_shm_10ab_0")
    (machine.processes / "self/ns/pid").unlink()
    (machine.processes / "self/ns/pid").symlink_to("pid:[4026532201]")
    state, text, _ = machine.look(clean=True)
    assert (state, path.exists()) == ("note", True)
    assert "outside this PID namespace" in text


def test_a_job_that_runs_is_no_finding(machine: Machine) -> None:
    machine.show(7, str(machine.leave("mpich_shm_10ab_0")))
    assert machine.look() == ("", "", {})
