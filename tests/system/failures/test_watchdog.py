"""Ranks that wait for others that never come: the job ends, or a report says who waits where, and for whom."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.helpers.launching import end, finish, read_until, run_code, run_program, start_program
from tests.helpers.waiting import process_of

pytestmark = pytest.mark.timeout_seconds(120)

HEAD = """
import os, signal, sys, threading, time
import numpy as np
import mpidist
from tests.helpers.waiting import let_pass, page_of, process_of, until, until_waits_in
strategy = mpidist.MultiWorkerMirroredStrategy()
ranks = strategy.communicator
rank = ranks.rank
with strategy.scope():
    variable = mpidist.Variable(np.zeros(3, "float32"))
    optimizer = mpidist.optimizers.SGD(0.5)
ranks.barrier()
# What is a limit of the program's, and not of its start.
os.environ.update({name[6:]: os.environ[name] for name in os.environ if name.startswith("LATER_")})

def never():
    while True:
        signal.pause()

"""


def report(text: str) -> list[str]:
    """The lines of the only report."""
    lines = text.splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith("mpidist:")]
    assert len(begins) == 1, text
    end = next((n for n, line in enumerate(lines) if n > begins[0] and not line.startswith("  ")), len(lines))
    return lines[begins[0] : end]


def line_of(call: str, code: str) -> int:
    """The number of the first line below the head of the program that has this text."""
    lines = (HEAD + code).splitlines()
    return next(number for number, line in enumerate(lines, 1) if number > HEAD.count("\n") and call in line)


def test_another_call_of_the_chief_ends_the_job(tmp_path: Path) -> None:
    program = "if rank == 0:\n    ranks.all_gather_object(1)\nranks.barrier()\n"
    result, text = run_code(tmp_path, HEAD + program)
    assert result.returncode != 0
    first, *lines = report(text)
    assert re.match(r"mpidist: rank \d of 3 on \S+ is deadlocked, the job ends: the ranks are in different", first)
    chief = next(line for line in lines if "rank 0 of 3" in line)
    assert re.search(rf"waits in exchange between ranks, call \d+, \S+py:{line_of('gather', program)}", chief), text
    for other in (1, 2):
        line = next(line for line in lines if f"rank {other} of 3" in line)
        assert re.search(rf"waits in barrier, call \d+, \S+py:{line_of('barrier', program)}", line), text
    assert "the same calls in the same order" in lines[-1]


CHIEF_ALONE = {
    "save": "mpidist.Checkpoint(v=variable).save(sys.argv[0])",
    "restore": "mpidist.Checkpoint(v=variable).restore(saved)",
    "assign": "variable.assign(np.ones(3, 'float32'))",
    "building an optimizer": "optimizer.apply_gradients([(np.ones(3, 'float32'), variable)])",
    "creating a variable": "with strategy.scope(): mpidist.Variable(1.0)",
    "splitting a communicator": "ranks.split(0)",
    "gather_object": "strategy.gather_object(1)",
}
CALLED = {
    "building an optimizer": "apply_gradients", "creating a variable": "__new__", "splitting a communicator": "split",
}


@pytest.mark.parametrize("name", CHIEF_ALONE)
@pytest.mark.parametrize("who", [0, 1])
def test_what_one_rank_calls_alone_ends_the_job(tmp_path: Path, name: str, who: int) -> None:
    program = (
        f"saved = mpidist.Checkpoint(v=variable).save({str(tmp_path / 'before')!r})\n"
        f"if rank == {who}:\n    {CHIEF_ALONE[name]}\nranks.barrier()\n"
    )
    result, text = run_code(tmp_path, HEAD + program, ranks=2)
    assert result.returncode != 0
    first, *lines = report(text)
    assert "the job ends: the ranks are in different calls" in first
    alone = next(line for line in lines if f"rank {who} of 2" in line)
    line = line_of(CHIEF_ALONE[name], program)
    assert re.search(rf"waits in {name}(?: \(.*\))?, call \d+, \S+py:{line} ", alone), text
    where, _, before = alone.partition(" (before it: ")
    assert where.endswith(f"({CALLED.get(name, name)})")
    assert before.endswith("barrier; save)"), text
    other = next(line for line in lines if f"rank {1 - who} of 2" in line)
    assert re.search(rf"waits in barrier, call \d+, \S+py:{line_of('barrier', program)}", other), text


def test_a_save_of_the_chief_beside_a_step_ends_the_job(tmp_path: Path) -> None:
    """Each of the two waits in a way of its own: in MPI, and in node memory."""
    program = (
        "step = lambda: optimizer.apply_gradients([(np.ones(3, 'float32'), variable)])\n"
        "for _ in range(30):\n    step()\n"
        f"if rank == 0:\n    mpidist.Checkpoint(v=variable).save({str(tmp_path / 'alone')!r})\nstep()\n"
    )
    result, text = run_code(tmp_path, HEAD + program)
    assert result.returncode != 0
    first, *lines = report(text)
    assert "the job ends: the ranks are in different calls" in first
    assert re.search(r"rank 0 of 3.* in save", "\n".join(lines)), text
    assert re.search(r"rank 1 of 3.* in apply_gradients", "\n".join(lines)), text
    assert not list(tmp_path.glob("alone*"))


@pytest.mark.parametrize(
    "end", ["raise SystemExit(main())", "sys.exit(0)", "raise SystemExit(3)"], ids=["main", "exit", "code"]
)
@pytest.mark.parametrize("who", [0, 2])
def test_an_early_exit_ends_the_job(tmp_path: Path, end: str, who: int) -> None:
    result, text = run_code(
        tmp_path, HEAD + f"def main():\n    return 0\nif rank == {who}:\n    {end}\nranks.barrier()\n"
    )
    assert result.returncode != 0
    first, *lines = report(text)
    assert first.endswith("it waits for a rank that has ended")
    assert re.search(rf"rank {who} of 3 \(process \d+ on \S+\) has ended", "\n".join(lines)), text


def test_calls_on_two_communicators_in_two_orders_end_the_job(tmp_path: Path) -> None:
    result, text = run_code(
        tmp_path, HEAD + "other = ranks.split(0)\nfirst, second = (ranks, other) if rank else (other, ranks)\n"
        "first.barrier()\nsecond.barrier()\n",
    )
    assert result.returncode != 0
    assert "the ranks wait for one another in different calls" in report(text)[0]


def test_ranks_of_different_communicators_do_not_wait_for_one_another(tmp_path: Path) -> None:
    """The first rank works alone, the others in a group of their own, and none is blamed for it."""
    result, text = run_code(
        tmp_path,
        HEAD + "pair = ranks.split(int(rank > 0))\n"
        "if rank == 2:\n    until_waits_in(0, 'barrier')\n    let_pass(3)\n"
        "if rank > 0:\n    pair.barrier()\n"
        "else:\n    until_waits_in(1, 'barrier')\n"
        "ranks.barrier()\nprint('went on')\n",
    )
    assert result.returncode == 0, text
    assert "mpidist:" not in text
    assert text.count("went on") == 3


def test_a_rank_that_computes_is_reported_and_waited_for(tmp_path: Path) -> None:
    program = (
        # Opening waits for the other end.
        "def compute():\n    open(sys.argv[1]).close()\n"
        "if rank == 1:\n    compute()\nranks.barrier()\nprint('went on')\n"
    )
    file, pipe = tmp_path / "program.py", tmp_path / "pipe"
    file.write_text(HEAD + program)
    os.mkfifo(pipe)
    process = start_program(3, file, pipe, LATER_MPIDIST_WARN_SECONDS="2")
    text = read_until(process, "A rank that still computes")
    os.close(os.open(pipe, os.O_RDWR))
    result = finish(process, file.name, 60)
    text += result.stderr
    assert result.returncode == 0, text
    assert result.stdout.count("went on") == 3
    first, *lines = report(text)
    assert re.match(r"mpidist: rank 0 of 3 on \S+ has waited \d+ s for 1 of 3 ranks", first)
    told = "\n".join(lines)
    assert re.search(rf"rank 0 of 3 on \S+ waits in barrier, call \d+, \S+py:{line_of('barrier', program)}", told), text
    assert re.search(
        rf"rank 1 of 3 \(.*\) is outside any call, \S+py:{line_of('open', program)} in compute", told
    ), text
    assert "    compute()" in told


def test_a_rank_that_holds_the_interpreter_shows_its_line(tmp_path: Path) -> None:
    # Such a call into C gives the interpreter to no other thread. The signal for the stack ends it.
    program = "import ctypes\nif rank == 1:\n    ctypes.PyDLL(None).pause()\nranks.barrier()\n"
    result, text = run_code(tmp_path, HEAD + program, LATER_MPIDIST_WARN_SECONDS="4")
    assert result.returncode == 0, text
    told = "\n".join(report(text))
    assert re.search(r"rank 1 of 3 \(.*\) holds the interpreter lock \(GIL\), or gets no core", told), text
    assert f'program.py", line {line_of("pause", program)} in <module>' in told, text


def test_a_stopped_rank_is_named_and_goes_on_as_the_report_says(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"{HEAD}if rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\nranks.barrier()\nprint('went on')\n"
    )
    process = start_program(3, program, LATER_MPIDIST_WARN_SECONDS="1")
    told = read_until(process, "A rank that still computes")
    stopped = re.search(r"rank 1 of 3 \(process (\d+) on \S+\) is stopped: `kill -CONT \1` resumes it\n", told)
    if stopped:
        os.kill(int(stopped[1]), signal.SIGCONT)
    result = finish(process, program.name, 60)
    assert stopped, told
    assert result.returncode == 0, told + result.stderr
    assert result.stdout.count("went on") == 3


STOPS = """
class Stops:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGSTOP)
        return Stops, ()
