"""`mpidist run` with copies in memory: kills in a copy, in a restore from one, and anywhere, end with the same bits."""

from __future__ import annotations

import json
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mpidist.checkpoint.memory.place import PREFIX, RUN_PREFIX
from tests.helpers.amounts import amount
from tests.helpers.launching import NEW_VARIABLES, ROOT, finish
from tests.helpers.selection import seed
from tests.helpers.waiting import until_exists
from tests.hosts.virtual_hosts import VirtualHosts
from tests.system.cli.test_restart import COMMAND, STEPS, TRAINING, Row, drawn, run, undisturbed, write

pytestmark = pytest.mark.timeout_seconds(120)

SHARED = Path("/dev/shm")
Act = Callable[[subprocess.Popen[str]], object]
CHANGES = {
    # A copy after each second step, and a checkpoint on the disk after each twenty-third.
    "manager = mpidist.CheckpointManager(checkpoint, folder / \"checkpoints\", max_to_keep=2)": """
with strategy.scope():
    counter = checkpoint.counter = mpidist.Variable(np.int64(0))
manager = mpidist.CheckpointManager(
    checkpoint, folder / "checkpoints", 2, step_counter=counter, checkpoint_interval=23, memory=2
)
from mpidist.checkpoint.memory import finding, writing

def counted(module, name, event):
    original, count = getattr(module, name), [0]
    def act(*arguments):
        count[0] += 1
        if count[0] == number:
            come_to(event)
        return original(*arguments)
    setattr(module, name, act)

if phase in ("copy", "look"):
    # Counted, not timed: in this one of all the pieces that are copied, or compared.
    number, delay = delay, 0
    counted(writing, "_write", "copy")
    counted(finding, "_add_up", "look")
""",
    # All ranks wait while the test cuts the host off: this one is stopped, and it is there to be ended with its host.
    "    if kind == \"fault\":": """    if kind == "cut":
        (folder / f"stopped-{rank}").touch()
        time.sleep(600)  # simulates work: the host is cut off while the rank is here
    if kind == "fault":""",
    'come_to("import")\n': 'come_to("import")\n(folder / "run").write_text(os.environ.get("MPIDIST_RUN", "none/0"))\n',
    "    history.losses.append(": "    counter.assign_add(1)\n    history.losses.append(",
    "    if optimizer.iterations % 3 == 0:\n        manager.save()": "    manager.save()",
}


def training() -> str:
    text = TRAINING
    for old, new in CHANGES.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def copies_of(folder: Path) -> Path:
    """The directory of the copies of a run; other tests may have theirs beside it."""
    name = Path((folder / "run").read_text()).parent.name
    assert name.startswith(RUN_PREFIX), name
    return SHARED / f"{PREFIX}{name.removeprefix(RUN_PREFIX)}"


def check(plan: list[Row], ranks: int, folder: Path) -> str:
    """Run to the end, which equals that of an undisturbed run; nothing is left in memory."""
    result = run("-n", ranks, "--max-restarts", 30, write(folder, plan, training()), folder, STEPS, folder=folder)
    assert result.returncode == 0, f"{plan}\n{result.stdout}{result.stderr}"
    assert json.loads((folder / "result").read_text()) == undisturbed(ranks), plan
    assert not copies_of(folder).exists()
    return result.stderr


def test_a_kill_in_a_copy_or_in_a_restore_from_one_costs_a_few_steps(tmp_path: Path) -> None:
    """The pieces of a copy are written one by one; each of these kills comes in the middle of one."""
    plan: list[Row] = [(0, "copy", "kill", 31), (1, "look", "kill", 1), (1, "copy", "kill", 29), (0, "look", "exit", 1)]
    text = check(plan, 2, tmp_path)
    found = re.findall(r"continues from the copy in memory in /dev/shm/mpidist-copies-\S+, step (\d+)", text)
    assert len(found) >= 2, text
    assert text.count("struck: ") == len(plan), text


@pytest.mark.parametrize("number", range(amount(1, 10)))
def test_deaths_at_random_moments(tmp_path: Path, number: int) -> None:
    plan, chance = drawn(5, 2, number + 1000), random.Random(f"{seed()} {number} copies")
    for row in range(0, len(plan) - 1, 2):
        plan[row] = plan[row][0], "copy", "kill", chance.randrange(22, 60)
    check(plan, 2, tmp_path)


