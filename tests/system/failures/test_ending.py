"""How a job ends: quickly, with one whole traceback, and with a code that says so."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.helpers.launching import find_mpirun, finish, mpirun_command, run_code, start_command

pytestmark = pytest.mark.timeout_seconds(150)

HEAD = """
import os, sys, time
import numpy as np
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
from tests.helpers.waiting import until_exists, until_has_ended
rank = strategy.communicator.rank
def wait_for_others():
    strategy.reduce("SUM", 1.0, axis=None)
def bug():
    raise ValueError("the bug of rank %d" % rank)
"""


def ours(text: str) -> list[str]:
    """What mpidist itself printed."""
    return re.findall(r"mpidist: .*", text)


@pytest.mark.parametrize("who", [0, 1, 2])
def test_a_lone_exception_ends_the_job(tmp_path: Path, who: int) -> None:
    result, text = run_code(tmp_path, HEAD + f"bug() if rank == {who} else wait_for_others()\n")
    assert result.returncode != 0
    assert text.count("Traceback (most recent call last)") == 1
    assert text.count(f"ValueError: the bug of rank {who}") == 1
    assert "in bug" in text
    assert len(ours(text)) == 1
    assert re.match(rf"mpidist: rank {who} of 3 on \S+ failed, the job ends", ours(text)[0])


def test_an_exception_in_a_scope_or_a_replica_ends_the_job(tmp_path: Path) -> None:
    code = "with strategy.scope():\n    strategy.run(lambda: bug() if rank == 1 else wait_for_others_in_run())\n"
    helper = "def wait_for_others_in_run():\n    mpidist.get_replica_context().all_reduce('SUM', 1.0)\n"
    result, text = run_code(tmp_path, HEAD + helper + code)
    assert result.returncode != 0
    assert text.count("ValueError: the bug of rank 1") == 1


@pytest.mark.parametrize(
    "code",
    [
        "strategy.reduce('SUM', np.ones(3 + rank), axis=None)",
        "mpidist.MirroredStrategy(devices=['cpu:0'] * 7)",
        "try:\n    strategy.reduce('SUM', np.ones(3 + rank), axis=None)\nexcept ValueError as e:\n"
        "    raise RuntimeError('cannot continue') from e",
    ],
    ids=["mismatch", "devices", "chained"],
)
def test_an_error_of_all_ranks_is_printed_once(tmp_path: Path, code: str) -> None:
    result, text = run_code(tmp_path, HEAD + code + "\n")
    assert result.returncode != 0
    assert len(ours(text)) == 1
    assert ours(text)[0].startswith("mpidist: rank 0 of 3")


def test_an_error_of_all_ranks_that_only_one_does_not_catch(tmp_path: Path) -> None:
    code = (
        "try:\n    strategy.reduce('SUM', np.ones(3 + rank), axis=None)\nexcept ValueError:\n"
        "    if rank == 2: raise\nwait_for_others()\n"
    )
    result, text = run_code(tmp_path, HEAD + code)
    assert result.returncode != 0
    assert len(ours(text)) == 1
    assert ours(text)[0].startswith("mpidist: rank 2 of 3")


@pytest.mark.parametrize("leave", ["sys.exit(3)", "sys.exit('no data')", "exit(3)", "argparse", "asyncio"])
@pytest.mark.parametrize("where", ["{}", "with strategy.scope(): strategy.run(lambda: {})"], ids=["top", "run"])
def test_a_lone_exit_with_a_code_ends_the_job(tmp_path: Path, leave: str, where: str) -> None:
    if leave == "argparse":
        leave = "__import__('argparse').ArgumentParser().parse_args(['--nonsense'])"
    if leave == "asyncio":
        # The task keeps its exception.
        leave = "asyncio.run(work())"
    code = "import asyncio\nasync def work():\n    await asyncio.sleep(0)\n    sys.exit(3)\n"
    result, text = run_code(tmp_path, HEAD + f"{code}if rank == 1:\n    {where.format(leave)}\nwait_for_others()\n")
    assert result.returncode != 0
    assert len(ours(text)) == 1
    assert re.match(r"mpidist: rank 1 of 3 on \S+ exited with \d", ours(text)[0])
    if "no data" in leave:
        assert "no data" in text


def test_a_caught_exit_ends_nothing(tmp_path: Path) -> None:
    code = (
        "kept = None\nif rank == 1:\n    try:\n        sys.exit(5)\n    except SystemExit as error:\n"
        "        kept = error\n"
        "if rank == 2:\n    try:\n        sys.exit(6)\n    except BaseException:\n        pass\n"
        "wait_for_others()\nsys.stdout.write('went on\\n')\nsys.exit(0)\n"
    )
    result, text = run_code(tmp_path, HEAD + code)
    assert result.returncode == 0, text
    assert text.count("went on") == 3
    assert ours(text) == []


@pytest.mark.parametrize("last", ["", "sys.exit()", "sys.exit(0)"])
def test_a_program_that_ends_well_prints_nothing(tmp_path: Path, last: str) -> None:
    # Ranks come to the end one after another.
    result, text = run_code(tmp_path, HEAD + f"wait_for_others()\nif rank:\n    until_has_ended(rank - 1)\n{last}\n")
    assert result.returncode == 0
    assert text == ""


def test_all_ranks_may_exit_with_a_code(tmp_path: Path) -> None:
    result, _ = run_code(tmp_path, HEAD + "wait_for_others()\nsys.exit(7)\n")
    assert result.returncode != 0


def test_a_keyboard_interrupt_ends_the_job(tmp_path: Path) -> None:
    result, text = run_code(tmp_path, HEAD + "if rank == 1: raise KeyboardInterrupt\nwait_for_others()\n")
    assert result.returncode != 0
    assert "Traceback" not in text


def test_the_users_own_hook_is_called(tmp_path: Path) -> None:
    code = "bug() if rank == 1 else wait_for_others()\n"
    hook = "import sys\nsys.excepthook = lambda *_: sys.stderr.write('the hook of the program\\n')\n"
    result, text = run_code(tmp_path, hook + HEAD + code)
    assert result.returncode != 0
    assert text.count("the hook of the program") == 1
    assert "Traceback" not in result.stderr


def test_output_before_the_failure_is_not_lost(tmp_path: Path) -> None:
    code = "print('before the failure')\nbug() if rank == 1 else wait_for_others()\n"
    _, text = run_code(tmp_path, HEAD + code, PYTHONUNBUFFERED="")
    assert "before the failure" in text
    assert text.index("before the failure") < text.index("mpidist: rank 1")


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    code = "if rank == 1:\n    sys.stderr.write(f'hook {sys.excepthook is sys.__excepthook__}')\nwait_for_others()\n"
    result, text = run_code(tmp_path, HEAD + code, MPIDIST_ABORT="0")
    assert result.returncode == 0
    assert "hook True" in text


def test_one_rank_switches_it_off_for_all(tmp_path: Path) -> None:
    """A rank without hooks takes no leave: the others would wait for it at their end."""
    result, _ = run_code(
        tmp_path, "import os\nfrom mpidist import launch\n"
        "if launch.world_rank() == 1:\n    os.environ['MPIDIST_ABORT'] = '0'\n" + HEAD + "wait_for_others()\n"
        "sys.stderr.write(f'hook {sys.excepthook is sys.__excepthook__}\\n')\n",
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("hook True") == 3


def test_a_program_that_finalizes_mpi_itself_ends_well(tmp_path: Path) -> None:
    result, text = run_code(tmp_path, HEAD + "from mpi4py import MPI\nwait_for_others()\nMPI.Finalize()\n")
    assert result.returncode == 0, text
    assert text == ""


def test_a_forked_child_may_fail(tmp_path: Path) -> None:
    code = """