"""


def test_a_rank_that_is_stopped_within_a_call_is_named(tmp_path: Path) -> None:
    """It has come, and does not go on."""
    result, text = run_code(
        tmp_path,
        HEAD + f"{STOPS}strategy.gather_object(Stops() if rank == 1 else 0)\n",
        LATER_MPIDIST_WARN_SECONDS="60", LATER_MPIDIST_TIMEOUT="3",
    )
    assert result.returncode != 0
    first, *_ = report(text)
    assert re.search(r"has waited \d+ s though all ranks have arrived, the limit is 3 s, the job ends", first), text
    assert re.search(r"rank 1 of 3 \(process (\d+) on \S+\) is stopped: `kill -CONT \1` resumes it", text), text


@pytest.mark.parametrize(("late", "told"), [
    ("never()", r"rank 1 of 3 \(process \d+ on \S+\) is outside any call, \S+program.py:\d+"),
    ("os.kill(os.getpid(), signal.SIGSTOP)", r"rank 1 of 3 \(process (\d+) on \S+\) is stopped: `kill -CONT \1`"),
])
def test_the_time_limit_holds_at_the_end_of_the_program(tmp_path: Path, late: str, told: str) -> None:
    result, text = run_code(tmp_path, HEAD + f"if rank == 1:\n    {late}\n", LATER_MPIDIST_TIMEOUT="2")
    assert result.returncode != 0
    first, *_ = report(text)
    said = r"rank 0 of 3 .* has ended and has waited \d+ s for other ranks, the job ends"
    assert re.search(said, first), text
    assert re.search(told, text), text


def test_a_time_limit_ends_the_job(tmp_path: Path) -> None:
    result, text = run_code(tmp_path, HEAD + "if rank == 1:\n    never()\nranks.barrier()\n", LATER_MPIDIST_TIMEOUT="2")
    assert result.returncode != 0
    assert re.match(
        r"mpidist: rank \d of 3 on \S+ has waited \d+ s for 1 of 3 ranks, the limit is 2 s, the job ends",
        report(text)[0],
    )


def test_a_job_goes_on_where_all_come_while_a_rank_waits_for_its_turn_to_end_it(tmp_path: Path) -> None:
    """The last rank's limit is over before the others come, and the first rank, which has no limit, would speak."""
    result, text = run_code(
        tmp_path,
        HEAD + "if rank == 2:\n    os.environ['MPIDIST_TIMEOUT'] = '2'\n"
        # The last rank's watchdog asks, and looks again in its turn.
        "if rank == 1:\n"
        "    until(lambda: page_of(os.getpid()).asked)\n"
        "    last = page_of(process_of(2))\n    beat = last.beat\n"
        "    until(lambda: last.beat != beat)\n"
        "ranks.barrier()\nos.environ.pop('MPIDIST_TIMEOUT', None)\n"
        # Longer than the turn.
        "let_pass(4.5)\nprint('went on')\n",
    )
    assert result.returncode == 0, text
    assert text.count("went on") == 3
    assert "mpidist:" not in text


