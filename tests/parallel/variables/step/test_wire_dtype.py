"""The wire dtype of a strategy: it rounds large gradients of a step, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.optimizers import SGD, LossScaleOptimizer
from mpidist.options import CommunicationOptions
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import lay_out

pytestmark = pytest.mark.mpi

# Of float32: 64 KB and more.
LARGE = 20_000
HALVES = CommunicationOptions(wire_dtype="float16")


@pytest.fixture(params=["node", "private", "pairs", "each", "first"])
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> ArenaStrategy:
    shared = False if request.param == "private" else None
    return ArenaStrategy(lay_out(communicator, request.param), options=HALVES, shared=shared)


def has_messages(strategy: ArenaStrategy) -> bool:
    """Whether gradients are sent: ranks of one node read one another's, and one rank rounds its own."""
    return not strategy.arena.shares_memory or len(strategy.communicator.node_sizes) > 1


def rounded(strategy: ArenaStrategy, value: float) -> float:
    return float(np.float16(value)) if has_messages(strategy) else float(np.float32(value))


def test_all_gradients_of_a_step_together_decide(strategy: ArenaStrategy) -> None:
    """Small variables go with the others; a step of small variables alone is exact."""
    with strategy.scope():
        small, large = (mpidist.Variable(np.zeros(size, "float32")) for size in (3, LARGE))
        optimizer = SGD(1 / strategy.num_replicas_in_sync)
    optimizer.build([small, large])
    third = [np.full(variable.shape, 1 / 3, "float32") for variable in (small, large)]
    strategy.run(lambda: optimizer.apply_gradients([(third[0], small)]))
    np.testing.assert_allclose(small.numpy(), -np.float32(1 / 3), rtol=1e-6)
    strategy.run(lambda: optimizer.apply_gradients(list(zip(third, (small, large), strict=True))))
    np.testing.assert_allclose(large.numpy(), -rounded(strategy, 1 / 3), rtol=1e-3 if has_messages(strategy) else 1e-6)
    assert (large.numpy() == large.numpy()[0]).all()
    if has_messages(strategy) and strategy.num_replicas_in_sync in (1, 2, 4):
        assert large.numpy()[0] == -np.float32(np.float16(1 / 3))
        np.testing.assert_allclose(small.numpy(), -np.float32(1 / 3) - np.float32(np.float16(1 / 3)), rtol=1e-6)


def test_float64_gradients_are_exact(strategy: ArenaStrategy) -> None:
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(LARGE))
        optimizer = SGD(1 / strategy.num_replicas_in_sync)
    strategy.run(lambda: optimizer.apply_gradients([(np.full(LARGE, 1 / 3), variable)]))
    np.testing.assert_allclose(variable.numpy(), -1 / 3, rtol=1e-15)


def test_norms_are_not_rounded(strategy: ArenaStrategy) -> None:
    """100 000 gradients of 1 have a sum of squares that float16 cannot hold."""
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(100_000, "float32"))
        optimizer = SGD(1.0, global_clipnorm=1.0)
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(100_000, "float32"), variable)]))
    np.testing.assert_allclose(np.linalg.norm(variable.numpy().astype("float64")), 1, rtol=1e-5)


def test_loss_scaling_sees_what_is_finite(strategy: ArenaStrategy) -> None:
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(100, "float32"))
        optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=2.0**15)
    gradient = np.full(100, 4.0, "float32")
    strategy.run(lambda: optimizer.apply_gradients([(gradient * optimizer.dynamic_scale, variable)]))
    np.testing.assert_array_equal(variable.numpy(), -4.0 * strategy.num_replicas_in_sync)


def test_what_users_reduce_is_not_rounded(strategy: ArenaStrategy) -> None:
    n = strategy.num_replicas_in_sync
    assert strategy.reduce("SUM", 40000.0, axis=None) == 40000.0 * n
    assert strategy.reduce("SUM", np.float64(40000.0), axis=None) == 40000.0 * n
    whole = np.full(LARGE, 40000, "float32")
    assert (strategy.reduce("SUM", whole, axis=None) == 40000 * n).all()
    assert (strategy.extended.all_reduce_async("SUM", whole.copy()).wait() == 40000 * n).all()
    others = CommunicationOptions(bytes_per_pack=1 << 12)
    assert (strategy.extended.reduce_to("SUM", whole, "cpu:0", others) == 40000 * n).all(), "this call asks for others"


def test_metrics_are_not_rounded(strategy: ArenaStrategy) -> None:
    with strategy.scope():
        mean = mpidist.metrics.Mean()
        count = mpidist.Variable(
            np.zeros(LARGE, "float32"), synchronization=mpidist.VariableSynchronization.ON_READ,
            aggregation=mpidist.VariableAggregation.SUM,
        )
    strategy.run(lambda: mean.update_state(np.full(2049, 40001.0)))
    assert mean.result() == 40001
    strategy.run(lambda: count.assign(np.full(LARGE, 2049, "float32")))
    assert (count.numpy() == 2049 * strategy.num_replicas_in_sync).all()


def test_a_call_may_ask_for_it(communicator: Communicator) -> None:
    strategy = ArenaStrategy(communicator)
    whole = np.full(LARGE, 0.3, "float32")
    result = strategy.extended.reduce_to("MEAN", whole, "cpu:0", HALVES)
    np.testing.assert_allclose(result, 0.3, rtol=1e-3)
    assert (result != np.float32(0.3)).all()

    def average() -> Any:
        replica = mpidist.get_replica_context()
        assert replica is not None
        return replica.all_reduce("MEAN", whole, HALVES)

    result = strategy.run(average)
    assert (result != np.float32(0.3)).all()
    assert strategy.extended.reduce_to("SUM", np.float64(0.3), "cpu:0", HALVES) == pytest.approx(
        communicator.size * 0.3, rel=1e-12
    )
    assert strategy.reduce("MEAN", whole, axis=None)[0] == pytest.approx(0.3, rel=1e-7)
