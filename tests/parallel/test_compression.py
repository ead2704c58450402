"""Compressed sums: against plain NumPy, their errors over many steps, the bytes that move, and in an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm import selection
from mpidist.comm.collective import AnyArray, Collective
from mpidist.comm.communicator import Communicator
from mpidist.comm.compression import Compression, Memory
from mpidist.comm.power_sgd import PowerSGD, matrix_shape
from mpidist.comm.ring_collective import RingCollective
from mpidist.comm.top_k import TopK
from mpidist.indexed_slices import IndexedSlices
from mpidist.optimizers import LAMB, SGD, Adam, LossScaleOptimizer
from mpidist.options import CommunicationOptions
from mpidist.strategy.base import Strategy
from mpidist.variables.variable import Variable
from tests.parallel.layouts import lay_out

pytestmark = pytest.mark.mpi

COMPRESSIONS: list[Compression] = [TopK(0.1), TopK(1.0), PowerSGD(1), PowerSGD(3, start_step=2)]
SHAPE = (24, 5, 8)


@pytest.fixture(params=["AUTO", "RING"])
def collective(request: pytest.FixtureRequest, communicator: Communicator) -> Collective:
    return selection.choose(communicator, CommunicationOptions(implementation=request.param))


def gradient_of(step: int, rank: int, shape: tuple[int, ...] = SHAPE, dtype: str = "float64") -> AnyArray:
    return np.random.default_rng((step, rank)).normal(size=shape).astype(dtype)


def require_same_bits(communicator: Communicator, array: AnyArray) -> None:
    assert len(set(communicator.all_gather_object(array.tobytes()))) == 1


def top_k_by_hand(ratio: float, size: int) -> Callable[[list[AnyArray]], AnyArray]:
    """Top-k of all ranks in one process."""
    errors = [np.zeros(SHAPE) for _ in range(size)]

    def reduce(gradients: list[AnyArray]) -> AnyArray:
        total = np.zeros(SHAPE)
        for rank, gradient in enumerate(gradients):
            whole = gradient + errors[rank]
            count = math.ceil(ratio * whole.size)
            least = np.sort(np.abs(whole), axis=None)[-count]
            sent = np.where(np.abs(whole) >= least, whole, 0)
            total += sent
            errors[rank] = whole - sent
        return total

    return reduce


def power_sgd_by_hand(parameters: PowerSGD, size: int) -> Callable[[list[AnyArray]], AnyArray]:
    """Algorithms 1 and 2 of the paper for all ranks in one process, of sums in place of means."""
    rows, columns = matrix_shape(SHAPE)
    errors = [np.zeros((rows, columns)) for _ in range(size)]
    right = np.random.default_rng(parameters.seed).standard_normal((parameters.rank, columns)).T
    step = 0

    def reduce(gradients: list[AnyArray]) -> AnyArray:
        nonlocal right, step
        step += 1
        if step <= parameters.start_step:
            return np.asarray(sum(gradients))
        wholes = [g.reshape(rows, columns) + e for g, e in zip(gradients, errors, strict=True)]
        left = np.linalg.qr(sum(whole @ right for whole in wholes))[0]
        factors = [whole.T @ left for whole in wholes]
        right = np.asarray(sum(factors))
        errors[:] = [whole - left @ factor.T for whole, factor in zip(wholes, factors, strict=True)]
        return np.asarray(left @ right.T).reshape(SHAPE)

    return reduce


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_is_the_plain_algorithm(collective: Collective, compression: Compression) -> None:
    rank, size = collective.communicator.rank, collective.communicator.size
    reference = (
        top_k_by_hand(compression.ratio, size) if isinstance(compression, TopK)
        else power_sgd_by_hand(compression, size) if isinstance(compression, PowerSGD) else None
    )
    assert reference is not None
    memory: Memory = {}
    for step in range(12):
        gradient = gradient_of(step, rank)
        compression.all_reduce(collective, gradient, memory)
        require_same_bits(collective.communicator, gradient)
        np.testing.assert_allclose(gradient, reference([gradient_of(step, r) for r in range(size)]), atol=1e-9)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_what_is_left_out_is_sent_later(collective: Collective, compression: Compression, dtype: str) -> None:
    """What was sent and what is kept add up to the true sums, and what is kept does not grow for ever."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    communicator = collective.communicator
    memory: Memory = {}
    sent, true, kept = np.zeros(SHAPE), np.zeros(SHAPE), []
    # A gradient that hardly changes, and is another one on each rank.
    for step in range(100):
        gradient = (gradient_of(0, communicator.rank) + 0.1 * gradient_of(step, communicator.rank)).astype(dtype)
        true += collective.all_reduce(gradient.astype("float64"))
        compression.all_reduce(collective, gradient, memory)
        require_same_bits(communicator, gradient)
        sent += gradient
        left = collective.all_reduce(memory.get("error", np.zeros(SHAPE)).astype("float64"))
        kept.append(float(np.linalg.norm(left)))
    # Sums are rounded to the dtype of the gradient once, and the sum of 100 roundings is about 10 of them.
    rounding = {"float16": 2e-2, "bfloat16": 2e-1, "float32": 1e-5, "float64": 1e-10}[dtype]
    np.testing.assert_allclose(sent + left, true, atol=12 * rounding * max(1.0, float(np.abs(sent).max()) / 100))
    assert max(kept[70:]) <= 1.5 * max(kept[:70]) + rounding


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_all_elements_are_the_exact_sum(collective: Collective, dtype: str) -> None:
    rank = collective.communicator.rank
    gradient = np.asarray(np.random.default_rng(rank).integers(-16, 17, SHAPE) / 8, dtype)
    expected = collective.all_reduce(gradient)
    memory: Memory = {}
    TopK(1).all_reduce(collective, gradient, memory)
    np.testing.assert_array_equal(gradient, expected)
    assert not memory["error"].any()


