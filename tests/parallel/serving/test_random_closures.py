"""Closures of random reads and changes give what NumPy gives: in the closure, in the next one, and at the end."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.options import WindowOptions
from mpidist.parameter_server.options import ServerOptions
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)

# Shape, dtype, and whether it is a table. The changes of some closures are more than what is written at once.
KINDS: tuple[tuple[tuple[int, ...], str, bool], ...] = (
    ((), "float32", False), ((), "int64", False), ((7,), "float32", False), ((5, 3), "float64", False),
    ((12000,), "float32", False), ((40, 8), "float32", True), ((300, 64), "float32", True),
    ((6, 2, 2), "float64", True), ((9, 4), "int32", True),
)
SCATTERS: dict[str, Any] = {
    "add": np.add.at, "sub": np.subtract.at, "mul": np.multiply.at, "min": np.minimum.at, "max": np.maximum.at,
}
RATE = 0.5


class Operation(NamedTuple):
    """What a closure does with a variable: a name of a method, or "read", or "step" of an optimizer."""

    name: str
    variable: int
    indices: Any = None
    values: Any = None


def drawn(rng: np.random.Generator) -> list[Operation]:
    """The operations of a closure; small whole numbers, so that no sum rounds."""
    operations: list[Operation] = []
    stepped: set[int] = set()
    for _ in range(rng.integers(1, 9)):
        number = int(rng.integers(len(KINDS)))
        shape, dtype, is_table = KINDS[number]
        if number in stepped:
            # It cannot be read or changed in the closure that has made a step.
            continue
        names = ["read", "assign", "assign_add", "assign_sub"]
        if shape:
            names += ["sparse_read", "scatter_update", *(f"scatter_{kind}" for kind in SCATTERS)]
        if dtype.startswith("f"):
            names.append("step")
        name = names[rng.integers(len(names))]
        if name == "step":
            stepped.add(number)
        if name == "read":
            operations.append(Operation(name, number))
        elif name.startswith("assign") or (name == "step" and not is_table):
            values = 2 * rng.integers(-3, 4, shape)
            order: Literal["C", "F"] = "F" if rng.random() < 0.3 else "C"
            operations.append(Operation(name, number, None, np.array(values, dtype, order=order)))
        else:
            count = int(rng.integers(0, min(shape[0], 40) + 1))
            indices = rng.choice(shape[0], count, replace=bool(rng.random() < 0.4)).astype(np.int64)
            values = rng.integers(-1, 2, (count, *shape[1:])) * (1 if name == "scatter_mul" else 2)
            operations.append(Operation(name, number, indices, None if name == "sparse_read" else values.astype(dtype)))
    return operations


def expected(arrays: list[AnyArray], operations: list[Operation]) -> list[AnyArray]:
    """What a closure reads; the arrays become what it makes of them."""
    found = []
    for name, number, indices, values in operations:
        before = arrays[number]
        if name in ("read", "sparse_read"):
            found.append(np.array(before if indices is None else before[indices]))
        elif name == "assign":
            arrays[number] = np.array(values, order="C")
        elif name == "step" and indices is not None:
            np.subtract.at(before, indices, np.asarray(RATE, before.dtype) * values)
        elif name == "scatter_update" and values is not None:
            for row, value in zip([] if indices is None else indices, values, strict=True):
                before[row] = value
        elif name.startswith("scatter"):
            SCATTERS[name.removeprefix("scatter_")](before, indices, values)
        else:
            factor = {"assign_add": 1, "assign_sub": -1, "step": -RATE}[name]
            arrays[number] = np.asarray(before + np.asarray(factor, before.dtype) * np.asarray(values))
    return found


@pytest.mark.parametrize("seed", [
    *range(4), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(4, 40))
])
def test_closures_of_one_worker_give_what_numpy_gives(communicator: Communicator, seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = 150 if seed < 4 else 1500

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            variables: list[Any] = [
                mpidist.Variable(rng.integers(-4, 5, shape).astype(dtype), sparse_gradient=is_table)
                for shape, dtype, is_table in KINDS
            ]
            optimizer = mpidist.optimizers.SGD(RATE)
            optimizer.build([one for one, (_, dtype, _) in zip(variables, KINDS, strict=True) if dtype[0] == "f"])
        arrays = [np.array(one.numpy()) for one in variables]

        def work(operations: list[Operation], fails: bool) -> list[AnyArray]:
            found = []
            for name, number, indices, values in operations:
                variable = variables[number]
                if name == "read":
                    found.append(np.array(variable.numpy()))
                elif name == "sparse_read":
                    found.append(np.array(variable.sparse_read(indices)))
                elif name == "step":
                    gradient = values if indices is None else mpidist.IndexedSlices(values, indices, variable.shape)
                    optimizer.apply_gradients([(gradient, variable)])
                elif indices is None:
                    getattr(variable, name)(values)
                else:
                    getattr(variable, name)(mpidist.IndexedSlices(values, indices))
            if fails:
                raise KeyError("as it was told")
            return found

        done = 0
        while done < count:
            for _ in range(int(rng.integers(1, 12))):
                operations, fails = drawn(rng), bool(rng.random() < 0.1)
                found = coordinator.schedule(work, (operations, fails), on_error="keep")
                done += 1
                if fails:
                    # Nothing of it counts.
                    with pytest.raises(KeyError, match="as it was told"):
                        found.fetch()
                    continue
                wanted = expected(arrays, operations)
                if rng.random() < 0.5:
                    same(found.fetch(), wanted, operations)
            coordinator.join()
        same([one.numpy() for one in variables], arrays, [])

    def same(found: list[AnyArray], wanted: list[AnyArray], operations: list[Operation]) -> None:
        assert len(found) == len(wanted)
        for mine, theirs in zip(found, wanted, strict=True):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), operations
            np.testing.assert_array_equal(mine, theirs, err_msg=str(operations))

    partitioner = mpidist.experimental.partitioners.FixedShardsPartitioner(2) if seed % 4 == 3 else None
    options = ServerOptions(
        heap_bytes=1 << 23, slot_bytes=1 << 20, window=WindowOptions(way="SOCKETS" if seed % 2 else "AUTO")
    )
    on_chief(
        communicator, program, options, servers=communicator.size - 2, prefetch=seed % 4 >= 2, partitioner=partitioner
    )
