"""A manager's program is killed at each of its system calls; the next one goes on, and nothing is lost or left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.amounts import turns

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
import builtins, json, os, signal, sys
from pathlib import Path
import numpy as np
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.manager import CheckpointManager, latest_checkpoint
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.variables.making.creation import create_variable
from tests.helpers.strategies import make_arena

CALLS = ["posix_fallocate", "pwrite", "fsync", "replace", "unlink", "link", "open"]
first, how, keep = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
killed = int(sys.argv[4])
v = create_variable(make_arena(SoloCommunicator()), np.zeros(3000))
count = 0

def run(directory, saves, last):
    v.assign(np.zeros(3000))
    checkpoint = Checkpoint(v=v)
    manager = CheckpointManager(checkpoint, directory, keep)
    manager.restore_or_initialize()
    start = int(v[0])
    assert (v.numpy() == start).all(), v.numpy()
    assert checkpoint.save_counter == start
    for step in range(start + 1, start + saves + 1):
        v.assign(np.full(3000, float(step)))
        if step == last:
            kill_at_call()
        if how == "manager":
            manager.save()
        elif how == "background":
            manager.save(background=True)
            manager.sync()
        else:
            checkpoint.save(directory / "ckpt")
    manager.close()
    for name in os.listdir(directory):
        assert not name.endswith((".tmp", ".lock")), name
    return start

def kill_at_call():
    def killing(call):
        def act(*arguments, **options):
            global count
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return call(*arguments, **options)
        return act
    for name in CALLS:
        setattr(os, name, killing(getattr(os, name)))
    builtins.open = killing(open)

for moment in range(1000):
    directory = first / str(moment)
    child = os.fork()
    if child == 0:
        try:
            run(directory, killed, killed)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    start = run(directory, 2, None)
    assert start in (killed - 1, killed), start
    files = sorted(os.listdir(directory))
    if how != "save":
        expected = [f"ckpt-{start + n}.h5" for n in (1, 2)][-keep:]
    else:
        expected = [f"ckpt-{n}.h5" for n in range(1, start + 3)]
    assert files == ["checkpoint", *expected], (moment, files)
    assert latest_checkpoint(directory) == str(directory / expected[-1])
    state = json.loads((directory / "checkpoint").read_text())
    assert state["all_model_checkpoint_paths"] == (expected if how != "save" else []), (moment, state)
    if not os.WIFSIGNALED(status):
        print("moments", moment)
        break
"""


@pytest.mark.parametrize(("how", "keep", "killed"), turns([
    ("manager", 1, 3), ("manager", 2, 1), ("save", 1, 2), ("background", 2, 1), ("background", 1, 3),
], 2, always=[("background", 2, 1)]))
def test_a_kill_at_any_call_loses_and_leaves_nothing(tmp_path: Path, how: str, keep: int, killed: int) -> None:
    # Python warns of a fork beside a thread; the lock has one.
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path), how, str(keep), str(killed)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.removeprefix("moments")) > 30
