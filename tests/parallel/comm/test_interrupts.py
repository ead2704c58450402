"""Interrupts between nodes, and beside the communication thread: they come at one call, on all ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.calls.schedule import USUAL
from mpidist.comm.group.communicator import Communicator
from mpidist.experimental import CommunicationOptions
from mpidist.failures import interrupts
from mpidist.failures.interrupts import INTERRUPTS
from mpidist.optimizers import SGD
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import lay_out

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.usefixtures("_interrupts")]


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """The library takes them, as in a program."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, INTERRUPTS.take)
    yield
    signal.signal(signal.SIGINT, before)
    INTERRUPTS.forget()


@pytest.mark.parametrize("layout", ["node", "pairs", "each", "private"])
@pytest.mark.parametrize("who", ["first", "last", "all"])
def test_all_ranks_raise_after_the_same_step(communicator: Communicator, layout: str, who: str) -> None:
    strategy = ArenaStrategy(lay_out(communicator, layout), shared=False if layout == "private" else None)
    with strategy.scope():
        variable: Any = mpidist.Variable(np.zeros(5000, np.float32))
        optimizer = SGD(1.0)
    gradient = np.ones(5000, np.float32)
    rank, size = communicator.rank, communicator.size
    asks = who == "all" or rank == (0 if who == "first" else size - 1)

    def train() -> None:
        for number in range(50):
            if number == 20 and asks:
                os.kill(os.getpid(), signal.SIGINT)
            optimizer.apply_gradients([(gradient, variable)])

    with pytest.raises(KeyboardInterrupt):
        train()
    # After the step that follows the interrupt.
    assert communicator.all_gather_object(optimizer.iterations) == [21] * size
    np.testing.assert_array_equal(variable.numpy(), -21.0 * size)
    assert strategy.reduce("SUM", 1.0, axis=None) == size


def test_between_nodes_it_comes_on_all_ranks_while_calls_come_slowly(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of different nodes hear of it after some calls, which may take longer than a rank waits for one call."""
    monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", 0.2)
    strategy = ArenaStrategy(lay_out(communicator, "each"))
    made: list[int] = []

    def evaluate() -> None:
        for number in range(20 + 2 * USUAL.every):
            if number == 20 and communicator.rank == communicator.size - 1:
                os.kill(os.getpid(), signal.SIGINT)
            strategy.reduce("SUM", 1.0, axis=None)
            made.append(number)
            # Nothing else is left of the calls when it is heard of.
            time.sleep(0.05 if number > 20 else 0)  # simulates work: an evaluation between two calls

    with pytest.raises(KeyboardInterrupt):
        evaluate()
    assert len(set(communicator.all_gather_object(len(made)))) == 1
    # And no second time, which comparisons on their way could bring.
    for _ in range(3 * USUAL.every):
        assert strategy.reduce("SUM", 1.0, axis=None) == communicator.size


@pytest.mark.parametrize("implementation", ["NODE", "MPI"])
def test_reductions_in_the_background_do_not_raise_it(communicator: Communicator, implementation: str) -> None:
    """Nor do they look like other calls to a rank that looks more closely, since another one was interrupted."""
    strategy = ArenaStrategy(communicator, options=CommunicationOptions(implementation=implementation))
    strategy.reduce("SUM", 1.0, axis=None)
    arrays = [np.ones(1000, np.float32) for _ in range(20)]
    handles = [strategy.extended.all_reduce_async("SUM", array) for array in arrays]
    if communicator.rank == 0:
        os.kill(os.getpid(), signal.SIGINT)
    for handle in handles:
        handle.wait()
    with pytest.raises(KeyboardInterrupt):
        strategy.reduce("SUM", 1.0, axis=None)
    assert all((array == communicator.size).all() for array in arrays)
