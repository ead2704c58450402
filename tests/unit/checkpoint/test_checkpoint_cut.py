"""Checkpoints of served variables in one process: of any size, and of what changes while the file is made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.checkpoint import server_snapshot, transfer
from mpidist.checkpoint.file.layout import PAGE_BYTES
from mpidist.parameter_server.options import ServerOptions
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.variables.making.partitioners import FixedShardsPartitioner

PAGE = PAGE_BYTES // 4


@pytest.fixture(params=[1, 3])
def strategy(request: pytest.FixtureRequest) -> Iterator[ParameterServerStrategy]:
    """With whole variables, and with variables of three shards."""
    partitioner = FixedShardsPartitioner(request.param) if request.param > 1 else None
    with ParameterServerStrategy(
        variable_partitioner=partitioner, options=ServerOptions(heap_bytes=1 << 22)
    ) as strategy:
        yield strategy


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE])
def test_a_variable_about_as_large_as_a_page_comes_back(
    strategy: ParameterServerStrategy, tmp_path: Path, size: int
) -> None:
    content = np.arange(size, dtype="float32")
    with strategy.scope():
        variable, beside = mpidist.Variable(content), mpidist.Variable(np.ones(3))
    checkpoint = mpidist.Checkpoint(variable=variable, beside=beside)
    path = checkpoint.save(tmp_path / "c")
    variable.assign(np.full(size, -1, "float32"))
    beside.assign(np.zeros(3))
    checkpoint.restore(path).assert_consumed()
    assert variable.numpy().tolist() == content.tolist()
    assert beside.numpy().tolist() == [1.0] * 3


class Box(mpidist.Module):
    """Two variables, and a second name of one of them."""

    def __init__(self) -> None:
        self.first, self.second = (mpidist.Variable(np.full(3, value)) for value in (1.0, 2.0))
        self.third = self.first


def test_a_name_that_changes_while_the_file_is_made_is_saved_as_it_is_then(
    strategy: ParameterServerStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The datasets are the same ones; another name belongs to them."""
    with strategy.scope():
        box = Box()
    create = transfer.create_blank

    def change_meanwhile(*arguments: Any) -> Any:
        blank = create(*arguments)
        box.third = box.second
        return blank

    monkeypatch.setattr(server_snapshot, "create_blank", change_meanwhile)
    path = mpidist.Checkpoint(box=box).save(tmp_path / "c")
    other = Box()
    other.third = mpidist.Variable(np.zeros(3))
    mpidist.Checkpoint(box=other).restore(path)
    assert [float(one.numpy()[0]) for one in (other.first, other.second, other.third)] == [1.0, 2.0, 2.0]
    assert [one.name for one in tmp_path.iterdir() if one.suffix == ".h5"] == ["c-1.h5"]
