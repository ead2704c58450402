"""Compressed sums: against plain NumPy, their errors over many steps, the bytes that move, and in an optimizer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.comm.backends.ring import RingBackend
from mpidist.comm.choice import selection
from mpidist.comm.collective import Collective
from mpidist.comm.compression.compression import Compression, CompressionState
from mpidist.comm.compression.power_sgd import PowerSGD, matrix_shape
from mpidist.comm.compression.top_k import TopK
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError
from mpidist.indexed_slices import IndexedSlices
from mpidist.optimizers import LAMB, SGD, Adam, LossScaleOptimizer
from mpidist.options import CommunicationOptions
from mpidist.variables.variable import BaseVariable
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.bits import require_same_bits
from tests.parallel.layouts import lay_out

pytestmark = pytest.mark.mpi

COMPRESSIONS: list[Compression] = [TopK(0.1), TopK(1.0), PowerSGD(1), PowerSGD(3, start_step=2)]
SHAPE = (24, 5, 8)


@pytest.fixture(params=["AUTO", "RING"])
def collective(request: pytest.FixtureRequest, communicator: Communicator) -> Collective:
    return selection.choose(communicator, CommunicationOptions(implementation=request.param))


def gradient_of(step: int, rank: int, shape: tuple[int, ...] = SHAPE, dtype: str = "float64") -> AnyArray:
    return np.random.default_rng((step, rank)).normal(size=shape).astype(dtype)


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
    memory: CompressionState = {}
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
    memory: CompressionState = {}
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
    rounding = {"float16": 2e-2, "bfloat16": 2e-1, "float32": 2e-6, "float64": 4e-15}[dtype]
    np.testing.assert_allclose(sent + left, true, atol=12 * rounding * max(1.0, float(np.abs(sent).max()) / 100))
    assert max(kept[70:]) <= 1.5 * max(kept[:70]) + rounding


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_all_elements_are_the_exact_sum(collective: Collective, dtype: str) -> None:
    rank = collective.communicator.rank
    gradient = np.asarray(np.random.default_rng(rank).integers(-16, 17, SHAPE) / 8, dtype)
    expected = collective.all_reduce(gradient)
    memory: CompressionState = {}
    TopK(1).all_reduce(collective, gradient, memory)
    np.testing.assert_array_equal(gradient, expected)
    assert not memory["error"].any()


@pytest.mark.parametrize("true_rank", [0, 1, 2, 4])
def test_a_matrix_of_low_rank_is_sent_whole(collective: Collective, true_rank: int) -> None:
    rank = collective.communicator.rank
    memory: CompressionState = {}
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
    memory: CompressionState = {}
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
    memory: CompressionState = {}
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
    backend = ring.backend
    assert isinstance(backend, RingBackend)

    def sent_by(compression: Compression, memory: CompressionState) -> int:
        before = backend.traffic.sent
        compression.all_reduce(ring, gradient_of(0, communicator.rank, shape, dtype), memory)
        return backend.traffic.sent - before

    # Each rank's message goes around the ring.
    assert sent_by(TopK(0.01), {}) == (n - 1) * 48 * (4 + item)
    # Both factors are all-reduced: over all ranks 2 (n - 1) times their size.
    thin = communicator.all_gather_object(sent_by(PowerSGD(3), {}))
    assert sum(thin) == 2 * (n - 1) * 3 * (60 + 80) * item
    memory: CompressionState = {}
    whole = communicator.all_gather_object(sent_by(PowerSGD(3, start_step=1), memory))
    assert sum(whole) == 2 * (n - 1) * 60 * 80 * item
    assert sum(communicator.all_gather_object(sent_by(PowerSGD(3, start_step=1), memory))) == sum(thin)


def compressed(communicator: Communicator, compression: Compression | None, **options: Any) -> ArenaStrategy:
    return ArenaStrategy(communicator, options=CommunicationOptions(compression=compression, **options))


def apply(strategy: ArenaStrategy, optimizer: Any, gradients: list[Any], variables: list[BaseVariable]) -> None:
    strategy.run(optimizer.apply_gradients, args=(list(zip(gradients, variables, strict=True)),))


SHAPES: tuple[tuple[int, ...], ...] = ((64, 40), (40,), (), (3, 3, 16, 32), (5, 4), (50, 30))


def make_model(dtype: str = "float32") -> list[BaseVariable]:
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
    with pytest.raises(ValueError, match="`compression` makes a collective sum them"):
        ArenaStrategy(communicator, options=CommunicationOptions(compression=PowerSGD(2)), shared=True)


class Run:
    """A model, its optimizer and their checkpoint, made anew."""

    def __init__(self, communicator: Communicator, compression: Compression | None, kind: Any, dtype: str) -> None:
        self.rank = communicator.rank
        self.dtype = dtype
        self.strategy = compressed(communicator, compression)
        with self.strategy.scope():
            self.variables = make_model(dtype)
        self.optimizer = kind()
        self.checkpoint = Checkpoint(v=self.variables, o=self.optimizer)

    def step(self, *steps: int) -> Run:
        for step in steps:
            gradients: list[Any] = [gradient_of(step, self.rank, shape, self.dtype) for shape in SHAPES]
            # Not every variable has a gradient in every step.
            gradients[step % 5] = None
            self.apply(gradients)
        return self

    def apply(self, gradients: list[Any]) -> None:
        apply(self.strategy, self.optimizer, gradients, self.variables)

    def bits(self) -> list[bytes]:
        """Of the variables, and of what is left out."""
        state = self.optimizer.state()
        inner = state.get("inner", state)
        kept = [value for name in sorted(inner) if name.startswith("compression_") for value in inner[name].items()]
        return [
            *(v.numpy().tobytes() for v in self.variables),
            *(b"%d" % n + getattr(v, "component", v).tobytes() for n, v in sorted(kept, key=lambda item: item[0])),
        ]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", [lambda: Adam(0.1), lambda: LossScaleOptimizer(SGD(0.1), 8.0)], ids=["Adam", "scaled"])
@pytest.mark.parametrize("compression", [TopK(0.05), PowerSGD(2), PowerSGD(2, start_step=3)], ids=repr)
def test_a_resumed_run_goes_on_bit_for_bit(
    communicator: Communicator, mpi_tmp_path: Path, compression: Compression, kind: Any, dtype: str
) -> None:
    undisturbed = Run(communicator, compression, kind, dtype).step(*range(8)).bits()
    # Step 2 is within `start_step`, step 5 behind it.
    for at in (2, 5):
        path = Run(communicator, compression, kind, dtype).step(*range(at)).checkpoint.write(mpi_tmp_path / f"{at}")
        fresh = Run(communicator, compression, kind, dtype)
        fresh.checkpoint.read(path).assert_consumed()
        assert fresh.step(*range(at, 8)).bits() == undisturbed
        # Into objects that have errors of their own.
        fresh.step(8, 9).checkpoint.read(path).assert_existing_objects_matched()
        assert fresh.step(*range(at, 8)).bits() == undisturbed


@pytest.mark.parametrize("layout", ["pairs", "each"])
def test_a_run_over_nodes_goes_on_bit_for_bit(communicator: Communicator, mpi_tmp_path: Path, layout: str) -> None:
    laid_out = lay_out(communicator, layout)
    first = Run(laid_out, TopK(0.05), lambda: SGD(0.1), "float32").step(0, 1, 2)
    fresh = Run(laid_out, TopK(0.05), lambda: SGD(0.1), "float32")
    fresh.checkpoint.read(first.checkpoint.write(mpi_tmp_path / "c")).assert_consumed()
    assert fresh.step(3, 4).bits() == first.step(3, 4).bits()


@pytest.mark.mpi(min_size=2)
def test_each_rank_has_its_error_in_the_file(communicator: Communicator, mpi_tmp_path: Path) -> None:
    run = Run(communicator, TopK(0.05), lambda: SGD(0.1), "float32").step(1, 2)
    errors = run.optimizer.state()["compression_error"]
    assert sorted(errors) == [0, 3, 5]
    assert all(v.is_per_replica and v.component.any() for v in errors.values())
    path = run.checkpoint.write(mpi_tmp_path / "c")
    with h5py.File(path) as file:
        for number, error in errors.items():
            saved = file[f"o/compression_error/v%2F{number}"]
            assert saved.shape == (communicator.size, *SHAPES[number])
            assert np.array_equal(saved[communicator.rank], error.component)


class Eighths(Run):
    """Values and gradients of few bits, whose sums are exact in every order."""

    def __init__(self, communicator: Communicator, compression: Compression | None) -> None:
        super().__init__(communicator, compression, lambda: SGD(1.0), "float64")
        for number, variable in enumerate(self.variables):
            variable.assign(eighths(number, 99, variable.shape))

    def step(self, *steps: int) -> Eighths:
        for step in steps:
            self.apply([eighths(step, self.rank, shape) for shape in SHAPES])
        return self


def eighths(step: int, rank: int, shape: tuple[int, ...]) -> AnyArray:
    return np.asarray(np.random.default_rng((step, rank)).integers(-16, 17, shape) / 8)


@pytest.mark.parametrize("compression", [TopK(0.05), PowerSGD(2)], ids=repr)
def test_on_other_ranks_nothing_of_the_sums_is_lost(
    communicator: Communicator, mpi_tmp_path: Path, compression: Compression, caplog: pytest.LogCaptureFixture
) -> None:
    """What was applied and what is restored, added up, is the true sum: whoever saved, restores, and compresses how."""
    world, rank = communicator.size, communicator.rank
    for savers in range(1, world + 1):
        group = communicator.split(int(rank >= savers))
        if rank < savers:
            run = Eighths(group, compression).step(*range(4))
            run.checkpoint.write(mpi_tmp_path / f"by-{savers}")
    communicator.barrier()
    initial = [v.numpy() for v in Eighths(communicator, None).variables]
    tolerance = 0.0 if isinstance(compression, TopK) else 1e-9
    for savers in range(1, world + 1):
        expected = [
            start - sum(eighths(step, r, start.shape) for step in range(4) for r in range(savers)) for start in initial
        ]
        for readers in range(1, world + 1):
            group = communicator.split(int(rank >= readers))
            # The rest goes at once, by a step that compresses without loss, or by one that compresses nothing.
            for now in (TopK(1.0), None):
                run = Eighths(group, now)
                caplog.clear()
                with caplog.at_level(logging.WARNING, "mpidist"):
                    run.checkpoint.read(mpi_tmp_path / f"by-{savers}").assert_consumed()
                    run.apply([np.zeros(shape) for shape in SHAPES])
                for variable, true in zip(run.variables, expected, strict=True):
                    np.testing.assert_allclose(variable.numpy(), true, rtol=0, atol=tolerance)
                said = [record.getMessage() for record in caplog.records]
                is_changed = savers > 1 and (group.size != savers or now is None)
                assert len(said) == int(group.rank == 0 and is_changed)
                if said:
                    assert f"{savers} ranks saved their errors" in said[0]
                    assert f"{group.size} restore" in said[0]
                # And it goes once.
                run.apply([np.zeros(shape) for shape in SHAPES])
                for variable, true in zip(run.variables, expected, strict=True):
                    np.testing.assert_allclose(variable.numpy(), true, rtol=0, atol=tolerance)


@pytest.mark.mpi(min_size=2)
def test_what_waits_for_a_gradient_is_saved_again(communicator: Communicator, mpi_tmp_path: Path) -> None:
    run = Eighths(communicator, TopK(0.05)).step(0, 1)
    errors = {n: v.component.copy() for n, v in run.optimizer.state()["compression_error"].items()}
    plain = Eighths(communicator, None)
    plain.checkpoint.read(run.checkpoint.write(mpi_tmp_path / "c")).assert_consumed()
    # All but variable 0 get a gradient, and with it what had been left out.
    plain.apply([None, *(np.zeros(shape) for shape in SHAPES[1:])])
    again = Eighths(communicator, TopK(0.05))
    again.checkpoint.read(plain.checkpoint.write(mpi_tmp_path / "d")).assert_consumed()
    again.optimizer.build(again.variables)
    kept = again.optimizer.state()["compression_error"]
    assert list(kept) == [0]
    np.testing.assert_array_equal(kept[0].component, errors[0])


@pytest.mark.mpi(min_size=2)
def test_errors_that_wait_for_build_are_saved_again(communicator: Communicator, mpi_tmp_path: Path) -> None:
    run = Eighths(communicator, TopK(0.05)).step(0, 1)
    waiting, last = Eighths(communicator, TopK(0.05)), Eighths(communicator, TopK(0.05))
    waiting.checkpoint.read(run.checkpoint.write(mpi_tmp_path / "c")).assert_consumed()
    last.checkpoint.read(waiting.checkpoint.write(mpi_tmp_path / "d")).assert_consumed()
    last.optimizer.build(last.variables)
    assert last.bits() == run.bits()


def test_a_factor_of_another_rank_begins_anew(communicator: Communicator, mpi_tmp_path: Path) -> None:
    path = Run(communicator, PowerSGD(2), lambda: SGD(0.1), "float32").step(0, 1).checkpoint.write(mpi_tmp_path / "c")
    wider = Run(communicator, PowerSGD(3), lambda: SGD(0.1), "float32")
    wider.checkpoint.read(path).assert_consumed()
    wider.step(2, 3)
    if communicator.size > 1:
        factors = wider.optimizer.state()["compression_factor"]
        assert {number: len(factor) for number, factor in factors.items()} == dict.fromkeys((0, 3, 5), 3)


@pytest.mark.mpi(min_size=2)
def test_errors_of_other_variables_are_an_error_of_all(communicator: Communicator, mpi_tmp_path: Path) -> None:
    run = Run(communicator, TopK(0.05), lambda: SGD(0.1), "float32").step(0, 1)
    path = Checkpoint(o=run.optimizer).write(mpi_tmp_path / "c")
    other = Run(communicator, TopK(0.05), lambda: SGD(0.1), "float32")
    Checkpoint(o=other.optimizer).read(path)
    with pytest.raises(CheckpointError, match=rf"on each of {communicator.size} .* 0 of shape \(50, 30\)"):
        other.optimizer.build(other.variables[::-1])
    other = Run(communicator, TopK(0.05), lambda: SGD(0.1), "float32")
    Checkpoint(o=other.optimizer).read(path)
    with pytest.raises(CheckpointError, match=r"for variable 3, .*; the optimizer has 2 variables\."):
        other.optimizer.build(other.variables[:2])