@pytest.mark.parametrize("true_rank", [0, 1, 2, 4])
def test_a_matrix_of_low_rank_is_sent_whole(collective: Collective, true_rank: int) -> None:
    rank = collective.communicator.rank
    memory: Memory = {}
    for step in range(4):
        # All ranks' matrices in the same few directions.
        left = np.random.default_rng((step, 99)).normal(size=(30, true_rank))
        gradient = left @ np.random.default_rng((step, rank)).normal(size=(true_rank, 40))
        expected = collective.all_reduce(gradient)
        PowerSGD(4).all_reduce(collective, gradient, memory)
        np.testing.assert_allclose(gradient, expected, atol=1e-8)
        assert float(np.abs(memory["error"]).max()) < 1e-8


def test_full_rank_is_the_sum(collective: Collective) -> None:
    gradient = gradient_of(0, collective.communicator.rank, (6, 9))
    expected = collective.all_reduce(gradient)
    PowerSGD(6).all_reduce(collective, gradient, {})
    np.testing.assert_allclose(gradient, expected, atol=1e-12)
    gradient = gradient_of(1, collective.communicator.rank, (6, 9))
    expected = collective.all_reduce(gradient)
    PowerSGD(60).all_reduce(collective, gradient, {})
    np.testing.assert_allclose(gradient, expected, atol=1e-12)


def test_directions_come_back_after_zeros(collective: Collective) -> None:
    memory: Memory = {}
    for step in range(4):
        gradient = np.zeros((20, 20), "float32")
        if step > 1:
            gradient[3, :] = 1 + collective.communicator.rank
        expected = collective.all_reduce(gradient)
        PowerSGD(2).all_reduce(collective, gradient, memory)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("compression", COMPRESSIONS, ids=repr)
