"""Signal handlers, which Python runs in the middle of a call: one makes another call, one raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launching import run_code

pytestmark = pytest.mark.timeout_seconds(120)

HEAD = """
import os, signal, sys, threading, time
import numpy as np
import mpidist
from tests.helpers.waiting import until_exists, until_process_waits_in, until_waits_in
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.communicator.rank
with strategy.scope():
    variable = mpidist.Variable(np.zeros(1000, "float32"))
    optimizer = mpidist.optimizers.SGD(1.0)
ones = np.ones(1000, "float32")
"""
# Gradients are reduced in node memory where no implementation is asked for.
WAYS: dict[str, dict[str, Any]] = {"NODE": {}, "MPI": {"MPIDIST_COLLECTIVE": "MPI"}}
CALLING = """
outer, inner = sys.argv[1:3]
calls = {
    "reduce": lambda: strategy.reduce("SUM", ones, axis=None)[0],
    "step": lambda: optimizer.apply_gradients([(ones, variable)]),
    "assign": lambda: variable.assign(5 * ones),
    "save": lambda: mpidist.Checkpoint(variable=variable).save(sys.argv[0]),
}
for _ in range(20):
    calls["reduce"]()
    calls["step"]()

def handle(*_):
    try:
        print("done", calls[inner](), flush=True)
    except RuntimeError as error:
        print("refused", error, flush=True)

def interrupt():
    until_process_waits_in(os.getpid())
    os.kill(os.getpid(), signal.SIGUSR2)
    # Where the call waits in MPI, the handler runs when the other rank has come.
    open(sys.argv[3], "w").close()

signal.signal(signal.SIGUSR2, handle)
if rank == 0:
    until_exists(sys.argv[3])
else:
    threading.Thread(target=interrupt).start()
result = calls[outer]()
assert outer != "reduce" or result == 2, result
for _ in range(20):
    assert calls["reduce"]() == 2
    calls["step"]()
steps = 40 + (outer == "step")
expected = -2 * steps if outer != "assign" else 5 - 2 * 20
assert (variable.numpy() == expected).all(), variable.numpy()
print("right", flush=True)
"""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("outer", "inner"),
    [("reduce", "reduce"), ("reduce", "step"), ("reduce", "save"), ("step", "reduce"), ("assign", "save")],
)
def test_a_call_within_a_call_is_refused(tmp_path: Path, outer: str, inner: str, way: str) -> None:
    """A signal handler of one rank makes a call while that rank waits in another one, whose result is right."""
    result, text = run_code(tmp_path, HEAD + CALLING, outer, inner, tmp_path / "signalled", ranks=2, **WAYS[way])
    assert result.returncode == 0, text
    assert "done" not in text, text
    assert text.count("this rank is in the middle of another call") == 1, text
    assert text.count("right") == 2, text


RAISING = """
def handle(*_):
    raise InterruptedError("by a handler")
signal.signal(signal.SIGUSR2, handle)
if rank == 0:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR2)).start()
try:
    while True:
        optimizer.apply_gradients([(ones, variable)])
except InterruptedError:
    print("caught", flush=True)
"""


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_leaves_a_step_in_the_middle_and_ends_ends_the_job(tmp_path: Path, way: str) -> None:
    """The others may be in the next step already, which never comes."""
    result, text = run_code(tmp_path, HEAD + RAISING, ranks=2, MPIDIST_TIMEOUT="12", **WAYS[way])
    assert result.returncode != 0, text
    # The other rank is either in this call, or in the next one. Where the handler has raised before the call was
    # noted, nothing but the limit ends the job.
    told = (
        "was left in the middle by InterruptedError: by a handler", "was left by InterruptedError: by a handler",
        "it waits for a rank that has ended", "other ranks have left this call before this part of it",
        "the limit is 12 s, the job ends",
    )
    assert any(one in text for one in told), text


INNER = """
added_up = mpidist.VariableAggregation.SUM
with strategy.scope():
    summed = mpidist.Variable(np.zeros(1000, "float32"), aggregation=added_up)
calls = {
    "assign": lambda: summed.assign(ones),
    "assign in run": lambda: strategy.run(lambda: summed.assign(ones)),
    "assign of another in run": lambda: strategy.run(lambda: variable.assign(ones)),
    "scatter": lambda: summed.scatter_add(mpidist.IndexedSlices(ones[:1], np.array([0]), (1000,))),
    "scatter in run": lambda: strategy.run(calls["scatter"]),
}
calls[sys.argv[1 + rank]]()
strategy.communicator.barrier()
print("went on", flush=True)
"""
# The ranks add up on one side only, before they write.
DIFFERENT_INSIDE = [
    ("assign in run", "assign"), ("assign of another in run", "assign in run"), ("scatter", "scatter in run"),
]


@pytest.mark.parametrize(("first", "second"), DIFFERENT_INSIDE)
def test_other_calls_inside_the_same_call_end_the_job(tmp_path: Path, first: str, second: str) -> None:
    """Both ranks are in one call of one number, and wait in it for ever."""
    text = ended_soon(tmp_path, HEAD + INNER, first, second)
    assert "is deadlocked, the job ends: the ranks are in different calls" in text, text


CAUGHT = """
for _ in range(20):
    strategy.reduce("SUM", ones, axis=None)
strategy.communicator.barrier()
if rank == 1:
    # Later than the other one, which then is in MPI.
    until_waits_in(0, "all_reduce")
try:
    strategy.reduce("SUM", ones if rank else ones.astype("float64"), axis=None)
except mpidist.errors.MismatchError:
    print("caught", flush=True)
    END
"""
ENDS = {"goes on alone": "threading.Event().wait()", "ends": "pass"}


@pytest.mark.parametrize("end", ENDS)
def test_a_mismatch_that_one_rank_alone_catches_ends_the_job(tmp_path: Path, end: str) -> None:
    """The other one waits in MPI, where it does not see that."""
    text = ended_soon(tmp_path, HEAD + CAUGHT.replace("END", ENDS[end]), MPIDIST_COLLECTIVE="MPI")
    assert "caught" in text, text


def ended_soon(tmp_path: Path, text: str, *arguments: str, **environment: Any) -> str:
    """The output of a program on 2 ranks that must end with an error, and not only after a report of a wait."""
    result, told = run_code(tmp_path, text, *arguments, ranks=2, MPIDIST_WARN_SECONDS="3600", **environment)
    assert result.returncode != 0, told
    assert "went on" not in told, told
    return told
