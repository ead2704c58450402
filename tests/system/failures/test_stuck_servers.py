"""Servers that do not answer: they are stopped, or in code that does not return, or have left with an error."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.helpers.launching import finish, run_program, start_program
from tests.helpers.listener import Listener

pytestmark = pytest.mark.timeout_seconds(120)

HEAD = """
import os, signal, sys
import numpy as np
import mpidist
from tests.helpers import marks

what, folder = sys.argv[1:]
resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=1)
options = mpidist.ServerOptions(heap_bytes=1 << 22)
"""
# What waits for the server, each in its own way.
WAITS = """
def variable(value):
    # A large one is made at once, and small ones when one of them is used.
    with strategy.scope():
        return mpidist.Variable(value)

waits = {
    "update": lambda: coordinator.schedule(lambda: count.assign_add(1)).fetch(),
    "write": lambda: (count.assign(5), int(count)),
    "variable": lambda: int(variable(0)),
    "large variable": lambda: variable(np.zeros(20_000)),
    "checkpoint": lambda: mpidist.Checkpoint(count=count).save(folder + "/saved/ckpt"),
    "read": lambda: coordinator.schedule(lambda: int(count)).fetch(),
}
"""
STOPPED = HEAD + """
strategy = mpidist.ParameterServerStrategy(resolver, options=options)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    count = mpidist.Variable(0)
""" + WAITS + """
# Whatever is opened and sent once is.
for name in what.split(","):
    waits[name]()
process = strategy.roles.group.processes[strategy.roles.servers[0]].number
marks.put(folder + "/pid", process)
# Not before: the start may take longer.
be_impatient = lambda: os.environ.update(MPIDIST_WARN_SECONDS="1")
be_impatient()
coordinator.schedule(be_impatient).fetch()
for name in what.split(","):
    os.kill(process, signal.SIGSTOP)
    waits[name]()
    print("went on", name, file=sys.stderr, flush=True)
"""
PLACE = r"mpidist: rank {} of 3 on \S+ has waited \d+ s for "
# The end of a report.
ADVICE = "the next one resumes from the last checkpoint\n"
IS_STOPPED = r"rank 2 of 3 \(process {0} on \S+\) is stopped: `kill -CONT {0}` resumes it$"


@pytest.mark.parametrize("way", ["RMA", "SOCKETS"])
def test_who_waits_for_a_stopped_server_names_it(tmp_path: Path, way: str) -> None:
    program, names = tmp_path / "program.py", ["update", "write", "variable", "large variable", "checkpoint"]
    program.write_text(STOPPED)
    # On one host a read takes nothing of a server but where it goes by sockets.
    names += ["read"] if way == "SOCKETS" else []
    job = start_program(3, program, ",".join(names), tmp_path, MPIDIST_WINDOW=way)
    said = Listener(job)
    for name in names:
        # The worker waits for a read, and the coordinator for the worker.
        speaker = 1 if name == "read" else 0
        text = said.until(PLACE.format(speaker) + f"(?s:.*?){ADVICE}")
        process = (tmp_path / "pid").read_text()
        os.kill(int(process), signal.SIGCONT)
        assert re.search(PLACE.format(speaker), text), said.text
        assert re.search(rf"^  ps 0 (is process {process} on \S+|\(process {process} on .*):$", text, re.M), said.text
        assert re.search(IS_STOPPED.format(process), text, re.M), said.text
        # Further reports may come meanwhile. None ends anything.
        said.until(f"went on {name}\n")
    result = finish(job, "the job", 60)
    assert result.returncode == 0, said.text + result.stderr


def test_a_time_limit_ends_a_job_whose_server_is_stopped(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    # The start of a job may take longer than this limit.
    begin = "process = strategy.roles"
    assert begin in STOPPED
    program.write_text(STOPPED.replace(begin, f'os.environ["MPIDIST_TIMEOUT"] = "1"\n{begin}'))
    result = run_program(3, program, "write", tmp_path)
    text = result.stdout + result.stderr
    assert re.search(PLACE.format(0) + r".*, the limit is 1 s, the job ends$", text, re.M), text
    assert re.search(IS_STOPPED.format((tmp_path / "pid").read_text()), text, re.M), text
    assert "went on" not in text, text
    assert result.returncode != 0, text


# An update that does not come back: it waits for a pipe.
KERNEL = HEAD + """
import ctypes
from mpidist.optimizers.optimizer import Optimizer
from mpidist.optimizers.families.sgd import SGDKernel

