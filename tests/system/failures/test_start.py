"""The start of jobs in which not all ranks come to the library: a report names those that have not."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.helpers import marks
from tests.helpers.launching import find_mpirun, finish, is_open_mpi, run_program, start_command, start_program
from tests.helpers.limits import limit
from tests.helpers.listener import Listener

pytestmark = pytest.mark.timeout_seconds(120)

ALONE = "from mpi4py import MPI\nimport sys\nfrom tests.helpers import marks\n"
TRAIN = "import mpidist\nstrategy = mpidist.MultiWorkerMirroredStrategy()\nprint('trains')\n"
# The launcher ends the others of a job before that, however busy the machine is.
LATE_TURNS = "from mpidist.failures import watchdog\nwatchdog._TURN_SECONDS = 3600.0\n"
# Ends a job in which nobody says what the test waits for.
SILENT_SECONDS = 40


def run(folder: Path, other: str, train: str, **environment: str) -> tuple[int, str]:
    """Two programs in one job: two ranks of another one, which is not Python by its name, and two that train."""
    programs = folder / "sim.py", folder / "train.py"
    for program, code in zip(programs, (other, train), strict=True):
        program.write_text(code)
    copy = folder / "copy"
    copy.write_bytes(Path(sys.executable).resolve().read_bytes())
    copy.chmod(0o755)
    paths = {
        "PYTHONHOME": sys.base_prefix, "PYTHONPATH": ":".join(sys.path),
        "LD_LIBRARY_PATH": str(Path(sys.prefix) / "lib"),
    }
    mpirun = find_mpirun()
    options = ["--oversubscribe"] if is_open_mpi(mpirun) else []
    command = [mpirun, *options]
    command += ["-n", "2", str(copy), str(programs[0]), ":", "-n", "2", sys.executable, str(programs[1])]
    result = finish(start_command(command, **paths, **environment), "the job", 60)
    return result.returncode, result.stdout + result.stderr


def test_another_program_in_the_job_ends_it_with_the_explanation(tmp_path: Path) -> None:
    code, text = run(tmp_path, f"{ALONE}marks.stay()\n", LATE_TURNS + TRAIN, MPIDIST_WARN_SECONDS="3")
    assert code != 0
    ends = r"mpidist: rank \d of 4 on \S+ has waited \d+ s for all ranks, the job ends"
    assert len(re.findall(ends, text)) == 1, text
    for rank in (0, 1):
        assert re.search(rf"rank {rank} \(process \d+\) runs another program: \S*copy \S*sim.py", text), text
    assert "passes the communicator of its own ranks" in text
    assert "trains" not in text


# While it is stopped no rank's end ends another one.
SLOW_LAUNCHER = f"""{ALONE}
import os, signal
from tests.helpers.processes import state_of
from tests.helpers.waiting import until, until_state
if MPI.COMM_WORLD.rank == 0:
    folder, launcher = "{{folder}}", os.getppid()
    first, second = (int(marks.read(f"{{{{folder}}}}/process {{{{rank}}}}")) for rank in (2, 3))
    os.kill(launcher, signal.SIGSTOP)
    marks.put(f"{{{{folder}}}}/launcher is stopped")
    until_state(first, "Z")
    until(lambda: os.path.exists(f"{{{{folder}}}}/waits for its turn") or state_of(second) == "Z")
    os.kill(launcher, signal.SIGCONT)
marks.stay()
"""
# The second one comes when the first one has ended.
ONE_BY_ONE = """
import os
os.environ["MPIDIST_WARN_SECONDS"] = "1"
from mpi4py import MPI
from mpidist.failures import watchdog
from tests.helpers import marks
from tests.helpers.waiting import until_state
folder, rank = "{folder}", MPI.COMM_WORLD.rank
marks.put(f"{{folder}}/process {{rank}}", os.getpid())
marks.read(f"{{folder}}/launcher is stopped")
if rank == 3:
    until_state(int(marks.read(f"{{folder}}/process 2")), "Z")

def wait_for_turn(self):
    marks.put(f"{{folder}}/waits for its turn")
    marks.stay()

