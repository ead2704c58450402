"""Whatever n ranks save, in the background or not, m ranks restore: random shapes, dtypes and kinds of variables."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.comm.group.communicator import Communicator
from mpidist.variables.kinds.sync_on_read import SyncOnReadVariable
from mpidist.variables.making.creation import create_variable
from mpidist.variables.variable import BaseVariable
from tests.helpers.amounts import amount
from tests.parallel.layouts import make_strategy

pytestmark = pytest.mark.mpi

KINDS: dict[str, dict[str, Any]] = {
    "mirrored": {}, "sum": {"synchronization": "ON_READ", "aggregation": "SUM"},
    "apart": {"synchronization": "ON_READ", "aggregation": "NONE"},
}


class Drawn(NamedTuple):
    """A variable."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: str

    def content(self, number: int, replica: int) -> npt.NDArray[Any]:
        return np.random.default_rng([number, replica]).integers(0, 8, self.shape).astype(self.dtype)


def draw_variable(draw: random.Random) -> Drawn:
    """Of nothing, of a few bytes, of pages, or of several pieces of the file."""
    shape: tuple[int, ...] = draw.choice([
        (), (0,), (draw.randrange(1, 9),), (draw.randrange(1, 40), 3, draw.randrange(1, 40)),
        (draw.randrange(500, 600_000),),
    ])
    dtype = np.dtype(draw.choice(["?", "i1", "u2", "i4", "i8", "f2", "f4", "f8", "c8"]))
    # Sums of booleans are none, and those of halves are rounded.
    kind = draw.choice(["mirrored", "apart", "sum" if dtype in ("i4", "i8", "f4", "f8") else "mirrored"])
    return Drawn(shape, dtype, kind)


def on_some(
    communicator: Communicator, layout: str, drawn: list[Drawn], act: Callable[[Communicator, list[BaseVariable]], None]
) -> None:
    """Make the variables, and call `act`, on the first ranks, or on all over a layout."""
    count = int(layout) if layout.isdecimal() else communicator.size
    group = communicator.split(int(communicator.rank >= count)) if layout.isdecimal() else communicator
    if communicator.rank < count:
        with make_strategy(group, "node" if layout.isdecimal() else layout) as strategy:
            act(group, [create_variable(strategy.arena, np.zeros(v.shape, v.dtype), **KINDS[v.kind]) for v in drawn])
    if group is not communicator:
        group.close()
    communicator.barrier()


@pytest.mark.parametrize("seed", range(amount(3, 200)))
def test_what_some_ranks_save_others_restore(communicator: Communicator, mpi_tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    drawn = [draw_variable(draw) for _ in range(8)]
    # Some of the ranks, or all of them as nodes of some sizes.
    layouts = ["private", "pairs", "each", "last", *map(str, range(1, communicator.size + 1))]
    savers, readers = (draw.choice(layouts) for _ in range(2))
    background = draw.random() < 0.5

    def save(group: Communicator, variables: list[BaseVariable]) -> None:
        for number, (one, variable) in enumerate(zip(drawn, variables, strict=True)):
            if isinstance(variable, SyncOnReadVariable) and one.kind == "apart":
                variable.accumulate(one.content(number, group.rank))
            else:
                variable.assign(one.content(number, 0))
        checkpoint = Checkpoint(v=variables)
        checkpoint.write(mpi_tmp_path / "c", background=background)
        checkpoint.sync()
        counts.append(group.size)

    def restore(group: Communicator, variables: list[BaseVariable]) -> None:
        Checkpoint(v=variables).read(mpi_tmp_path / "c").assert_consumed()
        for number, (one, variable) in enumerate(zip(drawn, variables, strict=True)):
            is_apart = isinstance(variable, SyncOnReadVariable) and one.kind == "apart"
            found = variable.component if isinstance(variable, SyncOnReadVariable) and is_apart else variable.numpy()
            expected = one.content(number, group.rank % counts[0] if is_apart else 0)
            np.testing.assert_array_equal(found, expected, str((savers, readers, number, one)))

    counts: list[int] = []
    on_some(communicator, savers, drawn, save)
    counts = [communicator.broadcast_object(counts[0] if counts else 0)]
    on_some(communicator, readers, drawn, restore)
