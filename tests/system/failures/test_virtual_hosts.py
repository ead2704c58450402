"""Jobs on several hosts: nodes, sums, training, checkpoints, the end of a job; and the hosts themselves.

The hosts are namespaces of this machine (see `tests/hosts`). Each has its own name, address, processes, interfaces and
node memory, so that MPI and mpidist treat them as separate machines, and all bytes between them go through a virtual
network. `mpirun` runs on the first host and starts ranks on the others through a stand-in for ssh. When a test ends,
however it ends, the kernel removes the hosts with everything on them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers import marks
from tests.helpers.digits import write_digits
from tests.helpers.launching import find_mpirun, finish, is_open_mpi, run_program
from tests.helpers.listener import Listener
from tests.helpers.waiting import until
from tests.hosts.virtual_hosts import ROOT, VirtualHosts
from tests.system.strategy.test_reproducible import PROGRAM as LOGICAL_REPLICAS

Open = Callable[[int], VirtualHosts]

pytestmark = pytest.mark.timeout_seconds(240)

EXAMPLE = ROOT / "examples" / "train.py"
JOB_SECONDS = 100

REPORT = '''
import itertools, json, socket, sys
import numpy as np
import mpidist
from mpidist.experimental import CommunicationOptions

strategies = {
    name: mpidist.MultiWorkerMirroredStrategy(communication_options=CommunicationOptions(implementation=name))
    for name in ["AUTO", "MPI", "RING", "NODE"]
}
strategy = strategies["AUTO"]
rank, size = strategy.communicator.rank, strategy.communicator.size

def sent():
    with open("/sys/class/net/eth0/statistics/tx_bytes") as file:
        return int(file.read())

def wrong_ones(name, strategy):
    # One element; fewer rows than ranks; more than one block of a node's memory.
    for shape, dtype in itertools.product([(1,), (3, 5), (700, 1000)], ["float32", "int64"]):
        everyones = [np.random.default_rng(r).integers(-99, 99, shape).astype(dtype) for r in range(size)]
        for op, expected in [("SUM", np.sum), ("MAX", np.max)]:
            before = sent()
            result = strategy.run(lambda: mpidist.get_replica_context().all_reduce(op, everyones[rank]))
            if not np.array_equal(result, expected(everyones, axis=0)):
                yield name, op, shape, dtype
            # A rank may return from the call before another rank of its node has sent its slice.
            strategy.communicator.barrier()
            if shape == (700, 1000) and sent() - before < result.nbytes / size:
                yield name, op, shape, dtype, "did not leave the host"
            strategy.communicator.barrier()

wrong = [each for name, strategy in strategies.items() for each in wrong_ones(name, strategy)]
with strategy.scope():
    variable = mpidist.Variable(np.full(7, float(rank)))
rows = strategy.gather(np.full((rank + 1, 2), rank), axis=0)
mine = {
    "host": socket.gethostname(),
    "mpi_host": strategy.communicator.host,
    "node_sizes": strategy.communicator.node_sizes,
    "node_index": strategy.communicator.node_index,
    "wrong": wrong,
    "variable": variable.numpy().tolist(),
    "rows": rows[:, 0].tolist(),
}
everyone = strategy.communicator.all_gather_object(mine)
if rank == 0:
    with open(sys.argv[1], "w") as file:
        json.dump(everyone, file)
'''


def succeed(result: subprocess.CompletedProcess[str]) -> str:
    """What a job printed, which must have ended well."""
    text = result.stdout + result.stderr
    assert result.returncode == 0, text
    return text


@pytest.mark.parametrize("ranks", [(2, 2), (1, 2, 1)], ids=["two hosts", "three hosts"])
def test_a_strategy_sees_each_host_as_a_node(virtual_hosts: Open, tmp_path: Path, ranks: tuple[int, ...]) -> None:
    hosts = virtual_hosts(len(ranks))
    program, out = tmp_path / "report.py", tmp_path / "report.json"
    program.write_text(REPORT)
    succeed(hosts.run(ranks, program, out, timeout_seconds=JOB_SECONDS))
    everyone: list[dict[str, Any]] = json.loads(out.read_text())
    where = [index for index, count in enumerate(ranks) for _ in range(count)]
    assert [one["host"] for one in everyone] == [hosts.names[index] for index in where]
    assert [one["mpi_host"] for one in everyone] == [hosts.names[index] for index in where]
    assert [one["node_index"] for one in everyone] == where
    size = sum(ranks)
    rows = [rank for rank in range(size) for _ in range(rank + 1)]
    for one in everyone:
        assert one["node_sizes"] == list(ranks)
        assert one["wrong"] == []
        assert one["variable"] == [0.0] * 7
        assert one["rows"] == rows


def test_ranks_of_one_host_that_share_no_memory_leave_the_other_host_a_node(
    virtual_hosts: Open, tmp_path: Path
) -> None:
    """As ranks in containers of their own on the second host alone."""
    program, out = tmp_path / "report.py", tmp_path / "report.json"
    closed = "if mpidist.launch.world_rank() > 1:\n    shared_file.can_open = lambda *_: False\n"
    program.write_text(f"import mpidist.launch\nfrom mpidist.comm.group import shared_file\n{closed}{REPORT}")
    succeed(virtual_hosts(2).run((2, 2), program, out, timeout_seconds=JOB_SECONDS))
    for one in json.loads(out.read_text()):
        assert one["node_sizes"] == [2, 1, 1]
        assert one["wrong"] == []


def test_training_on_two_hosts_is_training_on_one(virtual_hosts: Open, tmp_path: Path) -> None:
    losses = {name: tmp_path / name for name in ("one host", "two hosts", "resumed")}
    folder = tmp_path / "checkpoints"
    options = ("--epochs", 2, "--data", write_digits(tmp_path / "digits.npz"))
    succeed(run_program(4, EXAMPLE, *options, "--losses", losses["one host"], timeout_seconds=JOB_SECONDS))
    hosts = virtual_hosts(2)
    output = succeed(hosts.run(
        (2, 2), EXAMPLE, *options, "--checkpoint-dir", folder, "--losses", losses["two hosts"],
        timeout_seconds=JOB_SECONDS,
    ))
    assert "4 replica(s)" in output
    expected, got = (np.loadtxt(losses[name]) for name in ("one host", "two hosts"))
    assert got.shape == expected.shape == (2 * 23,)
    np.testing.assert_allclose(got, expected, rtol=2e-5)

    # What was saved after the first epoch on two hosts is restored on one, and training ends where it ended there.
    assert sorted(path.name for path in folder.glob("*.h5")) == ["ckpt-1.h5", "ckpt-2.h5"]
    (folder / "ckpt-2.h5").unlink()
    result = run_program(
        1, EXAMPLE, *options, "--checkpoint-dir", folder, "--losses", losses["resumed"], timeout_seconds=JOB_SECONDS
    )
    assert "resumed after epoch 1" in succeed(result)
    resumed = np.loadtxt(losses["resumed"])
    # The curve of the first epoch comes from the file.
    np.testing.assert_array_equal(resumed[:23], got[:23])
    np.testing.assert_allclose(resumed, got, rtol=2e-5)


def test_logical_replicas_give_the_same_bits_on_uneven_hosts(virtual_hosts: Open, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LOGICAL_REPLICAS)
    arguments = ("momentum", "shared", "logical", 6, "-")
    succeed(run_program(1, program, tmp_path / "one.npy", *arguments, RANKS="1", timeout_seconds=JOB_SECONDS))
    hosts = virtual_hosts(2)
    # A host has the environment of a login. Bits depend on the kernels of BLAS, which this one may choose otherwise.
    blas: dict[str, Any] = {name: value for name, value in os.environ.items() if name.startswith("OPENBLAS_")}
    succeed(hosts.run(
        (1, 2), program, tmp_path / "two.npy", *arguments, RANKS="3", timeout_seconds=JOB_SECONDS, **blas
    ))
    assert np.load(tmp_path / "two.npy").tobytes() == np.load(tmp_path / "one.npy").tobytes()


@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError('the bug')"], ids=["killed", "raises"]
)
def test_the_end_of_one_rank_ends_the_job_on_all_hosts(virtual_hosts: Open, tmp_path: Path, end: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys\nimport mpidist\nfrom tests.helpers import marks\n"
        "strategy = mpidist.MultiWorkerMirroredStrategy()\n"
        "strategy.reduce('SUM', 1.0, axis=None)\n"
        f"if strategy.communicator.rank == 3:\n    sys.stderr.write('the end comes\\n')\n    {end}\n"
        # The others are outside MPI and stay there: nothing in MPI tells them.
        "marks.stay()\n"
    )
    hosts = virtual_hosts(2)
    result = hosts.run((2, 2), program, timeout_seconds=JOB_SECONDS)
    text = result.stdout + result.stderr
    assert "the end comes" in text
    assert result.returncode != 0
    if "raise" in end:
        assert text.count("ValueError: the bug") == 1
        assert "mpidist: rank 3 of 4 on n2 failed, the job ends" in text
    until(lambda: not any(map(hosts.processes, hosts.names)), "no process is left")


@pytest.mark.parametrize("wait", ["strategy.communicator.mpi.Barrier()", "pass"], ids=["in MPI", "computing"])
def test_survivors_of_a_death_on_another_host_end(virtual_hosts: Open, tmp_path: Path, wait: str) -> None:
    open_mpi = is_open_mpi(find_mpirun())
    # Hydra ends all ranks of the proxy whose rank has died. Under Open MPI a rank that computes learns of a death from
    # MPI with its next call; from its launcher when a survivor of the other host ends.
    ranks = (2, 2) if open_mpi else (1, 1, 1)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal\nimport mpidist\n"
        "strategy = mpidist.MultiWorkerMirroredStrategy()\n"
        "strategy.reduce('SUM', 1.0, axis=None)\n"
        "if strategy.communicator.rank == strategy.communicator.size - 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"while True:\n    {wait}\n"
    )
    hosts = virtual_hosts(len(ranks))
    hosts.survivors_live = True
    result = hosts.run(ranks, program, timeout_seconds=JOB_SECONDS)
    text = result.stdout + result.stderr
    assert result.returncode != 0
    dead = r"rank 3 of 4(?: \(process \d+ on n2\))?" if open_mpi else "a rank on another host"
    told = set(re.findall(rf"mpidist: (rank \d) of \d on n\d cannot continue: {dead} terminated unexpectedly", text))
    assert told, text
    if not open_mpi:
        assert told == {"rank 0", "rank 1"}, text


ALONE = """
import sys
import mpidist
from tests.helpers import marks
strategy = mpidist.MultiWorkerMirroredStrategy()
ranks = strategy.communicator
last = ranks.rank == ranks.size - 1
ranks.barrier()
"""


@pytest.mark.parametrize(
    ("alone", "why", "where"),
    [
        ("ranks.all_gather_object(1)", "the ranks are in different calls", "waits in exchange between ranks"),
        ("sys.exit(0)", "it waits for a rank that has ended", "has ended"),
    ],
    ids=["another call", "an exit"],
)
def test_a_rank_that_never_comes_is_seen_from_other_hosts(
    virtual_hosts: Open, tmp_path: Path, alone: str, why: str, where: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"{ALONE}if last:\n    {alone}\nranks.barrier()\n")
    hosts = virtual_hosts(2)
    # The first host has two ranks, which wait, and the second one the rank that is alone.
    result = hosts.run((2, 1), program, timeout_seconds=JOB_SECONDS, MPIDIST_JOB_DIR=str(tmp_path))
    text = result.stdout + result.stderr
    assert result.returncode != 0
    assert text.count("mpidist: ") == 1, text
    assert re.search(rf"mpidist: rank \d of 3 on n\d is deadlocked, the job ends: {why}\n", text), text
    assert re.search(rf"  rank 2 of 3 (\(process \d+ )?on n2\)? {where}", text), text


LARGE = """
from mpidist.failures import job_directory
job_directory._ALL_SEEN, job_directory._FEW_SEEN = 0, 1
"""


def start_as_large_job(hosts: VirtualHosts, folder: Path, code: str, **environment: str) -> subprocess.Popen[str]:
    """Start a job on three hosts with two ranks each, where each rank sees one rank of the host before its own."""
    program = folder / "program.py"
    program.write_text(f"{LARGE}{ALONE}{code}")
    return hosts.start((2, 2, 2), program, folder, MPIDIST_JOB_DIR=str(folder), **environment)


def run_as_large_job(hosts: VirtualHosts, folder: Path, code: str) -> str:
    """What such a job prints, which must not end well."""
    result = finish(start_as_large_job(hosts, folder, code), "program.py", JOB_SECONDS)
    assert result.returncode != 0
    return result.stdout + result.stderr


def test_in_a_large_job_the_next_host_sees_that_all_ranks_of_one_have_ended(
    virtual_hosts: Open, tmp_path: Path
) -> None:
    text = run_as_large_job(virtual_hosts(3), tmp_path, "if ranks.rank in (2, 3):\n    sys.exit(0)\nranks.barrier()\n")
    # The counterparts on the third host.
    reports = re.findall(r"mpidist: (rank \d) of 6 on n\d is deadlocked, the job ends: it waits for a rank", text)
    assert reports == ["rank 4"], text
    assert re.search(r"  rank 2 of 6 .*has ended", text), text


def test_in_a_large_job_all_hosts_hear_of_the_death_of_one(virtual_hosts: Open, tmp_path: Path) -> None:
    """MPICH's launcher ends no other rank there, and the last host sees nothing of the one whose ranks are dead."""
    code = (
        "import os\n"
        "if ranks.rank in (2, 3):\n    marks.until_others_wait(ranks, sys.argv[1], 4)\n    os._exit(7)\n"
        "ranks.barrier()\n"
    )
    text = run_as_large_job(virtual_hosts(3), tmp_path, code)
    # Open MPI's launcher may end the others before they have spoken. MPICH's ends the other rank of a host when one has
    # spoken, and each of the two looks once a second.
    if not is_open_mpi(find_mpirun()):
        died = r"rank [23] of 6 \(process \d+ on n2\)"
        assert re.search(rf"mpidist: rank [01] of 6 on n1 cannot continue: {died}", text), text


