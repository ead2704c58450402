"""The state of optimizers in checkpoints: each variable gets its own back, in ranges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.file.saved import SavedArray
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError
from mpidist.optimizers.families.adam import Adam
from mpidist.optimizers.loss_scale import LossScaleOptimizer
from mpidist.optimizers.optimizer import Optimizer
from mpidist.variables.arena import Arena
from mpidist.variables.making.creation import create_variable
from mpidist.variables.variable import BaseVariable
from tests.helpers.strategies import ArenaStrategy

pytestmark = pytest.mark.mpi

NAMES = ("a", "b", "c")


def make(arena: Arena, value: float) -> dict[str, BaseVariable]:
    return {name: create_variable(arena, np.full(50, value), name=name) for name in NAMES}


def step(strategy: ArenaStrategy, optimizer: Any, variables: dict[str, BaseVariable], names: tuple[str, ...]) -> None:
    gradients = {name: np.full(50, number + 1.0) for number, name in enumerate(NAMES)}
    strategy.run(lambda: optimizer.apply_gradients([(gradients[name], variables[name]) for name in names]))


def values(variables: dict[str, BaseVariable]) -> list[float]:
    return [float(variables[name].numpy()[7]) for name in NAMES]


def inner(optimizer: Any) -> Optimizer:
    found = optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer
    assert isinstance(found, Optimizer)
    return found


@pytest.mark.parametrize("when", ["before build", "after build"])
@pytest.mark.parametrize(
    "kind",
    [
        lambda: Adam(0.1), lambda: Adam(0.1, gradient_accumulation_steps=2),
        lambda: LossScaleOptimizer(Adam(0.1, use_ema=True), 4.0),
    ],
    ids=["plain", "accumulated", "scaled"],
)
def test_variables_in_another_order_keep_their_state(
    communicator: Communicator, mpi_tmp_path: Path, kind: Any, when: str
) -> None:
    strategy = ArenaStrategy(communicator)
    straight, saved = make(strategy.arena, 1.0), make(strategy.arena, 1.0)
    one, two = kind(), kind()
    for optimizer, variables in ((one, straight), (two, saved)):
        for _ in range(3):
            step(strategy, optimizer, variables, NAMES)
    path = Checkpoint(model=saved, optimizer=two).write(mpi_tmp_path / "c")
    other, order = make(strategy.arena, 0.0), ("c", "a", "b")
    three = kind()
    if when == "after build":
        with strategy.scope():
            three.build([other[name] for name in order])
    status = Checkpoint(model=other, optimizer=three).read(path)
    status.assert_consumed()
    for _ in range(3):
        step(strategy, one, straight, NAMES)
        step(strategy, three, other, order)
    np.testing.assert_allclose(values(other), values(straight), rtol=1e-12)
    for slot in inner(one).state():
        if slot in ("m", "v"):
            ours = [inner(three).state()[slot][order.index(name)].numpy() for name in NAMES]
            np.testing.assert_allclose(ours, [v.numpy() for v in inner(one).state()[slot]], rtol=1e-12)


def test_the_file_names_state_by_the_path_of_the_variable(communicator: Communicator, mpi_tmp_path: Path) -> None:
    strategy = ArenaStrategy(communicator)
    variables, optimizer = make(strategy.arena, 1.0), Adam(0.1)
    step(strategy, optimizer, variables, ("b", "a", "c"))
    path = Checkpoint(a_first=optimizer, model={"layer": variables}).write(mpi_tmp_path / "c")
    slot = next(name for name in optimizer.state() if name not in ("iterations", "learning_rate"))
    with h5py.File(path) as file:
        assert sorted(file[f"a_first/{slot}"]) == [f"model%2Flayer%2F{name}" for name in NAMES]


def test_state_is_found_under_another_path_of_a_shared_variable(
    communicator: Communicator, mpi_tmp_path: Path
) -> None:
    strategy = ArenaStrategy(communicator)
    variables, optimizer = make(strategy.arena, 1.0), Adam(0.1)
    step(strategy, optimizer, variables, NAMES)
    path = Checkpoint(first=variables, model=variables, optimizer=optimizer).write(mpi_tmp_path / "c")
    fresh, again = make(strategy.arena, 0.0), Adam(0.1)
    Checkpoint(model=fresh, optimizer=again).read(path).assert_existing_objects_matched()
    for one, name in ((optimizer, variables), (again, fresh)):
        step(strategy, one, name, NAMES)
    np.testing.assert_array_equal(values(fresh), values(variables))


def test_files_with_numbers_are_read(communicator: Communicator, mpi_tmp_path: Path) -> None:
    """Without the variables there are no paths; older files have none at all."""
    strategy = ArenaStrategy(communicator)
    variables, optimizer = make(strategy.arena, 1.0), Adam(0.1)
    step(strategy, optimizer, variables, NAMES)
    alone = Checkpoint(optimizer=optimizer).write(mpi_tmp_path / "c")
    with h5py.File(alone) as file:
        slot = next(name for name in file["optimizer"] if name not in ("iterations", "learning_rate"))
        assert sorted(file["optimizer"][slot]) == ["0", "1", "2"]
    fresh, again = make(strategy.arena, 0.0), Adam(0.1)
    for name in NAMES:
        fresh[name].assign(variables[name].numpy())
    with strategy.scope():
        again.build([fresh[name] for name in NAMES])
    Checkpoint(model=fresh, optimizer=again).read(alone)
    for one, those in ((optimizer, variables), (again, fresh)):
        step(strategy, one, those, NAMES)
    np.testing.assert_array_equal(values(fresh), values(variables))


class Former:
    """An optimizer as checkpoints held it before they stored paths: by the numbers of its variables."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state(self) -> dict[str, Any]:
        tree = self.optimizer.state()
        return {**tree, "accumulates": np.array(tree["accumulates"])}

    def load_state(self, saved: Any) -> None:
        self.optimizer.load_state(saved)


