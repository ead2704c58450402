"""The reach of steady calls: a step and a reduction go one way, through few functions in few files."""

from __future__ import annotations

import numpy as np
import pytest

import mpidist
from mpidist.comm.calls.schedule import USUAL
from mpidist.comm.group.communicator import Communicator
from mpidist.options import CommunicationOptions
from tests.helpers.reach import reach_of
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import make_strategy

pytestmark = pytest.mark.mpi(min_size=2)

# After so many calls of a collective, none is compared before it begins; the one that is measured is no 32nd one.
STEADY = USUAL.first + 4


@pytest.mark.parametrize("place", ["between runs", "in run"])
def test_a_step(communicator: Communicator, place: str) -> None:
    strategy = make_strategy(communicator, "node")
    with strategy.scope():
        variables = [mpidist.Variable(np.zeros(shape, np.float32)) for shape in ((4, 4), (4,))]
        optimizer = mpidist.optimizers.SGD(0.1)
    pairs = [(np.ones(variable.shape, np.float32), variable) for variable in variables]

    def step() -> None:
        optimizer.apply_gradients(pairs)

    def measure() -> None:
        for _ in range(STEADY):
            step()
        reach = reach_of(step)
        assert reach.within(functions=25, files=10), sorted(reach.functions)

    if place == "in run":
        strategy.run(measure)
    else:
        measure()


def test_a_small_reduction(communicator: Communicator) -> None:
    """Between calls of another size, too: what was found for an array is kept for those like it.

    In node memory, which AUTO does not take everywhere for small arrays.
    """
    strategy = ArenaStrategy(communicator, options=CommunicationOptions(implementation="NODE"))
    small, other = np.ones(4, np.float32), np.ones(5, np.float32)
    for _ in range(STEADY):
        strategy.reduce("SUM", small, axis=None)
        strategy.reduce("SUM", other, axis=None)
    reach = reach_of(lambda: strategy.reduce("SUM", small, axis=None))
    assert reach.within(functions=8, files=6), sorted(reach.functions)


def test_a_large_reduction(communicator: Communicator) -> None:
    strategy = make_strategy(communicator, "node")
    large = np.ones(1 << 18, np.float32)
    for _ in range(STEADY):
        strategy.reduce("SUM", large, axis=None)
    reach = reach_of(lambda: strategy.reduce("SUM", large, axis=None))
    # Of three ranks and more the sum may be compiled: the way there and the compiler are four files.
    is_pair = communicator.size == 2
    assert reach.within(functions=25 if is_pair else 36, files=10 if is_pair else 14), sorted(reach.functions)