@pytest.mark.parametrize(("late", "speaker"), [((3,), "rank 2"), ((2, 3), "rank 4")], ids=["its host", "the next host"])
def test_in_a_large_job_a_report_comes_from_where_the_late_rank_is_seen(
    virtual_hosts: Open, tmp_path: Path, late: tuple[int, ...], speaker: str
) -> None:
    code = (
        "import os\nfrom mpidist.failures import peers\nfrom mpidist.failures.watchdog import WATCHDOG\n"
        # A rank that gets no core for long waits all the same: none speaks in its place.
        "peers.STALE_SECONDS = job_directory._OLD_SECONDS = 60.0\n"
        "assert sum(peer.is_far for peer in WATCHDOG.peers()) == 1\n"
        # Another host comes before its own in the group.
        "part = ranks.split(ranks.node_index == 1)\n"
        "far = [peer for peer in WATCHDOG.peers() if peer.is_far]\n"
        "assert len(far) == 1 + (ranks.node_index == 2) and all(peer._path_of_file.exists() for peer in far), far\n"
        f"if ranks.rank in {late}:\n    marks.read(sys.argv[1] + '/end')\n    os._exit(7)\nranks.barrier()\n"
    )
    job = start_as_large_job(virtual_hosts(3), tmp_path, code, MPIDIST_WARN_SECONDS="2")
    said = Listener(job)
    report = r"mpidist: (rank \d) of 6 on n\d has waited \d+ s for at least \d of 6 ranks\n"
    for _ in range(2):
        # When it speaks for the second time all others have had their first turn.
        said.until(report.replace(r"(rank \d)", speaker))
    marks.put(tmp_path / "end")
    text = said.text + finish(job, "program.py", JOB_SECONDS).stderr
    # On a busy machine others may come late to the barrier, too, and are reported by whoever sees them.
    never = re.compile(f"^  rank [{late[0]}{late[-1]}] of 6 ", re.MULTILINE)
    told = {rank for rank, lines in re.findall(rf"{report}((?:  .*\n)*)", text) if never.search(lines)}
    assert told == {speaker}, text
    others = re.findall(r"mpidist: (rank \d) of 6 on n\d has waited \d+ s though all ranks that it sees have", text)
    assert set(others) <= {"rank 0"}, text
    assert "In a large job a rank sees its own host and the hosts before it" in text or not others, text