@pytest.mark.parametrize("when", ["before build", "after build", "saved again"])
def test_files_of_before_paths_were_stored_are_read(
    communicator: Communicator, mpi_tmp_path: Path, when: str
) -> None:
    strategy = ArenaStrategy(communicator)
    straight, optimizer = make(strategy.arena, 1.0), Adam(0.1, gradient_accumulation_steps=2)
    for _ in range(3):
        step(strategy, optimizer, straight, NAMES)
    path = Checkpoint(model=straight, optimizer=Former(optimizer)).write(mpi_tmp_path / "c")
    for _ in range(2 if when == "saved again" else 1):
        variables, again = make(strategy.arena, 0.0), Adam(0.1, gradient_accumulation_steps=2)
        if when == "after build":
            with strategy.scope():
                again.build(variables.values())
        checkpoint = Checkpoint(model=variables, optimizer=again)
        checkpoint.read(path).assert_consumed()
        path = checkpoint.write(mpi_tmp_path / "d")
    for _ in range(3):
        step(strategy, optimizer, straight, NAMES)
        step(strategy, again, variables, NAMES)
    np.testing.assert_array_equal(values(variables), values(straight))


@pytest.mark.parametrize("when", ["before build", "after build"])
def test_state_of_other_variables_is_an_error_and_changes_nothing(
    communicator: Communicator, mpi_tmp_path: Path, when: str
) -> None:
    strategy = ArenaStrategy(communicator)
    variables, optimizer = make(strategy.arena, 1.0), Adam(0.1)
    step(strategy, optimizer, variables, NAMES)
    path = Checkpoint(model=variables, optimizer=optimizer).write(mpi_tmp_path / "c")
    fresh, again = make(strategy.arena, 0.0), Adam(0.1)
    acts: list[Callable[[], object]] = [
        lambda: Checkpoint(optimizer=again).read(path), lambda: again.build(fresh.values()),
    ]
    first, second = acts if when == "before build" else acts[::-1]
    first()
    with pytest.raises(CheckpointError, match=r"Adam: .*'a', not restored;.* of \['model/a', .*in one Checkpoint"):
        second()
    assert all(not slot.numpy().any() for slot in again.variables)


