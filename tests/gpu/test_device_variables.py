"""Training on a GPU gives what it gives in host memory: variables, gradients, rows, state and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.comm.compression.top_k import TopK
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError
from mpidist.indexed_slices import IndexedSlices
from mpidist.optimizers import SGD, Adam
from mpidist.optimizers.optimizer import Optimizer
from mpidist.options import CommunicationOptions
from mpidist.variables.arena import Arena
from mpidist.variables.drift import DriftCheck
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.making.creation import create_variable
from mpidist.variables.update.fused import UnknownOperationError
from tests.helpers.strategies import make_arena
from tests.optimizers import SETTINGS, WITH_ROWS
from tests.unit.checkpoint.test_checkpoint_walk import check_that_an_array_would_be_lost

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


@pytest.fixture
def arena(cupy: Any, communicator: Communicator) -> Arena:
    return make_arena(communicator, on_gpu=True)


@pytest.fixture
def tolerance(is_simulated: bool) -> float:
    """How far results may be from those of host memory: GPUs have functions of their own."""
    return 1e-6 if is_simulated else 1e-4


def least(family: str, tolerance: float) -> float:
    """How far results near zero may be from those of host memory.

    Other powers than roots are rounded differently, and the threshold of l1 subtracts numbers that are nearly equal.
    """
    return tolerance if family == "Ftrl, other power" else tolerance / 10


def make(arena: Arena, value: Any, **options: Any) -> MirroredVariable:
    variable = create_variable(arena, value, **options)
    assert isinstance(variable, MirroredVariable)
    return variable


def test_a_variable_is_an_array_of_the_device(arena: Arena, cupy: Any) -> None:
    rank, size = arena.communicator.rank, arena.communicator.size
    variable = make(arena, np.full((3, 2), rank, np.float32), name="w")
    assert isinstance(variable.value(), cupy.ndarray)
    assert variable.device == f"/device:GPU:{cupy.cuda.Device().id}"
    # The first replica's value, on all.
    np.testing.assert_array_equal(variable.numpy(), np.zeros((3, 2), np.float32))
    variable.assign(np.ones((3, 2), np.float32))
    variable.assign_add(cupy.full((3, 2), 2, np.float32))
    variable.assign_sub(np.full((3, 2), 0.5, np.float32))
    assert type(variable.numpy()) is np.ndarray
    np.testing.assert_array_equal(variable.numpy(), np.full((3, 2), 2.5, np.float32))
    np.testing.assert_array_equal(np.asarray(variable), variable.numpy())
    total = variable * 2 + cupy.ones((3, 2), np.float32)
    assert isinstance(total, cupy.ndarray)
    np.testing.assert_array_equal(total.get(), np.full((3, 2), 6, np.float32))
    np.testing.assert_array_equal((cupy.ones((3, 2), np.float32) * variable).get(), variable.numpy())
    assert "2.5" in repr(variable)
    reduced = arena.collective.all_reduce(variable.value())
    assert isinstance(reduced, cupy.ndarray)
    np.testing.assert_array_equal(reduced.get(), size * variable.numpy())


def test_what_lies_elsewhere_is_refused_by_name(arena: Arena, cupy: Any, communicator: Communicator) -> None:
    on_host = make(make_arena(communicator), np.zeros(3, np.float32))
    with pytest.raises(TypeError, match=r"is in GPU memory.*\.get\(\)"):
        on_host.assign(cupy.zeros(3, np.float32))
    with pytest.raises(NotImplementedError, match=r"compressed in host memory.*leave out compression=TopK"):
        make_arena(communicator, CommunicationOptions(compression=TopK(0.1)), on_gpu=True)
    with pytest.raises(ValueError, match="shared=True puts variables into node memory"):
        make_arena(communicator, on_gpu=True, shared=True)


WITH_OPTIONS: dict[str, Any] = {
    "AdamW, clipped": lambda: SETTINGS["AdamW"](clipnorm=0.5),
    "Lion, average": lambda: SETTINGS["Lion"](use_ema=True),
    "SGD, accumulated": lambda: SETTINGS["SGD"](gradient_accumulation_steps=2),
    "Adam, clipped by value, average": lambda: SETTINGS["Adam"](clipvalue=0.3, use_ema=True),
    "LARS, global norm": lambda: SETTINGS["LARS"](global_clipnorm=0.7),
    "AdamW, clipped, copied": lambda: SETTINGS["AdamW"](clipnorm=0.5, master_copy=True),
    "Adam, clipped by value": lambda: SETTINGS["Adam"](clipvalue=0.3),
}
FAMILIES: dict[str, Any] = {**SETTINGS, **WITH_OPTIONS}


def train(
    arena: Arena, optimizer: Optimizer, to_array: Any, dtype: str = "float32"
) -> tuple[list[AnyArray], dict[str, Any]]:
    rank = arena.communicator.rank
    random = np.random.default_rng(rank)
    variables = [
        make(arena, np.linspace(-1, 1, count, dtype=dtype).reshape(shape), name=f"v{count}")
        for count, shape in ((12, (3, 4)), (1, ()), (70_001, (70_001,)))
    ]
    for _ in range(3):
        gradients = [to_array(random.standard_normal(v.shape).astype(dtype)) for v in variables]
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    return [v.numpy() for v in variables], optimizer.state()


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_optimizer_does_what_it_does_in_host_memory(
    arena: Arena, cupy: Any, communicator: Communicator, monkeypatch: pytest.MonkeyPatch,
    tolerance: float, family: str, is_fused: bool,
) -> None:
    if not is_fused:
        # As where a user's update has a function that is unknown in a kernel.
        monkeypatch.setattr("mpidist.variables.update.fused.record", _cannot)
    values, state = train(arena, FAMILIES[family](), cupy.asarray)
    on_host = make_arena(communicator, shared=False)
    expected, expected_state = train(on_host, FAMILIES[family](), lambda array: array)
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=tolerance, atol=least(family, tolerance))
    assert _described(state) == _described(expected_state)


@pytest.mark.parametrize("family", ["AMSGrad", "LAMB", "Lion, average", "AdamW, clipped, copied"])
def test_state_of_half_precision_is_float32(
    arena: Arena, cupy: Any, communicator: Communicator, family: str
) -> None:
    optimizer, reference = FAMILIES[family](), FAMILIES[family]()
    values, _ = train(arena, optimizer, cupy.asarray, "float16")
    expected, _ = train(make_arena(communicator, shared=False), reference, lambda array: array, "float16")
    assert [slot.dtype for slot in optimizer.variables] == [slot.dtype for slot in reference.variables]
    assert {slot.dtype for slot in optimizer.variables} == {np.dtype(np.float32)}
    for value, other in zip(values, expected, strict=True):
        assert value.dtype == np.float16
        np.testing.assert_allclose(value.astype("f"), other.astype("f"), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("family", ["AdamW, clipped", "LAMB"])
def test_norms_are_measured_in_order_where_that_is_asked_for(
    arena: Arena, cupy: Any, communicator: Communicator, tolerance: float, family: str
) -> None:
    options = CommunicationOptions(reproducible=True)
    values, _ = train(make_arena(communicator, options, on_gpu=True), FAMILIES[family](), cupy.asarray)
    expected, _ = train(make_arena(communicator, options, shared=False), FAMILIES[family](), lambda array: array)
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=tolerance, atol=tolerance / 10)


def test_gradients_may_be_written_in_place_and_from_the_host(arena: Arena, cupy: Any) -> None:
    variable = make(arena, np.zeros(4, np.float32))
    optimizer = SGD(1.0)
    (view,) = optimizer.gradients([variable])
    assert isinstance(view, cupy.ndarray)
    view[...] = cupy.ones(4, np.float32)
    optimizer.apply_gradients([(view, variable)])
    optimizer.apply_gradients([(np.ones(4, np.float32), variable)])
    np.testing.assert_array_equal(variable.numpy(), np.full(4, -2.0 * arena.communicator.size, np.float32))


def test_rows_are_scattered_and_added_as_gradients(arena: Arena, cupy: Any) -> None:
    variable = make(arena, np.zeros((5, 2), np.float32))
    variable.scatter_add(IndexedSlices(np.ones((3, 2), np.float32), np.array([1, 1, 4])))
    variable.scatter_update(IndexedSlices(cupy.full((1, 2), 7, np.float32), cupy.asarray([0])))
    np.testing.assert_array_equal(variable.numpy()[:, 0], [7, 2, 0, 0, 1])
    variable.scatter_mul(IndexedSlices(np.full((2, 2), 2, np.float32), np.array([4, 4])))
    variable.scatter_min(IndexedSlices(np.full((1, 2), 5, np.float32), np.array([0])))
    variable.scatter_sub(IndexedSlices(np.ones((1, 2), np.float32), np.array([1])))
    np.testing.assert_array_equal(variable.numpy()[:, 0], [5, 1, 0, 0, 4])
    SGD(1.0).apply_gradients([(IndexedSlices(np.ones((2, 2), np.float32), np.array([3, 3])), variable)])
    assert variable.numpy()[3, 0] == -2 * arena.communicator.size


def train_tables(arena: Arena, optimizer: Optimizer, to_array: Any) -> list[AnyArray]:
    """A table, a dense variable and a table of vectors; on each rank any number of rows, some twice."""
    random = np.random.default_rng(arena.communicator.rank)
    variables = [
        make(arena, np.linspace(-1, 1, 60, dtype=np.float32).reshape(20, 3), sparse_gradient=True, name="rows"),
        make(arena, np.ones(5, np.float32), name="dense"),
        make(arena, np.linspace(0, 1, 8, dtype=np.float32), sparse_gradient=True, name="numbers"),
    ]
    for number in range(4):
        gradients = [
            IndexedSlices(
                to_array(random.standard_normal((count, *variable.shape[1:])).astype(np.float32)),
                to_array(random.integers(0, variable.shape[0], count)),
            ) if variable.sparse_gradient else to_array(random.standard_normal(5).astype(np.float32))
            for variable in variables
            for count in [(3 * arena.communicator.rank + number) % 7]
        ]
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))
    return [v.numpy() for v in (*variables, *optimizer.variables)]


@pytest.mark.parametrize("family", [*WITH_ROWS, "AdamW, clipped", "Adam, clipped by value"])
def test_declared_rows_are_updated_as_in_host_memory(
    arena: Arena, cupy: Any, communicator: Communicator, tolerance: float, family: str
) -> None:
    values = train_tables(arena, FAMILIES[family](), cupy.asarray)
    expected = train_tables(make_arena(communicator, shared=False), FAMILIES[family](), lambda array: array)
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=tolerance, atol=least(family, tolerance))


def test_declared_rows_of_the_slots_are_on_the_gpu(arena: Arena, cupy: Any) -> None:
    table = make(arena, np.zeros((4, 2), np.float32), sparse_gradient=True)
    optimizer = Adam(0.1)
    optimizer.apply_gradients([(IndexedSlices(cupy.ones((1, 2), np.float32), cupy.asarray([2])), table)])
    assert all(isinstance(slot.value(), cupy.ndarray) for slot in optimizer.variables)
    np.testing.assert_array_equal(table.numpy() != 0, np.arange(4)[:, None] == [2, 2])


def test_copies_that_drift_apart_are_found(arena: Arena) -> None:
    variable = make(arena, np.zeros(3, np.float32), name="w")
    check = DriftCheck(arena)
    check.after_step()
    if arena.communicator.size > 1:
        if arena.communicator.rank == 1:
            variable.value()[...] = 1
        with pytest.raises(MismatchError, match=r"'w'.*rank 1"):
            check.after_step()


def test_a_checkpoint_is_that_of_host_memory(arena: Arena, cupy: Any, mpi_tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    expected = random.standard_normal((50, 3)).astype(np.float32)
    variable = make(arena, expected)
    path = Checkpoint(w=variable).save(str(mpi_tmp_path / "ckpt"))
    on_host = make(make_arena(arena.communicator, shared=False), np.zeros((50, 3), np.float32))
    Checkpoint(w=on_host).restore(path)
    np.testing.assert_array_equal(on_host.numpy(), expected)
    again = make(arena, np.zeros((50, 3), np.float32))
    Checkpoint(w=again).restore(path)
    assert isinstance(again.value(), cupy.ndarray)
    np.testing.assert_array_equal(again.numpy(), expected)


def test_an_array_that_is_no_variable_would_be_lost(
    cupy: Any, communicator: Communicator, mpi_tmp_path: Path
) -> None:
    variable = make(make_arena(communicator, shared=False), np.ones(2, np.float32))
    check_that_an_array_would_be_lost(cupy.zeros(3), variable, mpi_tmp_path)


def test_state_goes_to_the_host_and_comes_back(arena: Arena, cupy: Any) -> None:
    variable = make(arena, np.arange(10, dtype=np.float32))
    saved = variable.reader()(0, 10)
    assert type(saved) is np.ndarray
    variable.assign(np.zeros(10, np.float32))
    variable.load(lambda start, stop: saved[start:stop])
    np.testing.assert_array_equal(variable.numpy(), saved)
    assert isinstance(variable.value(), cupy.ndarray)


def _cannot(*_: object, **__: object) -> None:
    raise UnknownOperationError("this test is without kernels")


def _described(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _described(value) for name, value in state.items()}
    return type(state).__name__, getattr(state, "shape", None)
