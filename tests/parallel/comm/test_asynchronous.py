"""Reductions in the background: the same results, in order, beside the program's own calls, and errors where waited."""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.calls import signature_page
from mpidist.comm.calls.order import CallOrder
from mpidist.comm.choice import selection
from mpidist.comm.collective import Collective
from mpidist.comm.cross_device.asynchronous import AsyncCollective, open_asynchronous
from mpidist.comm.cross_device.user_backend import CollectiveBackend
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.group.communication_thread import Handle, communication_thread
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CollectiveTimeoutError, MismatchError, is_shared
from mpidist.options import CommunicationOptions, ReduceOp
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import make_strategy

pytestmark = pytest.mark.mpi


@pytest.fixture(params=["thread", "at wait"])
def asynchronous(request: pytest.FixtureRequest, communicator: Communicator) -> AsyncCollective:
    collective = selection.choose(communicator, CommunicationOptions())
    if request.param == "at wait":
        return AsyncCollective(communicator, collective, has_thread=False)
    opened = open_asynchronous(collective)
    assert opened.has_thread == (communicator.size > 1)
    return opened


def total(communicator: Communicator, factor: float = 1.0) -> float:
    """The sum over ranks of factor * (rank + 1)."""
    return factor * communicator.size * (communicator.size + 1) / 2


@pytest.mark.parametrize("order", ["first to last", "last to first", "the last alone"])
def test_many_under_way(asynchronous: AsyncCollective, order: str) -> None:
    """Sizes on both sides of every backend's limits, while the program makes collective calls of its own."""
    communicator = asynchronous.communicator
    own = selection.choose(communicator, CommunicationOptions())
    sizes = [1, 0, 1000, 300_000, 7] * 6
    buckets = [np.full(size, (communicator.rank + 1) * number, np.float32) for number, size in enumerate(sizes)]
    handles = []
    for number, bucket in enumerate(buckets):
        handles.append(asynchronous.all_reduce_async(bucket))
        assert own.all_reduce(np.array([number]))[0] == number * communicator.size
    assert own.all_reduce(np.ones(300_000, np.float32)).sum() == 300_000 * communicator.size
    waited = handles[-1:] if order == "the last alone" else handles if order == "first to last" else handles[::-1]
    for handle in waited:
        handle.wait()
    # What was begun earlier is done, too.
    assert all(handle.done() for handle in handles)
    for number, (handle, bucket) in enumerate(zip(handles, buckets, strict=True)):
        assert handle.wait() is bucket
        np.testing.assert_array_equal(bucket, total(communicator, number))


def test_operations(asynchronous: AsyncCollective) -> None:
    communicator = asynchronous.communicator
    rank, size = communicator.rank, communicator.size
    array = np.arange(4) + rank
    mean = asynchronous.all_reduce_async(array, ReduceOp.MEAN, in_place=False)
    largest = asynchronous.all_reduce_async(array, ReduceOp.MAX, in_place=False)
    np.testing.assert_array_equal(mean.wait(), np.arange(4) + (size - 1) / 2)
    assert mean.wait().dtype == np.float64
    assert largest.wait().tolist() == (np.arange(4) + size - 1).tolist()
    assert array.tolist() == (np.arange(4) + rank).tolist()


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_arrays_of_other_libraries(asynchronous: AsyncCollective, library: str) -> None:
    pytest.importorskip(library.partition(".")[0], reason="takes arrays of that library")
    module: Any = importlib.import_module(library)
    size = asynchronous.communicator.size
    array = module.ones(5)
    new = asynchronous.all_reduce_async(array, in_place=False).wait()
    assert type(new) is type(array)
    assert new.tolist() == [size] * 5
    assert array.tolist() == [1] * 5
    if library == "torch":
        assert asynchronous.all_reduce_async(array, ReduceOp.MAX).wait() is array
        assert asynchronous.all_reduce_async(array).wait() is array
        assert array.tolist() == [size] * 5
    else:
        with pytest.raises(ValueError, match="writeable=False"):
            asynchronous.all_reduce_async(array)


def test_the_thread_works_while_the_program_does_not_call(communicator: Communicator) -> None:
    asynchronous = open_asynchronous(selection.choose(communicator, CommunicationOptions()))
    if not asynchronous.has_thread:
        pytest.skip("one rank has no thread")
    handle = asynchronous.all_reduce_async(np.ones(1 << 20, np.float32))
    while not handle.done():
        time.sleep(0.001)
    assert handle.wait()[0] == communicator.size