def test_what_is_not_finite_is_seen_everywhere_and_forgotten(
    collective: Collective, compression: Compression, bad: float
) -> None:
    communicator = collective.communicator
    memory: Memory = {}
    for step in range(3):
        compression.all_reduce(collective, gradient_of(step, communicator.rank), memory)
    before = {name: array.copy() for name, array in memory.items()}
    gradient = gradient_of(3, communicator.rank)
    if communicator.rank == communicator.size - 1:
        gradient[1, 2, 3] = bad
    compression.all_reduce(collective, gradient, memory)
    assert not np.isfinite(gradient).all()
    require_same_bits(communicator, np.isfinite(gradient))
    assert memory.keys() == before.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(memory[name], array)
    gradient = gradient_of(4, communicator.rank)
    compression.all_reduce(collective, gradient, memory)
    assert np.isfinite(gradient).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bytes_are_what_the_formula_says(communicator: Communicator, dtype: str) -> None:
    n, shape, item = communicator.size, (60, 80), np.dtype(dtype).itemsize
    ring = selection.choose(communicator, CommunicationOptions(implementation="RING"))
    assert isinstance(ring, RingCollective)

    def sent_by(compression: Compression, memory: Memory) -> int:
        before = ring.traffic.sent
        compression.all_reduce(ring, gradient_of(0, communicator.rank, shape, dtype), memory)
        return ring.traffic.sent - before

    # Each rank's message goes around the ring.
    assert sent_by(TopK(0.01), {}) == (n - 1) * 48 * (4 + item)
    # Both factors are all-reduced: over all ranks 2 (n - 1) times their size.
    thin = communicator.all_gather_object(sent_by(PowerSGD(3), {}))
    assert sum(thin) == 2 * (n - 1) * 3 * (60 + 80) * item
    memory: Memory = {}
    whole = communicator.all_gather_object(sent_by(PowerSGD(3, start_step=1), memory))
    assert sum(whole) == 2 * (n - 1) * 60 * 80 * item
    assert sum(communicator.all_gather_object(sent_by(PowerSGD(3, start_step=1), memory))) == sum(thin)


def compressed(communicator: Communicator, compression: Compression | None, **options: Any) -> Strategy:
    return Strategy(communicator, options=CommunicationOptions(compression=compression, **options))


def apply(strategy: Strategy, optimizer: Any, gradients: list[Any], variables: list[Variable]) -> None:
    strategy.run(optimizer.apply_gradients, args=(list(zip(gradients, variables, strict=True)),))


SHAPES: tuple[tuple[int, ...], ...] = ((64, 40), (40,), (), (3, 3, 16, 32), (5, 4), (50, 30))


def make_model(dtype: str = "float32") -> list[Variable]:
    generator = np.random.default_rng(1)
    initial = [generator.normal(size=shape).astype(dtype) for shape in SHAPES]
    return [mpidist.Variable(array, name=f"v{i}") for i, array in enumerate(initial)]


