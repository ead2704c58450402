"""Whole programs whose ranks make different calls: the job ends with an error that names them, and gives no result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.launching import run_program

pytestmark = pytest.mark.timeout_seconds(120)

HEAD = """
import sys
import numpy as np
import mpidist
from mpidist.experimental import CommunicationOptions
strategy = mpidist.MultiWorkerMirroredStrategy(
    communication_options=CommunicationOptions(implementation=sys.argv[1])
)
rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync
odd = rank == size - 1
def total(shape, dtype="float64", op="SUM"):
    return strategy.reduce(op, np.ones(shape, dtype), axis=None)
for _ in range(1000):
    total(3)
with strategy.scope():
    mean = mpidist.metrics.Mean()
"""
DIFFERENCES = {
    "shape": "total(2 if odd else 4)",
    "dtype": "total(4, 'float32' if odd else 'float64')",
    "operation": "total(4, op='MAX' if odd else 'SUM')",
    "empty": "total(0 if odd else 4)",
    "ways": "total(10 if odd else 100_000)",
    "sizes": "total(1_000_000 if odd else 900_000)",
}


def run_without_result(tmp_path: Path, text: str, *arguments: object) -> str:
    """The output of a program on 2 ranks, which ends with an error about its own lines, and prints no result."""
    program = tmp_path / "program.py"
    program.write_text(text)
    result = run_program(2, program, *arguments, timeout_seconds=60)
    told = result.stdout + result.stderr
    assert result.returncode != 0, told
    assert "result" not in result.stdout, told
    assert str(program) in told, told
    return told


@pytest.mark.parametrize("implementation", ["AUTO", "MPI", "RING"])
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_calls_that_differ_after_a_thousand(tmp_path: Path, implementation: str, difference: str) -> None:
    program = f"{HEAD}\nprint('result', {DIFFERENCES[difference]}, flush=True)\n"
    text = run_without_result(tmp_path, program, implementation)
    assert "must be the same on all ranks" in text, text


KEYS = {
    "several": "strategy.reduce('SUM', {'a': 1.0, 'c' if odd else 'b': 2.0}, axis=None)",
    "only one": "strategy.reduce('SUM', {'a' if odd else 'b': 1.0}, axis=None)",
    "of rows": "strategy.gather({'a' if odd else 'b': np.ones(3)}, axis=0)",
    "of the first replica's": "strategy.extended.broadcast_to({'a' if odd else 'b': np.ones(3)})",
}


@pytest.mark.parametrize("keys", KEYS)
def test_dictionaries_with_other_keys(tmp_path: Path, keys: str) -> None:
    """Their values would be combined by position."""
    # A broadcast meets nobody: the call after it tells.
    program = f"{HEAD}\ngot = {KEYS[keys]}\ntotal(2)\nprint('result', got, flush=True)\n"
    text = run_without_result(tmp_path, program, "AUTO")
    assert "must be the same on all ranks" in text, text


@pytest.mark.parametrize("implementation", ["AUTO", "MPI", "RING"])
def test_a_metric_and_a_sum_of_as_many_numbers(tmp_path: Path, implementation: str) -> None:
    """A metric enters a call before its sum, in which ranks do not meet: the rank with the metric is one call ahead."""
    program = f"{HEAD}\nprint('result', mean.result() if odd else total(2), flush=True)\n"
    text = run_without_result(tmp_path, program, implementation)
    # A rank that has seen it does not go on, and the other one may wait for it.
    assert "must be the same on all ranks" in text or "the ranks are in different calls" in text, text


def test_messages_of_a_call_that_one_rank_made_are_not_taken_for_objects(tmp_path: Path) -> None:
    """A broadcast needs nothing from the other ranks: its bytes wait there for a call that takes them for its own."""
    program = tmp_path / "program.py"
    program.write_text(
        f"{HEAD}\nif rank == 0:\n    strategy.replicas.collective.broadcast(np.arange(10.0))\n"
        "print('result', strategy.gather_object(rank), flush=True)\n"
    )
    result = run_program(3, program, "MPI", timeout_seconds=60)
    text = result.stdout + result.stderr
    if result.returncode:
        # Open MPI's gathering contains a broadcast.
        assert "must be the same on all ranks" in text, text
    else:
        assert result.stdout.count("[0, 1, 2]") == 3, text


@pytest.mark.parametrize("call", ["strategy.gather_object(rank)", "mpidist.Checkpoint(mean=mean).save(sys.argv[2])"])
def test_a_rank_that_left_others_in_a_call_makes_no_exchange(tmp_path: Path, call: str) -> None:
    """The others are in MPI, and come neither out of it nor to the exchange."""
    program = tmp_path / "program.py"
    program.write_text(
        f"{HEAD}\nfrom tests.helpers.waiting import until_waits_in\nif not odd:\n    until_waits_in(1)\n"
        "try:\n    total(2 if odd else 4)\n"
        f"except mpidist.errors.MismatchError:\n    print('caught', flush=True)\n    {call}\n"
    )
    result = run_program(2, program, "MPI", tmp_path / "saved", timeout_seconds=40)
    text = result.stdout + result.stderr
    assert result.returncode != 0, text
    assert "caught" in result.stdout, text
    assert re.search("an (exchange|agreement) between ranks is refused: ranks have made different calls", text), text


STEPS = """
import numpy as np
import mpidist
strategy = mpidist.MirroredStrategy(shared=False)
rank = strategy.communicator.rank
with strategy.scope():
    variable = mpidist.Variable(np.zeros(100, "float32"), name="w")
    optimizer = mpidist.optimizers.SGD(lambda step: 0.5 if rank == 1 and step == 30 else 0.25)
for number in range(40):
    optimizer.apply_gradients([(np.ones(100, "float32"), variable)])
    if number == 30:
        print("result", flush=True)
"""


def test_a_rate_that_differs_in_private_memory(tmp_path: Path) -> None:
    text = run_without_result(tmp_path, STEPS)
    assert "learning rate 0.5," in text, text
    assert "learning rate 0.25," in text, text
    assert "must be the same on all ranks" in text, text


ALONE = """
import sys
import numpy as np
import mpidist
from mpidist.experimental import CommunicationOptions
options = CommunicationOptions(implementation="NODE")
strategy = mpidist.MirroredStrategy(communication_options=options, shared=False)
with strategy.scope():
    variable = mpidist.Variable(np.zeros(3))
for _ in range(20):
    strategy.reduce("SUM", np.ones(3), axis=None)
if strategy.communicator.rank == 0:
    if sys.argv[1] == "assign":
        variable.assign(np.ones(3))
    else:
        strategy.communicator.order.enter("a call without a meeting", None, None, meets=False).leave()
print("result", strategy.reduce("SUM", np.ones(3), axis=None), flush=True)
"""


@pytest.mark.parametrize(("what", "text"), [
    ("assign", "got broadcast from rank 0 of float64 (3,) at"), ("call", "got all_reduce SUM of float64 (3,) at"),
])
def test_a_call_of_one_rank_only(tmp_path: Path, what: str, text: str) -> None:
    """Also where it meets nobody, so that the ranks have made different numbers of calls where they meet next."""
    told = run_without_result(tmp_path, ALONE, what)
    assert f"must be the same on all ranks, {text} {tmp_path / 'program.py'}" in told, told


@pytest.mark.parametrize("implementation", ["AUTO", "MPI", "RING"])
def test_an_asynchronous_call_that_one_rank_leaves_out(tmp_path: Path, implementation: str) -> None:
    """It is made by another thread, on another communicator: the calls in front of it look alike on all ranks."""
    program = tmp_path / "program.py"
    program.write_text(
        f"{HEAD}\nbegin = strategy.extended.all_reduce_async\nbegin('SUM', np.ones(5)).wait()\n"
        "handles = [] if odd else [begin('SUM', np.ones(5)) for _ in range(2)]\n"
        "print('result', total(3), flush=True)\n"
    )
    result = run_program(3, program, implementation, timeout_seconds=60)
    text = result.stdout + result.stderr
    assert result.returncode != 0, text
    assert "result" not in result.stdout, text
    assert "must be the same on all ranks" in text, text