def test_without_a_thread_wait_does_the_work(communicator: Communicator) -> None:
    asynchronous = AsyncCollective(
        communicator, selection.choose(communicator, CommunicationOptions()), has_thread=False
    )
    first, second, third = (np.ones(3) for _ in range(3))
    handles = [asynchronous.all_reduce_async(array) for array in (first, second, third)]
    assert not any(handle.done() for handle in handles)
    handles[1].wait()
    assert [handle.done() for handle in handles] == [True, True, False]
    assert second.tolist() == [communicator.size] * 3
    assert third.tolist() == [1] * 3
    handles[2].wait()


def test_arguments_are_looked_at_at_once(asynchronous: AsyncCollective) -> None:
    with pytest.raises(TypeError, match="booleans"):
        asynchronous.all_reduce_async(np.array([True]))
    with pytest.raises(TypeError, match="MEAN of int64"):
        asynchronous.all_reduce_async(np.ones(2, np.int64), ReduceOp.MEAN)
    with pytest.raises(ValueError, match="C-contiguous"):
        asynchronous.all_reduce_async(np.ones((4, 4)).T[:2])
    with pytest.raises(TypeError, match="NoneType"):
        asynchronous.all_reduce_async(None)
    with pytest.raises(ValueError, match=r"writeable=False: pass in_place=False"):
        asynchronous.all_reduce_async(np.float32(1))
    assert asynchronous.all_reduce_async(np.float32(1), in_place=False).wait() == asynchronous.communicator.size
    assert asynchronous.all_reduce_async(np.ones(2)).wait().tolist() == [asynchronous.communicator.size] * 2


@pytest.mark.mpi(min_size=2)
def test_an_error_reaches_its_handle_and_all_later_ones(asynchronous: AsyncCollective) -> None:
    communicator = asynchronous.communicator
    good, bad = np.ones(2), np.ones(2 + communicator.rank)
    before = asynchronous.all_reduce_async(good)
    failing = asynchronous.all_reduce_async(bad)
    untouched = np.ones(3)
    later = asynchronous.all_reduce_async(untouched)
    assert before.wait().tolist() == [communicator.size] * 2
    for handle in (later, failing, later):
        with pytest.raises(MismatchError, match="shape and dtype") as caught:
            handle.wait()
        assert is_shared(caught.value)
    with pytest.raises(MismatchError, match="shape and dtype"):
        asynchronous.all_reduce_async(untouched).wait()
    assert untouched.tolist() == [1, 1, 1], "nothing is reduced after a failure"
    # Others go on.
    other = open_asynchronous(selection.choose(communicator, CommunicationOptions()))
    assert other.all_reduce_async(np.ones(1)).wait() == communicator.size


@pytest.mark.mpi(min_size=2)
def test_who_does_not_come_is_named(communicator: Communicator) -> None:
    options = CommunicationOptions(timeout_seconds=1)
    # What ranks begin is part of their order of calls, which is not the same any more.
    with communicator.split(0) as own:
        asynchronous = open_asynchronous(selection.choose(own, options), options)
        if own.rank != 1:
            handle = asynchronous.all_reduce_async(np.ones(4))
            with pytest.raises(CollectiveTimeoutError, match=r"rank 1 .* did not arrive"):
                handle.wait()
        communicator.barrier()


def test_one_thread_for_all(communicator: Communicator) -> None:
    collective = selection.choose(communicator, CommunicationOptions())
    several = [open_asynchronous(collective) for _ in range(3)]
    handles = [one.all_reduce_async(np.full(5, float(number))) for number, one in enumerate(several * 4)]
    for number, handle in enumerate(handles):
        assert handle.wait()[0] == number * communicator.size
    ours = [thread for thread in threading.enumerate() if thread.name == "mpidist-communication"]
    if communicator.size > 1:
        assert communication_thread() is communication_thread()
        assert len(ours) == 1


class _OwnCollective:
    """A user's collective, known by its methods only."""

    def __init__(self, collective: Collective) -> None:
        self.communicator = collective.communicator
        for name in ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier"):
            setattr(self, name, getattr(collective, name))


