"""The way of a call through the library: how many functions it enters, in how many files."""

from __future__ import annotations

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from tests.helpers.calls import calls_of
from tests.helpers.strategies import ArenaStrategy

pytestmark = pytest.mark.mpi


def without_waiting(entered: list[tuple[str, str]]) -> set[tuple[str, str]]:
    """A rank that waits looks around, and so does one that sees another a barrier ahead: that is not on the way."""
    looks = ("look", "_look_closely")
    return {(file, name) for file, name in entered if file != "comm/calls/signature_page.py" and name not in looks}


def test_a_step_enters_few_functions(communicator: Communicator) -> None:
    """Of a step with Adam and two dense variables; the first steps, which open and compare more, do not count."""
    strategy = ArenaStrategy(communicator)
    with strategy.scope():
        variables = [mpidist.Variable(np.zeros(size, np.float32)) for size in (100, 10)]
        optimizer = mpidist.optimizers.Adam(0.1)
    gradients = [np.ones(variable.shape, np.float32) for variable in variables]

    def step() -> None:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for _ in range(20):
        strategy.run(step)
    entered = without_waiting(calls_of(lambda: strategy.run(step)))
    files = {file for file, _ in entered}
    # No more than that: what is done in every step is read, and paid for, in every step.
    assert len(entered) <= 32, sorted(entered)
    assert len(files) <= 12, sorted(files)


@pytest.mark.parametrize("value", [np.float32(1), np.ones(3, np.float32)], ids=["scalar", "array"])
def test_a_small_reduce_enters_few_functions(communicator: Communicator, value: np.float32 | AnyArray) -> None:
    """Under AUTO; the first calls, which open a backend and compare shapes by messages, do not count."""
    strategy = ArenaStrategy(communicator)
    for _ in range(20):
        strategy.reduce("SUM", value, axis=None)
    entered = without_waiting(calls_of(lambda: strategy.reduce("SUM", value, axis=None)))
    files = {file for file, _ in entered}
    assert len(entered) <= 12, sorted(entered)
    assert len(files) <= 8, sorted(files)
