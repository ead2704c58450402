"""Jobs that workers join, as tests drive them: their chief answers questions, and joiners are processes of the test."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.helpers.launching import finish, launch_environment, read_until, start_program
from tests.helpers.limits import limit
from tests.helpers.markdown import ROOT
from tests.helpers.waiting import until_exists

COMMAND = "from mpidist.cli.main import main; main()"

# The chief does what it is asked in one line after another: an expression has a value, a statement has none.
ANSWERING = """
import json, os, signal, socket, sys, time
from pathlib import Path
import numpy as np
import mpidist
from mpidist.recorder.recorder import RECORDER
from tests.helpers.limits import limit
from tests.helpers.processes import state_of
from tests.helpers.waiting import until as wait_for

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
strategy = mpidist.ParameterServerStrategy(
    mpidist.cluster_resolver.MPIClusterResolver(num_ps=2), join_directory=folder / "job",
    options=mpidist.ServerOptions(heap_bytes=1 << 22), **options,
)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    # They lie on different servers.
    sums = [mpidist.Variable(np.zeros(3)) for _ in range(2)]
    count = mpidist.Variable(0)
    optimizer = mpidist.optimizers.SGD(1.0)
    optimizer.build(sums)

def add(dies=0, number=signal.SIGKILL):
    # One more in every variable; a process may end, or stop, when it has pushed.
    read = int(count)
    count.assign_add(1)
    optimizer.apply_gradients([(np.full(3, -1.0), one) for one in sums])
    if os.getpid() == dies:
        os.kill(dies, number)
        if number == signal.SIGINT:
            # Another thread of the process may have got it: the interrupt comes when that one has run, and this one
            # looks.
            while True:
                time.sleep(0.01)
    return os.getpid(), read

def lose(worker):
    left = living() - 1
    os.kill(coordinator.schedule(os.getpid, worker=worker).fetch(), signal.SIGKILL)
    wait_for(lambda: living() == left)

def living():
    coordinator.done()
    return int(repr(coordinator).split("of ")[1].split()[0])

def is_stopped(pid):
    return state_of(pid) == "T"

def totals():
    return [int(count), optimizer.iterations, *sorted({float(x) for one in sums for x in one.numpy()})]

with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(str(folder / "ask.new"))
    listener.listen(1)
    os.rename(folder / "ask.new", folder / "ask")
    listener.settimeout(limit(60))
    asked = listener.accept()[0].makefile("rw")
for line in asked:
    text = json.loads(line)
    try:
        try:
            answer = eval(text, globals())
        except SyntaxError:
            answer = exec(text, globals())
        asked.write(json.dumps(["value", answer], default=str) + "\\n")
    except Exception as error:
        asked.write(json.dumps(["error", f"{type(error).__name__}: {error}"]) + "\\n")
    asked.flush()
"""


class Job:
    """A job of chief, workers and two servers, whose lost workers others replace. Its end ends the chief's program.

    Args:
        folder: An empty one.
        workers: So many at the beginning.
        options: Of the strategy.
    """

    def __init__(self, folder: Path, workers: int, **options: Any) -> None:
        program = folder / "program.py"
        program.write_text(ANSWERING)
        self.directory = folder / "job"
        self._joiners: list[subprocess.Popen[str]] = []
        self._link = socket.socket(socket.AF_UNIX)
        self._file = self._link.makefile("rw")
        self.process = start_program(workers + 3, program, folder, json.dumps(options), kills=True)
        try:
            until_exists(folder / "ask", job=self.process)
            self._link.connect(str(folder / "ask"))
        except BaseException:
            self._kill()
            raise

    def begin(self, text: str) -> None:
        """Ask the chief to do something; `end` waits for it."""
        self._file.write(json.dumps(text) + "\n")
        self._file.flush()

    def end(self) -> Any:
        """Wait for the answer to the last question."""
        line = self._file.readline()
        assert line, f"the chief has ended: {self.process.communicate(timeout=limit(30))}"
        kind, value = json.loads(line)
        assert kind == "value", value
        return value

    def ask(self, text: str) -> Any:
        """Ask the chief."""
        self.begin(text)
        return self.end()

    def join(self, before: str = "") -> subprocess.Popen[str]:
        """Start a worker that joins. It runs some Python before."""
        self._joiners.append(join(self.directory, before))
        return self._joiners[-1]

    def read_until(self, pattern: str) -> str:
        """What the job has said on stderr."""
        return read_until(self.process, pattern)

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Let the chief's program end. Joiners that live end with it, with its code, and say nothing."""
        living = [one for one in self._joiners if one.poll() is None]
        self._hang_up()
        result = finish(self.process, "the job", 60)
        for one in living:
            ended = finish(one, "the joiner", 30)
            assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", ""), ended
        return result

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._kill()

    def _hang_up(self) -> None:
        self._file.close()
        self._link.close()

    def _kill(self) -> None:
        self._hang_up()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        for one in (self.process, *self._joiners):
            one.kill()
            if one.stderr is not None and not one.stderr.closed:
                one.communicate(timeout=limit(30))


def join(directory: Path, before: str = "") -> subprocess.Popen[str]:
    """Start a worker that joins. It runs some Python before."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        [sys.executable, "-c", before + "\n" + COMMAND, "worker", "--join", str(directory)],
        env=launch_environment({**os.environ, "PYTHONPATH": path}), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )


def refusal(joiner: subprocess.Popen[str]) -> str:
    """What a command says that is refused: one line."""
    result = finish(joiner, "the joiner", 30)
    assert (result.returncode, result.stdout) == (1, ""), result
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr
