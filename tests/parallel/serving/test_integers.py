"""Integers on parameter servers: what does not fit is an error of the program's, and the variable stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.experimental import partitioners
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.variables.kinds.sharded import ShardedVariable
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)

HIGH = 2**31 - 1


def rows(*values: list[int]) -> mpidist.IndexedSlices:
    """Changes of row 0."""
    return mpidist.IndexedSlices(np.array(values, "int32"), np.zeros(len(values), int))


@pytest.mark.parametrize("is_table", [False, True])
def test_the_coordinators_own_writes(communicator: Communicator, is_table: bool) -> None:
    def program(strategy: ParameterServerStrategy, _: ClusterCoordinator) -> None:
        with strategy.scope():
            v = mpidist.Variable(np.full((2, 2), HIGH - 1, "int32"), name="seen", sparse_gradient=is_table)
            unsigned = mpidist.Variable(np.uint8(3))
        v.assign_add(np.array([[1, 0], [0, -1]]))
        full = [[HIGH, HIGH - 1], [HIGH - 1, HIGH - 2]]
        with pytest.raises(OverflowError, match=f"'seen' of dtype int32: .* assign_add would make {HIGH + 1}"):
            v.assign_add(np.array([[1, 0], [0, 0]]))
        with pytest.raises(OverflowError, match=f"'seen' .* assign_sub would make {HIGH + 1}"):
            v.assign_sub(np.array([[-1, 0], [0, 0]]))
        with pytest.raises(OverflowError, match=f"'seen' .* scatter_add would make {HIGH + 1}"):
            v.scatter_add(rows([0, 1], [0, 1]))
        with pytest.raises(OverflowError, match="assign_sub would make -1"):
            unsigned.assign_sub(np.uint8(4))
        assert v.numpy().tolist() == full
        v.assign_sub(np.array([[HIGH, 0], [0, 0]]))
        v.scatter_sub(rows([1, 1]))
        unsigned.assign_sub(np.uint8(3))
        assert (v.numpy().tolist(), int(unsigned)) == ([[-1, HIGH - 2], full[1]], 0)

    on_chief(communicator, program)


def test_functions(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            v = mpidist.Variable(np.full(3, HIGH - 2, "int32"), name="seen")
            table = mpidist.Variable(np.full((2, 2), HIGH - 2, "int32"), name="table", sparse_gradient=True)
            other = mpidist.Variable(0.0)

        def count(number: int) -> None:
            v.assign_add(np.full(3, number))
            other.assign_add(1.0)

        for number in (1, 1):
            coordinator.schedule(count, (number,))
        coordinator.join()
        # The server knows of it when the function has returned. The rest of its update counts.
        kept = coordinator.schedule(count, (1,), on_error="keep")
        coordinator.join()
        with pytest.raises(OverflowError, match=f"'seen' of dtype int32: .* assign_add would make {HIGH + 1}"):
            coordinator.fetch(kept)
        assert (v.numpy().tolist(), float(other)) == ([HIGH] * 3, 3.0)
        coordinator.schedule(lambda: table.scatter_add(rows([1, 1], [2, 0])))
        with pytest.raises(OverflowError, match=f"'table' .* scatter_add would make {HIGH + 1}"):
            coordinator.join()
        assert (table.numpy() == HIGH - 2).all()

        def looks(method: str, given: Any) -> str:
            one = v if method.startswith("assign") else table
            getattr(one, method)(given)
            with pytest.raises(OverflowError, match=f"'{one.name}' .* {method} would make") as caught:
                one.value()
            # All that the function has done is void.
            raise caught.value

        for method, given in (
            ("assign_add", np.ones(3, int)), ("assign_sub", -np.ones(3, int)), ("scatter_mul", rows([1, 2])),
        ):
            coordinator.schedule(looks, (method, given))
            with pytest.raises(OverflowError, match=f"{method} would make"):
                coordinator.join()
        coordinator.schedule(lambda: v.assign_sub(np.full(3, HIGH)).value().tolist())
        coordinator.join()
        assert v.numpy().tolist() == [0] * 3

    on_chief(communicator, program)


@pytest.mark.mpi(min_size=4)
def test_one_server_of_two_refuses(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            v = mpidist.Variable(np.array([0, HIGH], "int32"))
        assert isinstance(v, ShardedVariable)
        result = coordinator.schedule(lambda: v.assign_add(np.ones(2, int)), on_error="keep")
        coordinator.join()
        with pytest.raises(OverflowError, match=f"make {HIGH + 1}"):
            coordinator.fetch(result)
        assert v.numpy().tolist() == [1, HIGH]

    on_chief(communicator, program, servers=2, partitioner=partitioners.FixedShardsPartitioner(2))


def test_a_round_of_updates(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            v, weight = mpidist.Variable(np.int8(126)), mpidist.Variable(1.0)
        optimizer = mpidist.optimizers.SGD(1.0)
        optimizer.build([weight])

        def step() -> None:
            v.assign_add(np.int8(1))
            optimizer.apply_gradients([(np.float32(0.25), weight)])

        results = [coordinator.schedule(step, on_error="keep") for _ in range(2)]
        coordinator.join()
        errors = []
        for one in results:
            try:
                coordinator.fetch(one)
            except OverflowError as error:
                errors.append(str(error))
        assert len(errors) == 1
        assert "assign_add would make 128" in errors[0]
        assert int(v) == 127

    on_chief(communicator, program, synchronous=True)


def test_a_sum_on_read_is_int64(communicator: Communicator, mpi_tmp_path: Path) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            v = mpidist.Variable(np.int32(0), synchronization="ON_READ", aggregation="SUM")
            before = mpidist.Variable(np.int32(-7))
        for _ in range(3):
            coordinator.schedule(lambda: v.assign_add(np.int32(HIGH)))
        coordinator.join()
        assert (int(v), v.value().dtype.name) == (3 * HIGH, "int64")
        path = mpidist.Checkpoint(v=v).write(mpi_tmp_path / "c")
        v.assign(0)
        mpidist.Checkpoint(v=v).read(path).assert_consumed()
        assert int(v) == 3 * HIGH
        # An earlier version saved it in the dtype that the program gave.
        mpidist.Checkpoint(v=v).read(mpidist.Checkpoint(v=before).write(mpi_tmp_path / "e")).assert_consumed()
        assert int(v) == -7

    on_chief(communicator, program)