def test_a_rank_that_waits_for_its_turn_to_end_the_job_is_seen_where_it_waits(tmp_path: Path) -> None:
    """The first rank, which has no limit, would speak, and at last the second one does."""
    result, text = run_code(
        tmp_path,
        HEAD + f"{STOPS}if rank in (1, 2):\n    os.environ['MPIDIST_TIMEOUT'] = '2'\n"
        "strategy.gather_object(Stops() if rank == 3 else 0)\n",
        ranks=4,
    )
    assert result.returncode != 0
    first, *lines = report(text)
    assert re.match(r"mpidist: rank 1 .* on \S+ has waited \d+ s though all ranks have arrived, the limit is 2", first)
    assert re.search(r"rank 2 of 4 \(.*\) waits in gather_object", "\n".join(lines)), text


LIMITED = {name: call for name, call in CHIEF_ALONE.items() if name != "splitting a communicator"}


@pytest.mark.parametrize("name", LIMITED)
def test_the_time_limit_of_a_strategy_covers_all_it_does(tmp_path: Path, name: str) -> None:
    program = (
        "from mpidist.experimental import CommunicationOptions\n"
        "options = CommunicationOptions(timeout_seconds=2)\n"
        "strategy = mpidist.MultiWorkerMirroredStrategy(communication_options=options)\n"
        "with strategy.scope():\n    variable = mpidist.Variable(np.zeros(3, 'float32'))\n"
        f"saved = mpidist.Checkpoint(v=variable).save({str(tmp_path / 'before')!r})\n"
        f"if rank == 1:\n    never()\n{LIMITED[name]}\n"
    )
    result, text = run_code(tmp_path, HEAD + program, ranks=2)
    assert result.returncode != 0
    first, *lines = report(text)
    assert re.search(r"has waited \d+ s for 1 of 2 ranks, the limit is 2 s, the job ends", first), text
    assert re.search(rf"rank 0 of 2 on \S+ waits in {name}\b", "\n".join(lines)), text


