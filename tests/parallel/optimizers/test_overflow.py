"""State that overflows in the slice of one rank: the error is that of all ranks, at the same step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import optimizers
from mpidist.comm.group.communicator import Communicator
from tests.parallel.layouts import LAYOUTS, make_strategy

pytestmark = pytest.mark.mpi

SIZE = 70_001


@pytest.mark.parametrize("place", [0, SIZE - 1])
@pytest.mark.parametrize("options", [{}, {"clipvalue": 1e35}, {"clipnorm": 1e35}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_hear_of_it(communicator: Communicator, layout: str, options: dict[str, Any], place: int) -> None:
    strategy = make_strategy(communicator, layout)
    with strategy.scope():
        variable, other = mpidist.Variable(np.zeros(SIZE, "f")), mpidist.Variable(np.zeros(3, "f"))
    optimizer, second = optimizers.Adam(0.1, **options), optimizers.Adam(0.1)

    def step(number: float) -> None:
        gradient = np.ones(SIZE, "f")
        gradient[place] = number
        strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)]))

    step(1)
    step(1e19 / communicator.size)
    for number in (1e30, 1):
        with pytest.raises(OverflowError, match="1 elements of the optimizer's state 'velocity'") as caught:
            step(number)
        assert len(set(communicator.all_gather_object(str(caught.value)))) == 1
    # The ranks are together, and another optimizer goes on.
    strategy.run(lambda: second.apply_gradients([(np.ones(3, "f"), other)]))
    np.testing.assert_allclose(other.numpy(), -0.1, rtol=1e-6)


@pytest.mark.parametrize("name", ["Adam", "RMSprop", "Adadelta", "Adamax"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_that_overflow_have_one_outcome_on_all_ranks(communicator: Communicator, layout: str, name: str) -> None:
    """Between nodes one rank adds, and the others are sent the result."""
    strategy = make_strategy(communicator, layout)
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(SIZE, "f"))
    optimizer = getattr(optimizers, name)(0.1)
    gradient = np.ones(SIZE, "f")
    # The sum over the ranks of one node may be finite.
    gradient[[0, SIZE - 1]] = 2.1e38

    def outcome() -> str:
        try:
            # Here a warning would be an error, of the rank whose slice it is.
            with np.errstate(invalid="ignore"):
                strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)]))
        except OverflowError as error:
            return str(error)
        return "finite" if np.isfinite(variable.numpy()[[0, SIZE - 1]]).any() else "not finite"

    for _ in range(2):
        outcomes = communicator.all_gather_object(outcome())
        assert len(set(outcomes)) == 1
        # Adamax has no squares, and takes what is finite.
        assert outcomes[0] != "finite" or (name == "Adamax" and communicator.size == 1)


def test_tables(communicator: Communicator) -> None:
    for layout in ("node", "private", "pairs"):
        strategy = make_strategy(communicator, layout)
        with strategy.scope():
            table = mpidist.Variable(np.zeros((50, 3), "f"), sparse_gradient=True)
        optimizer = optimizers.Adagrad(0.1)
        rows = mpidist.IndexedSlices(np.full((2, 3), 1e30, "f"), np.array([0, 49]))
        with pytest.raises(OverflowError, match="6 elements of the optimizer's state 'accumulator'"):
            strategy.run(optimizer.apply_gradients, args=([(rows, table)],))
