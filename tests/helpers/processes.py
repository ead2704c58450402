"""Processes of this machine, as /proc shows them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def descendants(process: int) -> list[int]:
    """A process and all that it has started, as far as those between them still live."""
    parents = dict(_parents())
    found = [process]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def with_variable(setting: str) -> list[int]:
    """The processes whose environment has this `name=value`."""
    return sorted(
        int(folder.name) for folder in Path("/proc").glob("[0-9]*") if setting in environment_of(int(folder.name))
    )


def environment_of(process: int) -> list[str]:
    """The `name=value` with which a process was started; empty if it is gone."""
    try:
        return Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def state_of(process: int) -> str:
    """The state of a process as of `man 5 proc`; "X" if it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def read_name(process: int) -> str:
    """The name of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{process}/comm").read_text()
    except OSError:
        return ""


def _parents() -> Iterable[tuple[int, int]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # It has ended.