def run_on(hosts: VirtualHosts, folder: Path, *words: object, plan: list[Row], act: Act | None = None) -> str:
    """`mpidist run` on virtual hosts, to the end of the program; returns what it has told."""
    (folder / "jobs").mkdir()
    program = write(folder, plan, training())
    variables = {
        **NEW_VARIABLES, "MPIDIST_JOB_DIR": str(folder / "jobs"), "PYTHONPATH": str(ROOT),
        # How the launchers come to a host; Open MPI's passes no variables on.
        "HYDRA_LAUNCHER_EXEC": str(hosts.shell), "PRTE_MCA_plm_ssh_agent": str(hosts.shell),
        "OMPI_MCA_mpi_yield_when_idle": "1", "PRTE_MCA_hwloc_default_binding_policy": "none",
        # A host that does not answer is noticed by the others, and by the launcher.
        "MPIDIST_TIMEOUT": "30", "PRTE_MCA_oob_tcp_keepalive_time": "5", "PRTE_MCA_oob_tcp_keepalive_intvl": "2",
        "PRTE_MCA_oob_tcp_keepalive_probes": "3",
    }
    settings = [f"{name}={value}" for name, value in variables.items()]
    command = [COMMAND, "run", *words, sys.executable, program, folder, STEPS]
    line = shlex.join(["env", *settings, sys.executable, "-c", *map(str, command)])
    job = hosts.execute("n1", f"cd {shlex.quote(str(ROOT))} && exec {line}")
    result = finish(job, "mpidist run", 260, act)
    assert result.returncode == 0, result.stdout + result.stderr
    assert list((folder / "jobs").iterdir()) == []
    return result.stderr


@pytest.mark.timeout_seconds(200)
def test_ranks_of_one_of_two_hosts_die_and_continue_from_copies(
    virtual_hosts: Callable[[int], VirtualHosts], tmp_path: Path
) -> None:
    hosts = virtual_hosts(2)
    (tmp_path / "alone").mkdir()
    assert hosts.run((2, 2), write(tmp_path / "alone", []), tmp_path / "alone", STEPS).returncode == 0
    plan: list[Row] = [([2, 3], "copy", "kill", 34)]
    text = run_on(hosts, tmp_path, "-n", 4, "--hosts", "n1,n2", plan=plan)
    assert (tmp_path / "result").read_text() == (tmp_path / "alone" / "result").read_text()
    copies = copies_of(tmp_path)
    assert f"continues from the copy in memory in {copies}" in text, text
    assert not copies.exists()


@pytest.mark.long
@pytest.mark.timeout_seconds(300)
@pytest.mark.parametrize("has_spare", [True, False])
def test_a_host_that_is_cut_off_is_replaced_or_left_out(
    virtual_hosts: Callable[[int], VirtualHosts], tmp_path: Path, has_spare: bool
) -> None:
    """What its ranks had of their own is on the next node; with fewer ranks the sums have another order."""
    hosts = virtual_hosts(3 if has_spare else 2)
    (tmp_path / "alone").mkdir()
    assert hosts.run((2, 2), write(tmp_path / "alone", []), tmp_path / "alone", STEPS).returncode == 0
    words = ["--hosts", "n1,n2,n3"] if has_spare else ["--hosts", "n1,n2", "--min-ranks", 2]

    def act(job: subprocess.Popen[str]) -> None:
        until_exists(tmp_path / "stopped-3", job=job)
        hosts.cut("n2")

    plan: list[Row] = [(3, "copy", "cut", 34)]
    text = run_on(hosts, tmp_path, "-n", 4, "--ntasks-per-node", 2, *words, plan=plan, act=act)
    assert "n2 did not answer and is left out" + ("" if has_spare else ", with 2 ranks") in text, text
    assert "continues from the copy in memory" in text, text
    result, alone = (json.loads((one / "result").read_text()) for one in (tmp_path, tmp_path / "alone"))
    assert result[1:] == alone[1:]
    assert result == alone or not has_spare