watchdog.Watchdog._wait_for_turn = wait_for_turn
"""


def test_who_does_not_see_the_first_one_any_more_stays_silent(tmp_path: Path) -> None:
    """The first one that had come has said why the job ends, and has ended, and the launcher ends the others later."""
    code, text = run(tmp_path, SLOW_LAUNCHER.format(folder=tmp_path), ONE_BY_ONE.format(folder=tmp_path) + TRAIN)
    assert code != 0
    assert len(re.findall("mpidist: ", text)) == 1, text
    assert re.search(r"mpidist: rank 2 of 4 on \S+ has waited \d+ s for all ranks, the job ends", text), text


def test_a_rank_that_comes_late_is_named_and_waited_for(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"{ALONE}if MPI.COMM_WORLD.rank == 1:\n    marks.read(sys.argv[1])\n{TRAIN}"
    )
    job = start_program(
        3, program, tmp_path / "come", MPIDIST_WARN_SECONDS="2", MPIDIST_TIMEOUT=str(limit(SILENT_SECONDS))
    )
    # On a busy machine the first report may name rank 2, too.
    text = Listener(job).until(
        r"mpidist: rank 0 of 3 on \S+ has waited \d+ s for all ranks\n"
        r"(?:(?!  rank [02] \(process).*\n)*?  rank 1 \(process \d+\) .*\n  mpidist works on all ranks"
    )
    marks.put(tmp_path / "come")
    result = finish(job, program.name, 60)
    assert result.returncode == 0, text + result.stderr
    assert result.stdout.count("trains") == 3
    assert re.search(r"rank 1 \(process \d+\) has not reached mpidist yet: \S*python\S* \S*program.py", text), text


STOPS = """
import os, signal, sys
if int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]) == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_rank_that_is_stopped_before_mpi_starts_is_named_and_waited_for(tmp_path: Path, stopped: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"{STOPS}{TRAIN}")
    first = 1 if stopped == 0 else 0
    process = start_program(
        3, program, stopped, MPIDIST_WARN_SECONDS="2", MPIDIST_TIMEOUT=str(limit(SILENT_SECONDS))
    )
    text = Listener(process).until(rf"rank {first} of 3 on \S+ has waited \d+ s for all ranks\n(?s:.*?)is stopped.*\n")
    for number in re.findall(r"`kill -CONT (\d+)` resumes it", text):
        os.kill(int(number), signal.SIGCONT)
    result = finish(process, program.name, 60)
    assert result.returncode == 0, text + result.stderr
    assert result.stdout.count("trains") == 3
    assert re.search(rf"mpidist: rank {first} of 3 on \S+ has waited \d+ s for all ranks\n", text), text
    assert re.search(r"waits in starting MPI, call 1, \S*program.py:\d+ ", text), text
    line = rf"rank {stopped} \(process (\d+)\) is stopped, `kill -CONT \1` resumes it: \S+ \S*program"
    assert re.search(line, text), text


OPENS = """
from mpidist import launch
from mpidist.comm.group import shared_file
if launch.world_rank() == 1:
    can_open = shared_file.can_open

    def stop(shown, folder):
        import os, signal
        os.kill(os.getpid(), signal.SIGSTOP)
        return can_open(shown, folder)

    shared_file.can_open = stop
"""


def test_a_rank_that_is_stopped_while_the_first_communicator_opens_is_named(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"{OPENS}{TRAIN}")
    process = start_program(3, program, MPIDIST_WARN_SECONDS="2", MPIDIST_TIMEOUT=str(limit(SILENT_SECONDS)))
    text = Listener(process).until(
        r"rank 0 of 3 on \S+ waits in opening a communicator(?s:.*?)rank 1 \(process (\d+)\) is stopped.*\n"
    )
    stopped = re.search(r"rank 1 \(process (\d+)\) is stopped", text)
    if stopped:
        os.kill(int(stopped[1]), signal.SIGCONT)
    result = finish(process, "program.py", 60)
    assert result.returncode == 0, text + result.stderr
    assert re.search(r"rank 0 of 3 on \S+ waits in opening a communicator", text), text
    assert stopped, text
    assert result.stdout.count("trains") == 3


