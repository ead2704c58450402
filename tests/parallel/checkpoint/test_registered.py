"""Checkpoints of foreign objects, whose adapters register what is saved of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import context
from mpidist.checkpoint.walk.registered import KINDS, PerReplica, register
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError, MismatchError
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import make_strategy

pytestmark = pytest.mark.mpi


class Foreign:
    """A model of a framework: nothing of it is known."""

    def __init__(self, value: float = 0.0, own: int = 0) -> None:
        self.weights = np.full((2, 3), value)
        self.own = own
        self.steps = int(value)
        self.loaded: Any = None


def save(one: Foreign) -> dict[str, Any]:
    state: dict[str, Any] = {
        "weights": one.weights, "inner": {"steps": one.steps, "name": "foreign", "bytes": b"\0x", "nothing": None}
    }
    return {**state, "own": PerReplica(one.own), "seeds": PerReplica(np.arange(3) + one.own), "list": [1.5, 2]}


def load(one: Foreign, saved: Any) -> None:
    one.loaded = saved
    one.weights = saved["weights"]
    one.own = int(saved["own"].value)
    one.steps = int(saved["inner"]["steps"])


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(KINDS)
    KINDS.clear()
    # Without those that other tests of this process have left open.
    monkeypatch.setattr(context, "_made", weakref.WeakSet())
    yield
    KINDS.clear()
    KINDS.update(before)


@pytest.fixture(params=["node", "private", "first"])
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> Iterator[ArenaStrategy]:
    with make_strategy(communicator, request.param) as made:
        yield made


@pytest.fixture
def directory(communicator: Communicator, tmp_path: Path) -> Path:
    return communicator.broadcast_object(tmp_path)


def test_a_foreign_object_comes_back(strategy: ArenaStrategy, directory: Path) -> None:
    class Derived(Foreign):
        pass

    register(Foreign, save, load)
    ranks = strategy.communicator
    path = mpidist.Checkpoint(model=Derived(4.0, 10 + ranks.rank)).write(directory / "one")
    new = Derived()
    mpidist.Checkpoint(model=new).read(path).assert_consumed()
    assert (new.weights.tolist(), new.own, new.steps) == ([[4.0] * 3] * 2, 10 + ranks.rank, 4)
    assert (new.loaded["inner"]["name"], new.loaded["inner"]["bytes"]) == ("foreign", b"\0x")
    assert new.loaded["inner"]["nothing"] is None
    assert [int(one) for one in new.loaded["own"].values] == [10 + r for r in range(ranks.size)]
    assert new.loaded["seeds"].value.tolist() == [10 + ranks.rank, 11 + ranks.rank, 12 + ranks.rank]
    assert {name: float(one) for name, one in new.loaded["list"].items()} == {"0": 1.5, "1": 2.0}
    # Beside variables, and of the same ranks.
    with strategy.scope():
        variable: Any = mpidist.Variable(np.ones(3))
    both = mpidist.Checkpoint(model=new, variable=variable).write(directory / "both")
    variable.assign(np.zeros(3))
    mpidist.Checkpoint(model=new, variable=variable).read(both).assert_consumed()
    assert variable.numpy().tolist() == [1, 1, 1]


@pytest.mark.mpi(min_size=2)
def test_another_number_of_ranks_gets_all_values(communicator: Communicator, directory: Path) -> None:
    register(Foreign, save, load)
    with make_strategy(communicator, "node"):
        path = mpidist.Checkpoint(model=Foreign(1.0, communicator.rank)).write(directory / "all")
    count = communicator.size - 1
    part = communicator.split(int(communicator.rank >= count))
    with make_strategy(part, "node"):
        new = Foreign()
        mpidist.Checkpoint(model=new).read(path).assert_consumed()
        assert new.own == part.rank
        assert [int(one) for one in new.loaded["own"].values] == list(range(communicator.size))
    part.close()


@pytest.mark.mpi(min_size=2)
def test_what_differs_between_ranks_is_refused(strategy: ArenaStrategy, directory: Path) -> None:
    rank = strategy.communicator.rank
    register(Foreign, lambda one: {"weights": one.weights}, load)
    with pytest.raises(MismatchError, match=r"'model/weights' of shape .* with the content of checksum"):
        mpidist.Checkpoint(model=Foreign(rank)).write(directory / "differs")
    register(Foreign, lambda one: {"own": PerReplica(np.zeros(one.own))}, load)
    with pytest.raises(MismatchError, match="'model/own' of shape"):
        mpidist.Checkpoint(model=Foreign(0.0, rank + 1)).write(directory / "differs")
    register(Foreign, lambda one: {"own": PerReplica("text")}, load)
    with pytest.raises(ValueError, match="PerReplica: expected a number or an array of numbers, got 'text'"):
        mpidist.Checkpoint(model=Foreign()).write(directory / "text")
    register(Foreign, save, lambda _one, saved: saved["nothing"])
    path = mpidist.Checkpoint(model=Foreign()).write(directory / "wrong")
    with pytest.raises(CheckpointError, match="'model' a state that its RegisteredState cannot load: KeyError"):
        mpidist.Checkpoint(model=Foreign()).read(path)


def test_the_strategy_of_a_foreign_object(communicator: Communicator, directory: Path) -> None:
    register(Foreign, save, load)
    with make_strategy(communicator, "node") as first, make_strategy(communicator, "private"):
        one = Foreign(1.0, communicator.rank)
        if communicator.size > 1:
            with pytest.raises(ValueError, match="2 strategies are open: it is unknown whose ranks"):
                mpidist.Checkpoint(model=one).write(directory / "two")
        with first.scope():
            mpidist.Checkpoint(model=one).write(directory / "scope")
        register(Foreign, save, load, group=lambda _: first)
        mpidist.Checkpoint(model=one).write(directory / "named")
    for name in ("kind", "state", "load_state", "group"):
        given: dict[str, Any] = {"kind": Foreign, "state": save, "load_state": load, "group": None, name: 3}
        with pytest.raises(TypeError, match=f"register: `{name}` must be"):
            register(**given)
