"""Objects that come after `restore`: they take their values once, on all ranks alike."""

from __future__ import annotations

import copy
import logging
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError, is_shared
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.variables.arena import Arena
from mpidist.variables.making.creation import create_variable
from mpidist.variables.module import Module
from mpidist.variables.variable import BaseVariable
from tests.helpers.strategies import ArenaStrategy, make_arena

pytestmark = pytest.mark.mpi


class Layer(Module):
    """Its variables are made when `build` is called."""

    def __init__(self, arena: Arena, value: float | None = None) -> None:
        super().__init__()
        self.arena_of_layer = [arena]
        if value is not None:
            self.build(value)

    def build(self, value: float = 0.0) -> None:
        arena = self.arena_of_layer[0]
        self.kernel = create_variable(arena, np.full((40, 30), value))
        self.bias = create_variable(arena, np.full(3, value, "f4"))


class Model(Module):
    def __init__(self, arena: Arena, value: float) -> None:
        super().__init__()
        self.first = Layer(arena, value)
        self.layers = [Layer(arena, value + 1), Layer(arena, value + 2)]
        self.table = {"x": create_variable(arena, value)}


def save(arena: Arena, path: Path) -> str:
    return Checkpoint(model=Model(arena, 5.0)).save(path / "c")


def values(layer: Layer) -> list[float]:
    return [*np.unique(layer.kernel.numpy()), *np.unique(layer.bias.numpy())]


@pytest.fixture
def arena(communicator: Communicator) -> Arena:
    return make_arena(communicator)


def test_attributes_of_modules_are_restored_when_they_are_set(arena: Arena, mpi_tmp_path: Path) -> None:
    path = save(arena, mpi_tmp_path)
    late: Any = Module()
    # Neither the checkpoint nor the status is kept, as in tf.train's examples.
    Checkpoint(model=late).restore(path)
    late.first = Layer(arena)
    late.first.build(0.0)
    assert values(late.first) == [5.0, 5.0]
    late.layers = [Layer(arena, 0.0), Layer(arena)]
    assert values(late.layers[0]) == [6.0, 6.0]
    late.layers[1].build(0.0)
    assert values(late.layers[1]) == [7.0, 7.0]
    late.table = {"x": create_variable(arena, 0.0)}
    assert late.table["x"].numpy() == 5.0
    Checkpoint(model=late).read(path).assert_existing_objects_matched()


def test_each_takes_its_values_once(arena: Arena, mpi_tmp_path: Path) -> None:
    path = save(arena, mpi_tmp_path)
    late: Any = Module()
    checkpoint = Checkpoint(model=late)
    status = checkpoint.restore(path)
    late.first = Layer(arena, 0.0)
    late.first.kernel.assign(np.full((40, 30), 9.0))
    # Under another name, in another place of the walk, and another variable at the same place.
    late.another = late.first
    late.first.bias = create_variable(arena, np.zeros(3, "f4"))
    status.restore_new()
    assert values(late.first) == [9.0, 0.0]
    late.table = {"x": create_variable(arena, 0.0)}
    late.layers = [Layer(arena, 0.0), Layer(arena, 0.0)]
    assert values(late.layers[1]) == [7.0, 7.0]
    assert values(late.first) == [9.0, 0.0]
    late.first = Layer(arena, 0.0)
    assert values(late.first) == [0.0, 0.0]
    del late.another
    status.assert_consumed()


def test_an_optimizer_that_has_gone_on_is_not_set_back(communicator: Communicator, mpi_tmp_path: Path) -> None:
    strategy = ArenaStrategy(communicator)

    def build() -> tuple[Any, Any]:
        with strategy.scope():
            return mpidist.Variable(np.zeros(3)), mpidist.optimizers.SGD(1.0, momentum=0.5)

    def train(optimizer: Any, v: Any) -> None:
        optimizer.apply_gradients([(np.ones(3), v)])

    v, optimizer = build()
    train(optimizer, v)
    path = Checkpoint(v=v, optimizer=optimizer, w=create_variable(strategy.arena, 5.0)).save(mpi_tmp_path / "c")
    v, optimizer = build()
    checkpoint = Checkpoint(v=v, optimizer=optimizer)
    checkpoint.restore(path)
    train(optimizer, v)
    train(optimizer, v)
    checkpoint.w = create_variable(strategy.arena, 0.0)
    assert checkpoint.w.numpy() == 5.0
    assert optimizer.iterations == 3
    # Its momentum is that of three steps, too.
    before = v.numpy()
    train(optimizer, v)
    np.testing.assert_allclose(v.numpy() - before, -(1 + 0.5 + 0.25 + 0.125) * communicator.size)


