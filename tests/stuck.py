"""Programs that do not end: what their processes do, and whether MPI has stopped to deliver messages."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar, cast

import pytest

from tests import messages

DUMP_SECONDS = 20
_STARTS = 2

Test = TypeVar("Test", bound=Callable[..., None])


class BrokenMPIError(AssertionError):
    """What a test asks of mpidist, MPI itself has made impossible."""


class BrokenQueueError(BrokenMPIError):
    """MPI itself delivers nothing any more to a rank that lives and asks for messages."""


class BrokenLauncherError(BrokenMPIError):
    """MPICH's launcher has died of SIGPIPE, telling its own processes of a death, and has ended all ranks with it."""


# As `Popen` gives it, and as a shell does.
LAUNCHER_DIED = (-signal.SIGPIPE, 128 + signal.SIGPIPE)


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


def examine(job: subprocess.Popen[str]) -> tuple[str, type[AssertionError]]:
    """What the processes of a job do that does not end, and the error to raise; before they are ended."""
    words = job.args if isinstance(job.args, list) else []
    if "tests.messages" not in words:
        return describe(descendants(job.pid)), AssertionError
    folder = Path(words[words.index("tests.messages") + 1])
    (folder / messages.ASK).touch()
    time.sleep(messages.SECONDS + 5)
    seen = describe(descendants(job.pid))
    reason = why_broken(folder, seen)
    return (seen, AssertionError) if reason is None else (f"{reason}\n{seen}", BrokenQueueError)


def why_broken(folder: Path, seen: str) -> str | None:
    """The proof that MPI delivers nothing, or None.

    Args:
        folder: With the answers of the ranks.
        seen: Their stacks after these.
    """
    sent = {int(path.stem): path.stat().st_mtime for path in folder.glob(f"*.{messages.SENT}")}
    heard = {int(path.stem): {*map(int, path.read_text().split())} for path in folder.glob(f"*.{messages.HEARD}")}
    lost = sorted(
        (one, other) for other in heard for one in sent.keys() - heard[other] - {other}
        # Long before the other one gave up.
        if sent[one] < (folder / f"{other}.{messages.HEARD}").stat().st_mtime - messages.SECONDS / 2
    )
    if lost:
        return "MPI does not deliver messages: " + ", ".join(f"of rank {one} to {other}" for one, other in lost)
    # Who is in such a flush holds a lock of MPI's, so that its thread sends nothing.
    ranks = [one for one in re.split(r"^process ", seen, flags=re.MULTILINE) if "MainThread" in one]
    flushing = ["ucp_ep_flush" in one for one in ranks]
    if any(flushing) and len(heard) >= flushing.count(False):
        return f"MPI does not end a flush, though ranks {sorted(heard)} have asked for messages for a long time"
    return None


def require_launcher(job: subprocess.Popen[str]) -> None:
    """Raise BrokenLauncherError where the launcher has died, and with it ranks that were to live on."""
    if job.poll() in LAUNCHER_DIED:
        raise BrokenLauncherError("mpirun has died of SIGPIPE")


def starts_again(test: Test) -> Test:
    """Run a test once more, in another folder, where MPI was proved to deliver nothing, or its launcher has died."""

    @pytest.mark.timeout_seconds(_STARTS * 200)
    @functools.wraps(test)
    def run(*, tmp_path: Path, **named: object) -> None:
        folders = [tmp_path / f"start{number}" for number in range(_STARTS)]
        for folder in folders:
            folder.mkdir()
        for folder in folders[:-1]:
            with contextlib.suppress(BrokenMPIError):
                return test(tmp_path=folder, **named)
        return test(tmp_path=folders[-1], **named)

    return cast(Test, run)


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
