"""Job scripts that are written: what is in them, and that they have none of the known traps."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.cli.lint import lint
from mpidist.cli.main import main
from mpidist.cli.sbatch import Job, Site, read_site, write_script
from mpidist.errors import UnavailableError
from tests.amounts import amount

SITE = """
mpi = "pmix"
setup = ["module load openmpi"]
[sbatch]
account = "abc"
partition = "gpu"
exclusive = true
[environment]
HTTPS_PROXY = "a b"
"""

# The number of GPUs, and of ranks.
PLACES = st.integers(0, 8).flatmap(lambda gpus: st.tuples(st.just(gpus), st.none() | st.integers(1, gpus or 8)))
JOBS = st.builds(
    Job, program=st.tuples(st.sampled_from(["train.py", "./run"]), st.text("ab '\"$-", max_size=5)),
    nodes=st.integers(1, 9), cpus_per_task=st.integers(1, 16), requeue=st.booleans(),
    time=st.sampled_from(["10", "4:00:00", "2-12", "1-0:30:00"]),
)


@given(job=JOBS, place=PLACES, library=st.sampled_from(["Open MPI", "MPICH"]))
@settings(max_examples=amount(40, 1000), deadline=None)
def test_no_script_has_a_known_trap(job: Job, place: tuple[int, int | None], library: str) -> None:
    job = replace(job, gpus_per_node=place[0], tasks_per_node=place[1])
    text = write_script(job, Site(), library)
    assert lint(text) == []
    # The program's words come through the shell.
    line = text.splitlines()[-1]
    assert tuple(shlex.split(line)[-len(job.program):]) == job.program
    bash = shutil.which("bash")
    assert bash is not None
    assert subprocess.run([bash, "-n"], input=text, text=True, check=False).returncode == 0


def test_what_a_site_needs_is_in_the_script(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(SITE)
    result = CliRunner().invoke(main, [
        "sbatch", "--site", str(path), "--nodes", "4", "--gpus-per-node", "4", "--time", "4:00:00", "--requeue",
        "train.py", "--epochs", "3",
    ])
    assert result.exit_code == 0, result.output
    assert result.output == (
        "#!/bin/bash\n"
        "#SBATCH --account=abc\n"
        "#SBATCH --partition=gpu\n"
        "#SBATCH --exclusive\n"
        "#SBATCH --job-name=train\n"
        "#SBATCH --nodes=4\n"
        "#SBATCH --ntasks-per-node=4\n"
        "#SBATCH --cpus-per-task=1\n"
        "#SBATCH --time=4:00:00\n"
        "#SBATCH --gpus-per-node=4\n"
        "#SBATCH --output=%x-%j.out\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --requeue\n"
        "#SBATCH --signal=USR1@120\n"
        "set -euo pipefail\n"
        "\n"
        "module load openmpi\n"
        "export HTTPS_PROXY='a b'\n"
        "# srun takes the number of cores of a task from here only.\n"
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n"
        "# The program saves, and queues the job again: PreemptionCheckpointHandler, `requeue=True`.\n"
        "srun --mpi=pmix --kill-on-bad-exit=1 python train.py --epochs 3\n"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mpi = pmix", "expected TOML"),
        ("modules = []", "expected the keys mpi, setup, sbatch, environment, got 'modules'"),
        ("setup = 'a'", "`setup` must be of type list"),
        ("setup = ['''a\nb''']", "single lines"),
        ("[sbatch]\n\"--partition\" = 'a'", "options without dashes"),
        ("[environment]\n\"A B\" = 'a'", "texts by variable"),
    ],
)
def test_a_wrong_site_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=why) as caught:
        read_site(path)
    assert str(path) in str(caught.value)
    result = CliRunner().invoke(main, ["sbatch", "--site", str(path), "train.py"])
    assert result.exit_code == 1
    assert str(path) in result.output


def test_what_cannot_be_written_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"must be as 4:00:00.* got 'soon'"):
        write_script(Job(("a.py",), time="soon"), Site(), "MPICH")
    with pytest.raises(ValueError, match=r"number of GPUs on a node, 2, got 3"):
        write_script(Job(("a.py",), tasks_per_node=3, gpus_per_node=2), Site(), "MPICH")
    with pytest.raises(UnavailableError, match="not known how srun starts 'Other MPI'"):
        write_script(Job(("a.py",)), Site(), "Other MPI")
