"""The doctor's look at the variables that describe the cluster: TF_CONFIG, launchers' variables, Slurm's."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mpidist import launch
from mpidist.cli.doctor.finding import Finding
from mpidist.cluster.resolvers.tf_config import read_tf_config
from mpidist.cluster.roles.placement import JOB_ORDER, did_you_mean, is_task
from mpidist.cluster.slurm import job as slurm_job
from mpidist.cluster.slurm.idle_tasks import idle_tasks_warning
from mpidist.cluster.slurm.step import is_own_step, read_step
from mpidist.cluster.spec import Task
from mpidist.errors import MpidistError

_END_TIME = "SLURM_JOB_END_TIME"
# The number of names in a finding.
_MOST_TASKS = 8


def look_at_cluster() -> Iterator[Finding]:
    """Local. Look at the variables that describe the ranks that take part, and at the Slurm job, if there is one."""
    yield from _tf_config()
    yield from _launcher_variables()
    yield from _slurm()


def _tf_config() -> Iterator[Finding]:
    if not os.environ.get("TF_CONFIG", "").strip():
        return
    try:
        config = read_tf_config()
    except ValueError as error:
        fix = "unset TF_CONFIG: the launcher says who takes part; or write it in that form"
        yield Finding("TF_CONFIG", "wrong", str(error), fix)
        return
    cluster = config.cluster
    jobs = ", ".join(f"{cluster.num_tasks(job)} {job}(s)" for job in cluster.jobs) or "no cluster"
    task = None if config.task_type is None else Task(config.task_type, config.task_id or 0)
    text = f"{jobs}; this is {task or 'no task'}"
    if not cluster:
        # Without one the task is not read.
        yield Finding("TF_CONFIG", "ok", text)
    elif not cluster.tasks:
        yield Finding("TF_CONFIG", "wrong", f"{text}; the cluster has no task", "list addresses, or unset TF_CONFIG")
    elif task is not None and not is_task(task, cluster):
        tasks = ", ".join(map(str, cluster.tasks[:_MOST_TASKS])) + (", ..." if len(cluster.tasks) > _MOST_TASKS else "")
        yield Finding(
            "TF_CONFIG", "wrong",
            f"{text}, which is not in the cluster; its tasks are {tasks}{did_you_mean([*cluster.jobs, task.job])}",
            'give "task" one of these, or leave it out on all ranks, which then get the tasks in their order',
        )
    elif unknown := [job for job in cluster.jobs if job not in JOB_ORDER]:
        yield Finding(
            "TF_CONFIG", "wrong", f"{text}; no strategy takes the jobs {unknown}{did_you_mean(unknown)}",
            "name the jobs chief, worker, ps or evaluator",
        )
    else:
        yield Finding("TF_CONFIG", "ok", text)


def _launcher_variables() -> Iterator[Finding]:
    names = dict.fromkeys(name for one in launch.LAUNCHERS for name in (one.rank, *one.size))
    for name in names:
        value = os.environ.get(name)
        if value is not None and launch.number(value) is None:
            text = f"{name} must be a number, which a launcher sets, got {value!r}: it is ignored"
            if launch.read() is None:
                text += ", and this process assumes that it runs alone"
            yield Finding("launcher's variables", "note" if launch.read() else "wrong", text, f"unset {name}")


def _slurm() -> Iterator[Finding]:
    job = slurm_job.job_name()
    if not job:
        yield Finding("Slurm", "ok", "this is not a Slurm job")
        return
    place = launch.read()
    text = f"job {job}, restarted {slurm_job.restart_count()} time(s)"
    kind = os.environ.get("SLURM_MPI_TYPE", "")
    # A step of one task needs no MPI.
    if place is not None and place.size > 1 and place.launcher.startswith("srun") and kind in ("", "none"):
        yield Finding(
            "Slurm", "wrong", f"{text}; srun has started this without MPI, as a program of one rank",
            "srun --mpi=pmix (Open MPI), or srun --mpi=pmi2 (MPICH)",
        )
        return
    try:
        # Slurm would be asked for the time where the variable is not set.
        if os.environ.get(_END_TIME):
            slurm_job.end_time()
        if is_own_step(os.environ):
            read_step(os.environ)
    except (MpidistError, ValueError) as error:
        fix = "start it by srun, or unset the variable; MPIClusterResolver() reads none of them"
        yield Finding("Slurm", "wrong", f"{text}; {error}", fix)
    else:
        yield Finding("Slurm", "ok", text)
        idle = idle_tasks_warning()
        if idle is not None:
            said, _, fix = idle.rpartition(". ")
            yield Finding("tasks of the job", "note", said, fix)
