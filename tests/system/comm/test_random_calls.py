"""Random calls with a random mischief: every program ends, with right results or with an error that explains."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers import stuck
from tests.helpers.amounts import amount
from tests.helpers.launching import end, start_program
from tests.helpers.limits import limit
from tests.helpers.waiting import let_pass, until
from tests.system.comm.random_program import OUTSIDE, plan_of

pytestmark = pytest.mark.timeout_seconds(120)

PROGRAM = Path(__file__).with_name("random_program.py")
END_SECONDS = 40
# What explains an end: our own words, an error that a rank raised, or the launcher's words about a rank that it lost.
EXPLAINS = re.compile(r"^mpidist: |^\S*Error: |BAD TERMINATION|prterun|mpirun|signal \d+", re.MULTILINE)


def run_seed(seed: int, ranks: int, folder: Path) -> str:
    """Run the program of a seed.

    Returns:
        What is wrong with its end, with its output; empty if nothing is.
    """
    plan = plan_of(seed, ranks)
    process = start_program(ranks, PROGRAM, seed, folder, MPIDIST_TIMEOUT="15" if plan.mischief == "SIGSTOP" else "")
    if plan.mischief in OUTSIDE:
        send_signals(process, plan.mischief, [folder / f"pid.{rank}" for rank in range(ranks)], plan.ranks, plan.delay)
    try:
        out, err = process.communicate(timeout=limit(END_SECONDS))
    except subprocess.TimeoutExpired:
        if plan.mischief == "SIGSTOP":
            # It may have come after the farewell, in MPI_Finalize: nobody is left who could say so.
            signal_all(folder, signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                out, err = process.communicate(timeout=limit(30))
                if process.returncode == 0 and out.count("right") == ranks:
                    return ""
        signal_all(folder, signal.SIGKILL)
        out, err = end(process)
        return f"seed {seed}, {ranks} ranks, {plan}: no end within {END_SECONDS} s\n{out}\n{err}"
    stuck.require_launcher(process, err)
    wrong = judge(process.returncode, out, err, ranks)
    return wrong and f"seed {seed}, {ranks} ranks, {plan}: {wrong}\n{out}\n{err}"


def signal_all(folder: Path, number: signal.Signals) -> None:
    """Send a signal to all ranks that are alive."""
    for file in folder.glob("pid.*"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read_text()), number)


def send_signals(
    process: subprocess.Popen[str], mischief: str, files: list[Path], ranks: tuple[int, ...], delay: float
) -> None:
    """Send signals to some ranks after all of them have started."""
    until(lambda: process.poll() is not None or all(file.exists() and file.read_text() for file in files), "a start")
    let_pass(delay)
    first, *later = mischief.replace("twice", "and SIGINT").split(" and ")
    for name in (first, *later):
        for rank in ranks:
            try:
                os.kill(int(files[rank].read_text()), signal.Signals[name])
            except (ProcessLookupError, ValueError, FileNotFoundError):
                # It has ended.
                return
        let_pass(0.3 + delay)


def judge(code: int, out: str, err: str, ranks: int) -> str:
    """What is wrong with an end; empty if nothing is."""
    if "WRONG" in out:
        return "a wrong result"
    if code == 0:
        ended = max(out.count("right"), out.count("left"))
        return "" if ended == ranks else f"{ended} of {ranks} ranks have come to the end, and the job has code 0"
    # Hydra says nothing about a rank that chose its code itself, and ends the others before they can.
    if not EXPLAINS.search(out + err) and code != 3:
        return f"code {code} without a word"
    copies = err.count("failed, the job ends")
    return "" if copies <= 1 else f"{copies} tracebacks"


# Steps of eleven pass through all kinds of mischief.
@pytest.mark.parametrize("seed", range(0, 11 * amount(12, 360), 11))
def test_random_calls_end_right_or_with_an_explanation(tmp_path: Path, seed: int) -> None:
    assert not run_seed(seed, 2 + seed % 2, tmp_path)