def test_the_time_limit_of_a_strategy_is_not_that_of_another_one(tmp_path: Path) -> None:
    result, text = run_code(
        tmp_path,
        HEAD + "from mpidist.experimental import CommunicationOptions\n"
        "options = CommunicationOptions(timeout_seconds=1)\n"
        "impatient = mpidist.MultiWorkerMirroredStrategy(communication_options=options)\n"
        "if rank == 1:\n    until_waits_in(0, 'assign')\n    let_pass(2)\n"
        "variable.assign(np.ones(3, 'float32'))\nstrategy.gather_object(1)\nprint('went on')\n",
    )
    assert result.returncode == 0, text
    assert text.count("went on") == 3
    assert "mpidist:" not in text


def test_without_hooks_there_is_a_report_alone(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(HEAD + "if rank == 0:\n    ranks.all_gather_object(1)\nranks.barrier()\n")
    job = start_program(3, program, MPIDIST_ABORT="0")
    text = read_until(job, "the same calls in the same order.*\n")
    assert re.match(r"mpidist: rank 0 of 3 on \S+ is deadlocked, and waits: the ranks are in", report(text)[0])
    assert job.poll() is None
    assert process_of(1, job)
    end(job)


def test_output_before_the_end_is_not_lost(tmp_path: Path) -> None:
    _, text = run_code(
        tmp_path, HEAD + "print('before the end', rank)\n"
        "if rank == 0:\n    ranks.all_gather_object(1)\nranks.barrier()\n",
        PYTHONUNBUFFERED="",
    )
    assert "before the end 0" in text


def test_a_limit_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(HEAD)
    result = run_program(3, program, MPIDIST_TIMEOUT="soon")
    text = result.stdout + result.stderr
    assert result.returncode != 0, text
    assert "ValueError: MPIDIST_TIMEOUT must be a number of seconds, got 'soon': set for instance 60" in text


def test_one_rank_alone_has_no_thread(tmp_path: Path) -> None:
    _, text = run_code(tmp_path, HEAD + "print([one.name for one in threading.enumerate()])\n", ranks=1)
    assert "['MainThread']" in text


def test_a_rank_whose_messages_went_to_another_call_ends_the_job(tmp_path: Path) -> None:
    """The first rank has sent a broadcast and gone on: it waits for the others, and they for nobody.

    It begins to do so when the other one has waited for so long that it asks why.
    """
    program = (
        "collective = strategy.replicas.collective\nfor _ in range(20):\n    collective.broadcast(np.ones(1))\n"
        "if rank == 1:\n    ranks.all_gather_object(1)\nelse:\n    collective.broadcast(np.ones(1))\n"
        "    until(lambda: page_of(os.getpid()).asked)\nranks.barrier()\n"
    )
    result, text = run_code(tmp_path, HEAD + program, ranks=2, LATER_MPIDIST_WARN_SECONDS="3", MPIDIST_COLLECTIVE="MPI")
    assert result.returncode != 0
    assert re.search("rank 1 of 2 .* is deadlocked, the job ends: .* its messages went to another call", text), text
    assert re.search(rf"rank 1 .* waits in exchange between ranks, call \d+, \S+py:{line_of('gather', program)}", text)
    assert re.search(rf"rank 0 .* waits in barrier, call \d+, \S+py:{line_of('barrier', program)}", text)


LEFT_BEHIND = {
    # A call without a meeting has the number of the one in which the others are.
    "all_reduce": (
        "accumulating.apply_gradients([(np.ones(3, 'float32'), variable)])\n    ranks.barrier()",
        "strategy.reduce('SUM', 1.0, axis=None)",
    ),
    "value of variable number": (
        "accumulating.apply_gradients([(np.ones(3, 'float32'), variable)])\n    ranks.barrier()",
        "mean.result()",
    ),
    "agreement between ranks": (
        "accumulating.apply_gradients([(np.ones(3, 'float32'), variable)])\n    ranks.barrier()",
        "ranks.all_reduce_max(1)",
    ),
}


@pytest.mark.parametrize("call", LEFT_BEHIND)
def test_ranks_in_a_call_that_the_others_have_passed_end_the_job(tmp_path: Path, call: str) -> None:
    """Some are one call behind for ever: no rank waits for one that could still come."""
    ahead, behind = LEFT_BEHIND[call]
    program = (
        "for _ in range(20):\n    strategy.reduce('SUM', np.ones(2), axis=None)\n"
        "with strategy.scope():\n    mean = mpidist.metrics.Mean()\n"
        "accumulating = mpidist.optimizers.SGD(0.5, gradient_accumulation_steps=2)\naccumulating.build([variable])\n"
        f"if rank == 0:\n    {ahead}\nelse:\n    {behind}\n"
    )
    result, text = run_code(tmp_path, HEAD + program, LATER_MPIDIST_WARN_SECONDS="1")
    assert result.returncode != 0
    assert "its messages went to another call" in text, text
    assert re.search(rf"rank [12] .* waits in {call}[^,]*, call \d+, \S+py:{line_of(behind, program)}", text), text


def test_a_save_and_an_agreement_that_ranks_have_passed_are_one_error(tmp_path: Path) -> None:
    """Both combine the same numbers, so they end together, and the ranks see that their calls differ."""
    ahead, behind = "mpidist.Checkpoint(v=variable).save(sys.argv[0])", "ranks.all_reduce_max(1)"
    program = (
        "accumulating = mpidist.optimizers.SGD(0.5, gradient_accumulation_steps=2)\naccumulating.build([variable])\n"
        "if rank == 0:\n    accumulating.apply_gradients([(np.ones(3, 'float32'), variable)])\n"
        f"    {ahead}\nelse:\n    {behind}\n"
    )
    result, text = run_code(tmp_path, HEAD + program)
    assert result.returncode != 0
    assert "MismatchError: the collective call, its shape and dtype must be the same on all ranks" in text, text
    assert re.search(rf"got save of strategy number 1 at \S+py:{line_of(ahead, program)}", text), text
    assert re.search(rf"agreement between ranks at \S+py:{line_of(behind, program)}", text), text