class Slow(SGDKernel):
    def prepare(self, step, rate):
        def update(*_):
            LINE
        return update

strategy = mpidist.ParameterServerStrategy(resolver, options=options)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weight = mpidist.Variable(np.zeros(3))
optimizer = Optimizer(Slow(), 0.1, name="slow")
optimizer.build([weight])
coordinator.schedule(lambda: optimizer.apply_gradients([(np.ones(3), weight)])).fetch()
print("went on", flush=True)
"""
STUCK = {
    "waits in C": "open(folder + '/pipe').close()",
    "holds the interpreter": "ctypes.PyDLL(None).open((folder + '/pipe').encode(), os.O_RDONLY)",
}


@pytest.mark.parametrize("how", STUCK)
def test_who_waits_for_an_update_that_does_not_come_back_says_where_it_is(tmp_path: Path, how: str) -> None:
    program, pipe = tmp_path / "program.py", tmp_path / "pipe"
    program.write_text(KERNEL.replace("LINE", STUCK[how]))
    os.mkfifo(pipe)
    job = start_program(3, program, how, tmp_path, MPIDIST_WARN_SECONDS="1")
    text = Listener(job).until(PLACE.format(0) + f"(?s:.*)in update(?s:.*){ADVICE}")
    os.close(os.open(pipe, os.O_RDWR))
    result = finish(job, program.name, 60)
    line = KERNEL[: KERNEL.index("LINE")].count("\n") + 1
    assert re.search(r"^  ps 0 \(process \d+ on \S+\) has not answered for \d+ s:$", text, re.M), text
    assert re.search(rf'File "{re.escape(str(program))}", line {line},? in update', text), text
    assert "went on" in result.stdout, text + result.stderr
    assert result.returncode == 0, text + result.stderr


LEFT = HEAD + """
from mpidist.parameter_server.protocol.messages import Commit, Send

strategy = mpidist.ParameterServerStrategy(resolver, options=options, serve=False)
task = strategy.roles.task_type
try:
    if strategy.chief is None:
        strategy.serve()
    else:
        coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            count = mpidist.Variable(0)
        coordinator.schedule(lambda: count.assign_add(1)).fetch()
        station = strategy.chief.station
        # The server finds that this breaks the protocol: nothing of the kind is staged.
        station.send(Send(strategy.roles.servers[0], Commit(99, 1, 99, 1, ())))
        # It waits for the server's word.
        coordinator.schedule(lambda: count.assign_add(1)).fetch()
except (RuntimeError, mpidist.errors.DeadRankError) as error:
    print(f"{task} caught {type(error).__name__}: {error}", flush=True)
    marks.put(f"{folder}/{task}")
if task == "chief":
    # A worker that hears of the chief's end first ends in good order.
    marks.read(folder + "/worker")
strategy.close()
print(f"{task} goes on", flush=True)
"""


@pytest.mark.parametrize("way", ["RMA", "SOCKETS"])
def test_nobody_waits_for_a_server_that_has_left_with_an_error(tmp_path: Path, way: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(LEFT)
    result = run_program(3, program, way, tmp_path, MPIDIST_WINDOW=way)
    text = result.stdout + result.stderr
    # Hydra may put the lines of several ranks into one.
    assert re.search(r"ps caught RuntimeError: rank 0 sends Commit.* breaks the serving protocol", text), text
    for task in ("chief", "worker"):
        assert re.search(
            rf"{task} caught DeadRankError: ps 0 \(rank 2\) stopped serving after an error: .*Commit",
            text,
        ), text
    assert len(re.findall("(?:chief|worker|ps) goes on", text)) == 3, text
    assert result.returncode == 0, text
