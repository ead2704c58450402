"""Node memory of whole programs: nothing is left behind, and it can be protected."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launching import (
    end,
    find_mpirun,
    finish,
    is_open_mpi,
    launch_environment,
    mpirun_command,
    run_program,
    start_program,
)
from tests.helpers.leftovers import files_left_behind
from tests.helpers.waiting import until
from tests.hosts.virtual_hosts import why_unavailable


@pytest.mark.timeout_seconds(120)
def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, mpidist\nstrategy = mpidist.MultiWorkerMirroredStrategy(shared=True)\n"
        "with strategy.scope():\n    v = mpidist.Variable([1.0] * 100000)\n"
        "held = open('/proc/self/maps').read().count('/dev/shm/#')\n"
        f"open(r'{tmp_path}/' + str(strategy.communicator.rank), 'w').write(f'{{os.getpid()}} {{held}}')\n"
        "while True:\n    signal.pause()\n"
    )
    process = start_program(3, program)
    files = [tmp_path / str(rank) for rank in range(3)]
    until(
        lambda: all(file.exists() and len(file.read_text().split()) == 2 for file in files), "all ranks have begun",
        job=process,
    )
    for file in files:
        pid, held = file.read_text().split()
        assert int(held) > 0, "memory is shared"
        os.kill(int(pid), signal.SIGKILL)
    end(process)
    assert files_left_behind() == []


@pytest.mark.timeout_seconds(120)
@pytest.mark.parametrize("protect", ["0", "1"])
def test_protected_memory_stops_a_stray_write(tmp_path: Path, protect: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import ctypes, mpidist\nstrategy = mpidist.MultiWorkerMirroredStrategy(shared=True)\n"
        "with strategy.scope():\n    v = mpidist.Variable([1.0, 2.0])\n"
        "v.assign([3.0, 4.0])\n"
        "ctypes.memset(v.value().ctypes.data, 0, 4)\n"
        "print(f'survived {v.numpy()[0]}\\n', end='', flush=True)\n"
    )
    result = run_program(2, program, MPIDIST_PROTECT=protect)
    if protect == "1":
        assert result.returncode != 0
        assert "survived" not in result.stdout
        text = result.stdout + result.stderr
        assert "SIGSEGV" in text or "EXIT CODE: 139" in text or "signal 11" in text or result.returncode in (139, 11)
    else:
        assert result.stdout.count("survived 0.0") == 2, result.stderr


@pytest.mark.timeout_seconds(120)
@pytest.mark.parametrize("option", ["size=64m", "ro"])
def test_a_place_for_memory_that_cannot_be_used_is_one_warning(tmp_path: Path, option: str) -> None:
    """64 MB is what a container has unless its --shm-size says more. The ranks train on private copies."""
    if option == "ro" and not is_open_mpi(find_mpirun()):
        pytest.skip("MPICH itself does not start where /dev/shm cannot be written to")
    if why_unavailable():
        pytest.skip(str(why_unavailable()))
    program = tmp_path / "program.py"
    program.write_text(
        "import mpidist\nstrategy = mpidist.MirroredStrategy()\n"
        "with strategy.scope():\n    v = mpidist.Variable([3.0])\n"
        "mpidist.optimizers.SGD(1.0).apply_gradients([([1.0], v)])\nmpidist.MirroredStrategy()\n"
        "sizes, shares = strategy.communicator.node_sizes, strategy.home.shares_memory\n"
        "print(f'{sizes} {shares} {v.numpy()[0]}\\n', end='', flush=True)\n"
    )
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    inside = f'mount -t tmpfs -o {option} tmpfs /dev/shm && exec "$@"'
    process = subprocess.Popen(
        ["unshare", *user, "--mount", "sh", "-c", inside, "sh", *mpirun_command(2, find_mpirun()), sys.executable,
         str(program)],
        env={**launch_environment(), "PYTHONPATH": os.pathsep.join(sys.path)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )
    result = finish(process, program.name, 60)
    assert result.stdout.count("(2,) False 1.0\n") == 2, result.stdout + result.stderr
    assert "variables are private to each rank" in result.stderr
    if option == "size=64m":
        assert result.stderr.count("variables are private to each rank") == 1
        text = "/dev/shm has 64 MB, and is used only from 256 MB on. Enlarge it (a container's --shm-size"
        assert text in result.stderr
