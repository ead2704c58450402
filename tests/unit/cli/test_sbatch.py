"""Job scripts that are written: what is in them, and that they have none of the known traps."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.cli.main import main
from mpidist.cli.slurm.lint import lint
from mpidist.cli.slurm.sbatch import Job, Site, read_site, write_script
from mpidist.errors import UnavailableError
from tests.helpers.amounts import amount

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
        "module load openmpi\n"
        "set -euo pipefail\n"
        "\n"
        "export MPIDIST_DEVICE=gpu\n"
        "export HTTPS_PROXY='a b'\n"
        "# srun takes the number of cores of a task from here only.\n"
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\n"
        "# The program saves, and requeues the job: PreemptionCheckpointHandler, `requeue=True`.\n"
        "srun --mpi=pmix --kill-on-bad-exit=1 python train.py --epochs 3\n"
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mpi = pmix", "expected TOML"),
        ("modules = []", "expected the keys mpi, setup, sbatch, environment, got 'modules'"),
        ("setup = 'a'", "`setup` must be of type list"),
        ("setup = ['''a\nb''']", "single lines"),
        ("setup = [\"a\\rb\"]", "single lines"),
        ("mpi = 'pmix\\nrm'", "a kind that `srun --mpi=list` prints"),
        ("mpi = ''", "a kind that `srun --mpi=list` prints"),
        ("[sbatch]\ncomment = \"a\\nrm -rf b\"", "one line, without control characters, got 'comment'"),
        ("[sbatch]\njob_name = 'a'", "as cpus-per-task, not c or cpus_per_task, got 'job_name'"),
        ("[sbatch]\nc = 4", "long names of options, .* got 'c'"),
        ("[sbatch]\n\"x\\ny\" = 'a'", "long names of options"),
        ("[sbatch]\ncomment = 1.5", "options without dashes.* got 'comment': 1.5"),
        # These would be ignored, or fight with the command's own.
        ("[sbatch]\ntime = '4:00:00'", "options that the command has, got 'time': write --time"),
        ("[sbatch]\nntasks = 8", "options that the command has, got 'ntasks': write --ntasks-per-node"),
        ("[environment]\nA = \"a\\r\"", "one line, without control characters, got 'A'"),
        ("[sbatch]\n\"--partition\" = 'a'", "options without dashes"),
        ("[environment]\n\"A B\" = 'a'", "strings by variable"),
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


@pytest.mark.parametrize(
    "name", ["my job", "it's", 'a"b', "a#b", "$HOME", "`id`", "a\tb", "Größe", "x;y", " # ", "a\\b", "a'\\ b"]
)
def test_values_are_quoted(name: str) -> None:
    text = write_script(Job(("a.py",), name=name), Site(sbatch={"comment": name}), "MPICH")
    assert lint(text) == []
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    words = [word for line in directives for word in shlex.split(line, comments=True)]
    assert len(words) == len(directives)
    # A backslash is one of Slurm's quotes also within others.
    seen = name.replace("\\", "\\\\")
    assert {f"--job-name={seen}", f"--comment={seen}"} <= set(words)


def test_where_there_is_no_mpi_the_site_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    code, output = invoke("train.py")
    assert code == 1
    assert output.rstrip().endswith('or name srun\'s kind in the file of --site: mpi = "pmix"')
    site = tmp_path / "site.toml"
    site.write_text('mpi = "pmix"')
    assert invoke("--site", str(site), "train.py")[0] == 0


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (("dir/train.py", "a.py"), "train"), (("python", "-m", "pkg.train"), "pkg.train"),
        (("python3", "-u", "train.py", "b.py"), "train"), (("./run",), "run"), (("python",), "python"),
    ],
)
def test_a_job_has_the_name_of_its_program(program: tuple[str, ...], name: str) -> None:
    assert f"#SBATCH --job-name={name}\n" in write_script(Job(program), Site(), "MPICH")


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["sbatch", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train.py --epochs 5"], "python train.py --epochs 5"),
        (["train.py", "--epochs", "5"], "python train.py --epochs 5"),
        (["python -m 'my train'"], "python -m 'my train'"),
        (["my train.py", "5"], "python 'my train.py' 5"),
        ([r"./run\ it --fast"], "'./run it' --fast"),
    ],
)
def test_a_program_is_words_or_one_text(words: list[str], line: str) -> None:
    code, output = invoke(*words)
    assert (code, output.splitlines()[-1].partition("--kill-on-bad-exit=1 ")[2]) == (0, line)


def test_a_file_whose_name_has_blanks_is_one_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my train.py").touch()
    code, output = invoke("my train.py")
    assert (code, output.splitlines()[-1].endswith(" python 'my train.py'")) == (0, True)
    assert "#SBATCH --job-name='my train'\n" in output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([""], "expected a program, such as train.py --epochs 5, got ''"),
        (["", "5"], "expected a program, such as train.py --epochs 5, got '' 5"),
        (["  "], "expected a program"),
        (["--", "-m", "pkg.train"], "one of Python's, write python in front of it: python -m pkg.train"),
        (["--", "-m pkg.train"], "got the option '-m'"),
        (["train.py 'a"], "expected a program and its options, got \"train.py 'a\": No closing quotation"),
        (["--job-name", "x\nrm -rf y", "train.py"], "`job_name` must be one line without control characters, got 'x"),
        (["a\nb.py", "5"], "a word of the program must be one line"),
        (["a.py", "b\r"], "a word of the program must be one line"),
        (["--time", "1:00\n", "a.py"], "`time` must have a form such as 4:00:00"),
    ],
)
def test_what_is_no_program_is_an_error(arguments: list[str], text: str) -> None:
    code, output = invoke(*arguments)
    assert (code, text in output) == (1, True)
    assert len(output.splitlines()) == 1


def test_a_sites_setup_is_run_before_the_strict_mode(tmp_path: Path) -> None:
    """As /etc/bashrc has it, which reads variables that are not set."""
    (tmp_path / "bashrc").write_text('if [ "$PS1_OF_NOBODY" ]; then :; fi\nfalse\nSEEN=yes\n')
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    site = Site(setup=(f"source {shlex.quote(str(tmp_path / 'bashrc'))}",), environment={"SEEN": "no"})
    text = write_script(Job(("./run",)), site, "MPICH")
    assert lint(text) == []
    bash = shutil.which("bash")
    assert bash is not None
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "1"}
    result = subprocess.run([bash], input=text, text=True, capture_output=True, check=False, env=variables, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "--mpi=pmi2 --kill-on-bad-exit=1 ./run\n", "")


def test_what_cannot_be_written_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"must have a form such as 4:00:00.* got 'soon'"):
        write_script(Job(("a.py",), time="soon"), Site(), "MPICH")
    with pytest.raises(ValueError, match=r"number of GPUs on a node, 2, got 3"):
        write_script(Job(("a.py",), tasks_per_node=3, gpus_per_node=2), Site(), "MPICH")
    with pytest.raises(UnavailableError, match="which kind of `srun --mpi` starts 'Other MPI'"):
        write_script(Job(("a.py",)), Site(), "Other MPI")


def test_a_job_with_gpus_has_its_program_use_them() -> None:
    line = "export MPIDIST_DEVICE=gpu\n"
    assert line in write_script(Job(("a.py",), gpus_per_node=2), Site(), "MPICH")
    assert line not in write_script(Job(("a.py",)), Site(), "MPICH")
    site = Site(environment={"MPIDIST_DEVICE": "cpu"})
    text = write_script(Job(("a.py",), gpus_per_node=2), site, "MPICH")
    assert "export MPIDIST_DEVICE=cpu\n" in text
    assert line not in text
