"""The processes of a program that does not end: a line for each, and where those that run Python are."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

DUMP_SECONDS = 20


def descendants(process: int) -> list[int]:
    """A process and all that it has started, as far as those between them still live."""
    parents = dict(_parents())
    found = [process]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def with_variable(setting: str) -> list[int]:
    """The processes whose environment has this `name=value`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if setting in (folder / "environ").read_bytes().decode(errors="replace").split("\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # It has ended.
    return sorted(found)


def describe(processes: Iterable[int]) -> str:
    """Their state, their CPU time and what they run, with the stacks of those that run Python, in C as well."""
    return "\n".join(filter(None, map(_describe, processes)))


def _describe(process: int) -> str:
    folder = Path(f"/proc/{process}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        command = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ").strip()
        kernel = (folder / "wchan").read_text()
        program = (folder / "exe").readlink().name
    except OSError:
        return ""
    seconds = (int(fields[11]) + int(fields[12])) / 100
    line = f"process {process} of {fields[1]}, state {fields[0]}, {seconds} s of CPU, in {kernel}: {command[:150]}"
    return line + (f"\n{_stacks(process)}" if re.match("python", program) else "")


def _stacks(process: int) -> str:
    spy = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if spy is None:
        return "its stacks are not shown: no py-spy beside this Python"
    for native in (["--native"], []):
        try:
            shown = subprocess.run(
                [spy, "dump", *native, "--pid", str(process)],
                capture_output=True, text=True, timeout=DUMP_SECONDS, check=False,
            )
        except subprocess.TimeoutExpired:
            continue
        if shown.returncode == 0:
            return shown.stdout
    return "its stacks could not be read"


def _parents() -> Iterable[tuple[int, int]]:
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield int(folder.name), int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # It has ended.
