"""Node memory of whole programs: nothing is left behind, and it can be protected."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.launching import run_program, start_program
from tests.leftovers import files_left_behind


@pytest.mark.timeout_seconds(120)
def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, time, mpidist\nstrategy = mpidist.MultiWorkerMirroredStrategy(shared=True)\n"
        "with strategy.scope():\n    v = mpidist.Variable([1.0] * 100000)\n"
        "held = open('/proc/self/maps').read().count('/dev/shm/#')\n"
        f"open(r'{tmp_path}/' + str(strategy.communicator.rank), 'w').write(f'{{os.getpid()}} {{held}}')\n"
        "time.sleep(60)\n"
    )
    process = start_program(3, program)
    files = [tmp_path / str(rank) for rank in range(3)]
    while process.poll() is None and not all(f.exists() and len(f.read_text().split()) == 2 for f in files):
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()
    for file in files:
        pid, held = file.read_text().split()
        assert int(held) > 0, "memory is shared"
        os.kill(int(pid), signal.SIGKILL)
    process.communicate(timeout=30)
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
