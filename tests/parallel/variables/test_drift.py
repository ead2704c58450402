"""The drift check names the variable, the ranks and the first step, wherever copies can differ."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError, is_shared
from mpidist.variables.kinds.mirrored import MirroredVariable
from tests.parallel.layouts import LAYOUTS, make_strategy

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_copies_are_fine(communicator: Communicator, layout: str) -> None:
    strategy = make_strategy(communicator, layout, check=True)
    with strategy.scope():
        v = mpidist.Variable([1.0, 2.0], aggregation="SUM")
        local = mpidist.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        optimizer = mpidist.optimizers.SGD(0.1)
    rank = strategy.communicator.rank

    def step() -> None:
        optimizer.apply_gradients([(np.full(2, rank, "float32"), v)])
        v.assign_add([1.0, rank])
        local.assign(float(rank))

    for _ in range(3):
        strategy.run(step)


@pytest.mark.parametrize("layout", ["private", "each"])
def test_the_culprit_is_named(communicator: Communicator, layout: str) -> None:
    strategy = make_strategy(communicator, layout, check=True)
    with strategy.scope():
        kept = mpidist.Variable(np.zeros(3), name="kept")
        drifting = mpidist.Variable(np.zeros(3), name="drifting")
    assert isinstance(drifting, MirroredVariable)
    odd = strategy.communicator.rank == strategy.communicator.size - 1

    def write_behind_its_back() -> None:
        drifting.address.writable[:] = 7 if odd else 5

    strategy.run(kept.numpy)
    others = strategy.communicator.size - 2
    rest = "rank 0" if others == 0 else f"ranks 0-{others}"
    for step in (2, 3):
        with pytest.raises(MismatchError, match="variables") as caught:
            strategy.run(write_behind_its_back if step == 2 else kept.numpy)
        text = str(caught.value)
        assert f"after step {step} (call of `run`)" in text
        assert "variable 'drifting', first seen after step 2: checksum" in text
        assert f"on {rest}; checksum" in text
        assert f"on rank {strategy.communicator.size - 1}" in text
        assert "kept" not in text
        assert is_shared(caught.value)
    drifting.assign(np.ones(3))
    strategy.run(kept.numpy)
    with pytest.raises(MismatchError, match="variable 'drifting', first seen after step 5: checksum"):
        strategy.run(write_behind_its_back)


@pytest.mark.mpi(min_size=3)
def test_a_node_counts_as_one_copy(communicator: Communicator) -> None:
    strategy = make_strategy(communicator, "first", check=True)
    with strategy.scope():
        v = mpidist.Variable(np.zeros(3), name="v")
    assert isinstance(v, MirroredVariable)
    if not v.address.slab.is_shared:
        pytest.skip("no node memory here")
    if strategy.communicator.rank == 1:
        v.address.writable[:] = 4
    strategy.communicator.barrier()
    with pytest.raises(MismatchError, match=rf"on rank 0; checksum .* on ranks 1-{strategy.communicator.size - 1}"):
        strategy.run(lambda: None)


def test_variables_that_some_ranks_dropped_are_left_out(communicator: Communicator) -> None:
    strategy = make_strategy(communicator, "private", check=True)
    with strategy.scope():
        variables = [mpidist.Variable(float(i), name="kept" if i == 0 else "dropped") for i in range(4)]
    odd = strategy.communicator.rank == strategy.communicator.size - 1
    for variable in variables:
        assert isinstance(variable, MirroredVariable)
        if odd and variable is not variables[0]:
            variable.address.writable[:] = 9
    del variable
    if strategy.communicator.rank == 0:
        del variables[1:]
        gc.collect()
    assert strategy.run(lambda: 5) == 5, "rank 0 holds the first alone, which is the same on all"
    first = variables[0]
    assert isinstance(first, MirroredVariable)
    first.address.writable[:] = 7 if odd else 0
    if strategy.communicator.size > 1:
        with pytest.raises(MismatchError, match=r"variable 'kept', first seen after step 2"):
            strategy.run(lambda: None)


def test_without_the_option_nothing_is_compared(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIDIST_CHECK", raising=False)
    strategy = make_strategy(communicator, "private")
    with strategy.scope():
        v = mpidist.Variable(0.0)
    assert isinstance(v, MirroredVariable)
    v.address.writable[:] = strategy.communicator.rank
    assert strategy.run(v.numpy) == strategy.communicator.rank


def test_one_rank_may_ask_for_all(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_CHECK", "1" if communicator.rank == 1 else "0")
    strategy = make_strategy(communicator, "private")
    with strategy.scope():
        v = mpidist.Variable(0.0, name="v")
    assert isinstance(v, MirroredVariable)
    v.address.writable[:] = strategy.communicator.rank
    with pytest.raises(MismatchError, match="variable 'v', first seen after step 1"):
        strategy.run(lambda: None)