@pytest.mark.mpi(min_size=2)
def test_a_collective_of_the_users_is_not_shared_with_a_thread(
    communicator: Communicator, caplog: pytest.LogCaptureFixture
) -> None:
    options = CommunicationOptions()
    users: Any = _OwnCollective(selection.choose(communicator, options))
    asynchronous = open_asynchronous(CollectiveFront(CollectiveBackend(communicator, users), options))
    assert not asynchronous.has_thread
    assert ("its own way of communicating" in caplog.text) == (communicator.rank == 0)
    assert asynchronous.all_reduce_async(np.ones(2)).wait().tolist() == [communicator.size] * 2


def test_by_a_strategy(communicator: Communicator) -> None:
    strategy = make_strategy(communicator, "node")
    outside = strategy.extended.all_reduce_async("sum", np.ones(3))

    def step() -> Handle:
        return strategy.extended.all_reduce_async(mpidist.ReduceOp.MEAN, np.full(3, float(communicator.rank)))

    inside = strategy.run(step)
    assert strategy.reduce("SUM", 1.0, axis=None) == communicator.size
    assert outside.wait().tolist() == [communicator.size] * 3
    assert inside.wait().tolist() == [(communicator.size - 1) / 2] * 3
    with pytest.raises(ValueError, match="'median' is not a valid ReduceOp"):
        strategy.extended.all_reduce_async("median", np.ones(3))
    with make_strategy(communicator, "node").scope(), pytest.raises(RuntimeError, match="Mixing different"):
        strategy.extended.all_reduce_async("SUM", np.ones(3))


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_waits_outside_of_calls_does_not_take_it_for_another_call(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = ArenaStrategy(communicator)
    with strategy.scope():
        variable: Any = mpidist.Variable(np.zeros(3, "float32"))
        optimizer = mpidist.optimizers.SGD(1.0, use_ema=True)
    optimizer.apply_gradients([(np.ones(3, "float32"), variable)])
    # It shows itself in the page of the node.
    strategy.arena.collective.barrier()
    strategy.extended.all_reduce_async("SUM", np.ones(3)).wait()
    if communicator.rank == 0:
        # The others wait for this rank, and have looked long enough to take a difference for one that stays.
        while len(list(mpi_tmp_path.iterdir())) < communicator.size - 1:
            time.sleep(0.01)
    else:
        look, since = CallOrder.look, math.inf

        def look_long(order: CallOrder, has_met: Callable[[], bool]) -> None:
            nonlocal since
            look(order, has_met)
            since = min(since, time.monotonic())
            if time.monotonic() > since + 2 * signature_page._DIFFERENCE_SECONDS:
                (mpi_tmp_path / str(communicator.rank)).touch()

        monkeypatch.setattr(CallOrder, "look", look_long)
    optimizer.finalize_variable_values([variable])
    np.testing.assert_array_equal(variable.numpy(), -communicator.size)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("before", [0, 20], ids=["compared", "after the compared calls"])
@pytest.mark.parametrize("wrong", ["dtype", "nothing", "operation"])
def test_a_wrong_argument_on_one_rank_is_told_to_the_others(
    communicator: Communicator, before: int, wrong: str
) -> None:
    """Also where the program goes on there, and ends: the others do not wait for that."""
    strategy = make_strategy(communicator, "node")
    begin = strategy.extended.all_reduce_async
    for _ in range(1 + before):
        begin("SUM", np.ones(3)).wait()
    op, array = {
        "dtype": ("SUM", np.array([None, object()])), "nothing": ("SUM", None), "operation": ("TOTAL", np.ones(2)),
    }[wrong]
    reason = {"dtype": "object", "nothing": "NoneType", "operation": "TOTAL"}[wrong]
    if communicator.rank == communicator.size - 1:
        with pytest.raises((TypeError, ValueError), match=reason):
            begin(op, array)
        # Nothing more is done here until the others know.
    else:
        with pytest.raises(MismatchError, match=rf"refused: .*{reason}"):
            begin("SUM", np.ones(2)).wait()
    # The ranks agree on all other calls, and on further reductions.
    assert strategy.reduce("SUM", 1.0, axis=None) == communicator.size
    for one in (begin, make_strategy(communicator, "node").extended.all_reduce_async):
        assert one("SUM", np.ones(2)).wait().tolist() == [communicator.size] * 2


def test_a_wrong_argument_on_all_ranks_breaks_nothing(communicator: Communicator) -> None:
    opened = open_asynchronous(selection.choose(communicator, CommunicationOptions()))
    with pytest.raises(TypeError, match="object"):
        opened.all_reduce_async(np.array([None, object()]))
    assert opened.all_reduce_async(np.ones(2)).wait().tolist() == [communicator.size] * 2
