"""Declared sparse gradients over ranks: the same as of one rank with all the rows, and only these rows are touched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError
from mpidist.indexed_slices import IndexedSlices
from mpidist.optimizers import SGD, Adagrad, Adam, AdamW, Ftrl, LossScaleOptimizer, Optimizer
from mpidist.strategy.base import Strategy
from mpidist.variables.variable import BaseVariable
from tests.parallel.bits import require_same_bits
from tests.parallel.layouts import LAYOUTS, make_strategy
from tests.parallel.optimizers.test_optimizers import saved

pytestmark = pytest.mark.mpi

# Dense variables stand between the tables; the rows of the fifth variable do not all fit one block.
SHAPES: tuple[tuple[int, ...], ...] = ((50, 8), (3, 4), (40,), (), (40, 2048), (7, 2, 3))
TABLES = (0, 2, 4, 5)
STEPS = 5


@pytest.fixture(params=LAYOUTS)
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> Strategy:
    return make_strategy(communicator, request.param)


def make_model(dtype: str = "float64", *, declared: bool = True) -> list[BaseVariable]:
    generator = np.random.default_rng(1)
    return [
        mpidist.Variable(
            generator.normal(size=shape).astype(dtype), name=f"v{i}", sparse_gradient=declared and i in TABLES
        )
        for i, shape in enumerate(SHAPES)
    ]


def numbers_of(generator: np.random.Generator, shape: tuple[int, ...], dtype: str, *, exact: bool) -> AnyArray:
    """Eighths have exact sums in any order."""
    drawn = generator.integers(-16, 17, shape) / 8 if exact else generator.normal(size=shape)
    return np.asarray(drawn, dtype)


@functools.lru_cache(512)
def gradient_of(number: int, rank: int, i: int, dtype: str, *, exact: bool) -> Any:
    """Of one replica: any number of rows, some twice, none on some ranks and in step 2 on all; in step 3 a None.

    It is drawn once for all tests.
    """
    shape = SHAPES[i]
    generator = np.random.default_rng((number, rank, i))
    if i not in TABLES:
        return numbers_of(generator, shape, dtype, exact=exact)
    if number == 3 and i == 2:
        return None
    count = 0 if number == 2 else (5 * rank + 7 * number + i) % 60
    indices = generator.integers(0, shape[0] // (2 if rank % 2 else 1), count)
    return IndexedSlices(numbers_of(generator, (count, *shape[1:]), dtype, exact=exact), indices, shape)


def gradients_of(number: int, rank: int, dtype: str = "float64", *, exact: bool = True) -> list[Any]:
    return [gradient_of(number, rank, i, dtype, exact=exact) for i in range(len(SHAPES))]


def of_all(parts: list[Any]) -> Any:
    """The gradient of one replica that has the data of all."""
    if parts[0] is None:
        return None
    if isinstance(parts[0], IndexedSlices):
        return IndexedSlices(np.concatenate([p.values for p in parts]), np.concatenate([p.indices for p in parts]))
    return np.add.reduce(parts)


def step(strategy: Strategy, optimizer: Any, gradients: list[Any], variables: list[BaseVariable]) -> None:
    strategy.run(optimizer.apply_gradients, args=(list(zip(gradients, variables, strict=True)),))


FAMILIES: dict[str, Callable[[], Optimizer]] = {
    "SGD": lambda: SGD(0.1),
    "Nesterov": lambda: SGD(0.1, 0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda: Adam(0.1),
    "AdamW": lambda: AdamW(0.1, 0.1, clipvalue=2.0),
    "Adagrad": lambda: Adagrad(0.1, clipnorm=3.0),
    "Ftrl": lambda: Ftrl(0.1, global_clipnorm=5.0),
}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_is_one_rank_with_all_rows(strategy: Strategy, family: str) -> None:
    size, dtype = strategy.communicator.size, "float32"
    with strategy.scope():
        variables = make_model(dtype)
    alone = make_model(dtype)
    ours, reference = FAMILIES[family](), FAMILIES[family]()
    for number in range(STEPS):
        step(strategy, ours, gradients_of(number, strategy.communicator.rank, dtype), variables)
        whole = [of_all([gradient_of(number, r, i, dtype, exact=True) for r in range(size)])
                 for i in range(len(SHAPES))]
        reference.apply_gradients(list(zip(whole, alone, strict=True)))
    for ours_one, theirs in zip([*variables, *ours.variables], [*alone, *reference.variables], strict=True):
        np.testing.assert_array_equal(ours_one.numpy(), theirs.numpy(), err_msg=theirs.name)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_plain_descent_is_that_of_dense_gradients(strategy: Strategy, dtype: str) -> None:
    with strategy.scope():
        declared, dense = make_model(dtype), make_model(dtype, declared=False)
    first, second = SGD(0.125), SGD(0.125)
    for number in range(STEPS):
        given = gradients_of(number, strategy.communicator.rank, dtype)
        step(strategy, first, given, declared)
        step(strategy, second, given, dense)
    for a, b in zip(declared, dense, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_inexact_sums_go_in_the_order_of_the_ranks(communicator: Communicator) -> None:
    """As dense gradients in node memory do; and the bits are the same on every rank, wherever it keeps its copy."""
    results = []
    for layout in LAYOUTS:
        strategy = make_strategy(communicator, layout)
        with strategy.scope():
            variables = make_model("float32")
        optimizer = Adam(0.1)
        for number in range(STEPS):
            given = gradients_of(number, communicator.rank, "float32", exact=False)
            for i in (1, 3):
                given[i] = None
            step(strategy, optimizer, given, variables)
        require_same_bits(communicator, *(v.numpy() for v in (*variables, *optimizer.variables)))
        results.append([v.numpy() for v in [*variables, *optimizer.variables]])
    for result in results[1:]:
        for array, expected in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(array, expected)
    strategy = make_strategy(communicator, "node")
    with strategy.scope():
        declared, dense = make_model("float32"), make_model("float32", declared=False)
    first, second = SGD(0.1), SGD(0.1)
    for number in range(STEPS):
        given = gradients_of(number, communicator.rank, "float32", exact=False)
        step(strategy, first, given, declared)
        step(strategy, second, given, dense)
    for a, b in zip(declared, dense, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_other_rows_stand_still(strategy: Strategy) -> None:
    rank, size = strategy.communicator.rank, strategy.communicator.size
    with strategy.scope():
        table = mpidist.Variable(np.full((40, 16), 2.0), sparse_gradient=True)
    optimizer = AdamW(0.5, 0.1)
    for number in range(2):
        # Each rank names a row of its own, and all of them the last; the first rank then none.
        mine = [] if rank == 0 and number else [3 * rank + number, 39]
        rows = IndexedSlices(np.ones((len(mine), 16)), np.array(mine))
        strategy.run(optimizer.apply_gradients, args=([(rows, table)],))
    named = {39} | {3 * r + number for number in range(2) for r in range(size) if r or not number}
    touched = np.isin(np.arange(40), list(named))
    assert (table.numpy()[~touched] == 2).all()
    assert (table.numpy()[touched] < 2).all()
    for slot in optimizer.variables:
        assert ((slot.numpy() != 0).all(axis=1) == touched).all()


def test_state_round_trip(strategy: Strategy) -> None:
    """Also into an optimizer of variables that were not declared: the state has the shape of the variable."""
    rank = strategy.communicator.rank
    for declared in (True, False):
        with strategy.scope():
            first, second = make_model(), make_model(declared=declared)
        straight, stopped, resumed = Adagrad(0.1), Adagrad(0.1), Adagrad(0.1)
        for number in range(4):
            step(strategy, straight, gradients_of(number, rank), first)
        for number in range(2):
            step(strategy, stopped, gradients_of(number, rank), second)
        resumed.load_state(saved(stopped))
        for number in range(2, 4):
            step(strategy, resumed, gradients_of(number, rank), second)
        for a, b in zip([*first, *straight.variables], [*second, *resumed.variables], strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-12)


def test_one_ranks_overflow_skips_the_step_on_all(strategy: Strategy) -> None:
    rank, size = strategy.communicator.rank, strategy.communicator.size
    with strategy.scope():
        variables = make_model("float16")
    before = [v.numpy() for v in variables]
    optimizer = LossScaleOptimizer(SGD(0.1), 8.0)
    for poisoned in (0, 4):
        given = gradients_of(4, rank, "float16")
        if rank == size - 1:
            given[poisoned] = IndexedSlices(np.full((2, *SHAPES[poisoned][1:]), 6e4, "float16"), np.array([1, 1]))
        step(strategy, optimizer, given, variables)
    assert optimizer.dynamic_scale == 2
    for variable, expected in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), expected)


@pytest.mark.mpi(min_size=2)
def test_no_rows_are_not_no_gradient(strategy: Strategy) -> None:
    with strategy.scope():
        variables = make_model()
    optimizer = SGD(0.1)
    given = gradients_of(0, strategy.communicator.rank)
    if strategy.communicator.rank == 0:
        given[0] = None
    with pytest.raises(MismatchError, match="'v0'"):
        step(strategy, optimizer, given, variables)


@pytest.mark.mpi(min_size=2)
def test_all_ranks_declare_alike(strategy: Strategy) -> None:
    is_first = strategy.communicator.rank == 0
    with strategy.scope():
        with pytest.raises(MismatchError, match=r"sparse_gradient=True.* on rank 0;.*sparse_gradient=False.* on rank"):
            mpidist.Variable(np.zeros((3, 2)), sparse_gradient=is_first)
        table, dense = (mpidist.Variable(np.zeros((3, 2)), sparse_gradient=is_sparse) for is_sparse in (True, False))
        with pytest.raises(MismatchError, match="the variables of an optimizer"):
            SGD(0.1).build([table if is_first else dense])


def test_tables_alone(strategy: Strategy) -> None:
    with strategy.scope():
        tables = [mpidist.Variable(np.zeros((20, 3)), sparse_gradient=True) for _ in range(2)]
        optimizer = SGD(1.0, clipnorm=100.0)
        optimizer.build(tables)
    size = strategy.communicator.size
    for number in range(20):
        rows = IndexedSlices(np.ones((1, 3)), np.array([number]))
        strategy.run(optimizer.apply_gradients, args=([(rows, tables[number % 2])],))
    for parity, table in enumerate(tables):
        expected = np.zeros((20, 3))
        expected[parity::2] = -size
        np.testing.assert_array_equal(table.numpy(), expected)