def test_a_time_limit_holds_for_the_start_of_mpi(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    # The others wait as long as they must.
    others = 'if "0" not in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):\n'
    program.write_text(f'import os\n{others}    os.environ["MPIDIST_TIMEOUT"] = ""\n{STOPS}{TRAIN}')
    result = run_program(3, program, 1, MPIDIST_TIMEOUT="2")
    text = result.stdout + result.stderr
    assert result.returncode != 0
    assert re.search(r"mpidist: rank 0 of 3 on \S+ has waited \d+ s for all ranks, the job ends\n", text), text
    assert "rank 1 (process" in text
    assert "trains" not in text


SHOWS = r"""
import os
import mpi4py
from mpi4py import MPI
handlers = [one.Get_errhandler() == MPI.ERRORS_RETURN for one in (MPI.COMM_SELF, MPI.COMM_WORLD)]
os.write(1, f"MPI: {MPI.Query_thread()} {MPI.Is_thread_main()} {handlers} {vars(mpi4py.rc)}\n".encode())
"""


def test_mpi_starts_as_mpi4py_starts_it(tmp_path: Path) -> None:
    said = []
    asks = "import mpi4py\nmpi4py.rc.threads = False\n"
    for name, first in (("ours.py", TRAIN), ("theirs.py", ""), ("asked.py", f"{asks}{TRAIN}")):
        program = tmp_path / name
        program.write_text(f"{first}{SHOWS}")
        result = run_program(2, program)
        assert result.returncode == 0, result.stdout + result.stderr
        # Hydra may put the end of a line behind the line of another rank.
        said.append(re.findall(r"MPI: [^{]*\{[^}]*\}", result.stdout))
    ours, theirs, asked = said
    assert len(ours) == 2
    assert ours == theirs
    assert all("{'threads': False}" in line for line in asked), asked


STARTS_ANOTHER = """
import os, subprocess, sys
import mpidist
alone = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "OMPI_", "PMIX_"))}
code = "import mpidist; print(mpidist.MultiWorkerMirroredStrategy().num_replicas_in_sync, 'replica')"
strategy = mpidist.MultiWorkerMirroredStrategy()
for environment in (os.environ, alone):
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if strategy.communicator.rank == 0:
        print(result.stdout, result.stderr.strip().split("\\n")[-1])
"""


def test_a_process_that_a_rank_starts_is_no_rank(tmp_path: Path) -> None:
    if is_open_mpi(find_mpirun()):
        pytest.skip("Open MPI lets it take the place of its parent")
    program = tmp_path / "program.py"
    program.write_text(STARTS_ANOTHER)
    result = run_program(2, program)
    assert result.returncode == 0, result
    why = r"LauncherError: this process has the environment of rank 0 of 2 ranks, .*\(PMI_FD=\d+ is closed\).*env -u"
    assert re.search(why, result.stdout), result
    assert "1 replica" in result.stdout, result


PORTS = """
import os
import numpy as np
from mpi4py import MPI
import mpidist

def ports():
    # The sockets of this process that listen on a network: MPI's own, and others'.
    own = {link for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}")
           for link in [os.readlink(f"/proc/self/fd/{one}")]}
    lines = [line.split() for name in ("tcp", "tcp6") for line in list(open(f"/proc/self/net/{name}"))[1:]]
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own}

before = ports()
strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    variable = mpidist.Variable(np.zeros(1000))
    optimizer = mpidist.optimizers.SGD(0.5)
for batch in strategy.experimental_distribute_dataset(mpidist.data.Dataset.range(8).batch(4)):
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(1000), variable)]))
    strategy.gather(batch, axis=0)
import socket
opened = ports() - before
with socket.create_server(("127.0.0.1", 0)):
    seen = len(ports() - before - opened)
print(f"opened {sorted(opened)}, and {seen} that is seen", flush=True)
"""


def test_a_synchronous_strategy_opens_no_port(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PORTS)
    result = run_program(2, program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("opened [], and 1 that is seen") == 2, result.stdout
