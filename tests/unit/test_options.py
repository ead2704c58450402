"""Enums and options: tf.distribute's names and values, and errors that say what would be right."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mpidist.comm.compression.power_sgd import PowerSGD
from mpidist.comm.compression.top_k import TopK
from mpidist.options import (
    AutoShardPolicy,
    CommunicationImplementation,
    CommunicationOptions,
    InputOptions,
    InputReplicationMode,
    ReduceOp,
    RunOptions,
    VariableAggregation,
    VariableSynchronization,
    WindowOptions,
    parse_enum,
)
from mpidist.parameter_server.options import ServerOptions


def test_values_are_those_of_tf_distribute() -> None:
    assert (ReduceOp.SUM.value, ReduceOp.MEAN.value) == ("SUM", "MEAN")
    assert [m.value for m in VariableSynchronization] == [0, 1, 2, 3]
    assert [m.name for m in VariableAggregation] == ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"]
    assert {m.name: int(m) for m in AutoShardPolicy} == {"OFF": -1, "AUTO": 0, "FILE": 1, "DATA": 2, "HINT": 3}
    assert InputReplicationMode.PER_WORKER.value == "PER_WORKER"


def test_reduce_op_of_an_aggregation() -> None:
    assert ReduceOp.from_variable_aggregation(VariableAggregation.SUM) is ReduceOp.SUM
    assert ReduceOp.from_variable_aggregation(VariableAggregation.MEAN) is ReduceOp.MEAN
    for other in (VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA):
        with pytest.raises(ValueError, match=other.name):
            ReduceOp.from_variable_aggregation(other)


@pytest.mark.parametrize("value", [ReduceOp.SUM, "SUM", "sum", "Sum"])
def test_a_member_by_itself_or_by_name(value: object) -> None:
    assert parse_enum(ReduceOp, value, "reduce_op") is ReduceOp.SUM


def test_no_member() -> None:
    with pytest.raises(ValueError, match="`reduce_op`: 'median' is not a valid ReduceOp; expected one of SUM, MEAN"):
        parse_enum(ReduceOp, "median", "reduce_op")
    for value in (VariableAggregation.SUM, 1, None, b"SUM"):
        with pytest.raises(TypeError, match=r"Expected `reduce_op` to be a `mpidist.ReduceOp`"):
            parse_enum(ReduceOp, value, "reduce_op")


def test_communication_options() -> None:
    options = CommunicationOptions(implementation="ring")
    assert options.implementation is CommunicationImplementation.RING
    assert CommunicationOptions() == CommunicationOptions(0, None, "AUTO")
    with pytest.raises(dataclasses.FrozenInstanceError, match="bytes_per_pack"):
        options.bytes_per_pack = 5  # type: ignore[misc]  # that is the point


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"bytes_per_pack": -1}, ValueError, "-1"),
        ({"bytes_per_pack": 1.5}, TypeError, "1.5"),
        ({"bytes_per_pack": True}, TypeError, "True"),
        ({"timeout_seconds": -0.1}, ValueError, "-0.1"),
        ({"timeout_seconds": float("nan")}, ValueError, "nan"),
        ({"implementation": "smoke signals"}, ValueError, "smoke signals"),
        ({"implementation": 3}, TypeError, "CommunicationImplementation"),
    ],
)
def test_communication_options_that_make_no_sense(arguments: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        CommunicationOptions(**arguments)


@pytest.mark.parametrize(("size", "kind"), [(-1, ValueError), (1.0, TypeError), (True, TypeError), (None, TypeError)])
def test_input_options_that_make_no_sense(size: Any, kind: type[Exception]) -> None:
    text = "`experimental_per_replica_buffer_size` must be an integer of at least 0, got"
    with pytest.raises(kind, match=text):
        InputOptions(experimental_per_replica_buffer_size=size)


def test_an_input_option_by_name() -> None:
    by_name: Any = "per_replica"
    mode = InputOptions(experimental_replication_mode=by_name).experimental_replication_mode
    assert mode is InputReplicationMode.PER_REPLICA
    with pytest.raises(ValueError, match="is not a valid InputReplicationMode; expected one of PER_WORKER"):
        InputOptions(experimental_replication_mode="per_rank")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        # A time in float16 is infinite after one sum with a clock, and an int8 overflows.
        (CommunicationOptions(timeout_seconds=np.float16(3)), "timeout_seconds"),
        (CommunicationOptions(bytes_per_pack=np.int8(3)), "bytes_per_pack"),
        (CommunicationOptions(check=np.True_), "check"),  # type: ignore[arg-type]
        (InputOptions(experimental_per_replica_buffer_size=np.int64(2)), "experimental_per_replica_buffer_size"),
        (WindowOptions(silence_seconds=np.float32(3)), "silence_seconds"),
        (WindowOptions(ports=np.array([3, 4])), "ports"),  # type: ignore[arg-type]
        (ServerOptions(heap_bytes=np.int32(1 << 20), slot_bytes=np.int32(1 << 12)), "heap_bytes slot_bytes"),
        (PowerSGD(rank=np.int8(2), start_step=np.int64(1), seed=np.int64(3)), "rank start_step seed"),
        (TopK(np.float16(0.25)), "ratio"),
    ],
)
def test_numbers_of_numpy_become_those_of_python(options: Any, names: str) -> None:
    for name in names.split():
        assert type(getattr(options, name)) in (bool, int, float, tuple)


def test_options_kept_for_compatibility() -> None:
    assert RunOptions().experimental_enable_dynamic_batch_size
    assert InputOptions(experimental_per_replica_buffer_size=0).experimental_per_replica_buffer_size == 0