def test_a_death_on_another_host_has_a_name(virtual_hosts: Open, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        f"{ALONE}import os, signal\nif last:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "while True:\n    ranks.barrier()\n"
    )
    open_mpi = is_open_mpi(find_mpirun())
    hosts = virtual_hosts(2 if open_mpi else 3)
    hosts.survivors_live = True
    # Hydra ends all ranks of the proxy whose rank has died.
    ranks = (1, 2) if open_mpi else (1, 1, 1)
    result = hosts.run(ranks, program, timeout_seconds=JOB_SECONDS, MPIDIST_JOB_DIR=str(tmp_path))
    text = result.stdout + result.stderr
    assert result.returncode != 0
    dead = rf"rank 2 of 3 \(process \d+ on {'n2' if open_mpi else 'n3'}\)"
    assert re.search(rf"mpidist: rank 0 of 3 on n1 cannot continue: {dead} terminated unexpectedly", text), text
    assert "a rank on another host" not in text


def test_checkpoints_show_where_ranks_can_see_each_other(virtual_hosts: Open, tmp_path: Path) -> None:
    """Without a job directory the one of the first checkpoint serves."""
    program = tmp_path / "program.py"
    program.write_text(
        f"{ALONE}import numpy as np\nwith strategy.scope():\n    v = mpidist.Variable(np.ones(3))\n"
        "mpidist.Checkpoint(v=v).save(sys.argv[1])\nif last:\n    sys.exit(0)\nranks.barrier()\n"
    )
    hosts = virtual_hosts(2)
    result = hosts.run((2, 1), program, tmp_path / "saved" / "ckpt", timeout_seconds=JOB_SECONDS)
    text = result.stdout + result.stderr
    assert result.returncode != 0
    assert "is deadlocked, the job ends: it waits for a rank that has ended" in text, text
    assert re.search(r"  rank 2 of 3 .*has ended", text), text


