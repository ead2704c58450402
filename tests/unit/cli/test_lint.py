"""The traps that `mpidist lint` finds in job scripts, and the scripts in slurm/, which have none."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mpidist.cli.main import main
from mpidist.cli.slurm.lint import lint
from mpidist.cli.slurm.script import read_job_script

SCRIPTS = sorted((Path(__file__).resolve().parents[3] / "slurm").glob("*.sbatch"))
SRUN = "srun --mpi=pmix -K python train.py"
CONTAINER = "srun --mpi=pmix -K apptainer exec image.sif python train.py -c -e"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_our_own_scripts_are_short_and_have_no_trap(script: Path) -> None:
    text = script.read_text()
    assert lint(text) == []
    assert len(text.splitlines()) < 40


def test_our_own_scripts_are_there() -> None:
    names = {script.stem for script in SCRIPTS}
    assert {"train", "train_gpu", "parameter_server", "array", "requeue", "mpirun", "tests", "container"} <= names


@pytest.mark.parametrize(
    ("lines", "line", "expected"),
    [
        ([f"{SRUN} &", "#SBATCH --nodes=2"], 3, "ignores #SBATCH below the first command"),
        (["srun -K python train.py"], 2, "srun without --mpi.*srun --mpi=pmix for Open MPI, srun --mpi=pmi2 for MPICH"),
        # Options after the program are the program's.
        (["srun -K python train.py --mpi=pmix"], 2, "srun without --mpi"),
        (["x=1", "exec /usr/bin/srun -K \\", "  --mpi=none \\", "  python train.py"], 3, "--mpi=none starts each task"),
        (["srun --mpi pmix python train.py"], 2, "lets the other ranks wait.*--kill-on-bad-exit=1"),
        (["#SBATCH -n 1", "#SBATCH hetjob", "#SBATCH -n 2", "#SBATCH packjob", "#SBATCH -n 2", SRUN], 7,
         "has 3 components, and srun starts the first one only. Write srun --het-group=0-2"),
        (["#SBATCH -c4", SRUN], 3, "does not take --cpus-per-task=4 from the job.*export SRUN_CPUS_PER_TASK"),
        (["#SBATCH --gpus-per-task=1", SRUN], 2, "--gpus-per-task hides .*Write --gpus-per-node=N --ntask"),
        (["#SBATCH --gpus-per-node=2", SRUN.replace("-K", "-K --gpu-bind=none")], 3,
         "--gpu-bind=none leaves CUDA_VISIBLE_DEVICES unset.*GPUs of other jobs.*#SBATCH --exclusive"),
        ([SRUN.replace("-K", "-K --gpus-per-task=1")], 2, "--gpus-per-task hides"),
        (["#SBATCH --ntasks-per-node=8 --gpus-per-node=4", SRUN], 2,
         r"8 task\(s\) on a node with 4 GPU\(s\).*-per-node=4"),
        (["#SBATCH --requeue", SRUN], 2, "log is overwritten.*--open-mode=append"),
        (["#SBATCH --requeue --open-mode=truncate", SRUN], 2, "log is overwritten"),
        ([SRUN, "scontrol requeue $SLURM_JOB_ID"], 3, "log is overwritten"),
        (["#SBATCH --signal=B:USR1@60", SRUN], 2, "only the script's shell gets the signal.*trap .* USR1"),
        (["#SBATCH --signal=B:USR1@60", "trap 'echo USR1' TERM", f"{SRUN} &"], 2, "has no trap for it"),
        (["#SBATCH --signal=RB:SIGUSR1@60", "trap 'echo' USR1", SRUN], 4, "trap when this command has ended.*wait"),
        (["#SBATCH --signal=B:USR1@60", "trap 'echo' USR1", f"{SRUN} 2>&1 | tee log", "true & wait"], 4, "ended.*wait"),
        # Behind a `srun` of its own, and in a script that one starts.
        ([f"{SRUN} && srun --mpi=pmix python train.py"], 2, "lets the other ranks wait"),
        (["srun -K bash -c '", "  cd /data", "  python train.py", "'"], 2, "srun without --mpi"),
        (["#SBATCH -c4", f"{SRUN[:-len('python train.py')]} bash -c 'python train.py'"], 3, "--cpus-per-task=4"),
        (["#SBATCH -N1", *["#SBATCH hetjob", "#SBATCH -N1"] * 2, f"{SRUN} : --mpi=pmix python b.py"], 7,
         "has 3 components, and srun starts the first 2 only"),
        (["cat <<END", "a text", "END", "srun -K python train.py"], 5, "srun without --mpi"),
        (["#SBATCH --signal=USR1@60", "mpirun python train.py"], 2, "mpirun's daemons.*--signal=B:USR1@60"),
        (["#SBATCH -N 2", "module load python; conda run python train.py"], 3, "several tasks"),
        (["#SBATCH -N 2", "python train.py"], 3, "several tasks, and this line starts one process"),
        (["#SBATCH --ntasks-per-node 4", "python -m train"], 3, "several tasks"),
        ([CONTAINER.replace("exec", "exec --contain")], 2, "--contain keeps the ranks of a node apart"),
        ([CONTAINER.replace("exec", "exec -p")], 2, r"-p keeps .*NOLOCAL=1 UCX_TLS=\^shm OMPI_MCA_btl=self,tcp"),
        ([CONTAINER.replace("exec", "exec -e")], 2, "-e removes the launcher's variables"),
        (["export MPIR_CVAR_NOLOCAL=1", CONTAINER.replace("exec", "exec -C")], 3, "-C removes the launcher's"),
        (["#SBATCH --gpus-per-node=2", CONTAINER], 3, "the container sees no GPU. Write apptainer exec --nv"),
        (["srun --mpi=pmix -K podman run --ipc=host image python train.py"], 2,
         "share no memory and no network.*Write podman run --pid=host --network=host"),
        (["singularity exec image mpirun -n 4 python train.py"], 2, "starts all ranks in it, on one node. Write it in"),
        # Slurm takes these for comments.
        ([" #SBATCH --nodes=2", SRUN], 2, "for a comment.*begins its line"),
        (["#sbatch --nodes=2", SRUN], 2, "for a comment.*capital letters"),
        # By variables, and in brackets.
        (["OPTIONS=-K", "srun $OPTIONS python train.py"], 3, "srun without --mpi"),
        (["OPTIONS=(-l)", "OPTIONS+=(-K)", "srun ${OPTIONS[@]} python a.py"], 4, "srun without --mpi"),
        (['LAUNCHER="srun -K"', "$LAUNCHER python train.py"], 3, "srun without --mpi"),
        (["srun -K $PYTHON -m train"], 2, "srun without --mpi"),
        (["srun -K mpidist doctor"], 2, "srun without --mpi"),
        (["#SBATCH -n 1", "srun -n 4 -K python train.py"], 3, "srun without --mpi"),
        (["#SBATCH -n 1 -c 4", "srun python train.py"], 3, "--cpus-per-task=4"),
        (["srun -n 1 -K python chief.py : -n 4 -K python train.py"], 2, "srun without --mpi"),
        (["#SBATCH -N 2 --ntasks-per-node=1", "srun -K python train.py"], 3, "srun without --mpi"),
        (["loss=$(srun -K python train.py)"], 2, "srun without --mpi"),
        (["export SLURM_MPI_TYPE=none", "srun -K python train.py"], 3, "SLURM_MPI_TYPE=none starts each task"),
        (["#SBATCH --nodes=2-4", "python train.py"], 3, "several tasks"),
        (["#SBATCH --ntasks-per-node=4 --gpus-per-node=a100:2", SRUN], 2, r"4 task\(s\) on a node with 2 GPU\(s\)"),
        (["#SBATCH --ntasks-per-node=4 --gres=shard:4,gpu:a100:2", SRUN], 2, r"4 task\(s\) on a node with 2 GPU\(s\)"),
        (["#SBATCH --ntasks-per-node=2 --gres=gpu", SRUN], 2, r"2 task\(s\) on a node with 1 GPU\(s\)"),
    ],
)
def test_each_trap_is_found_at_its_line(lines: list[str], line: int, expected: str) -> None:
    (finding,) = lint("\n".join(["#!/bin/bash", *lines, ""]))
    assert finding.line == line
    assert re.search(expected, finding.text)


@pytest.mark.parametrize(
    "lines",
    [
        [SRUN],
        [CONTAINER],
        ["#SBATCH --gres=gpu:2", CONTAINER.replace("exec", "exec --nv")],
        ["export MPIR_CVAR_NOLOCAL=1", CONTAINER.replace("exec", "exec -c")],
        [CONTAINER.replace("exec", "exec --ipc")],
        ["srun --mpi=pmix -K docker run --ipc=host --pid=host --network=host image python train.py"],
        ["export SLURM_MPI_TYPE=pmi2 SLURM_KILL_BAD_EXIT=1", "srun python train.py"],
        ["#SBATCH --signal=USR1@60", SRUN],
        ["#SBATCH --signal=B:USR1@60", "trap 'scontrol show job' TERM SIGUSR1", f"{SRUN} &", "wait $!"],
        ["#SBATCH --signal=B:USR1@60", "trap 'scontrol show job' 10", f"{SRUN} &", "wait $!"],
        ["#SBATCH --signal=B:10@60", "trap 'scontrol show job' sigusr1", f"{SRUN} &", "wait $!"],
        ["#SBATCH --cpus-per-task=2", "srun --mpi=pmix -K -c 2 python train.py"],
        ["#SBATCH --ntasks-per-node=4 --gpus-per-node=4", SRUN],
        ["#SBATCH --gpus-per-node=2", "#SBATCH --exclusive", SRUN.replace("-K", "-K --gpu-bind=none")],
        ["#SBATCH --gpus-per-node=2", SRUN.replace("-K", "-K --gpu-bind=closest")],
        ["#SBATCH -N 2", "python prepare.py", "mpirun python train.py"],
        ["#SBATCH -n 1", "python train.py"],
        ["#SBATCH -N 2", "srun hostname", "# srun python train.py", SRUN],
        ["#SBATCH -n 1", "#SBATCH hetjob", "#SBATCH -n 2", SRUN.replace("-K", "-K --het-group=0,1")],
        ["cat <<'END'", "it's", "END", SRUN],
        *(
            ["#SBATCH --signal=B:USR1@60", "trap 'kill -USR1 $PID' USR1", *lines]
            for lines in (
                [f"{SRUN} & PID=$!", "wait $PID"], [f"{SRUN} & wait $!"], [f"{SRUN} &  # as long as it takes", "wait"],
                [f"{SRUN} > log 2>&1 &", "wait"], [f"{SRUN} &>log &", "wait"],
                [f"( cd /data; {SRUN} | tee log ) &", "wait"],
                ["{", SRUN, "} &", "wait"], ["for seed in 1 2; do", f"{SRUN} --seed $seed", "done &", "wait"],
            )
        ),
        ["cat > note <<END", "srun python train.py", "#SBATCH --nodes=9", "END", SRUN],
        ["text=$(cat <<-'END'", "srun python train.py", "\tEND", ")", SRUN],
        ["#SBATCH -N 2", "srun --mpi=pmix -K bash -c '", "  source env", "  python train.py", "'"],
        ["#SBATCH -n 1", "#SBATCH hetjob", "#SBATCH -n 2", f"{SRUN} : --mpi=pmix python train.py"],
        ["srun --mpi=pmix -lK python train.py", "srun --mpi=pmix -uK1 python train.py"],
        ["#SBATCH -c 4", "srun --mpi=pmix -K -lc4 python train.py"],
        ["echo 'srun python train.py'", SRUN],
        ["echo srun python train.py", "grep -c srun train.py", SRUN],
        # These start no program of Python, or one process of it.
        ["srun --ntasks-per-node=1 cp train.py /tmp", "srun bash -c 'cp train.py /tmp'", "srun tar xf python.tar"],
        ["#SBATCH -N 2", "srun -N1 -n1 python prepare.py", "srun --ntasks 1 python prepare.py"],
        ["#SBATCH -N 2", "python collect.py", "srun ./simulation"],
        ["#SBATCH -N 2", "cp train.py /tmp", "which python", "./run"],
        ["#SBATCH -N 2", "module load gcc python", "conda activate python3", "pip install pytest", "./run"],
        ["docker pull image", "podman build -t python .", SRUN],
        ["#SBATCH --gres=gpu:1", "apptainer build python.sif docker://python:3.12", "srun nvidia-smi"],
        # Values of options are no programs.
        ["srun -o python.out -D /opt/python --job-name python -J train.py --mpi pmix -K python train.py"],
        ["srun --container-image=hub/python --container-writable --mpi=pmix -K python train.py"],
        # What stands in variables.
        ['OPTIONS="--mpi=pmix --kill-on-bad-exit=1"', "srun $OPTIONS python train.py"],
        ["options=(--mpi=pmix -K)", 'srun "${options[@]}" python train.py'],
        ["options=(", "--mpi=pmix -K", ")", 'srun "${options[@]}" python train.py'],
        ["if $OLD; then", "OPTIONS=-l", "else", "OPTIONS='-K --mpi=pmix'", "fi", "srun $OPTIONS python train.py"],
        ["srun $SRUN_OPTIONS python train.py"],
        ["#SBATCH -c 1", SRUN],
        # Of two options Slurm takes the last one.
        ["#SBATCH --cpus-per-task=4", "#SBATCH --cpus-per-task=1", SRUN],
        # One task needs no MPI.
        ["#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-task=1", "srun python train.py"],
        ["#SBATCH -n 1", "srun python train.py"],
        ["#SBATCH --signal=B:USR1@60", "on_signal save USR1", f"{SRUN} &", "wait"],
        ["#SBATCH --requeue --open-mode=a", SRUN],
        # Quotes that do not end are not understood; only what shlex can read is looked at.
        ["#SBATCH --signal=B:USR1@60", "srun python train.py", "echo \"a"],
        ["#SBATCH -N 2", "python train.py", "echo $'it\\'s'"],
        ["srun 2>err --mpi=pmix >log -K python a.py#1 &>>more", f"{SRUN}  #SBATCH or", "x='# y'", "z=${#x}"],
        ["## SBATCH --gpus-per-task=1", "# SBATCH -N2", "##SBATCH -N 2", "# sbatch starts it", SRUN],
    ],
)
def test_what_is_right_is_not_found(lines: list[str]) -> None:
    assert lint("\n".join(["#!/bin/bash", *lines])) == []


@given(st.text(st.sampled_from(list("ab '\"\\$#;&|()<>`\t\n=-{}\r\f\v\x1c\x85\u2028é")), max_size=60))
def test_any_text_is_read(text: str) -> None:
    lines = text.count("\n") + 1
    assert all(1 <= command.line <= lines for command in read_job_script(text).commands)
    assert all(1 <= finding.line <= lines for finding in lint(text))


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        (f"#SBATCH -N 2\n{SRUN}\n", 1, "sbatch refuses a script without an interpreter. Write .*: #!/bin/bash"),
        ("", 1, "without an interpreter"),
        (f"\ufeff#!/bin/bash\n#SBATCH -N 2\n{SRUN}\n", 1, r"without the mark \(BOM\)"),
        (f"#!/bin/bash\n#SBATCH -N 2\r\n{SRUN}\r\n", 2, "refuses Windows line endings.*sed -i"),
        (f"#!/bin/bash\n{SRUN} \0\n", 2, "refuses a script with the character NUL"),
    ],
)
def test_what_sbatch_refuses_is_found(text: str, line: int, expected: str) -> None:
    (finding,) = lint(text)
    assert finding.line == line
    assert re.search(expected, finding.text)


def test_options_are_read_in_every_form() -> None:
    script = read_job_script("#SBATCH --nodes=2 -n 8 -c4 --job-name 'a b'  # words\n#SBATCH hetjob\n#SBATCH -N=3\n")
    assert [(o.line, o.name, o.value, o.component) for o in script.options] == [
        (1, "nodes", "2", 0), (1, "ntasks", "8", 0), (1, "cpus-per-task", "4", 0), (1, "job-name", "a b", 0),
        (3, "nodes", "3", 1),
    ]
    assert (script.components, script.count("nodes"), script.count("nodes", 1), script.count("time")) == (2, 2, 3, None)


class Counted(str):
    """A text that counts the characters which searches and copies may have looked at."""

    looked = 0

    def count(self, *given: Any) -> int:
        Counted.looked += len(range(len(self))[slice(*given[1:])])
        return super().count(*given)

    def find(self, *given: Any) -> int:
        found = super().find(*given)
        searched = range(len(self))[slice(*given[1:])]
        Counted.looked += len(searched) if found < 0 else found - searched.start
        return found

    def removeprefix(self, *given: Any) -> Counted:
        return Counted(super().removeprefix(*given))

    def replace(self, *given: Any) -> Counted:
        Counted.looked += len(self)
        return Counted(super().replace(*given))


def work_of_lint(line: str, lines: int, findings: int) -> tuple[int, int]:
    """How many lines of Python run for a script of so many lines, and how many of its characters are looked at."""
    steps = Counted.looked = 0

    def step(_: FrameType, event: str, __: Any) -> Any:
        nonlocal steps
        steps += event == "line"
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        found = lint(Counted("#!/bin/bash\n" + f"{line}\n" * lines))
    finally:
        sys.settrace(before)
    assert len(found) == findings * lines
    return steps, Counted.looked


@pytest.mark.parametrize(("line", "findings"), [("srun python train.py", 2), ("cat <<< a 'b' \"c\"", 0)])
def test_a_long_script_is_read_in_steps_that_grow_with_its_lines(line: str, findings: int) -> None:
    few, many = (work_of_lint(line, lines, findings) for lines in (50, 400))
    # With the square of their number they are 64 times as many.
    assert 4 < many[0] / few[0] < 9
    assert 4 < many[1] / few[1] < 9


def test_the_command_prints_lines_and_ends_with_1(tmp_path: Path) -> None:
    bad, good = tmp_path / "bad.sbatch", tmp_path / "good.sbatch"
    bad.write_text("#!/bin/bash\nsrun -K python train.py\n")
    good.write_text(f"#!/bin/bash\n{SRUN}\n")
    result = CliRunner().invoke(main, ["lint", str(good), str(bad)])
    assert result.exit_code == 1
    assert result.output.startswith(f"{bad}:2: srun without --mpi: ")
    assert len(result.output.splitlines()) == 1
    result = CliRunner().invoke(main, ["lint", str(good)])
    assert (result.exit_code, result.output) == (0, "")
