"""A rank dies, and the launcher lets the others live: they end soon, with an error that names the dead rank."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.helpers.amounts import amount
from tests.helpers.launching import find_mpirun, finish, is_open_mpi, run_code, start_command, survivors_live
from tests.helpers.leftovers import files_left_behind

pytestmark = pytest.mark.timeout_seconds(120)

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import atexit, os, signal, sys, time
import numpy as np
import mpidist
from mpidist.errors import DeadRankError
from tests.helpers.waiting import let_pass, until, until_exists, until_has_ended

strategy = mpidist.MultiWorkerMirroredStrategy()
rank, size = strategy.communicator.rank, strategy.communicator.size
with strategy.scope():
    variable = mpidist.Variable(np.zeros(1000, "float32"))
optimizer = mpidist.optimizers.SGD(0.5)
atexit.register(lambda: os.write(1, f"exit function of rank {rank}\\n".encode()))

def step():
    optimizer.apply_gradients([(np.ones(1000, "float32"), variable)])

def until_known():
    until(lambda: not strategy.communicator.is_whole(), "the death is known")

def for_ever(function):
    while True:
        function()

def die():
    os.kill(os.getpid(), signal.SIGKILL)

for _ in range(20):
    step()
# The thread for them and its communicator are there before the death.
strategy.extended.all_reduce_async("SUM", np.ones(3)).wait()
# Nobody dies while another one is in it: not by a barrier of MPI's, in which the same could happen.
open(f"{__file__}.{rank}", "w").close()
until_exists(*(f"{__file__}.{one}" for one in range(size)))
"""


def run(folder: Path, code: str, head: str = "") -> tuple[int, str]:
    """The exit code of the job on three ranks, and what it wrote."""
    result, text = run_code(folder, head + PROGRAM + code, kills=True, tells_codes=True)
    return result.returncode, text


def assert_named(text: str, dead: int = 2) -> None:
    """Each survivor names the dead rank, and has run its exit functions."""
    for rank in {0, 1, 2} - {dead}:
        line = re.search(rf"mpidist: rank {rank} of 3 on \S+ .*", text)
        assert line is not None, text
        # The other survivor may have ended before this one noticed.
        names = rf"rank {dead} of 3 \(process \d+ on \S+\)(, rank \d of 3 \(process \d+ on \S+\))*"
        assert re.search(f"{names} terminated unexpectedly", line[0]), text
        assert f"exit function of rank {rank}\n" in text, text
    assert "signal only works in main thread" not in text
    assert files_left_behind() == []


@pytest.mark.parametrize(
    "survive", [
        "for_ever(step)", "for_ever(lambda: strategy.reduce('SUM', 1.0, axis=None))", "for_ever(lambda: None)",
        "strategy.communicator.mpi.Barrier(); for_ever(strategy.communicator.mpi.Barrier)", "pass",
        "until_known()\n    with strategy.scope():\n        mpidist.Variable(1.0)",
        "until_known()\n    raise ValueError('something else')", "until_known(); sys.exit(3)",
        "strategy.extended.all_reduce_async('SUM', np.ones(3)).wait()",
    ],
    ids=["steps", "reductions", "computing", "in MPI", "ended", "a variable", "an error", "an exit", "asynchronous"],
)
def test_survivors_end_and_name_the_dead(tmp_path: Path, survive: str) -> None:
    code, text = run(tmp_path, f"if rank == 2:\n    die()\nelse:\n    {survive}\n")
    assert code != 0
    assert_named(text)


def test_survivors_that_have_begun_a_reduction_end_and_name_the_dead(tmp_path: Path) -> None:
    # A survivor that has not begun yet would fail at once, and a second before the other one. Open MPI's launcher would
    # then end that other one before it has said why.
    code, text = run(
        tmp_path,
        "from pathlib import Path\n"
        "marks = Path(__file__).parent\n"
        "if rank == 2:\n"
        "    until_exists(marks / 'begun 0', marks / 'begun 1')\n"
        "    die()\n"
        "handle = strategy.extended.all_reduce_async('SUM', np.ones(3))\n"
        "(marks / f'begun {rank}').touch()\n"
        "until_known()\n"
        "strategy.gather_object(1)\n",
    )
    assert code != 0
    assert_named(text)


@pytest.mark.parametrize("how", ["die()", "os._exit(0)", "os._exit(5)", "os.abort()"])
def test_however_it_ends(tmp_path: Path, how: str) -> None:
    code, text = run(tmp_path, f"if rank == 0:\n    {how}\nfor_ever(step)\n")
    assert code != 0
    assert_named(text, dead=0)


OPENS = """
import os, signal, sys
from mpidist import launch
from mpidist.comm.group import shared_file

def fail(shown, folder):
    HOW

if launch.world_rank() == 1:
    shared_file.can_open = fail
"""


def test_a_death_while_the_first_communicator_opens(tmp_path: Path) -> None:
    code, text = run(tmp_path, "", OPENS.replace("HOW", "os.kill(os.getpid(), signal.SIGKILL)"))
    assert code != 0
    for rank in (0, 2):
        assert re.search(rf"mpidist: rank {rank} of 3 on \S+ cannot continue: rank 1 of 3 \(process \d+ ", text), text


def test_an_error_of_one_rank_while_the_first_communicator_opens_ends_the_job(tmp_path: Path) -> None:
    code, text = run(tmp_path, "", OPENS.replace("HOW", "raise OSError('no more')"))
    assert code != 0
    assert text.count("Traceback") == 1, text
    assert re.search(r"mpidist: rank 1 of 3 on \S+ failed, the job ends\n(.*\n)+OSError: no more", text), text