@pytest.mark.parametrize("layout", ["node", "pairs", "each"])
@pytest.mark.parametrize("options", [{}, {"implementation": "RING"}])
def test_without_loss_an_optimizer_does_as_ever(
    communicator: Communicator, layout: str, options: dict[str, Any]
) -> None:
    strategies = [
        compressed(lay_out(communicator, layout), compression, **options) for compression in (TopK(1), None)
    ]
    results = []
    for strategy in strategies:
        with strategy.scope():
            variables = [*make_model(), mpidist.Variable(np.ones((20, 3), "float32"), sparse_gradient=True)]
        for optimizer in (Adam(0.1), LAMB(0.1), SGD(0.1, global_clipnorm=1.0)):
            for step in range(3):
                generator = np.random.default_rng((step, communicator.rank))
                gradients: list[Any] = [generator.integers(-16, 17, shape) / 8 for shape in SHAPES]
                if step == 1:
                    gradients[0] = gradients[3] = None
                rows = IndexedSlices(np.ones((2, 3), "float32"), np.array([step, 7]))
                chosen = variables if optimizer.name != "LAMB" else variables[:-1]
                apply(strategy, optimizer, [*gradients, rows][: len(chosen)], chosen)
        results.append([v.numpy() for v in variables])
    for ours, expected in zip(*results, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("compression", [TopK(0.05), PowerSGD(2), PowerSGD(2, start_step=3)], ids=repr)
def test_a_regression_converges(communicator: Communicator, compression: Compression) -> None:
    """Each rank has data of its own; the loss over all of it ends near that of exact sums."""
    rank, n = communicator.rank, communicator.size
    target = np.random.default_rng(5).normal(size=(40, 30))
    inputs = np.random.default_rng((7, rank)).normal(size=(200, 40))
    outputs = inputs @ target + 0.1 * np.random.default_rng((8, rank)).normal(size=(200, 30))
    losses = []
    for strategy in (compressed(communicator, compression), compressed(communicator, None)):
        with strategy.scope():
            weights, bias = mpidist.Variable(np.zeros((40, 30))), mpidist.Variable(np.zeros(30))
        optimizer = SGD(0.1)
        for _ in range(400):
            residual = inputs @ weights.numpy() + bias.numpy() - outputs
            apply(strategy, optimizer, [inputs.T @ residual / 200 / n, residual.mean(0) / n], [weights, bias])
        require_same_bits(communicator, weights.numpy())
        residual = inputs @ weights.numpy() + bias.numpy() - outputs
        losses.append(float(strategy.reduce("MEAN", (residual**2).mean(), axis=None)))
    assert losses[1] < 0.012
    assert losses[0] < 1.05 * losses[1]


@pytest.mark.mpi(min_size=2)
def test_memory_is_of_the_variable_and_small_ones_are_exact(communicator: Communicator) -> None:
    strategy = compressed(communicator, TopK(0.01))
    with strategy.scope():
        variables = make_model("float64")
    initial = [v.numpy() for v in variables]
    optimizer, rank = SGD(1.0), communicator.rank
    true = [np.zeros(shape) for shape in SHAPES]
    # In different selections, which have one memory.
    for step in range(60):
        gradients: list[Any] = [gradient_of(0, rank, shape) for shape in SHAPES]
        if step % 3 == 1:
            gradients[0] = None
        for i, gradient in enumerate(gradients):
            true[i] += 0 if gradient is None else strategy.reduce("SUM", gradient, axis=None)
        apply(strategy, optimizer, gradients, variables)
    for i, (variable, start, total) in enumerate(zip(variables, initial, true, strict=True)):
        moved = start - variable.numpy()
        if np.prod(SHAPES[i]) * 8 < 4096:
            np.testing.assert_allclose(moved, total, atol=1e-9)
        else:
            # In 60 steps of 1 % more than a third was sent, the largest.
            assert np.linalg.norm(moved - total) < 0.8 * np.linalg.norm(total)
            require_same_bits(communicator, moved)


def test_a_scaled_step_that_overflows_is_skipped(communicator: Communicator) -> None:
    strategy = compressed(communicator, PowerSGD(2))
    with strategy.scope():
        variables = make_model("float16")
    optimizer = LossScaleOptimizer(SGD(1.0), 8.0)
    for step in range(6):
        gradients = [gradient_of(step, communicator.rank, shape, "float16") for shape in SHAPES]
        before = [v.numpy() for v in variables]
        if step == 3 and communicator.rank == 0:
            gradients[0][5, 5] = np.inf
        apply(strategy, optimizer, gradients, variables)
        for variable, old in zip(variables, before, strict=True):
            assert np.isfinite(variable.numpy()).all()
            assert np.array_equal(variable.numpy(), old) == (step == 3)
    assert optimizer.dynamic_scale == 4


@pytest.mark.mpi(min_size=2)
def test_the_arena_shares_nothing(communicator: Communicator) -> None:
    strategy = compressed(communicator, PowerSGD(2))
    assert not strategy.arena.shares_memory
    with pytest.raises(ValueError, match="`compression` makes a collective do it"):
        Strategy(communicator, options=CommunicationOptions(compression=PowerSGD(2)), shared=True)
