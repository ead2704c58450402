"""`Strategy.gradients`: micro-batches are the leaves of the sum, whoever has their rows and whoever computes them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import optimizers
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.tree_order import leaves, pairing
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError, is_shared
from mpidist.options import CommunicationOptions
from mpidist.strategy.default import Variable, get_replica_context
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import lay_out

pytestmark = pytest.mark.mpi


@pytest.fixture
def strategy(communicator: Communicator) -> ArenaStrategy:
    return ArenaStrategy(communicator, options=CommunicationOptions(reproducible=True))


def dealt(batch: AnyArray, sizes: Sequence[int], rank: int) -> AnyArray:
    """The rows of a rank, where the first ranks have `sizes` and the last one the rest."""
    edges = np.cumsum([0, *sizes]).tolist()
    return batch[edges[rank] : edges[rank + 1]]


def ways_to_deal(rows: int, ranks: int) -> list[list[int]]:
    """Evenly; all on one rank, the first or the last; and something odd."""
    even = [len(part) for part in np.array_split(np.empty(rows), ranks)]
    odd = [min(3 * rank, rows // ranks) for rank in range(ranks - 1)]
    first = [rows, *[0] * (ranks - 1)]
    return [even, first, first[::-1], [*odd, rows - sum(odd)]]


def expected_sum(batch: AnyArray, logical_replicas: int) -> AnyArray:
    parts = [np.exp(part).sum(0, dtype="f") for part in np.array_split(batch, logical_replicas) if len(part)]
    for left, right in pairing(leaves(len(parts))):
        parts[left] = parts[left] + parts[right]
    result: AnyArray = parts[0]
    return result


@pytest.mark.parametrize("logical_replicas", [4, 5, 8, 13])
@pytest.mark.parametrize("rows", [1, 3, 16, 61])
def test_the_sum_is_the_tree_over_micro_batches(strategy: ArenaStrategy, rows: int, logical_replicas: int) -> None:
    ranks = strategy.communicator
    if logical_replicas < ranks.size:
        pytest.skip("fewer logical replicas than ranks is an error")
    # Wide enough for slices: small sums go whole.
    batch = np.random.default_rng(rows).normal(size=(rows, 3000)).astype(np.float32)
    expected = expected_sum(batch, logical_replicas)
    for sizes in ways_to_deal(rows, ranks.size):
        result = strategy.gradients(
            lambda b: np.exp(b).sum(0, dtype="f"), dealt(batch, sizes, ranks.rank), logical_replicas
        )
        assert result.tobytes() == expected.tobytes(), sizes


def test_nests_dtypes_and_none(strategy: ArenaStrategy) -> None:
    ranks = strategy.communicator
    x = np.arange(40, dtype=np.float32).reshape(20, 2)
    labels = np.arange(20, dtype=np.int64)
    sizes = ways_to_deal(20, ranks.size)[3]

    def fn(batch: dict[str, Any]) -> dict[str, Any]:
        assert batch["w"] is None
        assert all(batch[name].ctypes.data % 64 == 0 and batch[name].flags.c_contiguous for name in ("x", "y"))
        half = (batch["x"].sum(0) + 2000).astype(np.float16)
        grads = [batch["x"].sum(0), None, half]
        return {"loss": 0.5, "count": len(batch["y"]), "grads": grads, "ids": batch["y"].sum()}

    batch = {"x": dealt(x, sizes, ranks.rank), "y": dealt(labels, sizes, ranks.rank), "w": None}
    result = strategy.gradients(fn, batch, 8)
    assert result["loss"].dtype == np.float32
    assert float(result["loss"]) == 4.0
    assert (int(result["count"]), int(result["ids"])) == (20, 190)
    np.testing.assert_array_equal(result["grads"][0], x.sum(0))
    assert result["grads"][1] is None
    halves = [(part.sum(0) + 2000).astype(np.float16).astype(np.float32) for part in np.array_split(x, 8)]
    assert result["grads"][2].dtype == np.float16
    # Added up in half precision they would be rounded eight times.
    np.testing.assert_array_equal(result["grads"][2], np.sum(halves, 0).astype(np.float16))


def test_the_replica_context_numbers_the_micro_batches(strategy: ArenaStrategy) -> None:
    ranks = strategy.communicator

    def fn(batch: AnyArray) -> AnyArray:
        replica = get_replica_context()
        assert replica is not None
        seen = np.zeros(9, np.int32)
        seen[replica.replica_id_in_sync_group] = 1
        # A term that each replica adds in full comes out once.
        weights = mpidist.scale_regularization_loss(np.float64(1))
        assert replica.num_replicas_in_sync == 6
        return seen, weights  # type: ignore[return-value]

    rows = dealt(np.zeros(6), ways_to_deal(6, ranks.size)[0], ranks.rank)
    seen, one = strategy.gradients(fn, rows, 8)
    assert seen.tolist() == [1] * 6 + [0] * 3
    assert one == pytest.approx(1)


def test_collectives_inside(strategy: ArenaStrategy) -> None:
    """Refused where a rank has several micro-batches, as in `run` where it has one."""
    ranks = strategy.communicator
    with strategy.scope():
        variable = Variable(1.0)
    optimizer = optimizers.SGD(0.1)
    optimizer.build([variable])

    def sum_of_ranks(_: AnyArray) -> Any:
        replica = get_replica_context()
        assert replica is not None
        return replica.all_reduce("SUM", np.float32(1))

    attempts = [
        sum_of_ranks,
        lambda _: get_replica_context().merge_call(lambda s: s),  # type: ignore[union-attr]
        lambda _: variable.assign(2.0),
        lambda _: optimizer.apply_gradients([(1.0, variable)]),
    ]
    batch = np.zeros(2)
    for fn in attempts:
        with pytest.raises(RuntimeError, match=r"micro-batches .* give as many logical replicas as there are ranks"):
            strategy.gradients(fn, batch, 2 * ranks.size)
    # Nothing has changed, and nothing is left behind.
    assert float(variable) == 1.0
    assert strategy.gradients(sum_of_ranks, batch, ranks.size) == ranks.size**2
    with pytest.raises(RuntimeError, match="cross-replica"):
        strategy.run(lambda: strategy.gradients(sum_of_ranks, batch, 8))


def test_errors_are_the_same_on_every_rank(strategy: ArenaStrategy) -> None:
    ranks = strategy.communicator
    batch = np.zeros((4, 2), np.float32)
    for wrong, kind in ((0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError), ("8", TypeError)):
        # Also where one rank alone is wrong.
        for given in (wrong, wrong if ranks.rank == ranks.size - 1 else 8):
            with pytest.raises(kind, match=r"`logical_replicas` must be an integer of at least 1"):
                strategy.gradients(np.sum, batch, given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`blas_threads`"):
        strategy.gradients(np.sum, batch, 8, blas_threads=0)
    unequal: list[Any] = [np.float32(1), [], {"a": np.zeros(3), "b": np.zeros(2)}]
    for bad in unequal:
        with pytest.raises(ValueError, match="common first dimension"):
            strategy.gradients(np.sum, bad)
    with pytest.raises(ValueError, match="empty"):
        strategy.gradients(np.sum, batch[:0])
    if ranks.size > 1:
        with pytest.raises(ValueError, match=rf"1 logical replicas on {ranks.size} ranks .* mpirun -n 1"):
            strategy.gradients(np.sum, batch, 1)
        with pytest.raises(MismatchError, match="logical_replicas") as caught:
            strategy.gradients(np.sum, batch, 8 + ranks.rank)
        assert is_shared(caught.value)
        with pytest.raises(MismatchError, match="shapes of the batch"):
            strategy.gradients(np.sum, np.zeros((4, 2 + ranks.rank)))
        with pytest.raises(MismatchError, match="what `fn` returns"):
            strategy.gradients(lambda _: np.zeros(1 + ranks.rank), batch)
    with pytest.raises(TypeError, match="booleans"):
        strategy.gradients(lambda _: True, batch)
    if ranks.size <= 4:
        count = iter(range(1, 100))
        with pytest.raises(ValueError, match="same structure, shapes and dtypes for every micro-batch"):
            # Every rank has two micro-batches.
            strategy.gradients(lambda _: np.zeros(next(count)), batch, 2 * ranks.size)
    # Nothing is left on the way.
    assert strategy.gradients(lambda b: b.sum(), np.ones((4, 2), "f"), 8) == 8 * ranks.size
    # An int8 would overflow with any number of rows.
    assert strategy.gradients(lambda b: b.sum(), np.ones((200, 2), "f"), np.int8(8)) == 400 * ranks.size


def test_skipped_aggregation_wants_the_same_values_under_check(communicator: Communicator) -> None:
    strategy = ArenaStrategy(communicator, options=CommunicationOptions(check=True))
    with strategy.scope():
        variable = Variable(np.zeros(3, np.float32))
    optimizer = optimizers.SGD(1.0)
    optimizer.apply_gradients([(np.ones(3, np.float32), variable)], skip_gradients_aggregation=True)
    np.testing.assert_array_equal(variable.numpy(), [-1, -1, -1])
    if communicator.size > 1:
        with pytest.raises(MismatchError, match="skip_gradients_aggregation"):
            optimizer.apply_gradients(
                [(np.full(3, communicator.rank, np.float32), variable)], skip_gradients_aggregation=True
            )
    with pytest.raises(MismatchError) if communicator.size > 1 else pytest.raises(ValueError, match="all are None"):
        # One rank sums, the others do not; or, alone, no gradient at all.
        gradient = np.ones(3, np.float32) if communicator.size > 1 else None
        optimizer.apply_gradients([(gradient, variable)], skip_gradients_aggregation=communicator.rank == 0)


@pytest.mark.parametrize("layout", ["node", "private", "pairs", "first"])
def test_skipped_aggregation_with_accumulation_and_loss_scaling(communicator: Communicator, layout: str) -> None:
    strategy = ArenaStrategy(lay_out(communicator, layout), shared=False if layout == "private" else None)
    with strategy.scope():
        variable, scaled = Variable(np.zeros(3, np.float32)), Variable(np.zeros(3, np.float32))
    optimizer = optimizers.SGD(1.0, gradient_accumulation_steps=2)
    for value in (1.0, 3.0):
        optimizer.apply_gradients([(np.full(3, value, "f"), variable)], skip_gradients_aggregation=True)
    np.testing.assert_array_equal(variable.numpy(), [-2, -2, -2])
    scaling = optimizers.LossScaleOptimizer(optimizers.SGD(1.0), initial_scale=8)
    scaling.apply_gradients([(np.full(3, 16, "f"), scaled)], skip_gradients_aggregation=True)
    np.testing.assert_array_equal(scaled.numpy(), [-2, -2, -2])


def test_numerics_are_recorded_compared_and_saved(
    communicator: Communicator, strategy: ArenaStrategy, mpi_tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mpidist"):
        for _ in range(3):
            strategy.gradients(lambda b: b.sum(), np.ones(8))
    assert sum("gradients of logical replicas" in r.message for r in caplog.records) == (communicator.rank == 0)
    present = strategy.numerics.present
    assert present is not None
    assert (present.numpy, present.blas_threads, present.alignment) == (np.__version__, 1, 64)
    assert present.blas != "none"
    with strategy.scope():
        variable = Variable(1.0)
    path = mpidist.Checkpoint(v=variable, numerics=strategy.numerics).write(str(mpi_tmp_path / "saved"))
    caplog.clear()
    mpidist.Checkpoint(v=variable, numerics=strategy.numerics).read(path)
    assert not [r for r in caplog.records if "bits may differ" in r.message]
    strategy.gradients(lambda b: b.sum(), np.ones(8), blas_threads=2)
    mpidist.Checkpoint(v=variable, numerics=strategy.numerics).read(path)
    assert any("blas_threads was 1 and is 2" in r.message for r in caplog.records)
