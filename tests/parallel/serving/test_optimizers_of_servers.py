"""Every optimizer with every option, on servers: the bits of one process with one worker, or an error that says why."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import optimizers
from mpidist.comm.arithmetic.combine import named_dtype
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.optimizers.optimizer import Optimizer
from mpidist.parameter_server.options import ServerOptions
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.variables.update import compiled
from mpidist.variables.update.llvm_text import Loop
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)

# Functions that make one, and no schedules.
KINDS: dict[str, Callable[..., Optimizer]] = {
    name: getattr(optimizers, name) for name in optimizers.__all__ if inspect.isfunction(getattr(optimizers, name))
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "clipnorm": {"clipnorm": 0.3}, "clipvalue": {"clipvalue": 0.2},
    "global_clipnorm": {"global_clipnorm": 0.3}, "averages": {"use_ema": True, "ema_momentum": 0.5},
    "decay": {"weight_decay": 0.05},
    "schedule": {"learning_rate": optimizers.CosineDecay(0.3, 4)},
    "together": {
        "clipvalue": 0.4, "use_ema": True, "weight_decay": 0.01, "learning_rate": lambda step: 0.1 / (1 + step),
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "ema_overwrite_frequency": {"use_ema": True, "ema_overwrite_frequency": 2},
}
SHAPES = ((5,), (3, 4), ())
STEPS = 3


def gradients(step: int) -> list[Any]:
    random = np.random.default_rng(step)
    return [random.standard_normal(shape).astype("float32") for shape in SHAPES]


def beginning() -> list[Any]:
    return [np.full(shape, 0.5 + number, "float32") for number, shape in enumerate(SHAPES)]


@pytest.mark.parametrize(
    "compiles", [False, pytest.param(True, marks=pytest.mark.skipif(
        importlib.util.find_spec("llvmlite") is None, reason="needs llvmlite: pip install 'mpidist[fast]'"
    ))], ids=["NumPy", "compiled"],
)
def test_each_optimizer_with_each_option_has_the_bits_of_one_process(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, compiles: bool
) -> None:
    assert len(KINDS) >= 10
    # The chief computes by NumPy what is expected of the servers.
    least = 0 if compiles and communicator.rank else sys.maxsize
    monkeypatch.setattr(compiled, "LEAST_BYTES", least)
    monkeypatch.setattr(compiled, "LEAST_BLOCK_BYTES", least)
    options_of = {name: OPTIONS[name] for name in ("plain", "together")} if compiles else OPTIONS
    find, loops = compiled._compile, []

    def find_and_count(loop: Loop) -> Any:
        loops.append(loop)
        return find(loop)

    monkeypatch.setattr(compiled, "_compile", find_and_count)

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weights = [mpidist.Variable(value) for value in beginning()]
        for (kind, make), (option, given) in itertools.product(KINDS.items(), options_of.items()):
            for weight, value in zip(weights, beginning(), strict=True):
                weight.assign(value)
            alone = [mpidist.Variable(value) for value in beginning()]
            options = {"learning_rate": 0.1, **given}
            served, expected = make(**options), make(**options)
            served.build(weights)
            expected.build(alone)

            def step(number: int, served: Optimizer = served) -> None:
                served.apply_gradients(zip(gradients(number), weights, strict=True))

            for number in range(STEPS):
                coordinator.schedule(step, (number,), worker=0)
                expected.apply_gradients(zip(gradients(number), alone, strict=True))
            coordinator.join()
            if "use_ema" in given:
                served.finalize_variable_values(weights)
                expected.finalize_variable_values(alone)
            assert served.iterations == STEPS
            pairs = zip([*weights, *served.variables], [*alone, *expected.variables], strict=True)
            for one, other in pairs:
                assert one.numpy().tobytes() == other.numpy().tobytes(), (kind, option, one.name)
        for (kind, make), (option, given) in itertools.product(KINDS.items(), REFUSED.items()):
            with pytest.raises(NotImplementedError, match=f"{option} is not supported under a Param.*: "):
                make(learning_rate=0.1, **given).build(weights)
            assert kind

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 22))
    has_compiled = any(loop.is_aside for loop in loops)
    assert any(communicator.all_gather_object(has_compiled)) is compiles


def test_servers_calculate_whatever_the_program_has_told_numpy(communicator: Communicator) -> None:
    """Programs look for NaNs so. An error in the middle of an update would end the server, and the job with it."""
    gradient = np.array([1e-30, 1e20, np.inf, np.nan], "float32")

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight = mpidist.Variable(np.ones(4, "float32"))
            table = mpidist.Variable(np.ones((4, 1)), sparse_gradient=True)
        optimizer = optimizers.Adam(0.1)
        optimizer.build([weight])
        coordinator.schedule(lambda: optimizer.apply_gradients([(gradient, weight)]))
        rows = mpidist.IndexedSlices(np.zeros((2, 1)), np.arange(2))
        coordinator.schedule(lambda: table.scatter_div(rows))
        coordinator.join()
        alone = mpidist.Variable(np.ones(4, "float32"))
        with np.errstate(all="ignore"):
            optimizers.Adam(0.1).apply_gradients([(gradient, alone)])
        assert weight.numpy().tobytes() == alone.numpy().tobytes()
        assert table.numpy().ravel().tolist() == [np.inf, np.inf, 1, 1]

    for synchronous in (False, True):
        with np.errstate(all="raise"):
            on_chief(communicator, program, synchronous=synchronous)


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "float16", "bfloat16", "longdouble"])
def test_other_dtypes_have_the_bits_of_one_process(communicator: Communicator, dtype: str) -> None:
    pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    kind = named_dtype(dtype)
    parts = (1, 3j) if kind.kind == "c" else (1,)

    def values(step: int) -> list[Any]:
        return [
            np.asarray(sum(part * one.astype("float64") for part, one in zip(parts, pair, strict=False))).astype(kind)
            for pair in zip(gradients(step), gradients(step + 10), strict=True)
        ]

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weights = [mpidist.Variable(value) for value in values(20)]
            total = mpidist.Variable(np.ones(3).astype(kind))
        coordinator.schedule(lambda: total.assign_add(np.ones(3).astype(kind))).fetch()
        assert total.numpy().astype("complex128").tolist() == [2] * 3
        for (name, make), given in itertools.product(
            KINDS.items(), ({}, {"clipnorm": 0.3}, {"global_clipnorm": 0.3}, {"weight_decay": 0.05})
        ):
            for weight, value in zip(weights, values(20), strict=True):
                weight.assign(value)
            alone = [mpidist.Variable(value) for value in values(20)]
            served, expected = make(learning_rate=0.1, **given), make(learning_rate=0.1, **given)
            served.build(weights)
            expected.build(alone)

            def step(number: int, served: Optimizer = served) -> None:
                served.apply_gradients(zip(values(number), weights, strict=True))

            for number in range(STEPS):
                coordinator.schedule(step, (number,)).fetch()
                expected.apply_gradients(zip(values(number), alone, strict=True))
            for one, other in zip([*weights, *served.variables], [*alone, *expected.variables], strict=True):
                assert np.array_equal(one.numpy(), other.numpy()), (name, given, one.name)

    on_chief(communicator, program, ServerOptions(heap_bytes=1 << 22))


def test_loss_scaling_is_each_workers_own(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight = mpidist.Variable(np.ones(3, "float32"))
            inner = optimizers.Adam(0.1)
        inner.build([weight])
        scaled = optimizers.LossScaleOptimizer(inner)

        def step_of(optimizer: Any, over: Any, factor: float) -> float:
            gradient = optimizer.scale_loss(np.full(3, factor, "float32"))
            optimizer.apply_gradients([(gradient, over)])
            return float(optimizer.dynamic_scale)

        calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
            (lambda: scaled.apply_gradients([(np.ones(3), weight)]), ()), (step_of, (scaled, weight, 1.0)),
        ]
        for function, args in calls:
            with pytest.raises(TypeError, match=r"keeps a scale that its steps change, .*`create_per_worker_value`"):
                coordinator.schedule(function, args)
        own = coordinator.create_per_worker_value(lambda: optimizers.LossScaleOptimizer(inner, 64.0))
        alone = mpidist.Variable(np.ones(3, "float32"))
        expected = optimizers.LossScaleOptimizer(optimizers.Adam(0.1), 64.0)
        expected.build([alone])
        for factor in (0.5, float("inf"), 0.25, float("nan"), 2.0):
            scale = coordinator.schedule(step_of, (own, weight, factor), worker=0).fetch()
            assert scale == step_of(expected, alone, factor)
        assert inner.iterations == expected.iterations == 3
        assert weight.numpy().tobytes() == alone.numpy().tobytes()

    on_chief(communicator, program)


def test_a_learning_rate_that_was_changed_comes_back(communicator: Communicator, mpi_tmp_path: Path) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weight = mpidist.Variable(np.zeros(4))
            optimizer = optimizers.SGD(0.5)
        optimizer.build([weight])

        def step() -> None:
            optimizer.apply_gradients([(np.full(4, -1.0), weight)])

        coordinator.schedule(step).fetch()
        optimizer.learning_rate = 0.125
        coordinator.schedule(step).fetch()
        checkpoint = mpidist.Checkpoint(weight=weight, optimizer=optimizer)
        path = checkpoint.save(mpi_tmp_path / "c")
        optimizer.learning_rate = 8.0
        coordinator.schedule(step).fetch()
        checkpoint.restore(path)
        assert (optimizer.iterations, optimizer.learning_rate) == (2, 0.125)
        coordinator.schedule(step).fetch()
        assert (weight.numpy() == 0.75).all()

    on_chief(communicator, program)
