"""The state of optimizers in shards: the numbers of the unsharded run, whatever the nodes and the options are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import optimizers
from mpidist.comm.compression.top_k import TopK
from mpidist.comm.group.communicator import Communicator
from mpidist.optimizers import LAMB, SGD, Adam, AdamW, LossScaleOptimizer
from mpidist.options import CommunicationOptions
from tests.helpers.amounts import turns
from tests.helpers.strategies import ArenaStrategy
from tests.optimizers import SETTINGS, WITH_ROWS
from tests.parallel.bits import require_same_bits
from tests.parallel.layouts import lay_out, make_strategy
from tests.parallel.optimizers.sharded import (
    ALL_LAYOUTS,
    everything,
    make_model,
    pairs_of,
    require_alike,
    shard_counts,
    train,
    trained,
)

pytestmark = pytest.mark.mpi

SOME_LAYOUTS = ("first", "private", "uneven", "full")
# Around the kernel; the second of a pair says whether sums over elements decide, whose order depends on the shards.
AROUND: dict[str, tuple[Callable[[], Any], bool]] = {
    "plain": (lambda: AdamW(0.01), False),
    "clipnorm": (lambda: Adam(0.01, clipnorm=3.0), True),
    "global_clipnorm": (lambda: SGD(0.01, 0.9, global_clipnorm=3.0), True),
    "clipvalue": (lambda: AdamW(0.01, clipvalue=0.5), False),
    "average": (lambda: Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3), False),
    "accumulation": (lambda: Adam(0.01, gradient_accumulation_steps=3, use_ema=True), False),
    "LAMB": (lambda: LAMB(0.01, global_clipnorm=3.0, use_ema=True), True),
    "scaled": (lambda: LossScaleOptimizer(Adam(0.01), 8.0), False),
}


@pytest.mark.parametrize("name", turns(tuple(SETTINGS), 2))
def test_families_have_the_bits_of_the_unsharded_run(communicator: Communicator, name: str) -> None:
    setting = SETTINGS[name]
    layout = ("pairs", "first", "last", "cyclic")[sorted(SETTINGS).index(name) % 4]
    found, expected = (
        trained(communicator, layout, setting, shard_optimizer=sharded) for sharded in (True, False)
    )
    exact = shard_counts(communicator, layout) <= 2 and not setting.is_layerwise
    require_alike(found, expected, exact=exact, tolerance=1e-5)
    require_same_bits(communicator, *found)


def in_turn(names: Sequence[str], layout: str, communicator: Communicator) -> str:
    """One of the names: each layout has another one, and so has each number of ranks."""
    return names[(ALL_LAYOUTS.index(layout) + communicator.size) % len(names)]


@pytest.mark.parametrize("reproducible", [False, True], ids=["", "reproducible"])
@pytest.mark.parametrize("layout", turns(ALL_LAYOUTS, 1, always=("each",)))
def test_layouts_have_the_numbers_of_the_unsharded_run(
    communicator: Communicator, layout: str, reproducible: bool
) -> None:
    make, sums_elements = AROUND[in_turn(list(AROUND)[:: -1 if reproducible else 1], layout, communicator)]
    found, expected = (
        trained(communicator, layout, make, shard_optimizer=sharded, reproducible=reproducible)
        for sharded in (True, False)
    )
    exact = reproducible or (shard_counts(communicator, layout) <= 2 and not sums_elements)
    require_alike(found, expected, exact=exact, tolerance=1e-5)
    require_same_bits(communicator, *found)


HALVES: dict[str, Callable[[], Any]] = {
    "Adam": lambda: Adam(0.01),
    "copied": lambda: Adam(0.01, master_copy=True),
    "LAMB": lambda: LAMB(0.01),
    "LARS": lambda: optimizers.LARS(1.0, use_ema=True, ema_overwrite_frequency=2, master_copy=True),
}


@pytest.mark.parametrize(
    ("layout", "dtype", "name"),
    turns([
        ("pairs", "float16", "copied"), ("private", "float16", "LAMB"), ("uneven", "float16", "LARS"),
        ("full", "float16", "LAMB"), ("full", "float16", "LARS"), ("first", "float16", "Adam"),
        ("pairs", "complex64", "Adam"), ("private", "complex64", "Adam"),
    ], 3),
)
def test_dtypes(communicator: Communicator, layout: str, dtype: str, name: str) -> None:
    found, expected = (
        trained(communicator, layout, HALVES[name], shard_optimizer=sharded, dtype=dtype) for sharded in (True, False)
    )
    # A rounding to float16 that falls the other way is a thousandth.
    exact = shard_counts(communicator, layout) <= 2 and name in ("Adam", "copied")
    require_alike(found, expected, exact=exact, tolerance=1e-5 if dtype == "complex64" else 1e-2)
    require_same_bits(communicator, *found)


@pytest.mark.parametrize("name", ["LAMB", "LARS"])
def test_norms_under_reproducible_have_the_bits_of_the_unsharded_run(communicator: Communicator, name: str) -> None:
    """Each block of a variable is measured as a whole, on the node that has its direction."""
    found, expected = (
        trained(communicator, "each", SETTINGS[name], shard_optimizer=sharded, reproducible=True)
        for sharded in (True, False)
    )
    require_alike(found, expected, exact=True, tolerance=0)


@pytest.mark.mpi(min_size=3)
def test_halves_are_rounded_once(communicator: Communicator) -> None:
    """2048 + 1 + 1 is 2050 in float32, and 2048 where each sum is rounded to float16."""
    strategy = make_strategy(communicator, "each", shard_optimizer=True)
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(500, "float16"))
    gradient = np.full(500, (2048, 1, 1, 0)[communicator.rank], "float16")
    strategy.run(SGD(1.0, 0.9).apply_gradients, args=([(gradient, variable)],))
    np.testing.assert_array_equal(variable.numpy(), -2050)


@pytest.mark.parametrize("kind", ["family", "around"])
@pytest.mark.parametrize("layout", turns(ALL_LAYOUTS, 1, always=("each",)))
def test_tables_have_the_numbers_of_the_unsharded_run(communicator: Communicator, layout: str, kind: str) -> None:
    around: dict[str, Callable[[], Any]] = {
        "clipped": lambda: Adam(0.01, global_clipnorm=2.0), "scaled": lambda: LossScaleOptimizer(Adam(0.01), 8.0),
    }
    choice: dict[str, Any] = around if kind == "around" else WITH_ROWS
    name = in_turn(list(choice), layout, communicator)
    make = choice[name]
    found, expected = (
        trained(
            communicator, layout, make, shard_optimizer=sharded, table=True, reproducible=name == "scaled",
        ) for sharded in (True, False)
    )
    exact = name == "scaled" or (shard_counts(communicator, layout) <= 2 and name != "clipped")
    require_alike(found, expected, exact=exact, tolerance=1e-5)
    require_same_bits(communicator, *found)


@pytest.mark.parametrize(
    "options", [{"implementation": "MPI"}, {"wire_dtype": "float16"}, {"compression": TopK(0.25)}, {"check": True}],
    ids=["implementation", "wire_dtype", "compression", "check"],
)
def test_other_ways_to_sum(communicator: Communicator, options: dict[str, Any]) -> None:
    for layout in ("pairs", "first"):
        found, expected = (
            trained(
                communicator, layout, lambda: Adam(0.01), shard_optimizer=sharded,
                options=CommunicationOptions(**options),
            ) for sharded in (True, False)
        )
        # With a dtype of the wire the sums are made as in the unsharded run.
        exact = "wire_dtype" in options or communicator.size <= 2
        require_alike(found, expected, exact=exact, tolerance=1e-5)


def test_a_reduction_of_the_programs_own_is_used(communicator: Communicator) -> None:
    results = []
    for shard_optimizer in (True, False):
        given = mpidist.HierarchicalCopyAllReduce()
        strategy = ArenaStrategy(
            lay_out(communicator, "pairs"), cross_device_ops=given, shard_optimizer=shard_optimizer
        )
        variables, optimizer = make_model(strategy), Adam(0.01)
        train(strategy, optimizer, variables)
        results.append(everything(optimizer, variables))
    require_alike(*results, exact=True, tolerance=0)


@pytest.mark.parametrize("layout", turns(SOME_LAYOUTS, 1, always=("first",)))
def test_sums_that_are_given_are_not_summed_again(communicator: Communicator, layout: str) -> None:
    results = []
    for shard_optimizer in (True, False):
        strategy = make_strategy(communicator, layout, shard_optimizer=shard_optimizer)
        variables, optimizer = make_model(strategy, table=True), Adam(0.01, clipnorm=1.0)
        optimizer.build(variables)
        for step in range(3):
            pairs = pairs_of(step, 0, variables)
            strategy.run(optimizer.apply_gradients, args=(pairs,), kwargs={"skip_gradients_aggregation": True})
        results.append(everything(optimizer, variables))
    require_alike(*results, exact=False, tolerance=1e-6)


@pytest.mark.parametrize("layout", turns(SOME_LAYOUTS, 1, always=("first",)))
def test_a_step_that_is_not_finite_changes_nothing_on_any_node(communicator: Communicator, layout: str) -> None:
    strategy = make_strategy(communicator, layout, shard_optimizer=True)
    variables, optimizer = make_model(strategy), LossScaleOptimizer(Adam(0.01, use_ema=True), 8.0)
    train(strategy, optimizer, variables, 0, 2)
    before = everything(optimizer, variables)
    pairs = pairs_of(2, communicator.rank, variables)
    if communicator.rank == communicator.size - 1:
        # In the shard of the last node.
        pairs[-1] = (np.full(variables[-1].shape, np.nan, "f"), variables[-1])
    strategy.run(optimizer.apply_gradients, args=(pairs,))
    assert (optimizer.dynamic_scale, optimizer.iterations) == (4.0, 2)
    require_alike(everything(optimizer, variables), before, exact=True, tolerance=0)
    train(strategy, optimizer, variables, 3, 4)
    assert optimizer.iterations == 3


@pytest.mark.parametrize("layout", turns(SOME_LAYOUTS, 1, always=("first",)))
def test_accumulated_gradients_are_flushed_and_averages_taken(communicator: Communicator, layout: str) -> None:
    results = []
    for shard_optimizer in (True, False):
        strategy = make_strategy(communicator, layout, shard_optimizer=shard_optimizer)
        variables, optimizer = make_model(strategy), Adam(0.01, gradient_accumulation_steps=3, use_ema=True)
        optimizer.build(variables)
        train(strategy, optimizer, variables, 0, 5)
        strategy.run(optimizer.flush)
        optimizer.finalize_variable_values()
        results.append(everything(optimizer, variables))
    require_alike(*results, exact=shard_counts(communicator, layout) <= 2, tolerance=1e-5)


@pytest.mark.parametrize("layout", turns(SOME_LAYOUTS, 1, always=("first",)))
def test_all_ranks_hear_of_an_overflow_on_one_node(communicator: Communicator, layout: str) -> None:
    strategy = make_strategy(communicator, layout, shard_optimizer=True)
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(9001, "f"))
        table = mpidist.Variable(np.zeros((50, 3), "f"), sparse_gradient=True)
    optimizer, second = Adam(0.1), optimizers.Adagrad(0.1)

    def step(number: float) -> None:
        gradient = np.ones(9001, "f")
        gradient[-1] = number
        strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)]))

    step(1)
    for number in (1e30, 1):
        with pytest.raises(OverflowError, match="1 elements of the optimizer's state 'velocity'") as caught:
            step(number)
        assert len(set(communicator.all_gather_object(str(caught.value)))) == 1
    rows = mpidist.IndexedSlices(np.full((1, 3), 1e30, "f"), np.array([49]))
    with pytest.raises(OverflowError, match="3 elements of the optimizer's state 'accumulator'"):
        strategy.run(lambda: second.apply_gradients([(rows, table)]))


@pytest.mark.parametrize("shape", turns(((), (1,), (1, 1)), 1))
def test_a_model_of_one_element_is_on_one_of_several_nodes(communicator: Communicator, shape: tuple[int, ...]) -> None:
    found = []
    for shard_optimizer in (False, True):
        strategy = make_strategy(communicator, "uneven", shard_optimizer=shard_optimizer)
        with strategy.scope():
            variable = mpidist.Variable(np.zeros(shape))
            table = mpidist.Variable(np.zeros((1, 3)), sparse_gradient=True)
        optimizer = Adam(0.1, global_clipnorm=1.0)
        rows = mpidist.IndexedSlices(np.ones((1, 3)), np.array([0]), (1, 3))
        for step in range(2):
            pairs = [(np.full(shape, 1.0 + step + communicator.rank), variable), (rows, table)]
            strategy.run(optimizer.apply_gradients, args=(pairs,))
        found.append(everything(optimizer, [variable, table]))
    require_alike(*found, exact=False, tolerance=1e-12)
