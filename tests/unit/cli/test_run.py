"""`mpidist run`: what is started again, on which hosts, and what its files say."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpidist.cli.main import main
from mpidist.cli.run import command, sweep
from mpidist.cli.run.hosts import Crew
from mpidist.cli.run.rules import DIED, JobOutcome, RestartRules
from mpidist.cli.run.start import JobStart, Signals
from mpidist.cluster.launch_line import Starter
from mpidist.comm.group.mpi_library import check_launcher
from mpidist.errors import LauncherError
from mpidist.failures.restart import notes
from mpidist.failures.restart.notes import FAILED, FINISHED, INTERRUPTED, PREEMPTED, Word, read_word, write_word
from mpidist.failures.restart.rank import RestartedRank

DEATH = JobOutcome(DIED, 1, "rank 1 died")
SAVED = DEATH._replace(has_saved=True, knows_saves=True)
HYDRA, OPEN_MPI = (Starter(name, "mpirun", in_slurm=False) for name in ("MPICH", "Open MPI"))


def restarts(rules: RestartRules, outcomes: Sequence[JobOutcome]) -> int:
    """The number of these ends after which the job is started again, up to the first one where it is not."""
    return next((number for number, one in enumerate(outcomes) if rules.why_not(one) is not None), len(outcomes))


@pytest.mark.parametrize(
    ("outcomes", "count"),
    [
        ([DEATH] * 9, 3),
        ([SAVED] * 20, 10),
        ([SAVED, *[DEATH._replace(knows_saves=True)] * 9], 2),
        ([SAVED, *[DEATH] * 9], 2),
        ([DEATH, DEATH, SAVED, *[DEATH] * 9], 4),
        ([DEATH._replace(knows_saves=True)] * 9, 2),
        ([DEATH, JobOutcome(FINISHED, 0, "")], 1),
        ([JobOutcome(FAILED, 1, "ValueError")], 0),
        ([JobOutcome(PREEMPTED, 42, "")], 0),
        ([JobOutcome(INTERRUPTED, 130, "")], 0),
        ([SAVED, SAVED._replace(was_told_to_end=15)], 1),
    ],
)
def test_who_saves_nothing_new_is_restarted_a_few_times(outcomes: list[JobOutcome], count: int) -> None:
    assert restarts(RestartRules(), outcomes) == count


def test_the_options_change_what_is_restarted() -> None:
    failure = JobOutcome(FAILED, 1, "ValueError", has_saved=True)
    assert restarts(RestartRules(restarts_errors=True), [failure] * 20) == 10
    assert restarts(RestartRules(max_restarts=0), [SAVED]) == 0
    assert restarts(RestartRules(max_restarts=4), [SAVED] * 9) == 4


def word(kind: str, text: str = "", rank: int = 0) -> Word:
    return Word(kind, 0, rank, text, 1.0)


def test_the_first_word_counts_and_that_of_one_that_has_finished_gives_way(tmp_path: Path) -> None:
    folder = tmp_path / "0"
    notes.make_folder(folder)
    assert read_word(folder) is None
    write_word(folder, word(FINISHED))
    write_word(folder, word(FAILED, "first", 1))
    write_word(folder, word(FINISHED))
    write_word(folder, word(FAILED, "second", 2))
    assert read_word(folder) == word(FAILED, "first", 1)


def test_a_word_needs_no_room_on_the_disk_and_is_cut_where_it_is_long(tmp_path: Path) -> None:
    folder = tmp_path / "0"
    notes.make_folder(folder)
    size, blocks = (folder / "word").stat().st_size, (folder / "word").stat().st_blocks
    write_word(folder, word(FAILED, "\N{SNOWMAN}" * 100_000 + "the end"))
    left = read_word(folder)
    assert left is not None
    assert left.text.endswith("the end")
    assert ((folder / "word").stat().st_size, (folder / "word").stat().st_blocks) == (size, blocks)
    assert blocks * 512 >= size


@pytest.mark.parametrize("has_died", [False, True])
def test_a_rank_that_is_ended_after_a_death_has_not_finished(tmp_path: Path, has_died: bool) -> None:
    """Its exit functions run although its program has not ended, where a call of MPI does not return."""
    folder = tmp_path / "0"
    notes.make_folder(folder)
    rank = RestartedRank(folder, 0)
    assert rank.sign()
    if has_died:
        rank.on_dead(["rank 3 of 4 (process 30 on n2)"])
    rank.before_end()
    rank.after_end()
    word = read_word(folder)
    assert (word is None) == has_died
    assert any("left" in line for line in notes.read_lines(folder / "rank-0")[0]) != has_died


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_launcher_that_dies_before_mpi_has_started_is_no_error_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """Each rank is then alone, for Open MPI, and says that the launcher does not fit."""
    monkeypatch.setattr("mpidist.launch.has_lost_launcher", lambda: is_lost)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(LauncherError, match="it died while the ranks started" if is_lost else "do not match") as caught:
        check_launcher(1, "Open MPI v5.0.11, package: Open MPI")
    folder = tmp_path / "0"
    notes.make_folder(folder)
    rank = RestartedRank(folder, 0)
    assert rank.sign()
    rank.on_end(1, caught.value, str(caught.value), ends_job=True, hangs=False)
    left = read_word(folder)
    assert (left.kind if left else None) == (None if is_lost else FAILED)


@pytest.mark.parametrize("at", [0, 8, 12, 64, 80])
def test_half_a_word_is_none(tmp_path: Path, at: int) -> None:
    folder = tmp_path / "0"
    notes.make_folder(folder)
    write_word(folder, word(FAILED, "an error"))
    data = (folder / "word").read_bytes()
    (folder / "word").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert read_word(folder) is None


def test_lines_that_are_half_written_are_read_later(tmp_path: Path) -> None:
    path = tmp_path / "events"
    notes.add_line(path, {"event": "saved"})
    with path.open("a") as file:
        file.write('{"event": "rest')
    lines, position = notes.read_lines(path)
    assert lines == [{"event": "saved"}]
    with path.open("a") as file:
        file.write('ored"}\n')
    assert notes.read_lines(path, position)[0] == [{"event": "restored"}]


LINES = {
    "one host": (Crew(HYDRA, (), 4), "mpirun -n 4"),
    "hosts": (Crew(HYDRA, ("a", "b"), 4), "mpirun -hosts a:2,b:2 -n 4"),
    "a spare host": (Crew(HYDRA, ("a", "b", "c"), 4, 2), "mpirun -hosts a:2,b:2 -n 4"),
    "more hosts than ranks": (Crew(HYDRA, ("a", "b", "c"), 2), "mpirun -hosts a:1,b:1 -n 2"),
    "Slurm": (Crew(HYDRA, ("n1", "n2"), 8, None, "pmi2"), "srun --mpi=pmi2 --kill-on-bad-exit=1 -n 8"),
    "a node of Slurm's is lost": (
        Crew(HYDRA, ("n1", "n2", "n3"), 4, 2, "pmi2", frozenset({"n2"})),
        "srun --mpi=pmi2 --kill-on-bad-exit=1 --nodes=2 --nodelist=n[1,3] -n 4",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_lines(name: str) -> None:
    crew, line = LINES[name]
    assert " ".join(crew.line(["python", "train.py"])) == f"{line} python train.py"


def test_open_mpi_passes_the_folder_to_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_CHECK", "1")
    line = Crew(OPEN_MPI, ("a", "b"), 2).line(["true"])
    passed = {word for option, word in itertools.pairwise(line) if option == "-x"}
    assert passed >= {"MPIDIST_RUN", "MPIDIST_JOB_DIR", "MPIDIST_CHECK"}
    assert "-x" not in Crew(OPEN_MPI, (), 2).line(["true"])


def test_a_lost_host_is_replaced_or_left_out() -> None:
    crew = Crew(HYDRA, ("a", "b", "c"), 4, 2)
    with_spare = crew.without(["b"], None)
    assert with_spare is not None
    assert (with_spare.used, with_spare.ranks) == (["a", "c"], 4)
    assert with_spare.without(["c"], None) is None
    assert with_spare.without(["c"], 3) is None
    fewer = with_spare.without(["c"], 2)
    assert fewer is not None
    assert (fewer.used, fewer.ranks) == (["a"], 2)
    assert fewer.without(["a"], 1) is None


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, "was started by MPICH mpirun"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "as rank 1 of 2"),
        ({"SLURM_STEP_ID": "3"}, "is a step of srun"),
    ],
)
def test_it_is_no_program_of_a_launcher(
    variables: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(main, ["run", "-n", "2", "train.py"])
    assert result.exit_code == 1
    assert text in result.output


def test_the_step_of_a_script_is_no_step_of_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", str(0xFFFFFFFB))
    monkeypatch.setattr(command, "find_starter", lambda: HYDRA)
    assert command.gather((), 2, None, "").line(["true"]) == ["mpirun", "-n", "2", "true"]


def test_more_ranks_than_places_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_starter", lambda: HYDRA)
    with pytest.raises(ValueError, match="at most 4 ranks, 2 on each of 2 hosts, got 5"):
        command.gather(["a", "b"], 5, 2, "")


def test_what_is_no_program_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_starter", lambda: HYDRA)
    text = tmp_path / "text"
    text.touch(mode=0o600)
    for word in ("./nothing-here", "nothing-here", str(text)):
        result = CliRunner().invoke(main, ["run", "-n", "2", word])
        assert result.exit_code == 1
        assert f"expected a program, got {word!r}" in result.output


def named(shared: Path, count: int) -> list[str]:
    names = [f"mpich_shm_{number:x}_0" for number in range(count)]
    for name in names:
        (shared / name).write_bytes(bytes(4096))
    return names


def test_files_that_a_process_has_mapped_stay(tmp_path: Path) -> None:
    free, mapped = named(tmp_path, 2)
    other = tmp_path / "mpich_shm_0123_0.txt"
    other.touch()
    code = f"""
