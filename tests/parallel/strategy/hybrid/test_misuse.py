"""What programs do wrong, or do with several strategies at once: one error on every rank, and no wrong number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError
from mpidist.optimizers import SGD
from tests.parallel.strategy.hybrid.making import make_hybrid
from tests.parallel.strategy.hybrid.test_training import same_everywhere
from tests.parallel.strategy.tpu.making import make_tpu

pytestmark = pytest.mark.mpi(min_size=2)


def everywhere(communicator: Communicator, error: BaseException) -> str:
    """The text of an error, which is the same on all ranks."""
    assert len(set(communicator.all_gather_object(str(error)))) == 1
    return str(error)


def step(optimizer: Any, variable: Any, gradient: float) -> None:
    optimizer.apply_gradients([(np.full(variable.value().shape, gradient), variable)])


def test_ranks_that_make_other_strategies_are_one_error(communicator: Communicator) -> None:
    rank, size = communicator.rank, communicator.size
    each = [[one] for one in range(size)]
    # On one rank only, or different ones; in turn what is wrong and what is not the same.
    given: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ValueError, "rank 0 twice", [*each, [0]] if rank else each, {}),
        (ValueError, f"divide the number of ranks, {size}, .* got {size + 1}", size + 1 if rank else 1, {}),
        (TypeError, "a list of lists of ranks, got the element 0", [0, 1] if rank == size - 1 else each, {}),
        (ValueError, "every", 1, {"every": rank - 1}),
        (ValueError, "linear momentum, got Adam", 1, {"outer": None if rank else mpidist.optimizers.Adam()}),
        (MismatchError, r"\(groups, settings\) must be the same", each if rank else 1, {}),
        (MismatchError, r"\(groups, settings\) must be the same", 1, {"every": rank + 1}),
        (MismatchError, r"\(groups, settings\) must be the same", 1, {"outer": SGD(0.5 + rank)}),
        (MismatchError, r"\(groups, settings\) must be the same", 1, {"synchronous": rank == 0}),
    ]
    for error, match, groups, arguments in given:
        with pytest.raises(error, match=match) as caught:
            mpidist.HybridStrategy(groups, **arguments)
        everywhere(communicator, caught.value)
    with mpidist.HybridStrategy(each) as strategy:
        assert strategy.num_replicas_in_sync == 1


def test_strategies_side_by_side_do_not_meet_each_other(communicator: Communicator) -> None:
    size = communicator.size
    with (
        make_hybrid(communicator, every=2, outer=SGD(1.0)) as halves,
        make_hybrid(communicator, groups=[[rank] for rank in range(size)], every=1, outer=SGD(1.0)) as each,
        make_tpu(communicator) as replicas,
    ):
        made: list[tuple[Any, Any, Any]] = []
        for strategy in (halves, each, replicas):
            with strategy.scope():
                made.append((strategy, mpidist.Variable(np.zeros(3)), SGD(1.0)))
        for number in range(4):
            # Each time another one is first, and one of them is not there at all.
            for strategy, variable, optimizer in made[number % 3 :] + made[: max(0, number % 3 - 1)]:
                share = 1 / strategy.num_replicas_in_sync
                strategy.run(step, (optimizer, variable, share))
        for strategy in (each, halves):
            strategy.finish()
        trained = [same_everywhere(communicator, one.numpy())[0] for _, one, _ in made]
        np.testing.assert_allclose(trained, [-3, -3, -4], rtol=1e-12)
        (_, first, first_optimizer), (_, second, _), _ = made
        for other in (second, made[2][1]):
            with pytest.raises(ValueError, match="was not built on variable"):
                halves.run(lambda v=other: first_optimizer.apply_gradients([(np.zeros(3), first), (np.zeros(3), v)]))


def test_groups_that_meet_for_different_things_are_told(communicator: Communicator, mpi_tmp_path: Path) -> None:
    with make_hybrid(communicator, every=2, outer=SGD(1.0)) as strategy:
        with strategy.scope():
            variable, optimizer = mpidist.Variable(np.zeros(3)), SGD(1.0)
        checkpoint = mpidist.Checkpoint(variable=variable)
        calls: dict[str, Any] = {"finish": strategy.finish, "save": lambda: checkpoint.save(mpi_tmp_path / "c")}
        strategy.run(step, (optimizer, variable, 1 / strategy.num_replicas_in_sync))
        met = "must meet for the same thing, got 'finish' in group 0; 'saving a checkpoint' in group 1"
        with pytest.raises(MismatchError, match=met) as caught:
            calls["save" if strategy.group_index else "finish"]()
        assert everywhere(communicator, caught.value).startswith("HybridStrategy: groups must meet")
        # All have left the same meeting, and meet again.
        for call in calls.values():
            call()
        assert same_everywhere(communicator, variable.numpy()).tolist() == [-1, -1, -1]
        assert communicator.all_reduce_max(len([*mpi_tmp_path.glob("*.h5")])) == 1


def test_logical_devices_that_go_different_ways_are_told(communicator: Communicator) -> None:
    with make_tpu(communicator) as strategy:
        device = strategy.logical_devices.device

        def mine(name: str, *arguments: Any) -> Any:
            return getattr(mpidist.get_replica_context(), f"logical_{name}")(*arguments)

        three = np.ones(3)
        for other in (("all_gather", three, 0), ("all_reduce", "MAX", three), ("all_reduce", "SUM", np.ones(4))):
            call = other if device else ("all_reduce", "SUM", three)
            with pytest.raises(MismatchError, match="must be the same on all ranks"):
                strategy.run(mine, call)
        assert strategy.run(mine, ("all_reduce", "SUM", 1)) == strategy.logical_devices.count