child = os.fork()
if child == 0:
    try:
        sys.excepthook(ValueError, ValueError("the child's own"), None)
    finally:
        os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
wait_for_others()
print("the ranks go on")
"""
    result, text = run_code(tmp_path, HEAD + code)
    assert result.returncode == 0, text
    assert text.count("the child's own") == text.count("the ranks go on") == 3
    assert not ours(text)


def test_forked_children_that_end_by_themselves_leave_their_parents_mpi_alone(tmp_path: Path) -> None:
    ends = {"sys.exit(3)": 3, "bug()": 1, "raise KeyboardInterrupt": 130, "sys.exit()": 0}
    program = "import atexit\n" + "".join(f"""
child = os.fork()
if child == 0:
    atexit.register(os.write, 1, b"the child ends by {end}\\n")
    {end}
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == {code}
""" for end, code in ends.items()) + """
wait_for_others()
os.write(1, b"the ranks go on\\n")
"""
    result, text = run_code(tmp_path, HEAD + program)
    assert result.returncode == 0, text
    for end in ends:
        assert text.count(f"the child ends by {end}\n") == 3, text
    assert text.count("the ranks go on") == 3
    assert not ours(text)


FORKED = """
import signal
from mpidist.experimental import CommunicationOptions
with strategy.scope():
    variable = mpidist.Variable(np.zeros(1000, "float32"))
    mean = mpidist.metrics.Mean()
    optimizer = mpidist.optimizers.SGD(1.0)
