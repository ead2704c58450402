"""The Slurm job of this process: when it ends, how often it was restarted, and how it is requeued."""

from __future__ import annotations

import importlib
import os
import re
import signal
import time
from collections.abc import Mapping
from typing import Any

from mpidist.errors import LauncherError

# The control daemon answers within this time, or something is wrong with it.
_ANSWER_SECONDS = 30.0
# Slurm shows a job whose processes still end as COMPLETING. These distinguish a cancelled job from one whose time is up
# (Reason=TimeLimit), whose node has failed, or that was preempted.
_CANCELLED = {"Reason": "None", "PreemptTime": "None"}
# The lines of `scontrol show job` with the fields that are read here. Only these: a job's name and its comment are in
# lines of their own, and may look like any field.
_LINES = re.compile(r"\s+(?:JobState|Requeue|PreemptEligibleTime)=")


def job_name(environment: Mapping[str, str] | None = None) -> str:
    """Local. The job's name for Slurm's commands: "77", or "77_3" for an element of an array; empty outside Slurm.

    Args:
        environment: Defaults to `os.environ`.
    """
    environment = os.environ if environment is None else environment
    array, element = environment.get("SLURM_ARRAY_JOB_ID", ""), environment.get("SLURM_ARRAY_TASK_ID", "")
    if array and element:
        return f"{array}_{element}"
    # Of a heterogeneous job only the first component can be named.
    return environment.get("SLURM_JOB_ID_HET_GROUP_0", "") or environment.get("SLURM_JOB_ID", "")


def restart_count(environment: Mapping[str, str] | None = None) -> int:
    """Local. The number of times that Slurm has started this job again; 0 outside Slurm."""
    environment = os.environ if environment is None else environment
    count = environment.get("SLURM_RESTART_COUNT", "")
    return _count(count)


def end_time(environment: Mapping[str, str] | None = None) -> float | None:
    """Local. The time at which Slurm ends this job, in seconds since 1970; None outside Slurm, and where it is unknown.

    `SLURM_JOB_END_TIME` says so; old versions of Slurm do not set it, and `squeue` is asked.

    Args:
        environment: Defaults to `os.environ`.

    Raises:
        LauncherError: The variable is no number.
    """
    environment = os.environ if environment is None else environment
    given = environment.get("SLURM_JOB_END_TIME", "")
    if given:
        if given.isdecimal():
            return float(given)
        raise LauncherError(
            f"SLURM_JOB_END_TIME must be a number of seconds since 1970, got {given!r}. Unset it, and pass "
            "TerminationConfig(time_limit=...)"
        )
    job = job_name(environment)
    if not job:
        return None
    try:
        answer = _ask("squeue", "--noheader", "--format=%e", f"--jobs={job}")
        return time.mktime(time.strptime(answer.splitlines()[0].strip(), "%Y-%m-%dT%H:%M:%S"))
    except (LauncherError, ValueError, IndexError):
        # "NONE" is a job without a limit; a container may have no squeue.
        return None


def requeue(environment: Mapping[str, str] | None = None) -> str:
    """Local. Have Slurm end this job and queue it again: `scontrol requeue`.

    Args:
        environment: Defaults to `os.environ`.

    Returns:
        The name of the job.

    Raises:
        LauncherError: This is no job of Slurm's, it was cancelled, or Slurm has refused.
    """
    job = job_name(environment)
    if not job:
        raise LauncherError(
            "cannot requeue: there is no Slurm job (SLURM_JOB_ID is not set). Start the program by sbatch, or leave "
            "out `requeue=True`"
        )
    seen = _seen(job)
    # Slurm preempts some jobs by a requeue of its own, and a script may have asked before.
    if _count(seen.get("Restarts", "")) > restart_count(environment):
        return job
    if seen.get("JobState") in ("COMPLETING", "CANCELLED") and _CANCELLED.items() <= seen.items():
        raise LauncherError(f"job {job} was cancelled (scancel), and a requeue would start it again")
    _ask("scontrol", "requeue", job)
    return job


def can_be_requeued(environment: Mapping[str, str] | None = None) -> bool:
    """Local. Whether Slurm may queue this job again; it is asked.

    Args:
        environment: Defaults to `os.environ`.

    Raises:
        LauncherError: It does not say.
    """
    job = job_name(environment)
    found = _seen(job).get("Requeue") if job else None
    if found is None:
        raise LauncherError(f"Slurm does not say whether job {job!r} can be requeued")
    return found == "1"


def _count(text: str) -> int:
    """The number of restarts; 0 where Slurm does not say."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else 0


def _seen(job: str) -> dict[str, str]:
    """The fields that Slurm shows of a job; empty where it does not answer."""
    try:
        shown = _ask("scontrol", "show", "job", job)
    except LauncherError:
        return {}
    # The first component of a heterogeneous job: Slurm shows a blank line between components.
    lines = [line for line in shown.strip("\n").partition("\n\n")[0].splitlines() if _LINES.match(line)]
    return {name: value for line in lines for name, _, value in (word.partition("=") for word in line.split())}


def _ask(*command: str) -> str:
    line = " ".join(command)
    # Loaded by name: a rank of Slurm that is not asked about does without.
    subprocess: Any = importlib.import_module("subprocess")
    # Slurm's signals go to every process of a step: this one's commands inherit that they wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
    try:
        result = subprocess.run(
            # The name of a job may be text of any encoding.
            command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace",
            timeout=_ANSWER_SECONDS, check=False,
        )
    except OSError as error:
        raise LauncherError(
            f"`{line}` cannot be run ({error}). In a container, bind Slurm's commands and its configuration into it"
        ) from None
    except subprocess.TimeoutExpired:
        raise LauncherError(f"`{line}` has not answered within {_ANSWER_SECONDS:g} s") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if result.returncode != 0:
        raise LauncherError(
            f"`{line}` failed with code {result.returncode}: {result.stderr.strip() or 'no text'}. A job that may be "
            "requeued has `#SBATCH --requeue`"
        )
    return str(result.stdout)