def test_attributes_of_the_checkpoint_are_restored_when_they_are_set(arena: Arena, mpi_tmp_path: Path) -> None:
    path = save(arena, mpi_tmp_path)
    checkpoint = Checkpoint()
    status = checkpoint.restore(path)
    checkpoint.model = SimpleNamespace(first=Layer(arena, 0.0))
    assert values(checkpoint.model.first) == [5.0, 5.0]
    checkpoint.model = Model(arena, 0.0)
    assert checkpoint.model.table["x"].numpy() == 5.0
    status.assert_consumed()


def test_what_no_attribute_tells_of_must_be_restored_before_saving(arena: Arena, mpi_tmp_path: Path) -> None:
    path = save(arena, mpi_tmp_path)
    late = SimpleNamespace()
    checkpoint = Checkpoint(model=late)
    status = checkpoint.restore(path)
    late.table = {"x": create_variable(arena, 1.0)}
    # It may have been trained since: only the program knows which value counts.
    with pytest.raises(CheckpointError, match=r"still holds values for 'model/table/x'.*restore_new.*end_waiting"):
        checkpoint.save(mpi_tmp_path / "c")
    assert late.table["x"].numpy() == 1.0
    status.restore_new()
    assert late.table["x"].numpy() == 5.0
    saved = checkpoint.save(mpi_tmp_path / "c")
    fresh = SimpleNamespace(table={"x": create_variable(arena, 0.0)})
    Checkpoint(model=fresh).restore(saved).assert_consumed()
    assert fresh.table["x"].numpy() == 5.0
    # It has taken its values: what is written now stays.
    late.table["x"].assign(8.0)
    checkpoint.save(mpi_tmp_path / "c")
    assert late.table["x"].numpy() == 8.0