mean.update_state([1.0, 2.0])
ones = np.ones(1000, "float32")
timed = mpidist.MultiWorkerMirroredStrategy(communication_options=CommunicationOptions(timeout_seconds=50))
handle = strategy.extended.all_reduce_async("SUM", ones.copy())
handle.wait()

def step():
    optimizer.apply_gradients([(ones, variable)])

def create():
    with strategy.scope():
        mpidist.Variable(1.0)

calls = {
    "reduce": wait_for_others,
    "reduce in time": lambda: timed.reduce("SUM", 1.0, axis=None),
    "gather": lambda: strategy.gather(ones, axis=0),
    "step": step,
    "assign": lambda: variable.assign(7 * ones),
    "create": create,
    "metric": mean.result,
    "object": lambda: strategy.gather_object(1),
    "barrier": strategy.communicator.barrier,
    "asynchronous": lambda: strategy.extended.all_reduce_async("SUM", ones.copy()).wait(),
    "strategy": mpidist.MultiWorkerMirroredStrategy,
    "save": lambda: mpidist.Checkpoint(variable=variable).save(sys.argv[0]),
}
step()
for _ in range(20):
    wait_for_others()
    timed.reduce("SUM", 1.0, axis=None)
"""


def test_a_forked_child_is_no_rank(tmp_path: Path) -> None:
    """Its calls would meet the other ranks instead of its parent's, and results would be wrong in silence."""
    code = f"""{FORKED}
child = os.fork() if rank == 0 else None
if child == 0:
    for name, call in calls.items():
        try:
            call()
            os.write(1, f"{{name}} was done\\n".encode())
        except RuntimeError as error:
            if "this process was forked from a rank" not in str(error):
                os.write(1, f"{{name}}: {{error}}\\n".encode())
    # What was made before can be read, and let go.
    assert variable.numpy()[0] == -3
    strategy.close()
    os.write(1, f"{{len(calls)}} calls are refused\\n".encode())
    os._exit(0)
if rank == 0:
    assert os.waitpid(child, 0)[1] == 0
for number in range(10):
    assert strategy.reduce("SUM", float(rank), axis=None) == 3
    assert timed.reduce("SUM", float(rank), axis=None) == 3
    step()
    assert (variable.numpy() == -3 * (number + 2)).all(), variable.numpy()
assert mean.result() == 1.5
print("the ranks go on")
"""
    result, text = run_code(tmp_path, HEAD + code)
    assert result.returncode == 0, text
    assert "12 calls are refused\n" in text, text
    assert "was done" not in text, text
    assert text.count("the ranks go on") == 3, text
    assert not ours(text)


