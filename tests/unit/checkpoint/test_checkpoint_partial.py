"""Restores in part, under other paths, and with other dtypes."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import CheckpointError
from mpidist.optimizers.families.adam import Adam
from mpidist.optimizers.families.sgd import SGD
from mpidist.variables.making.creation import create_variable
from mpidist.variables.variable import BaseVariable
from tests.helpers.amounts import amount
from tests.helpers.strategies import ArenaStrategy, make_arena

ARENA = make_arena(SoloCommunicator())
STRATEGY = ArenaStrategy(SoloCommunicator())


def variable(value: Any) -> BaseVariable:
    return create_variable(STRATEGY.arena, np.asarray(value, "f4"))


def trained(*names: str, size: int = 3) -> dict[str, Any]:
    """A model with these variables, and an Adam that has made a step."""
    model = SimpleNamespace(**{name: variable(np.full(size, place + 1.0)) for place, name in enumerate(names)})
    adam = Adam(0.5)
    STRATEGY.run(lambda: adam.apply_gradients([(np.full(size, 2.0, "f4"), one) for one in vars(model).values()]))
    return {"model": model, "adam": adam}


def fresh(**shapes: int) -> dict[str, Any]:
    model = SimpleNamespace(**{name: variable(np.zeros(size)) for name, size in shapes.items()})
    return {"model": model, "adam": Adam(0.1)}


def slot(adam: Any, name: str, of: BaseVariable) -> list[float]:
    return [float(x) for x in np.asarray(adam._plan.slots[name][adam._number(of)].numpy())]


@pytest.mark.parametrize("is_built", [True, False])
def test_a_part_is_restored_with_the_state_of_its_variables(
    is_built: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = trained("a", "b", "c")
    path = Checkpoint(**old).write(tmp_path / "c")
    # A layer more (d), one less (c), and one of another shape (b).
    new = fresh(a=3, b=4, d=2)
    variables = list(vars(new["model"]).values())
    if is_built:
        new["adam"].build(variables)
    checkpoint = Checkpoint(**new)
    with pytest.raises(CheckpointError, match=r"'model/b' has shape \(4,\), but \(3,\) was saved \(dtype float32"):
        checkpoint.read(path)
    assert not new["model"].a.numpy().any()
    status = checkpoint.read(path, partial=True)
    np.testing.assert_array_equal(new["model"].a.numpy(), old["model"].a.numpy())
    assert not new["model"].b.numpy().any()
    with pytest.raises(AssertionError, match="'model/b' has shape"):
        status.assert_existing_objects_matched()
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    # A save goes on, and says once what was left out.
    checkpoint.write(tmp_path / "again")
    new["adam"].build(variables)
    assert (int(new["adam"].iterations), new["adam"].learning_rate) == (1, 0.5)
    expected = slot(old["adam"], "velocity", old["model"].a)
    assert any(expected)
    assert slot(new["adam"], "velocity", new["model"].a) == expected
    assert not any(slot(new["adam"], "velocity", new["model"].b) + slot(new["adam"], "velocity", new["model"].d))
    del status
    gc.collect()
    (warning,) = [one.getMessage() for one in caplog.records if "in part" in one.getMessage()]
    for text in ("'model/b' has shape (4,), but (3,)", "'model/d'", "'model/c'"):
        assert text in warning, warning


def test_expect_partial_silences_the_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = Checkpoint(a=variable([1.0]), b=variable([2.0])).write(tmp_path / "c")
    one = Checkpoint(a=variable([0.0]), d=variable([0.0]))
    one.read(path, partial=True).expect_partial()
    one.read(path, partial=True)
    gc.collect()
    assert "in part" not in caplog.text
    one.read(path, partial=True).expect_partial()
    assert caplog.text.count("in part") == 1
    whole = Checkpoint(a=variable([0.0]), b=variable([0.0]))
    whole.read(path, partial=True).assert_consumed().initialize_or_restore()
    del whole
    gc.collect()
    assert caplog.text.count("in part") == 1


def test_another_optimizer_is_left_out_as_a_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = trained("a")
    path = Checkpoint(**old).write(tmp_path / "c")
    model = SimpleNamespace(a=variable(np.zeros(3)))
    sgd = SGD(0.25, momentum=0.5)
    sgd.build([model.a])
    checkpoint = Checkpoint(model=model, adam=sgd)
    with pytest.raises(CheckpointError, match=r"saved with another optimizer.*`partial=True` restores what fits"):
        checkpoint.read(path)
    checkpoint.read(path, partial=True)
    assert (model.a.numpy()[0], sgd.learning_rate) == (old["model"].a.numpy()[0], 0.25)
    checkpoint.write(tmp_path / "again")
    assert "'adam': checkpoint" in caplog.text


def test_the_variables_of_a_refused_optimizer_are_named_by_their_paths(tmp_path: Path) -> None:
    path = Checkpoint(**trained("a", "b")).write(tmp_path / "c")
    new = fresh(a=3, d=3)
    new["adam"].build([new["model"].a, new["model"].d])
    with pytest.raises(CheckpointError, match="Of its variables 'model/d' were not restored"):
        Checkpoint(**new).read(path)


def test_objects_are_restored_under_other_paths(tmp_path: Path) -> None:
    old = trained("a", "b")
    path = Checkpoint(**old, shared=[old["model"].a]).save(tmp_path / "c")

    def renamed(name: str) -> str:
        if name == "model/b":
            return "net/last"
        first, _, rest = name.partition("/")
        return "/".join(filter(None, [{"adam": "optimizer", "model": "net/inner"}.get(first, first), rest]))

    renames: tuple[Any, ...] = ({"model": "net/inner", "model/b": "net/last", "adam": "optimizer"}, renamed)
    for rename in renames:
        net = SimpleNamespace(inner=SimpleNamespace(a=variable(np.zeros(3))), last=variable(np.zeros(3)))
        adam = Adam(0.1)
        adam.build([net.last, net.inner.a])
        one = Checkpoint(net=net, optimizer=adam, shared=[net.inner.a])
        one.restore(path, rename=rename).assert_consumed()
        np.testing.assert_array_equal(net.inner.a.numpy(), old["model"].a.numpy())
        np.testing.assert_array_equal(net.last.numpy(), old["model"].b.numpy())
        assert slot(adam, "velocity", net.inner.a) == slot(old["adam"], "velocity", old["model"].a)
        assert one.save_counter == 1
    # Into an object, and out of it.
    whole = Checkpoint(all=SimpleNamespace(model=SimpleNamespace(a=variable(np.zeros(3)))))
    whole.read(path, rename={"": "all"})
    assert whole.all.model.a.numpy().any()
    lifted = Checkpoint(a=variable(np.zeros(3)))
    lifted.read(path, rename={"model": ""}, only="a").assert_consumed()
    assert lifted.a.numpy().any()


@pytest.mark.parametrize(("choice", "kind", "text"), [
    ({"rename": {"models": "net"}}, CheckpointError, "`rename`: the checkpoint has nothing at 'models'; it has"),
    ({"rename": {"model/a": "model/b"}}, CheckpointError, "one path in the program, 'model/b'"),
    ({"rename": 3}, TypeError, "`rename` must be a dictionary"), ({"rename": {1: "a"}}, TypeError, "`rename` must be"),
    ({"rename": lambda path: 3}, TypeError, "`rename` must return a path or None"),
    ({"only": "models"}, CheckpointError, "`only`: the checkpoint has nothing at 'models'"),
    ({"only": [1]}, TypeError, "`only` must be"), ({"partial": 3}, TypeError, "`partial` must be True or False"),
    ({"cast": None}, TypeError, "`cast` must be True or False"),
])
def test_a_choice_that_makes_no_sense_is_an_error(
    choice: Any, kind: type[Exception], text: str, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(**trained("a", "b"))
    with CheckpointManager(checkpoint, tmp_path, 2) as manager:
        path = str(manager.save())
        before = checkpoint.model.a.numpy().copy()
        checkpoint.model.a.assign_add(np.ones(3, "f4"))
        for act in (checkpoint.restore, checkpoint.read, lambda _, **more: manager.restore_or_initialize(**more)):
            with pytest.raises(kind, match=text):
                act(path, **choice)
        np.testing.assert_array_equal(checkpoint.model.a.numpy(), before + 1)
        assert manager.save()


def test_only_a_part_is_touched(tmp_path: Path) -> None:
    old = trained("a", "b")
    path = Checkpoint(**old).save(tmp_path / "c")
    new = trained("a", "b")
    for one in vars(new["model"]).values():
        one.assign(np.full(3, 9.0))
    checkpoint = Checkpoint(**new, extra=variable([5.0]))
    checkpoint.restore(path, only=["model/a"]).assert_consumed()
    assert (new["model"].a.numpy()[0], new["model"].b.numpy()[0]) == (old["model"].a.numpy()[0], 9.0)
    assert checkpoint.save_counter == 0
    checkpoint.restore(path, only=["model", "save_counter"]).assert_consumed()
    assert (new["model"].b.numpy()[0], checkpoint.save_counter) == (old["model"].b.numpy()[0], 1)
    with CheckpointManager(checkpoint, tmp_path / "m", 2) as manager:
        manager.save()
        new["model"].a.assign(np.zeros(3))
        new["model"].b.assign(np.zeros(3))
        manager.restore_or_initialize(only="model/b")
        assert (new["model"].a.numpy()[0], new["model"].b.numpy()[0]) == (0.0, old["model"].b.numpy()[0])


KINDS = ["i1", "i8", "u2", "u8", "f2", "f4", "f8", "c8", "b1"]


@settings(max_examples=amount(40, 1000))
@example(saved="i8", wanted="i1", values=[3, 200])
@example(saved="i8", wanted="u2", values=[3, 200])
@given(saved=st.sampled_from(KINDS), wanted=st.sampled_from(KINDS), values=st.lists(st.integers(0, 300), max_size=4))
def test_numbers_are_converted_or_refused(
    tmp_path_factory: pytest.TempPathFactory, saved: str, wanted: str, values: list[int]
) -> None:
    array = np.array(values, "f8").astype(saved) if saved != "i1" else np.array([one % 100 for one in values], saved)
    path = Checkpoint(v=create_variable(ARENA, array)).write(tmp_path_factory.getbasetemp() / "c")
    one = Checkpoint(v=create_variable(ARENA, np.zeros(len(values), wanted)))
    ranks = ["b", "iu", "f", "c"]
    place = [next(n for n, kinds in enumerate(ranks) if np.dtype(kind).kind in kinds) for kind in (saved, wanted)]
    is_int = np.dtype(wanted).kind in "iu" and np.dtype(saved).kind in "iu"
    fits = not is_int or not values or int(array.max()) <= np.iinfo(wanted).max
    if saved != wanted:
        with pytest.raises(CheckpointError, match=f"'v' has dtype {np.dtype(wanted)}, but {np.dtype(saved)} was saved"):
            one.read(path)
    if place[0] > place[1] or not fits:
        with pytest.raises(CheckpointError, match="was saved"):
            one.read(path, cast=True)
        assert not one.v.numpy().any()
    else:
        one.read(path, cast=True).assert_consumed()
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(one.v.numpy(), array.astype(wanted))


def test_an_optimizer_continues_in_another_precision(tmp_path: Path) -> None:
    old = trained("a")
    path = Checkpoint(**old).write(tmp_path / "c")
    model = SimpleNamespace(a=create_variable(STRATEGY.arena, np.zeros(3, "f8")))
    adam = Adam(0.1)
    adam.build([model.a])
    checkpoint = Checkpoint(model=model, adam=adam)
    with pytest.raises(CheckpointError, match=r"dtype float64, but float32 was saved.*`cast=True` converts"):
        checkpoint.read(path)
    checkpoint.read(path, cast=True).assert_consumed()
    assert model.a.numpy().tolist() == old["model"].a.numpy().tolist()
    assert slot(adam, "velocity", model.a) == slot(old["adam"], "velocity", old["model"].a)


def test_what_comes_late_is_chosen_like_the_rest(tmp_path: Path) -> None:
    path = Checkpoint(m={"x": variable([1.0, 2.0]), "y": variable([3.0])}).write(tmp_path / "c")
    late = SimpleNamespace()
    status = Checkpoint(n=late).read(path, rename={"m": "n"}, partial=True, cast=True)
    late.x, late.y = create_variable(ARENA, np.zeros(2)), create_variable(ARENA, np.zeros(2))
    status.restore_new()
    assert (late.x.numpy().tolist(), late.y.numpy().tolist()) == ([1.0, 2.0], [0.0, 0.0])
    with pytest.raises(AssertionError, match="'n/y' has shape"):
        status.assert_consumed()