@pytest.mark.parametrize("when", ["before build", "after build"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_layer_more_begins_anew_and_the_others_go_on(
    communicator: Communicator, mpi_tmp_path: Path, when: str, scaled: bool
) -> None:
    def kind() -> Any:
        return LossScaleOptimizer(Adam(0.1), 4.0) if scaled else Adam(0.1)

    strategy = ArenaStrategy(communicator)
    straight, optimizer, few = make(strategy.arena, 1.0), kind(), NAMES[:2]
    for _ in range(3):
        step(strategy, optimizer, straight, few)
    path = Checkpoint(model={name: straight[name] for name in few}, o=optimizer).write(mpi_tmp_path / "c")
    more, again = make(strategy.arena, 1.0), kind()
    if when == "after build":
        with strategy.scope():
            again.build(more.values())
    checkpoint = Checkpoint(model=more, o=again)
    status = checkpoint.read(path).expect_partial()
    named = r"has nothing for 'model/c'" + ("" if when == "before build" else ", 'o/.*model%2Fc'")
    with pytest.raises(AssertionError, match=named):
        status.assert_existing_objects_matched()
    step(strategy, again, more, NAMES)
    step(strategy, optimizer, straight, few)
    np.testing.assert_array_equal(values(more)[:2], values(straight)[:2])
    assert values(more)[2] != values(straight)[2] == 1.0
    assert inner(again).iterations == 4
    # All of it is saved.
    checkpoint.write(mpi_tmp_path / "d")


@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_less_is_left_and_the_others_go_on(
    communicator: Communicator, mpi_tmp_path: Path, frozen: bool
) -> None:
    strategy = ArenaStrategy(communicator)
    straight, optimizer, few = make(strategy.arena, 1.0), Adam(0.1, gradient_accumulation_steps=2), NAMES[1:]
    for _ in range(3):
        step(strategy, optimizer, straight, NAMES)
    path = Checkpoint(model=straight, o=optimizer).write(mpi_tmp_path / "c")
    less, again = make(strategy.arena, 0.0), Adam(0.1, gradient_accumulation_steps=2)
    with strategy.scope():
        again.build([less[name] for name in few])
    model = less if frozen else {name: less[name] for name in few}
    checkpoint = Checkpoint(model=model, o=again)
    status = checkpoint.read(path)
    status.assert_existing_objects_matched()
    # The state waits for nobody; the variable does where it is not there.
    assert (checkpoint.pending is None) == frozen
    with pytest.raises(AssertionError, match=r"values that no object has taken: .*'o/.*model%2Fa'"):
        status.assert_consumed()
    for _ in range(3):
        step(strategy, again, less, few)
        step(strategy, optimizer, straight, NAMES)
    np.testing.assert_array_equal(values(less)[1:], values(straight)[1:])


def test_an_average_of_a_variable_does_not_begin_in_the_middle(
    communicator: Communicator, mpi_tmp_path: Path
) -> None:
    strategy = ArenaStrategy(communicator)
    variables, optimizer, few = make(strategy.arena, 1.0), Adam(0.1, use_ema=True), NAMES[:2]
    step(strategy, optimizer, variables, few)
    path = Checkpoint(model={name: variables[name] for name in few}, o=optimizer).write(mpi_tmp_path / "c")
    more, again = make(strategy.arena, 0.0), Adam(0.1, use_ema=True)
    with strategy.scope():
        again.build(more.values())
    with pytest.raises(CheckpointError, match=r"slot 'average' of variable 'c' needs .* the checkpoint has nothing"):
        Checkpoint(model=more, o=again).read(path)
    assert values(more) == [0.0] * 3


def test_no_rank_reads_a_slot_whole(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = ArenaStrategy(communicator)
    size = 6000
    table, optimizer = create_variable(strategy.arena, np.ones(size)), Adam(0.1)
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(size), table)]))
    path = Checkpoint(table=table, optimizer=optimizer).write(mpi_tmp_path / "c")
    again, fresh = Adam(0.1), create_variable(strategy.arena, np.zeros(size))
    read, counts = SavedArray.read, []

    def count(self: SavedArray, start: int, stop: int) -> Any:
        if self.size == size:
            counts.append(stop - start)
        return read(self, start, stop)

    monkeypatch.setattr(SavedArray, "read", count)
    Checkpoint(table=fresh, optimizer=again).read(path).assert_consumed()
    # The table itself; its state waits for `build`.
    assert len(counts) == 1
    communicator.barrier()
    if communicator.rank == 0:
        Path(path).unlink()
    communicator.barrier()
    with strategy.scope():
        again.build([fresh])
    assert len(counts) == 1 + len(again.variables)
    share = -(-size // communicator.node.size)
    assert max(counts) <= share
    for slot, expected in zip(again.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(slot.numpy(), expected.numpy())


@pytest.mark.parametrize("steps", [{}, {"gradient_accumulation_steps": 2}], ids=["plain", "accumulated"])
def test_state_that_waits_for_build_is_saved_again(
    communicator: Communicator, mpi_tmp_path: Path, steps: dict[str, Any]
) -> None:
    strategy = ArenaStrategy(communicator)
    straight, optimizer = make(strategy.arena, 1.0), Adam(0.1, **steps)
    for _ in range(3):
        step(strategy, optimizer, straight, NAMES)
    path = Checkpoint(model=straight, optimizer=optimizer).save(mpi_tmp_path / "c")
    for _ in range(2):
        # Restored and saved before the first step, twice.
        variables, again = make(strategy.arena, 0.0), Adam(0.1, **steps)
        checkpoint = Checkpoint(model=variables, optimizer=again)
        checkpoint.restore(path).assert_consumed()
        assert again.iterations == 3
        path = checkpoint.save(mpi_tmp_path / "c")
    for _ in range(3):
        step(strategy, optimizer, straight, NAMES)
        step(strategy, again, variables, ("c", "a", "b"))
    np.testing.assert_allclose(values(variables), values(straight), rtol=1e-12)


@pytest.mark.parametrize("when", ["before build", "after build"])
@pytest.mark.parametrize("kind", [Adam, lambda rate: LossScaleOptimizer(Adam(rate), 4.0)], ids=["plain", "scaled"])
def test_a_learning_rate_that_was_changed_comes_back(
    communicator: Communicator, mpi_tmp_path: Path, kind: Any, when: str
) -> None:
    strategy = ArenaStrategy(communicator)
    variables, optimizer = make(strategy.arena, 1.0), kind(0.1)
    step(strategy, optimizer, variables, NAMES)
    inner(optimizer).learning_rate = 1 / 3
    path = Checkpoint(model=variables, optimizer=optimizer).write(mpi_tmp_path / "c")
    other, again = make(strategy.arena, 0.0), kind(0.5)
    if when == "after build":
        with strategy.scope():
            again.build(other.values())
    Checkpoint(model=other, optimizer=again).read(path).assert_consumed()
    assert inner(again).learning_rate == 1 / 3
    # A program may change it again before the first step, which builds.
    inner(again).learning_rate = 0.25
    path = Checkpoint(model=other, optimizer=again).write(mpi_tmp_path / "d")
    third = kind(0.5)
    Checkpoint(model=make(strategy.arena, 0.0), optimizer=third).read(path)
    assert inner(third).learning_rate == 0.25
    step(strategy, again, other, NAMES)
    inner(optimizer).learning_rate = 0.25
    step(strategy, optimizer, variables, NAMES)
    np.testing.assert_array_equal(values(other), values(variables))


def test_a_schedule_is_the_program_s_own(communicator: Communicator, mpi_tmp_path: Path) -> None:
    strategy = ArenaStrategy(communicator)
    variables = make(strategy.arena, 1.0)

    def schedule(step: int) -> float:
        return 0.1 / (1 + step)

    number, scheduled = Adam(0.1), Adam(schedule)
    paths = []
    for name, optimizer in (("number", number), ("scheduled", scheduled)):
        step(strategy, optimizer, variables, NAMES)
        paths.append(Checkpoint(model=variables, optimizer=optimizer).write(mpi_tmp_path / name))
    for path in paths:
        Checkpoint(model=variables, optimizer=scheduled).read(path).assert_consumed()
        assert scheduled.learning_rate is schedule
    number.learning_rate = 0.75
    # There is none in this file.
    Checkpoint(model=variables, optimizer=number).read(paths[1]).assert_consumed()
    assert number.learning_rate == 0.75


@pytest.mark.parametrize("when", ["before build", "after build"])
def test_files_of_before_the_learning_rate_was_stored_are_read(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    strategy = ArenaStrategy(communicator)
    variables, optimizer = make(strategy.arena, 1.0), Adam(0.1)
    step(strategy, optimizer, variables, NAMES)
    state = Optimizer.state
    monkeypatch.setattr(
        Optimizer, "state", lambda self: {name: one for name, one in state(self).items() if name != "learning_rate"}
    )
    path = Checkpoint(model=variables, optimizer=optimizer).write(mpi_tmp_path / "c")
    monkeypatch.undo()
    other, again = make(strategy.arena, 0.0), Adam(0.5)
    if when == "after build":
        with strategy.scope():
            again.build(other.values())
    Checkpoint(model=other, optimizer=again).read(path).assert_consumed()
    assert again.iterations == 1
    assert again.learning_rate == 0.5
