"""`Strategy.run`: the three examples of its reference, and what its text says about arguments and results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist

pytestmark = pytest.mark.mpi


def test_constant_input(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices)
    tensor_input = np.float32(3.0)

    def replica_fn(input: Any) -> Any:  # noqa: A002  # the document's name
        return input * 2.0

    result = strategy.run(replica_fn, args=(tensor_input,))
    # Printed: PerReplica {0: 6.0, 1: 6.0}, of shape () and dtype float32.
    assert (result, result.shape, result.dtype) == (6.0, (), np.float32)


def test_distributed_values_input(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices)

    def run() -> Any:
        def value_fn(value_context: mpidist.experimental.ValueContext) -> int:
            return value_context.num_replicas_in_sync

        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)

        def replica_fn2(input: Any) -> Any:  # noqa: A002
            return input * 2

        return strategy.run(replica_fn2, args=(distributed_values,))

    result = run()
    assert result == 2 * strategy.num_replicas_in_sync
    if strategy.num_replicas_in_sync == 2:
        assert result == 4  # as printed


def test_all_reduce_in_replica_context(devices: list[str]) -> None:
    strategy = mpidist.MirroredStrategy(devices)

    def run() -> Any:
        def value_fn(value_context: mpidist.experimental.ValueContext) -> Any:
            return np.int32(value_context.replica_id_in_sync_group)

        distributed_values = strategy.experimental_distribute_values_from_function(value_fn)

        def replica_fn(input: Any) -> Any:  # noqa: A002
            return mpidist.get_replica_context().all_reduce("sum", input)  # type: ignore[union-attr]

        return strategy.run(replica_fn, args=(distributed_values,))

    result = run()
    n = strategy.num_replicas_in_sync
    assert (result, result.shape, result.dtype) == (n * (n - 1) // 2, (), np.int32)
    if n == 2:
        assert result == 1  # as printed, on both replicas


def test_nested_arguments_and_results(devices: list[str]) -> None:
    # "All arguments in args or kwargs can be a nested structure"; "the structure of the return value is the same".
    strategy = mpidist.MirroredStrategy(devices)
    distributed_values = strategy.experimental_distribute_values_from_function(
        lambda ctx: np.int32(ctx.replica_id_in_sync_group)
    )

    def replica_fn(pair: Any, *, named: Any) -> Any:
        context = mpidist.get_replica_context()
        assert context is not None
        own = context.replica_id_in_sync_group
        assert (pair[1]["own"], named["own"]) == (own, own)  # each replica gets its own component
        return {"sum": pair[0] + named["scale"] * named["own"], "same": pair[0]}

    result = strategy.run(
        replica_fn, args=([np.float32(3.0), {"own": distributed_values}],),
        kwargs={"named": {"own": distributed_values, "scale": 2}},
    )
    assert list(result) == ["sum", "same"]
    reduced = strategy.reduce("SUM", result, axis=None)
    n = strategy.num_replicas_in_sync
    assert (reduced["sum"], reduced["same"]) == (3.0 * n + n * (n - 1), 3.0 * n)