def test_a_job_directory_is_empty_after_a_good_end(virtual_hosts: Open, tmp_path: Path) -> None:
    program, folder = tmp_path / "program.py", tmp_path / "jobs"
    program.write_text(
        f"{ALONE}import os\nfrom mpidist.failures.watchdog import WATCHDOG\nfrom tests.helpers.waiting import until\n"
        "assert len(os.listdir(sys.argv[1])) == 1\nranks.barrier()\n"
        # What it writes when it has waited.
        "for _ in range(3):\n    before = WATCHDOG.page.beat\n    until(lambda: WATCHDOG.page.beat != before)\n"
    )
    folder.mkdir()
    hosts = virtual_hosts(2)
    succeed(hosts.run((2, 1), program, folder, timeout_seconds=JOB_SECONDS, MPIDIST_JOB_DIR=str(folder)))
    assert list(folder.iterdir()) == []


def test_hosts_have_processes_memory_and_interfaces_of_their_own(virtual_hosts: Open) -> None:
    hosts = virtual_hosts(3)
    code = (
        "import os, socket\n"
        "print(socket.gethostname(), socket.gethostbyname(socket.gethostname()), os.listdir('/dev/shm'),\n"
        "      sorted(os.listdir('/sys/class/net')), open('/proc/sys/kernel/random/boot_id').read().strip())\n"
        "open('/dev/shm/mine', 'w').write(socket.gethostname())\n"
    )
    lines = []
    for name in hosts.names:
        out, err = hosts.execute(name, f'{sys.executable} -IS -c "{code}"').communicate(timeout=60)
        assert not err
        lines.append(out.split())
    assert [line[0] for line in lines] == ["n1", "n2", "n3"]
    assert len({line[1] for line in lines}) == 3
    assert [line[2] for line in lines] == ["[]"] * 3
    assert all(line[3:5] == ["['eth0',", "'lo']"] for line in lines)
    assert len({line[5] for line in lines}) == 3
    for name in hosts.names:
        assert hosts.processes(name) == []