import mmap, sys
file = open({str(tmp_path / mapped)!r}, "r+b")
memory = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        assert sweep.remove_files([free, mapped, other.name, "nowhere", "../mpich_shm_1_0"], tmp_path) == [free]
        process.communicate()
    assert (tmp_path / mapped).exists()
    assert other.exists()


def test_the_processes_of_a_start_are_ended_and_no_others(tmp_path: Path) -> None:
    def sleeper(folder: Path) -> subprocess.Popen[bytes]:
        code = "print(1, flush=True); import threading; threading.Event().wait()"
        process = subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, notes.VARIABLE: str(folder)}, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        return process

    with sleeper(tmp_path / "0") as mine, sleeper(tmp_path / "01") as other:
        reaper: Callable[[], int] = mine.wait
        assert sweep.processes_of(tmp_path / "0") == {mine.pid}
        assert sweep.end_processes(tmp_path / "0")
        assert reaper() == -9
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("is_here", [True, False])
def test_a_program_that_never_comes_to_mpidist_is_told_so(is_here: bool, tmp_path: Path) -> None:
    start = JobStart(["mpirun"], tmp_path / "0", Signals(), 0.1, lambda _: None, is_here=is_here)
    outcome = start._judge(2)
    start.ranks.close()
    assert (outcome.kind, outcome.code) == (FAILED, 2)
    assert outcome.text.startswith("mpirun ended with 2 before rank 0 had reached `import mpidist`")
    # On one host every rank sees the folder.
    assert ("MPIDIST_JOB_DIR" in outcome.text) is not is_here
