"""What optimizers do around their kernels: accumulation, averages, loss scaling, sparse gradients, saved state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError, MismatchError
from mpidist.indexed_slices import IndexedSlices
from mpidist.optimizers import LAMB, SGD, Adam, ExponentialDecay, Ftrl, LossScaleOptimizer, Optimizer
from mpidist.strategy.base import Strategy
from mpidist.variables.variable import BaseVariable
from tests.parallel.layouts import LAYOUTS, make_strategy
from tests.parallel.optimizers.test_optimizers import Stored, whole

pytestmark = pytest.mark.mpi

SHAPES: tuple[tuple[int, ...], ...] = ((3, 4), (), (50,), (2000,))


@pytest.fixture(params=LAYOUTS)
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> Strategy:
    return make_strategy(communicator, request.param)


def make_model(strategy: Strategy, dtype: str = "float64") -> list[BaseVariable]:
    generator = np.random.default_rng(1)
    with strategy.scope():
        return [mpidist.Variable(generator.normal(size=shape).astype(dtype), name=f"v{i}")
                for i, shape in enumerate(SHAPES)]


def gradients_of(step: int, rank: int) -> list[AnyArray]:
    return [np.asarray(np.random.default_rng((step, rank, i)).normal(size=shape)) for i, shape in enumerate(SHAPES)]


def step(strategy: Strategy, optimizer: Any, gradients: list[Any], variables: list[BaseVariable]) -> None:
    strategy.run(optimizer.apply_gradients, args=(list(zip(gradients, variables, strict=True)),))


def stored(tree: Any) -> Any:
    """A state as a checkpoint gives it back. Collective."""
    if isinstance(tree, Mapping):
        return {key: stored(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return {str(i): stored(value) for i, value in enumerate(tree)}
    return Stored(whole(tree) if isinstance(tree, BaseVariable) else tree)


def require_equal(first: list[BaseVariable], second: list[BaseVariable]) -> None:
    for a, b in zip(first, second, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [
    lambda k: Adam(0.1, gradient_accumulation_steps=k), lambda k: LAMB(0.1, gradient_accumulation_steps=k),
    lambda k: SGD(0.1, global_clipnorm=3.0, gradient_accumulation_steps=k),
])
def test_accumulated_calls_are_one_of_their_mean(strategy: Strategy, make: Callable[[Any], Optimizer]) -> None:
    rank = strategy.communicator.rank
    first, second = make_model(strategy), make_model(strategy)
    accumulating, plain = make(3), make(None)
    for update in range(3):
        calls = [gradients_of(3 * update + call, rank) for call in range(3)]
        for call, gradients in enumerate(calls):
            before = [v.numpy() for v in first]
            views: tuple[AnyArray, ...] = ()
            if update == 1:
                # In place as well.
                with strategy.scope():
                    views = accumulating.gradients(first)
                for view, gradient in zip(views, gradients, strict=True):
                    view[...] = gradient
            # A variable may have gradients in some calls only.
            given = [None if call == 1 and i == 2 else g for i, g in enumerate(views or gradients)]
            step(strategy, accumulating, given, first)
            if call < 2:
                np.testing.assert_equal([v.numpy() for v in first], before)
        calls[1][2][...] = 0
        step(strategy, plain, [sum(parts) / 3 for parts in zip(*calls, strict=True)], second)
        require_equal(first, second)
    assert accumulating.iterations == 9


def test_a_schedule_is_asked_for_the_number_of_calls(strategy: Strategy) -> None:
    with strategy.scope():
        variable = mpidist.Variable(0.0)
    optimizer = SGD(ExponentialDecay(1.0, 1, 0.5), gradient_accumulation_steps=2)
    for _ in range(4):
        step(strategy, optimizer, [1.0 / strategy.num_replicas_in_sync], [variable])
    np.testing.assert_allclose(variable.numpy(), -(0.5 + 0.125), rtol=1e-6)


@pytest.mark.mpi(min_size=2)
def test_accumulating_for_other_variables_is_a_mismatch(strategy: Strategy) -> None:
    variables = make_model(strategy)
    optimizer = SGD(0.1, gradient_accumulation_steps=2)
    with strategy.scope():
        optimizer.build(variables)
    odd = strategy.communicator.rank == 0
    for call in range(2):
        given = [None if odd and i == 1 else g for i, g in enumerate(gradients_of(0, 0))]
        if call == 0:
            step(strategy, optimizer, given, variables)
        else:
            with pytest.raises(MismatchError, match="'v1'"):
                step(strategy, optimizer, given, variables)


def test_average_of_the_weights(strategy: Strategy) -> None:
    rank = strategy.communicator.rank
    variables, reference = make_model(strategy), make_model(strategy)
    optimizer, plain = Adam(0.1, use_ema=True, ema_momentum=0.75), Adam(0.1)
    optimizer.finalize_variable_values()
    average: list[AnyArray] = []
    for number in range(5):
        gradients: list[Any] = [*gradients_of(number, rank)]
        if number in (0, 3):
            # Its average moves all the same, towards what it was before.
            gradients[1 if number == 0 else 0] = None
        step(strategy, optimizer, gradients, variables)
        step(strategy, plain, gradients, reference)
        values = [v.numpy() for v in reference]
        average = [0.75 * a + 0.25 * v for a, v in zip(average, values, strict=True)] if average else values
        require_equal(variables, reference)
    for slot, expected in zip(optimizer.state()["average"], average, strict=True):
        np.testing.assert_allclose(slot.numpy(), expected, rtol=1e-9)
    optimizer.finalize_variable_values(variables[:1])
    np.testing.assert_allclose(variables[0].numpy(), average[0], rtol=1e-9)
    require_equal(variables[1:], reference[1:])
    optimizer.finalize_variable_values()
    for variable, expected in zip(variables, average, strict=True):
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-9)


def test_variables_become_their_average_every_so_often(strategy: Strategy) -> None:
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(40))
    optimizer = SGD(1.0, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
    seen = []
    for _ in range(4):
        step(strategy, optimizer, [np.full(40, -1.0 / strategy.num_replicas_in_sync)], [variable])
        assert len(set(variable.numpy().round(9))) == 1
        seen.append(float(variable.numpy()[0]))
    np.testing.assert_allclose(seen, [1, 1.5, 2.5, (0.5 * (0.5 * 1.5 + 0.5 * 2.5) + 0.5 * 3.5)])


@pytest.mark.parametrize("make", [
    lambda: SGD(0.1, momentum=0.9), lambda: LAMB(0.1), lambda: Adam(0.1, clipnorm=1.0, use_ema=True),
])
def test_scaled_gradients_are_unscaled(strategy: Strategy, make: Callable[[], Optimizer]) -> None:
    rank = strategy.communicator.rank
    first, second = make_model(strategy), make_model(strategy)
    scaled, plain = LossScaleOptimizer(make(), 1024.0, 2), make()
    scales = []
    for number in range(4):
        gradients = gradients_of(number, rank)
        scales.append(scaled.dynamic_scale)
        step(strategy, scaled, [scaled.scale_loss(g) for g in gradients], first)
        step(strategy, plain, gradients, second)
    require_equal(first, second)
    assert scales == [1024, 1024, 2048, 2048]
    assert scaled.dynamic_scale == 4096
    assert scaled.iterations == 4
    assert len(scaled.variables) == len(plain.variables)


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_one_ranks_overflow_skips_the_step_on_all(strategy: Strategy, poison: float, dtype: str) -> None:
    communicator = strategy.communicator
    variables = make_model(strategy, dtype)
    optimizer = LossScaleOptimizer(Adam(0.1, use_ema=True), 8.0, 100)
    ones = [np.ones(v.shape, np.float16) for v in variables]
    step(strategy, optimizer, ones, variables)
    before = [v.numpy() for v in [*variables, *optimizer.variables]]
    for rank in range(communicator.size):
        bad = [g.copy() for g in ones]
        if communicator.rank == rank:
            bad[3][1000] = poison
        step(strategy, optimizer, bad, variables)
        assert optimizer.dynamic_scale == 4.0 / 2**rank if rank < 3 else optimizer.dynamic_scale == 1.0
        np.testing.assert_equal([v.numpy() for v in [*variables, *optimizer.variables]], before)
    assert optimizer.iterations == 1
    step(strategy, optimizer, ones, variables)
    assert optimizer.iterations == 2
    assert not np.array_equal(variables[0].numpy(), before[0])


@pytest.mark.mpi(min_size=2)
def test_a_sum_of_half_precision_that_overflows_is_seen(strategy: Strategy) -> None:
    variables = make_model(strategy, "float16")
    optimizer = LossScaleOptimizer(SGD(0.1))
    before = [v.numpy() for v in variables]
    step(strategy, optimizer, [np.full(v.shape, 60000, np.float16) for v in variables], variables)
    assert optimizer.dynamic_scale == 2.0**14
    np.testing.assert_equal([v.numpy() for v in variables], before)


def test_a_skipped_update_forgets_its_calls(strategy: Strategy) -> None:
    rank = strategy.communicator.rank
    first, second = make_model(strategy), make_model(strategy)
    scaled = LossScaleOptimizer(SGD(0.1, gradient_accumulation_steps=2), 4.0)
    plain = SGD(0.1, gradient_accumulation_steps=2)
    bad = [np.full(v.shape, np.nan if rank == 0 else 1.0) for v in first]
    step(strategy, scaled, bad, first)
    step(strategy, scaled, gradients_of(5, rank), first)
    assert scaled.dynamic_scale == 2.0
    assert scaled.iterations == 0
    for number in range(2):
        step(strategy, scaled, [scaled.scale_loss(g) for g in gradients_of(number, rank)], first)
        step(strategy, plain, gradients_of(number, rank), second)
    require_equal(first, second)


@pytest.mark.parametrize("options", [{}, {"clipnorm": 0.5}, {"global_clipnorm": 0.5}])
def test_a_rate_that_a_kernel_refuses_leaves_the_step_undone(strategy: Strategy, options: dict[str, Any]) -> None:
    """A warm-up may begin at 0. The program goes on with another rate."""
    variables, expected = make_model(strategy), make_model(strategy)
    optimizer, reference = Ftrl(0.1, **options), Ftrl(0.1, **options)
    gradients = gradients_of(0, strategy.communicator.rank)
    optimizer.learning_rate = 0
    with pytest.raises(ValueError, match="Ftrl needs a learning rate above 0"):
        step(strategy, optimizer, gradients, variables)
    optimizer.learning_rate = 0.1
    step(strategy, optimizer, gradients, variables)
    step(strategy, reference, gradients, expected)
    require_equal(variables, expected)
    assert optimizer.iterations == 1


@pytest.mark.parametrize("options", [{}, {"global_clipnorm": 0.5}])
def test_a_rate_that_a_kernel_refuses_keeps_what_was_accumulated(strategy: Strategy, options: dict[str, Any]) -> None:
    variables, expected = make_model(strategy), make_model(strategy)
    optimizer = Ftrl(0.1, gradient_accumulation_steps=2, **options)
    reference = Ftrl(0.1, gradient_accumulation_steps=2, **options)
    calls = [gradients_of(call, strategy.communicator.rank) for call in range(2)]
    step(strategy, optimizer, calls[0], variables)
    optimizer.learning_rate = 0
    with pytest.raises(ValueError, match="Ftrl needs a learning rate above 0"):
        step(strategy, optimizer, calls[1], variables)
    optimizer.learning_rate = 0.1
    step(strategy, optimizer, calls[1], variables)
    for gradients in calls:
        step(strategy, reference, gradients, expected)
    require_equal(variables, expected)
    assert optimizer.iterations == 2


def test_sparse_gradients_are_their_dense_forms(strategy: Strategy) -> None:
    rank = strategy.communicator.rank
    makers: list[Callable[[], Optimizer]] = [
        lambda: Adam(0.1), lambda: SGD(0.1, gradient_accumulation_steps=2), lambda: LAMB(0.1)
    ]
    for make in makers:
        first, second = make_model(strategy), make_model(strategy)
        sparse, dense = make(), make()
        for number in range(4):
            gradients: list[Any] = [*gradients_of(number, rank)]
            generator = np.random.default_rng((number, rank))
            # Another number of rows on each rank, none at all on the first; rows come twice.
            count = 3 * rank
            rows = IndexedSlices(generator.normal(size=(count, 4)), generator.integers(0, 3, count), (3, 4))
            some = IndexedSlices(np.ones(2), np.array([49, 49]))
            step(strategy, sparse, [rows, gradients[1], some, gradients[3]], first)
            forty_nine = np.zeros(50)
            forty_nine[49] = 2
            step(strategy, dense, [rows.to_dense(), gradients[1], forty_nine, gradients[3]], second)
        require_equal(first, second)


def test_sparse_gradients_that_do_not_fit(strategy: Strategy) -> None:
    variables = make_model(strategy)
    ones: list[Any] = [np.ones(v.shape) for v in variables]
    cases: list[tuple[int, IndexedSlices, type[Exception], str]] = [
        (0, IndexedSlices(np.ones((1, 4)), np.array([3])), ValueError, r"'v0': expected indices from 0 to 2, got 3"),
        (0, IndexedSlices(np.ones((1, 4)), np.array([-1])), ValueError, "got -1 to -1"),
        (0, IndexedSlices(np.ones((1, 3)), np.array([0])), ValueError, r"rows of an array of shape \(3, 4\)"),
        (1, IndexedSlices(np.ones(1), np.array([0])), ValueError, r"rows of an array of shape \(\)"),
        (2, IndexedSlices(np.ones(1, complex), np.array([0])), TypeError, "rows of dtype float64, got complex128"),
    ]
    optimizer = SGD(0.1)
    for number, slices, kind, text in cases:
        with pytest.raises(kind, match=text):
            step(strategy, optimizer, [*ones[:number], slices, *ones[number + 1 :]], variables)
    assert optimizer.iterations == 0


@pytest.mark.parametrize("when", ["before build", "after build"])
def test_all_state_is_saved(strategy: Strategy, when: str) -> None:
    """Stopped between accumulated calls, with a scale that has changed and an average."""
    rank = strategy.communicator.rank

    def make() -> LossScaleOptimizer:
        inner = Adam(0.1, use_ema=True, gradient_accumulation_steps=2, clipnorm=2.0, weight_decay=0.1)
        return LossScaleOptimizer(inner, 16.0, 2)

    def train(optimizer: LossScaleOptimizer, variables: list[BaseVariable], start: int, stop: int) -> None:
        for number in range(start, stop):
            gradients: list[Any] = [optimizer.scale_loss(g) for g in gradients_of(number, rank)]
            if number == 5:
                gradients[2] = None
            step(strategy, optimizer, gradients, variables)

    first, second = make_model(strategy), make_model(strategy)
    straight, stopped, resumed = make(), make(), make()
    train(straight, first, 0, 8)
    train(stopped, second, 0, 5)
    if when == "after build":
        with strategy.scope():
            resumed.build(second)
    resumed.load_state(stored(stopped.state()))
    assert resumed.iterations == 5
    assert resumed.dynamic_scale == stopped.dynamic_scale == 32
    train(resumed, second, 5, 8)
    require_equal(first, second)
    assert resumed.dynamic_scale == straight.dynamic_scale == 64
    resumed.finalize_variable_values()
    straight.finalize_variable_values()
    require_equal(first, second)


def test_a_state_of_other_options_is_an_error(strategy: Strategy) -> None:
    variables = make_model(strategy)
    optimizer = SGD(0.1, use_ema=True)
    step(strategy, optimizer, gradients_of(0, 0), variables)
    state = stored(optimizer.state())
    for stranger in (SGD(0.1), SGD(0.1, use_ema=True, gradient_accumulation_steps=2)):
        with pytest.raises(CheckpointError, match="other options"):
            stranger.load_state(state)
    with pytest.raises(CheckpointError, match="LossScaleOptimizer needs"):
        LossScaleOptimizer(SGD(0.1)).load_state(state)
    fresh = SGD(0.1, use_ema=True, gradient_accumulation_steps=2)
    optimizer.load_state(stored(fresh.state()))
    assert optimizer.iterations == 0
    assert all((slot.numpy() == 0).all() for slot in optimizer.variables)


def test_accumulated_gradients_go_through_a_checkpoint_file(strategy: Strategy, mpi_tmp_path: Any) -> None:
    rank = strategy.communicator.rank
    results = []
    for breaks in (False, True):
        variables = make_model(strategy)
        optimizer = LossScaleOptimizer(Adam(0.1, gradient_accumulation_steps=2, use_ema=True), 4.0, 1)
        step(strategy, optimizer, gradients_of(0, rank), variables)
        if breaks:
            path = mpidist.Checkpoint(model=variables, optimizer=optimizer).write(str(mpi_tmp_path / "all"))
            variables = make_model(strategy)
            optimizer = LossScaleOptimizer(Adam(0.1, gradient_accumulation_steps=2, use_ema=True), 2.0, 1)
            with strategy.scope():
                optimizer.build(variables)
            mpidist.Checkpoint(model=variables, optimizer=optimizer).read(path).assert_consumed()
            assert optimizer.dynamic_scale == 4
        step(strategy, optimizer, gradients_of(1, rank), variables)
        assert optimizer.dynamic_scale == 8
        results.append([v.numpy() for v in variables])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
