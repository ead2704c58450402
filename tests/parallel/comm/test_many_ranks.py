"""More ranks on a node than look at all others: what differs on one of them, or interrupts it, comes on all."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.calls.rank_tree import MOST_FLAT
from mpidist.comm.choice import selection
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.memory.show_calls import open_node_barrier
from mpidist.comm.memory.tree_barrier import TreeBarrier
from mpidist.errors import MismatchError, is_shared
from mpidist.failures.interrupts import INTERRUPTS
from mpidist.optimizers import Adam
from mpidist.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from tests.helpers.strategies import ArenaStrategy

pytestmark = [pytest.mark.mpi(min_size=MOST_FLAT + 1)]


def test_they_meet_in_a_tree(communicator: Communicator) -> None:
    assert isinstance(open_node_barrier(communicator), TreeBarrier)


def test_a_call_that_differs_on_a_rank_is_an_error_on_every_rank(communicator: Communicator) -> None:
    collective = selection.choose(
        communicator, CommunicationOptions(implementation=CommunicationImplementation.NODE)
    )
    chance = random.Random(5)
    for _ in range(15):
        odd = chance.randrange(communicator.size)
        op = ReduceOp.MAX if communicator.rank == odd else ReduceOp.SUM
        for _ in range(chance.randrange(4)):
            assert collective.all_reduce(np.ones(2)).tolist() == [communicator.size] * 2
        with pytest.raises(MismatchError, match=r"all_reduce SUM.*MAX|all_reduce MAX.*SUM") as caught:
            collective.all_reduce(np.ones(4), op)
        assert is_shared(caught.value)
        assert len(set(communicator.all_gather_object(str(caught.value)))) == 1


@pytest.mark.parametrize("implementation", ["NODE", "MPI"])
def test_an_interrupt_of_a_rank_comes_after_the_same_call(communicator: Communicator, implementation: str) -> None:
    collective = selection.choose(
        communicator, CommunicationOptions(implementation=CommunicationImplementation[implementation])
    )
    before = signal.signal(signal.SIGINT, INTERRUPTS.take)
    chance = random.Random(7)
    try:
        for _ in range(10):
            asked, at = chance.randrange(communicator.size), chance.randrange(5)
            calls = 0

            def go(asked: int = asked, at: int = at) -> None:
                nonlocal calls
                while calls < 20:
                    if calls == at and communicator.rank == asked:
                        os.kill(os.getpid(), signal.SIGINT)
                    calls += 1
                    collective.all_reduce(np.ones(2))

            with pytest.raises(KeyboardInterrupt):
                go()
            assert communicator.all_gather_object(calls) == [at + 1] * communicator.size
            INTERRUPTS.forget()
    finally:
        signal.signal(signal.SIGINT, before)
        INTERRUPTS.forget()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_fewer_ranks_update_a_small_plan(communicator: Communicator, dtype: str) -> None:
    """The bits are those of the sums rank after rank; a plan of some bytes has one writer, a larger one several."""
    for size in (7, 3000, 40_000):
        strategy = ArenaStrategy(communicator)
        with strategy.scope():
            variable: Any = mpidist.Variable(np.zeros(size, dtype))
            optimizer = Adam(0.1)
        chances = [np.random.default_rng(rank) for rank in range(communicator.size)]
        gradients = [chance.standard_normal(size).astype(dtype) for chance in chances]
        alone: Any = mpidist.Variable(np.zeros(size, dtype))
        expected = Adam(0.1)
        total = gradients[0].astype(np.float32)
        for gradient in gradients[1:]:
            total += gradient.astype(np.float32)
        for _ in range(3):
            optimizer.apply_gradients([(gradients[communicator.rank], variable)])
            expected.apply_gradients([(total.astype(dtype), alone)])
        assert variable.numpy().tobytes() == alone.numpy().tobytes()
