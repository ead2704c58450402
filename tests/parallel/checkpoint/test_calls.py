"""The way of a save through the package: how many functions it enters, in how many rounds the ranks agree."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.comm.group.communicator import Communicator
from mpidist.optimizers.families.adam import Adam
from mpidist.variables.making.creation import create_variable
from tests.helpers.amounts import amount
from tests.helpers.calls import calls_of
from tests.helpers.strategies import ArenaStrategy

pytestmark = pytest.mark.mpi

CALLS = "recorder/calls.py"
WALK = ("checkpoint/walk/objects.py", "walk")
# Each is one round of messages between the ranks.
ROUNDS = {"all_gather_object", "all_reduce_max", "barrier", "broadcast_object", "gather_object"}


def trained(communicator: Communicator) -> dict[str, Any]:
    """Two variables and an Adam that has made a step."""
    strategy = ArenaStrategy(communicator)
    a, b = create_variable(strategy.arena, np.zeros(100, "f4")), create_variable(strategy.arena, np.zeros(10, "f4"))
    adam = Adam(0.1)
    gradients = [(np.ones(100, "f4"), a), (np.ones(10, "f4"), b)]
    strategy.run(lambda: adam.apply_gradients(gradients))
    return {"a": a, "b": b, "adam": adam}


def rounds(calls: list[tuple[str, str]]) -> int:
    # The communicator of one rank sends nothing.
    return sum(
        file.startswith("comm/") and file != "comm/group/solo.py" and function in ROUNDS for file, function in calls
    )


def meetings(calls: list[tuple[str, str]]) -> int:
    """Rounds of messages, and barriers of the ranks of one node."""
    barriers = ("comm/memory/node_barrier.py", "__call__"), ("comm/memory/tree_barrier.py", "__call__")
    return rounds(calls) + sum(map(calls.count, barriers))


def test_a_save_enters_few_functions_and_stays_in_a_file(communicator: Communicator, mpi_tmp_path: Path) -> None:
    checkpoint = Checkpoint(**trained(communicator))
    checkpoint.save(mpi_tmp_path / "c")
    # Calls note themselves there; it is not on the way.
    calls = [one for one in calls_of(lambda: checkpoint.save(mpi_tmp_path / "c")) if one[0] != CALLS]
    moves = sum(one[0] != other[0] for one, other in itertools.pairwise(calls))
    assert WALK in calls
    # A third of them look after the directory: its lock, and the state file, which others may have written, too.
    assert len(set(calls)) <= 81, sorted(set(calls))
    assert moves <= 123, moves


def test_the_ranks_agree_in_few_rounds(communicator: Communicator, mpi_tmp_path: Path) -> None:
    checkpoint = Checkpoint(**trained(communicator))
    checkpoint.save(mpi_tmp_path / "c")
    several = communicator.size > 1
    # What is saved, the new file, the shares on the disk, the file's name together with the state file.
    assert rounds(calls_of(lambda: checkpoint.save(mpi_tmp_path / "c"))) == 4 * several
    with CheckpointManager(checkpoint, mpi_tmp_path, 2) as manager:
        manager.save()
        # And before these, whether to save at all.
        assert rounds(calls_of(manager.save)) == 5 * several


@pytest.mark.parametrize("kind", ["mirrored", "replicas", "optimizer"])
def test_the_ranks_meet_as_often_for_many_variables_as_for_few(
    communicator: Communicator, mpi_tmp_path: Path, kind: str
) -> None:
    """What the number of variables decides is read and written between meetings, and not in them."""
    arena = ArenaStrategy(communicator).arena
    counted = []
    # Of 200 and more the file has the places, too.
    for number in (10, amount(250, 1000) if kind == "mirrored" else 100):
        options: Any = {"synchronization": "ON_READ"} if kind == "replicas" else {}
        variables = [create_variable(arena, np.full(3, i, "f4"), **options) for i in range(number)]
        # Each has three paths.
        objects: dict[str, Any] = {"a": variables, "b": list(variables), "c": list(variables)}
        if kind == "optimizer":
            objects["adam"] = Adam(0.1)
            objects["adam"].build(variables)
        checkpoint = Checkpoint(**objects)
        path = checkpoint.write(mpi_tmp_path / f"c{number}")
        acts = (lambda: checkpoint.write(mpi_tmp_path / "c"), lambda: checkpoint.read(path))  # noqa: B023
        counted.append([meetings(calls_of(act)) for act in acts])
    assert counted[0] == counted[1]
    # What is saved, the new file, the shares on the disk, the name. The structure, the file, what is restored, the end.
    if kind == "mirrored" and communicator.size > 1:
        assert counted[0][0] == 4
        assert counted[0][1] <= 6


def test_the_objects_are_walked_once(communicator: Communicator, mpi_tmp_path: Path) -> None:
    objects = trained(communicator)
    checkpoint = Checkpoint(**objects)
    path = checkpoint.save(mpi_tmp_path / "c")
    with CheckpointManager(checkpoint, mpi_tmp_path, 2) as manager:
        for act in (
            lambda: checkpoint.save(mpi_tmp_path / "c"), lambda: checkpoint.write(mpi_tmp_path / "w"), manager.save,
            lambda: checkpoint.restore(path), lambda: checkpoint.read(path), manager.restore_or_initialize,
        ):
            assert calls_of(act).count(WALK) == 1


def test_what_waits_is_restored_in_one_walk(communicator: Communicator, mpi_tmp_path: Path) -> None:
    objects = trained(communicator)
    arena = objects["a"].arena
    path = Checkpoint(m=SimpleNamespace(x=create_variable(arena, 1.0)), **objects).write(mpi_tmp_path / "c")
    late = SimpleNamespace()
    waiting = Checkpoint(m=late, **objects)
    status = waiting.read(path)
    assert waiting.pending is status
    late.x = create_variable(arena, 0.0)
    assert calls_of(status.restore_new).count(WALK) == 1
    assert late.x.numpy() == 1.0
    assert waiting.pending is None
