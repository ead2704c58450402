"""Programs that do not end: what their processes do, and whether MPI has stopped to deliver messages."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tests.helpers import messages
from tests.helpers.processes import descendants

DUMP_SECONDS = 20


class OutsideError(AssertionError):
    """What a test asks of mpidist, MPI, a launcher or Slurm has made impossible, as was proved (`second_try`)."""


class NotStartedError(OutsideError):
    """A launcher has ended before any rank was there."""


class BrokenQueueError(OutsideError):
    """MPI itself delivers nothing any more to a rank that lives and asks for messages."""


class BrokenLauncherError(OutsideError):
    """MPICH's launcher has died of SIGPIPE, telling its own processes of a death, and has ended all ranks with it."""


# As `Popen` gives it, and as a shell does.
LAUNCHER_DIED = (-signal.SIGPIPE, 128 + signal.SIGPIPE)
# Open MPI's launcher was seen to end so on a busy machine, once in 330 programs, before any rank was there.
NOT_STARTED = "PMIx server's listener thread failed to start"

# Of launchers, in the test that runs.
DEATHS: list[str] = []


def describe(processes: Iterable[int]) -> str:
    """Their state, their CPU time and what they run, with the stacks of those that run Python, in C as well."""
    return "\n".join(filter(None, map(_describe, processes)))


def examine(job: subprocess.Popen[str]) -> tuple[str, type[AssertionError]]:
    """What the processes of a job do that does not end, and the error to raise; before they are ended."""
    folder = folder_of_answers(job)
    if folder is None:
        return describe(descendants(job.pid)), AssertionError
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
    # Nor does one that the test has stopped.
    ranks = [one for one in ranks if ", state T," not in one.partition("\n")[0]]
    flushing = ["ucp_ep_flush" in one for one in ranks]
    if any(flushing) and len(heard) >= flushing.count(False):
        return f"MPI does not end a flush, though ranks {sorted(heard)} have asked for messages for a long time"
    return None


def folder_of_answers(job: subprocess.Popen[str]) -> Path | None:
    """Where the ranks of a job answer whether messages arrive; None where none is expected to die."""
    command = " ".join(job.args) if isinstance(job.args, list) else str(job.args)
    found = re.search(r"-m tests\.helpers\.messages (\S+)", command)
    return Path(found[1]) if found else None


def require_launcher(job: subprocess.Popen[str], errors: str = "") -> None:
    """Raise an OutsideError where the launcher has not started the ranks, or has died, and with it those that lived.

    Args:
        job: That may have ended.
        errors: What it has written to stderr.
    """
    note_launcher(job, errors)
    if DEATHS:
        raise BrokenLauncherError(DEATHS[-1])


def note_launcher(job: subprocess.Popen[str], errors: str) -> None:
    """Raise NotStartedError; where a launcher has died, note it: if the test fails, it may be for that reason."""
    if NOT_STARTED in errors:
        raise NotStartedError(NOT_STARTED)
    if job.poll() in LAUNCHER_DIED and folder_of_answers(job) is not None:
        DEATHS.append("mpirun has died of SIGPIPE")


def reason_of(error: BaseException) -> str:
    """The reason outside mpidist for which a test may have failed; empty if none was proved."""
    if isinstance(error, OutsideError):
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return DEATHS[-1] if DEATHS else ""


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
