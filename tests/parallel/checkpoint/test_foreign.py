"""Objects of registered classes: saved, looked at from outside, and restored in part and on other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.checkpoint.walk import registered
from mpidist.comm.group.communicator import Communicator

pytestmark = pytest.mark.mpi


class Foreign:
    """An object of another library, with a state of all kinds of values."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree = tree


@pytest.fixture
def kind() -> Iterator[type[Foreign]]:
    def load(one: Foreign, saved: Any) -> None:
        if saved.keys() != one.tree.keys():
            raise RuntimeError(f"unexpected keys {sorted(saved)}")
        one.tree = saved

    mpidist.checkpoint.register(Foreign, lambda one: one.tree, load)
    yield Foreign
    del registered.KINDS[Foreign]


def test_foreign_objects_are_saved_shown_and_restored_in_part(
    communicator: Communicator, mpi_tmp_path: Path, kind: type[Foreign]
) -> None:
    rank, size = communicator.rank, communicator.size
    each = mpidist.checkpoint.PerReplica
    with mpidist.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        tree = {
            "0.weight": np.arange(3.0), "0.bias": np.ones(2, "f4"), "note": "größe", "raw": b"\0\1", "nothing": None,
            "buffer": each(np.full(2, float(rank))), "old": np.zeros(4),
        }
        path = mpidist.Checkpoint(net=kind(tree)).save(mpi_tmp_path / "c")
        shown = dict(mpidist.list_variables(path))
        assert shown["net/buffer"] == [size, 2]
        assert mpidist.checkpoint.verify(path) > 0
        assert mpidist.load_variable(path, "net/buffer").tolist() == [[float(r)] * 2 for r in range(size)]
        assert [mpidist.load_variable(path, f"net/{one}") for one in ("note", "raw", "nothing")] == [
            "größe", b"\0\1", None
        ]
        whole = kind(dict.fromkeys(tree))
        mpidist.Checkpoint(net=whole).restore(path).assert_consumed()
        assert (whole.tree["note"], whole.tree["raw"], whole.tree["nothing"]) == ("größe", b"\0\1", None)
        assert whole.tree["buffer"].value.tolist() == [float(rank)] * 2
        # One entry more, one less, one of another shape.
        part = kind({
            "0.weight": np.zeros(3), "0.bias": np.zeros(5, "f4"), "note": "", "raw": b"", "nothing": 3,
            "buffer": each(np.zeros(2)), "new": np.full(2, 7.0),
        })
        checkpoint = mpidist.Checkpoint(net=part)
        with pytest.raises(mpidist.errors.CheckpointError, match="unexpected keys"):
            checkpoint.restore(path)
        with pytest.raises(AssertionError, match=r"'net/0.bias': it has shape \(5,\), but \(2,\) was saved"):
            checkpoint.restore(path, partial=True).assert_existing_objects_matched()
        assert part.tree["0.weight"].tolist() == [0.0, 1.0, 2.0]
        assert (part.tree["0.bias"].tolist(), part.tree["new"].tolist()) == ([0.0] * 5, [7.0] * 2)
        assert part.tree["buffer"].value.tolist() == [float(rank)] * 2
        assert checkpoint.save(mpi_tmp_path / "c")
