"""The plan of a step: every element of every variable is updated once, on any arrangement of ranks and nodes."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import MismatchError, is_shared
from mpidist.options import CommunicationOptions
from mpidist.variables.arena import Arena
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.making.creation import create_variable
from mpidist.variables.step.bundle import Bundle
from mpidist.variables.step.plan import KEPT_SELECTIONS, Plan
from mpidist.variables.step.step import Step
from mpidist.variables.step.variable_pass import VariablePass
from mpidist.variables.update.kernel import Update
from tests.helpers.amounts import amount
from tests.helpers.strategies import ArenaStrategy, make_arena
from tests.parallel.layouts import LAYOUTS, make_strategy

pytestmark = pytest.mark.mpi

# Less than a cache line, empty, exactly a line, several blocks: on the borders of slices, lanes and chunks.
SIZES = (1, 3, 0, 16, 17, 100, 5000, 70_001)


@pytest.fixture(params=LAYOUTS)
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> ArenaStrategy:
    return make_strategy(communicator, request.param)


def make(arena: Arena, size: int, dtype: str = "float32", name: str = "v") -> MirroredVariable:
    variable = create_variable(arena, np.arange(size).astype(dtype), name=name)
    assert isinstance(variable, MirroredVariable)
    return variable


def count_up(
    parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
) -> None:
    """Adds the gradient, counts the visits in a slot, and spoils what it may spoil."""
    np.add(parameter, gradient, out=parameter)
    for slot in slots:
        np.add(slot, 1, out=slot)
    gradient[...] = -99
    for block in scratch:
        block[...] = -98


def apply(plan: Plan, numbers: tuple[int, ...]) -> None:
    """A step, as the plan of an optimizer makes it."""
    with plan.arena.communicator.order.during("apply_gradients"):
        plan.step(numbers).apply(count_up)


def reduce(plan: Plan, numbers: tuple[int, ...]) -> None:
    """The half of a step."""
    with plan.arena.communicator.order.during("apply_gradients"):
        plan.step(numbers).reduce()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "longdouble"])
def test_every_element_is_updated_once(strategy: ArenaStrategy, dtype: str) -> None:
    arena, rank, n = strategy.arena, strategy.communicator.rank, strategy.num_replicas_in_sync
    sizes = [size for size in SIZES if dtype != "float16" or size < 1000]
    variables = [make(arena, size, dtype) for size in sizes]
    del variables[3]  # a hole between two runs
    plan = Plan(variables, {"visits": 5.0}, scratch_count=2)
    for step in range(3):
        for variable, view in zip(variables, plan.gradients, strict=True):
            assert view.shape == variable.shape
            view[...] = rank + 1
        apply(plan, tuple(range(len(variables))))
        for number, variable in enumerate(variables):
            expected = np.arange(variable.size) + (step + 1) * n * (n + 1) / 2
            np.testing.assert_array_equal(variable.numpy(), expected.astype(dtype))
            assert (plan.slot("visits", number).numpy() == 6 + step).all()
    strategy.communicator.barrier()


def test_several_dtypes_and_subsets(strategy: ArenaStrategy) -> None:
    arena, n = strategy.arena, strategy.num_replicas_in_sync
    variables = [make(arena, 40, dtype) for dtype in ("float32", "float64", "float32", "float64")]
    plan = Plan(variables, {}, 0)
    for subset in [(0,), (1, 3), (0, 1, 2), (3,), (0,)]:
        for number in subset:
            plan.gradients[number][...] = 1
        apply(plan, subset)
    for number, count in enumerate([3, 2, 1, 2]):
        np.testing.assert_array_equal(variables[number].numpy(), np.arange(40) + count * n)


def test_sums_alone_change_nothing_else(strategy: ArenaStrategy) -> None:
    variables = [make(strategy.arena, 100), make(strategy.arena, 33)]
    plan = Plan(variables, {}, 0)
    for view in plan.gradients:
        view[...] = strategy.communicator.rank
    reduce(plan, (0, 1))
    np.testing.assert_array_equal(variables[0].numpy(), np.arange(100))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("case", ["other", "fewer", "none", "order"])
def test_different_variables_are_a_mismatch_everywhere(strategy: ArenaStrategy, case: str) -> None:
    variables = [make(strategy.arena, 10, name=name) for name in "abc"]
    plan = Plan(variables, {}, 0)
    odd = strategy.communicator.rank == strategy.communicator.size - 1
    mine: dict[str, tuple[int, ...]] = {"other": (0, 2), "fewer": (0,), "none": (), "order": (1, 2)}
    with pytest.raises(MismatchError, match="the variables with gradients must be the same") as caught:
        apply(plan, mine[case] if odd else (0, 1))
    assert is_shared(caught.value)
    assert len(set(strategy.communicator.all_gather_object(str(caught.value)))) == 1
    assert "'b'" in str(caught.value)
    for variable in variables:
        np.testing.assert_array_equal(variable.numpy(), np.arange(10), err_msg="nothing was updated")
    # The plan can go on.
    for view in plan.gradients:
        view[...] = 1
    apply(plan, (0, 1, 2))
    assert variables[0].numpy()[0] == strategy.num_replicas_in_sync


@pytest.mark.parametrize("layout", ["node", "private", "first"])
def test_steps_without_gradients_fail_alike_however_late_a_rank_is(communicator: Communicator, layout: str) -> None:
    """A rank that goes on to its next step must not change what a slow one still compares."""
    strategy = make_strategy(communicator, layout)
    plan = Plan([make(strategy.arena, 4)], {}, 0)
    for number in range(60):
        if number % communicator.size == communicator.rank:
            time.sleep(0.001)  # simulates work: each rank is the last one in turn
        with pytest.raises(ValueError, match="no gradients for any of"):
            apply(plan, ())
    plan.gradients[0][...] = 1
    apply(plan, (0,))
    np.testing.assert_array_equal(plan.variables[0].numpy(), np.arange(4) + communicator.size)


def test_few_steps_are_kept_for_many_selections(communicator: Communicator) -> None:
    strategy = make_strategy(communicator, "node")
    count = 11
    variables = [make(strategy.arena, 3) for _ in range(count)]
    plan = Plan(variables, {}, 0)

    def kept(kind: type) -> int:
        return sum(type(one) is kind for one in gc.get_objects())

    before = kept(Step), kept(VariablePass)
    selections = [tuple(i for i in range(count) if bits >> i & 1) for bits in range(1, 1 << count)]
    for place, selection in enumerate(selections):
        plan.variable_pass(selection)
        step = plan.step(selection)
        if place % 8 == 7:
            for number in selection:
                plan.gradients[number][...] = 1
            apply(plan, selection)
    del step
    assert kept(Step) - before[0] <= KEPT_SELECTIONS
    assert kept(VariablePass) - before[1] <= KEPT_SELECTIONS
    for number, variable in enumerate(variables):
        steps = sum(number in selection for selection in selections[7::8])
        np.testing.assert_array_equal(variable.numpy(), np.arange(3) + steps * communicator.size)
    step = plan.step(selections[0])
    for selection in selections[1:KEPT_SELECTIONS]:
        plan.step(selection)
        assert plan.step(selections[0]) is step, "what is used often is kept"


def test_the_ways_of_one_rank_that_do_more_than_add(communicator: Communicator) -> None:
    class Twice(mpidist.CrossDeviceOps):
        def reduce_implementation(
            self, reduce_op: object, per_replica_value: Any, destinations: object, options: object
        ) -> Any:
            return 2 * per_replica_value

    third = np.float32(1) / 3
    for strategy, expected in [
        (ArenaStrategy(SoloCommunicator(), cross_device_ops=Twice()), 2 * third),
        (ArenaStrategy(SoloCommunicator(), options=CommunicationOptions(wire_dtype="float16")), np.float16(third)),
        (ArenaStrategy(SoloCommunicator()), third),
    ]:
        plan = Plan([make(strategy.arena, 1), make(strategy.arena, 1 << 14)], {}, 0)
        for view in plan.gradients:
            view[...] = third
        apply(plan, (0, 1))
        assert plan.variables[0].numpy()[0] == np.float32(expected)


@pytest.mark.mpi(min_size=2)
def test_differences_are_found_late_on_one_node(communicator: Communicator) -> None:
    """Inside a node every step is compared, not only the first ones."""
    strategy = make_strategy(communicator, "node")
    plan = Plan([make(strategy.arena, 4), make(strategy.arena, 4)], {}, 0)
    for _ in range(40):
        apply(plan, (0, 1))
    with pytest.raises(MismatchError, match=r"the step's number.*variables with gradients must be the same"):
        apply(plan, (0,) if communicator.rank else (1,))


@pytest.mark.mpi(min_size=2)
def test_different_lists_are_a_mismatch_everywhere(strategy: ArenaStrategy) -> None:
    a, b, c = (make(strategy.arena, 10) for _ in range(3))
    odd = strategy.communicator.rank == strategy.communicator.size - 1
    # All have the same name, shape and dtype.
    for mine, others in [([a, b], [a, b, c]), ([b, a], [a, b]), ([c], [a])]:
        with pytest.raises(MismatchError, match="the variables of an optimizer must be the same") as caught:
            Plan(mine if odd else others, {}, 0)
        assert is_shared(caught.value)
        assert len(set(strategy.communicator.all_gather_object(str(caught.value)))) == 1


def test_lists_that_make_no_sense(strategy: ArenaStrategy, communicator: Communicator) -> None:
    a = make(strategy.arena, 10)
    stranger = make(make_strategy(communicator, "private").arena, 10, name="stranger")
    for variables, text in [([], "empty list"), ([a, a], "twice"), ([a, stranger], "different strategies")]:
        with pytest.raises(ValueError, match=text):
            Plan(variables, {}, 0)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_slices_cover_and_start_on_cache_lines(communicator: Communicator, parts: int) -> None:
    arena = make_strategy(communicator, "private").arena
    variables = [(0, make(arena, 1000)), (1, make(arena, 77))]
    bundle = Bundle(arena, variables, {}, 0)
    for count in (0, 1, 15, 16, 17, bundle.size):
        slices: list[tuple[int, int]] = [bundle.slice_of(count, index, parts) for index in range(parts)]
        assert slices[0][0] == 0
        assert slices[-1][1] == count
        assert all(a[1] == b[0] for a, b in itertools.pairwise(slices))
        assert all(low % 16 == 0 or low == count for low, _ in slices)


def test_state_lives_once_per_node(communicator: Communicator) -> None:
    strategy = make_strategy(communicator, "node")
    plan = Plan([make(strategy.arena, 1000)], {"momentum": 0.0}, 0)
    slab: Any = plan.bundles[0].slots["momentum"]
    assert slab.is_shared == (communicator.size > 1)
    assert slab.writable.size < 1100


def test_a_pass_measures_and_changes_variables_one_by_one(strategy: ArenaStrategy) -> None:
    arena, n = strategy.arena, strategy.num_replicas_in_sync
    variables = [make(arena, size, "float64" if i % 2 else "float32") for i, size in enumerate(SIZES)]
    plan = Plan(variables, {"visits": 5.0}, scratch_count=2)
    numbers = (0, 1, 2, 5, 6, 7)
    for view in plan.gradients:
        view[...] = strategy.communicator.rank + 1
    reduce(plan, numbers)
    variable_pass = plan.variable_pass(numbers)
    assert variable_pass is plan.variable_pass(numbers)
    total = n * (n + 1) / 2

    def check(parameter: AnyArray, gradient: AnyArray) -> list[float]:
        return [float(parameter.sum(dtype=np.float64)), float((gradient == total).sum()), 1 - 1]

    measured = variable_pass.measure(check, 3)
    expected = [[sum(range(SIZES[number])), SIZES[number], 0] for number in numbers]
    np.testing.assert_array_equal(measured, expected)

    def change(number: int) -> Update:
        def double(
            parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
        ) -> None:
            gradient *= 2
            slots[0][...] += number
            scratch[0][...] = -1
        return double

    def apply(number: int) -> Update:
        def add(
            parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
        ) -> None:
            scratch[1][...] = -1
            parameter += gradient + number
            slots[0][...] += 1
            gradient[...] = -99
        return add

    variable_pass.change(change)
    doubled = variable_pass.measure(lambda _, gradient: [float((gradient == 2 * total).sum())], 1)
    np.testing.assert_array_equal(doubled[:, 0], [SIZES[number] for number in numbers])
    variable_pass.apply(apply)
    for number, variable in enumerate(variables):
        moved, visits = (2 * total + number, 6 + number) if number in numbers else (0, 5)
        np.testing.assert_array_equal(variable.numpy(), np.arange(SIZES[number]) + moved)
        assert (plan.slot("visits", number).numpy() == visits).all()


@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=6), parts=st.integers(1, 5), data=st.data(),
)
@settings(max_examples=amount(50, 2000), deadline=None)
def test_blocks_of_variables_cover_them_once(sizes: list[int], parts: int, data: st.DataObject) -> None:
    arena = make_arena(SoloCommunicator())
    variables = [(number, make(arena, size)) for number, size in enumerate(sizes)]
    bundle = Bundle(arena, variables, {}, 0)
    chosen = sorted(data.draw(st.sets(st.sampled_from(range(len(sizes))))))
    visits = np.zeros(bundle.size)
    for index in range(parts):
        for number, block in bundle.variable_blocks(chosen, index, parts):
            variable = variables[number][1]
            inside = np.flatnonzero([np.shares_memory(block.gradients[0], bundle.gradient[i : i + 1])
                                     for i in range(*bundle.spans[number])])
            assert len(inside) == len(block.gradients[0]), "a block lies inside its variable"
            np.testing.assert_array_equal(block.parameter, variable.numpy()[inside])
            start = bundle.spans[number][0] + inside[0]
            assert start % 16 == 0, "no two ranks write to one cache line"
            visits[start : start + len(inside)] += 1
    for number, (low, high) in bundle.spans.items():
        assert (visits[low:high] == (number in chosen)).all()
    assert visits.sum() == sum(sizes[number] for number in chosen)