def test_the_error_can_be_caught(tmp_path: Path) -> None:
    _, text = run(
        tmp_path,
        "if rank == 1:\n    die()\n"
        "until_known()\n"
        "for call in (lambda: strategy.communicator.split(0), lambda: strategy.communicator.open_sibling('x'),\n"
        "             lambda: strategy.extended.all_reduce_async('SUM', np.ones(3)),\n"
        "             lambda: strategy.gather_object(1), step):\n"
        "    try:\n        call()\n"
        "    except DeadRankError as error:\n        os.write(1, f'caught {error}\\n'.encode())\n"
        "strategy.close()\n"
        "os.write(1, b'closed\\n')\n",
    )
    assert text.count("caught ") == 2 * 5, text
    assert text.count("closed\n") == 2
    assert_named(text, dead=1)


def test_ranks_that_tolerate_deaths_go_on_in_groups_that_are_whole(tmp_path: Path) -> None:
    _, text = run(
        tmp_path,
        "from mpidist.failures import ending\n"
        "pair = strategy.communicator.split(rank // 2)\n"
        "if rank == 2:\n    die()\n"
        "ending.tolerate_deaths()\n"
        # Longer than a rank that does not tolerate deaths would live.
        "begin = time.monotonic()\n"
        "while pair.broadcast_object(time.monotonic() - begin < 5):\n"
        "    total = sum(pair.all_gather_object(rank + 1))\n"
        "assert not strategy.communicator.is_whole() and pair.is_whole()\n"
        "os.write(1, f'went on with {total}\\n'.encode())\n"
        "if rank == 1:\n    raise ValueError('of this rank alone')\n",
    )
    assert text.count("went on with 3\n") == 2, text
    assert text.count("ValueError: of this rank alone") == 1
    assert "exit function of rank 0\n" in text
    assert "exit function of rank 1\n" in text
    assert not re.search(r"mpidist: rank 0 of 3", text)


def test_a_rank_that_leaves_with_the_others_is_not_dead(tmp_path: Path) -> None:
    code, text = run(tmp_path, "if rank:\n    until_has_ended(rank - 1)\n")
    assert code == 0, text
    assert "mpidist:" not in text
    assert text.count("exit function") == 3


def test_the_launcher_outlives_ranks_that_end_at_once(tmp_path: Path) -> None:
    """Hydra may die of SIGPIPE where its proxies end while it tells them of ends."""
    program = tmp_path / "program.py"
    program.write_text("import mpidist\nmpidist.MultiWorkerMirroredStrategy()\n")
    for _ in range(amount(1, 40)):
        job = start_command([*survivors_live(8, tells_codes=True), sys.executable, str(program)])
        result = finish(job, program.name, 90)
        assert result.returncode == 0, result.stdout + result.stderr
        # Nor does MPICH write of the socket.
        assert "PMI" not in result.stdout + result.stderr


def test_mpi_that_the_program_has_started_is_not_finalized_after_a_death(tmp_path: Path) -> None:
    """mpi4py would finalize it, and wait for the dead rank for ever."""
    code, text = run(tmp_path, "if rank == 2:\n    die()\nfor_ever(step)\n", head="from mpi4py import MPI\n")
    assert code != 0
    assert_named(text)


def test_a_users_sigusr1_stays_the_users(tmp_path: Path) -> None:
    code, text = run(
        tmp_path,
        "got = []\nsignal.signal(signal.SIGUSR1, lambda *_: got.append(1))\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\nassert got == [1]\nfor _ in range(10):\n    step()\n"
        "os.write(1, b'handled\\n')\n",
    )
    assert code == 0, text
    assert text.count("handled\n") == 3


DIES_IN_FINALIZE = """
import ctypes
from mpi4py import MPI

if rank == 1:
    # MPI calls this first thing in MPI_Finalize; a function of Python it would call only as long as that lives.
    end = ctypes.cast(ctypes.CDLL(None)._exit, ctypes.c_void_p)
    key, library = ctypes.c_int(), ctypes.CDLL(MPI.__file__)
    world = (ctypes.c_int if MPI._sizeof(MPI.COMM_SELF) == 4 else ctypes.c_void_p)(MPI._handleof(MPI.COMM_SELF))
    assert library.MPI_Comm_create_keyval(end, end, ctypes.byref(key), None) == 0
    assert library.MPI_Comm_set_attr(world, key, None) == 0
"""


def test_a_death_in_the_end_of_mpi(tmp_path: Path) -> None:
    _, text = run(tmp_path, DIES_IN_FINALIZE)
    if not is_open_mpi(find_mpirun()):
        # Open MPI sees the death, and goes on.
        for rank in (0, 2):
            said = rf"mpidist: rank {rank} of 3 on \S+ leaves MPI_Finalize: rank 1 of 3 \(process .*\) died in it"
            assert re.search(said, text), text
    assert text.count("exit function") == 3
    assert files_left_behind() == []


def test_one_rank_of_many_reports_a_death(tmp_path: Path) -> None:
    """All of hundreds of ranks would print the same: those in a call, those that compute, and those that end."""
    code = """
if rank == 2:
    die()
elif rank < 5:
    for_ever(step)
elif rank < 7:
    for_ever(lambda: None)
"""
    _, text = run_code(tmp_path, PROGRAM + code, ranks=9, kills=True)
    assert len(re.findall(r"mpidist: rank \d of 9 on .* rank 2 of 9 .* terminated unexpectedly", text)) == 1, text
    assert text.count("exit function of rank") == 8
    assert files_left_behind() == []