def test_restore_new_is_for_all_else(arena: Arena, mpi_tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(arena, mpi_tmp_path)
    late: Any = Module()
    late.layers = []
    checkpoint = Checkpoint(model=late)
    status = checkpoint.restore(path)
    late.layers.append(Layer(arena, 0.0))
    assert values(late.layers[0]) == [0.0, 0.0]
    status.restore_new()
    assert values(late.layers[0]) == [6.0, 6.0]
    with caplog.at_level(logging.WARNING, "mpidist"):
        checkpoint.save(mpi_tmp_path / "c")
    assert caplog.records == []


def test_the_manager_asks_for_a_late_step_counter_before_it_looks(arena: Arena, mpi_tmp_path: Path) -> None:
    late = SimpleNamespace()
    step = create_variable(arena, 7)
    Checkpoint(model=SimpleNamespace(step=step)).save(mpi_tmp_path / "ckpt")
    step = create_variable(arena, 0)
    checkpoint = Checkpoint(model=late)
    with CheckpointManager(checkpoint, mpi_tmp_path, 5, step_counter=step, checkpoint_interval=3) as manager:
        manager.restore_or_initialize()
        late.step = step
        with pytest.raises(CheckpointError, match="still holds values for 'model/step'"):
            manager.save()
        assert checkpoint.pending is not None
        checkpoint.pending.restore_new()
        assert manager.save() == str(mpi_tmp_path / "ckpt-2.h5")
        assert step.numpy() == 7
        step.assign_add(2)
        assert manager.save() is None
        step.assign_add(1)
        assert manager.save() == str(mpi_tmp_path / "ckpt-3.h5")


def test_the_latest_restore_counts(arena: Arena, mpi_tmp_path: Path) -> None:
    old = Checkpoint(model=Model(arena, 1.0)).write(mpi_tmp_path / "old")
    new = Checkpoint(model=SimpleNamespace(first=Layer(arena, 2.0))).write(mpi_tmp_path / "new")
    # One checkpoint: what its former restore has is not waited for.
    late: Any = Module()
    checkpoint = Checkpoint(model=late)
    checkpoint.read(old)
    checkpoint.read(new)
    late.table = {"x": create_variable(arena, 0.0)}
    late.first = Layer(arena, 0.0)
    assert values(late.first) == [2.0, 2.0]
    assert late.table["x"].numpy() == 0.0
    # Two checkpoints of one module: the older one does not overwrite.
    model: Any = Module()
    model.first = Layer(arena)
    whole, part = Checkpoint(model=model), Checkpoint(model=SimpleNamespace(first=model.first))
    whole.read(old)
    part.read(new)
    model.first.build(0.0)
    model.table = {"x": create_variable(arena, 0.0)}
    whole.write(mpi_tmp_path / "again")
    assert values(model.first) == [2.0, 2.0]
    assert model.table["x"].numpy() == 1.0


def test_what_one_rank_sets_alone_communicates_nothing(
    communicator: Communicator, arena: Arena, mpi_tmp_path: Path
) -> None:
    path = save(arena, mpi_tmp_path)
    late: Any = Module()
    Checkpoint(model=late).restore(path)
    late.first = Layer(arena, 0.0)
    if communicator.rank == communicator.size - 1:
        late.log = [{"step": 1}]
        late.alias = late.first.kernel
        late.notes = SimpleNamespace(text="", model=late.first)
    late.table = {"x": create_variable(arena, 0.0)}
    assert late.table["x"].numpy() == 5.0


def test_what_does_not_fit_is_an_error_of_all_where_it_is_set(
    communicator: Communicator, arena: Arena, mpi_tmp_path: Path
) -> None:
    path = save(arena, mpi_tmp_path)
    late: Any = Module()
    Checkpoint(model=late).restore(path)
    with pytest.raises(CheckpointError, match=r"'model/table/x' has shape \(2,\), but \(\) was saved") as caught:
        late.table = {"x": create_variable(arena, np.zeros(2))}
    assert communicator.size == 1 or is_shared(caught.value)


def test_variables_that_are_made_inside_run(communicator: Communicator, mpi_tmp_path: Path) -> None:
    strategy = ArenaStrategy(communicator)
    path = save(strategy.arena, mpi_tmp_path)
    late: Any = Module()
    Checkpoint(model=late).restore(path)

    def step() -> float:
        if "first" not in vars(late):
            late.first = Layer(strategy.arena, 0.0)
        return float(late.first.kernel.value()[0, 0])

    assert [strategy.run(step) for _ in range(2)] == [5.0, 5.0]


def test_components_and_sums_come_late_too(communicator: Communicator, arena: Arena, mpi_tmp_path: Path) -> None:
    def make(aggregation: VariableAggregation) -> BaseVariable:
        return create_variable(
            arena, np.zeros(2), synchronization=VariableSynchronization.ON_READ, aggregation=aggregation
        )

    def build() -> Module:
        module = Module()
        module.own, module.total = make(VariableAggregation.NONE), make(VariableAggregation.SUM)
        return module

    first: Any = build()
    first.own.accumulate(np.full(2, communicator.rank + 1.0))
    first.total.accumulate(np.full(2, communicator.rank + 1.0))
    path = Checkpoint(m=first).write(mpi_tmp_path / "c")
    checkpoint = Checkpoint()
    checkpoint.read(path)
    checkpoint.m = build()
    assert checkpoint.m.own.component.tolist() == [communicator.rank + 1.0] * 2
    total = communicator.size * (communicator.size + 1) / 2
    np.testing.assert_allclose(checkpoint.m.total.numpy(), total)


def test_the_file_is_open_only_while_values_wait(communicator: Communicator, arena: Arena, mpi_tmp_path: Path) -> None:
    path = save(arena, mpi_tmp_path)

    def is_open() -> bool:
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return any(os.path.realpath(link) == os.path.realpath(path) for link in links)

    late: Any = Module()
    checkpoint = Checkpoint(model=late)
    checkpoint.restore(path)
    assert is_open()
    whole = Model(arena, 0.0)
    late.first, late.layers, late.table = whole.first, whole.layers, whole.table
    assert late.table["x"].numpy() == 5.0
    assert checkpoint.pending is None
    assert not is_open()
    communicator.barrier()


def test_a_copy_of_a_module_waits_for_nothing(arena: Arena, mpi_tmp_path: Path) -> None:
    path = save(arena, mpi_tmp_path)
    late: Any = Module("model")
    Checkpoint(model=late).restore(path)
    for other in (copy.copy(late), copy.deepcopy(late), pickle.loads(pickle.dumps(late))):
        other.table = {"x": create_variable(arena, 0.0)}
        assert other.table["x"].numpy() == 0.0
        assert other.name == "model"
    late.table = {"x": create_variable(arena, 0.0)}
    assert late.table["x"].numpy() == 5.0


def test_what_shall_keep_its_values_is_saved_as_it_is(arena: Arena, mpi_tmp_path: Path) -> None:
    late = SimpleNamespace()
    checkpoint = Checkpoint(model=late)
    status = checkpoint.restore(save(arena, mpi_tmp_path))
    late.table = {"x": create_variable(arena, 1.0)}
    status.end_waiting()
    checkpoint.save(mpi_tmp_path / "c")
    assert late.table["x"].numpy() == 1.0
