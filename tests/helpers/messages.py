"""Run a program as a rank, and say when asked whether messages of MPI arrive: `-m tests.helpers.messages FOLDER ...`.

On MPICH, where each rank has a process of the launcher, ranks of a host write their messages into a queue of the
receiver's, by UCX. One that is killed between taking a place there and filling it leaves that place empty for ever: the
receiver waits for it, and gets nothing of anybody (`comm/windows/ways.py`). No test can ask of mpidist that it goes on
there, and none may take another hang for it. So ranks that hang send each other messages of MPI alone, by a thread.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

# Long enough for a busy machine.
SECONDS = 20.0
_TAG = 77
# Names of files: the question, and the answers of each rank.
ASK, SENT, HEARD = "ask", "sent", "heard"


def command(folder: Path) -> list[str]:
    """What comes between Python and the program, for ranks that answer in this folder."""
    folder.mkdir(exist_ok=True)
    return ["-m", "tests.helpers.messages", str(folder)]


def answer(folder: Path) -> None:
    """Wait until somebody asks; then send a message to every other rank, and tell of whom one has come."""
    while not (folder / ASK).exists():
        time.sleep(0.5)
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        return
    world = mpi.COMM_WORLD
    others = {*range(world.size)} - {world.rank}
    requests = []
    for one in sorted(others):
        # Some are dead.
        with contextlib.suppress(mpi.Exception):
            requests.append(world.Isend(b"?", one, _TAG))
    (folder / f"{world.rank}.{SENT}").touch()
    heard: set[int] = set()
    end = time.monotonic() + SECONDS
    while heard != others and time.monotonic() < end:
        with contextlib.suppress(mpi.Exception):
            heard |= {one for one in others - heard if world.Iprobe(one, _TAG)}
        time.sleep(0.01)
    text = folder / f"{world.rank}.new"
    text.write_text(" ".join(map(str, sorted(heard))))
    os.replace(text, folder / f"{world.rank}.{HEARD}")
    # MPI may still read what was sent.
    threading.Event().wait()
    del requests


if __name__ == "__main__":
    # By its name it is none of the program's own, which would be left to call MPI to the end (`ending.end_mpi`).
    threading.Thread(target=answer, args=(Path(sys.argv[1]),), name="mpidist-answer", daemon=True).start()
    del sys.argv[:2]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    # Kept: what a program holds lives until the process ends.
    PROGRAM = runpy.run_path(sys.argv[0], run_name="__main__")