def test_a_command_answers_as_through_ssh(virtual_hosts: Open) -> None:
    hosts = virtual_hosts(1)
    process = hosts.execute("n1", "echo out; echo err >&2; exit 7")
    assert process.communicate(timeout=60) == ("out\n", "err\n")
    assert process.returncode == 7
    # No ssh passes on the caller's environment.
    out, _ = hosts.execute("n1", "echo [$MPIDIST_NO_SUCH$PYTHONPATH]").communicate(timeout=60)
    assert out == "[]\n"
    unknown = hosts.execute("n9", "true")
    assert "host n9 cannot be reached" in unknown.communicate(timeout=60)[1]
    assert unknown.returncode == 255
    # A sender that goes away ends its command.
    sleeper = hosts.execute("n1", "sleep 600")
    until(lambda: hosts.processes("n1") != [])
    sleeper.kill()
    sleeper.communicate(timeout=60)
    until(lambda: hosts.processes("n1") == [])


def test_nothing_is_left_of_hosts_whose_test_was_killed(virtual_hosts: Open, tmp_path: Path) -> None:
    virtual_hosts(1).close()
    program = tmp_path / "program.py"
    program.write_text(
        "from tests.helpers import marks\nfrom tests.hosts.virtual_hosts import VirtualHosts\n"
        "from tests.helpers.waiting import until\n"
        "hosts = VirtualHosts(2)\nprocess = hosts.execute('n2', 'sleep 601')\n"
        "until(lambda: hosts.processes('n2'))\n"
        "print(hosts.folder, flush=True)\nmarks.stay()\n"
    )
    process = subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert folder.is_dir()
    assert processes_that_name(str(folder))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    until(lambda: not processes_that_name(str(folder)) and not folder.exists())
    assert not processes_that_name("sleep\x00601")


def processes_that_name(text: str) -> list[str]:
    """The command lines of this machine, that of hosts among them, with the text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(line)
    return found


def test_large_arrays_are_summed_in_the_background(virtual_hosts: Open, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np, mpidist\n"
        "strategy = mpidist.MultiWorkerMirroredStrategy()\n"
        "for count in (10, 1_000_000):\n"
        "    mine = np.full(count, strategy.communicator.rank + 1.0, 'float32')\n"
        "    assert (strategy.extended.all_reduce_async('SUM', mine).wait() == 10).all()\n"
        "print('all right', flush=True)\n"
    )
    assert succeed(virtual_hosts(2).run((2, 2), program, timeout_seconds=JOB_SECONDS)).count("all right") == 4