def test_a_forked_child_does_not_wait_for_its_parents_reduction(tmp_path: Path) -> None:
    code = """
handle = strategy.extended.all_reduce_async("SUM", np.ones(3)) if rank == 0 else None
child = os.fork() if rank == 0 else None
if child == 0:
    try:
        handle.wait()
    except RuntimeError as error:
        os._exit(7 if "forked after the reduction began" in str(error) else 8)
    os._exit(9)
if rank == 0:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
else:
    handle = strategy.extended.all_reduce_async("SUM", np.ones(3))
wait_for_others()
assert (handle.wait() == 3).all()
print("the ranks go on")
"""
    result, text = run_code(tmp_path, HEAD + code)
    assert result.returncode == 0, text
    assert text.count("the ranks go on") == 3, text


def test_a_signal_of_a_forked_child_is_its_own(tmp_path: Path) -> None:
    """The child shares the descriptor by which signals wake a thread of its parent."""
    code = """
import signal, threading
child = os.fork() if rank == 0 else None
if child == 0:
    try:
        open(sys.argv[1], "w").close()
        threading.Event().wait()
    except KeyboardInterrupt:
        os._exit(7)
    os._exit(8)
if rank == 0:
    until_exists(sys.argv[1])
    os.kill(child, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
begin = time.monotonic()
# Longer than an interrupt of the parent's own would wait for the end of a call.
while strategy.reduce("MIN", time.monotonic() - begin, axis=None) < 6:
    pass
print("the ranks go on")
"""
    result, text = run_code(tmp_path, HEAD + code, tmp_path / "child")
    assert result.returncode == 0, text
    assert text.count("the ranks go on") == 3, text
    assert not ours(text)


@pytest.mark.parametrize("who", ["rank == 1", "True"])
@pytest.mark.parametrize("late", ["atexit.register(call)", "keep.append(Last())"])
def test_calls_after_the_end_are_refused(tmp_path: Path, late: str, who: str) -> None:
    """A rank that made one alone would wait for ever, and nobody would say so."""
    head = f"""
import atexit, os

def call():
    try:
        strategy.reduce("SUM", 1.0, axis=None)
    except RuntimeError as error:
        os.write(1, f"{{error}}\\n".encode())

class Last:
    def __del__(self):
        call()

keep = []
keep.append(keep)
if {who.replace("rank", "int(os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')))")}:
    {late}
"""
    result, text = run_code(tmp_path, f"{head}{HEAD}for _ in range(20):\n    wait_for_others()\n", ranks=2)
    assert result.returncode == 0, text
    refused = "cannot be done: the program has ended on all ranks"
    assert text.count(refused) == (2 if who == "True" else 1), text


def test_a_thread_of_the_programs_own_may_call_mpi_to_the_end(tmp_path: Path) -> None:
    code = (
        "import threading, time\nfrom mpi4py import MPI\n"
        "def poll():\n    while True:\n        MPI.COMM_SELF.Iprobe()\n"
        "        time.sleep(0.0005)  # simulates work: a library that polls now and then\n"
        "threading.Thread(target=poll, daemon=True).start()\nwait_for_others()\n"
    )
    result, text = run_code(tmp_path, HEAD + code)
    assert result.returncode == 0, text
    assert ours(text) == []


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "2>/dev/full >/dev/full"])
def test_a_job_ends_where_its_words_cannot_be_written(tmp_path: Path, closed: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import mpidist\n"
        "strategy = mpidist.MultiWorkerMirroredStrategy()\n"
        "if strategy.communicator.rank == 1:\n"
        "    raise ValueError('alone')\n"
        "strategy.reduce('SUM', 1.0, axis=None)\n"
    )
    command = [*mpirun_command(2, find_mpirun()), "bash", "-c", f"exec {sys.executable} {program} {closed}"]
    result = finish(start_command(command), "the job", 50)
    assert result.returncode
