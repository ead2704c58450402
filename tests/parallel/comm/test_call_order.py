"""The order of calls: what differs between ranks is an error, at any call; what was left in the middle is refused."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.backends.automatic import AutomaticBackend
from mpidist.comm.calls import text as call_text
from mpidist.comm.calls.schedule import USUAL
from mpidist.comm.calls.signature_page import HASH
from mpidist.comm.calls.text import AT_ONCE
from mpidist.comm.choice import selection
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import InterruptedCallError, MismatchError, is_shared
from mpidist.optimizers import SGD
from mpidist.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import lay_out

pytestmark = [pytest.mark.mpi(min_size=2)]

# There ranks whose calls differ come out of them.
IN_NODE_MEMORY = CommunicationOptions(implementation=CommunicationImplementation.NODE)


def in_node_memory(strategy: ArenaStrategy) -> ArenaStrategy:
    """AUTO passes small arrays to MPI on some machines."""
    backend = strategy.arena.collective.backend
    assert isinstance(backend, AutomaticBackend)
    backend.limit = 0
    return strategy


@pytest.fixture
def collective(communicator: Communicator) -> CollectiveFront:
    """A collective that has long made more calls than are compared before they begin.

    In node memory ranks whose calls differ come out of them. What MPI makes of such calls is for whole programs.
    """
    collective = selection.choose(communicator, IN_NODE_MEMORY)
    for _ in range(40):
        collective.all_reduce(np.ones(3))
    return collective


Call = Callable[[CollectiveFront], Any]
DIFFERENCES: dict[str, tuple[Call, Call, str]] = {
    "shape": (
        lambda c: c.all_reduce(np.ones(4)), lambda c: c.all_reduce(np.ones(2)),
        r"all_reduce SUM of float64 \(4,\).*all_reduce SUM of float64 \(2,\)",
    ),
    "dtype": (
        lambda c: c.all_reduce(np.ones(4)), lambda c: c.all_reduce(np.ones(4, np.float32)),
        r"of float64 \(4,\).*of float32 \(4,\)",
    ),
    "operation": (
        lambda c: c.all_reduce(np.ones(4)), lambda c: c.all_reduce(np.ones(4), ReduceOp.MAX), "all_reduce SUM.*MAX",
    ),
    "no elements": (
        lambda c: c.all_reduce(np.ones(4)), lambda c: c.all_reduce(np.ones(0)), r"\(4,\).*\(0,\)",
    ),
    "large": (
        lambda c: c.all_reduce(np.ones(300_000)), lambda c: c.all_reduce(np.ones(250_000)), r"300000.*250000",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_late_call_that_differs_is_an_error_on_every_rank(collective: CollectiveFront, difference: str) -> None:
    usual, other, text = DIFFERENCES[difference]
    is_last = collective.communicator.rank == collective.communicator.size - 1
    with pytest.raises(MismatchError, match=text) as caught:
        (other if is_last else usual)(collective)
    assert is_shared(caught.value)
    assert "test_call_order.py" in str(caught.value)
    # The ranks agree again.
    for _ in range(3):
        assert collective.all_reduce(np.ones(2)).tolist() == [collective.communicator.size] * 2


def test_rooted_calls_that_differ_are_an_error_there_or_at_the_next_call_of_all(collective: CollectiveFront) -> None:
    communicator = collective.communicator
    odd = communicator.rank == communicator.size - 1

    def calls() -> None:
        # As many bytes, so that a broadcast by MPI passes.
        collective.broadcast(np.ones(2, np.float32) if odd else np.ones(1, np.float64))
        collective.all_reduce(np.ones(1))

    with pytest.raises(MismatchError, match="they differ in this call, or one before it"):
        calls()
    assert collective.all_reduce(np.ones(1)) == communicator.size


def test_ranks_that_are_one_call_apart_meet_in_an_error(communicator: Communicator) -> None:
    """One rank alone has made a call in which ranks do not meet: sums that look alike belong to different calls."""
    own = communicator.split(0)
    collective = selection.choose(own, IN_NODE_MEMORY)
    for _ in range(20):
        collective.all_reduce(np.ones(2))
    if own.rank == own.size - 1:
        with own.order.enter("a call of one rank", None, None, meets=False):
            pass
    with pytest.raises(MismatchError, match=r"all_reduce SUM of float64 \(2,\) at \S*test_call_order.py:\d+ on rank"):
        collective.all_reduce(np.ones(2))
    # Nobody can tell which numbers belong together.
    with pytest.raises(InterruptedCallError, match="ranks have made different calls"):
        collective.all_reduce(np.ones(2))
    own.order.broken = ""
    communicator.barrier()
    own.close()


@pytest.mark.parametrize("layout", ["pairs", "each"])
def test_ranks_of_different_nodes_compare_now_and_then(communicator: Communicator, layout: str) -> None:
    laid_out = lay_out(communicator, layout)
    if len(laid_out.node_sizes) == 1:
        pytest.skip("these ranks are on one node")
    collective = selection.choose(laid_out, CommunicationOptions())
    kinds = np.ones(4, np.uint32), np.ones(4, np.int32)
    for number in range(40):
        # None is new any more, see below.
        collective.all_reduce((np.ones(3), *kinds)[number % 3])
    # All ranks of the last node: among the ranks of one node a difference ends the job at once.
    is_last = laid_out.node_index == len(laid_out.node_sizes) - 1

    def calls() -> None:
        # As many bytes, so that the call itself passes.
        collective.all_reduce(kinds[is_last])
        for _ in range(2 * USUAL.every):
            collective.all_reduce(np.ones(3))

    with pytest.raises(MismatchError, match="this call, or one shortly before it") as caught:
        calls()
    assert is_shared(caught.value)
    assert collective.all_reduce(np.ones(2)).tolist() == [communicator.size] * 2


@pytest.mark.parametrize("layout", ["pairs", "each"])
def test_a_new_call_is_compared_between_nodes_before_it_sends(communicator: Communicator, layout: str) -> None:
    """MPICH ends the job where ranks give a call of MPI arrays of other sizes."""
    laid_out = lay_out(communicator, layout)
    if len(laid_out.node_sizes) == 1:
        pytest.skip("these ranks are on one node")
    collective = selection.choose(laid_out, CommunicationOptions())
    for number in range(40):
        collective.all_reduce(np.ones(3 + number % 2))
    sizes = 5000 + communicator.rank, 700 + laid_out.node_index
    for size in sizes:
        with pytest.raises(MismatchError, match=rf"float64 \({size},\) at \S*test_call_order.py:\d+[ ,]") as caught:
            collective.all_reduce(np.ones(size))
        assert is_shared(caught.value)
        assert laid_out.order.key[:2] == ("all_reduce", ReduceOp.SUM), "others may still ask what it was"
        # What one rank has tried, and the others have not, is no call that they have made.
        for again in (sizes[0] - communicator.rank, 3):
            assert (collective.all_reduce(np.ones(again)) == communicator.size).all()


@pytest.mark.parametrize("layout", ["pairs", "each"])
def test_more_kinds_of_calls_than_are_kept_are_right(
    communicator: Communicator, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that are forgotten are new again, on all ranks alike; so they are after errors that all ranks have."""
    monkeypatch.setattr(call_text, "_KEPT", 8)
    collective = selection.choose(lay_out(communicator, layout), CommunicationOptions())
    for size in [*range(1, 30), *range(10, 20)]:
        assert (collective.all_reduce(np.ones(size)) == communicator.size).all()
        if size % 5 == 0:
            with pytest.raises(OverflowError, match="uint8"):
                collective.all_reduce(np.full(size, 200, np.uint8))


def test_who_refuses_a_call_waits_for_no_comparison(communicator: Communicator) -> None:
    """Others may be in a call that they have made before, and compare nothing."""
    laid_out = lay_out(communicator, "each")
    collective = selection.choose(laid_out, CommunicationOptions())
    for _ in range(40):
        collective.all_reduce(np.ones(3))
    before = laid_out.order.comparisons
    with pytest.raises(TypeError, match="no array"):
        collective.log.refuse("all_reduce", TypeError("no array"))
    # By chance this was the call for the comparison now and then.
    assert laid_out.order.comparisons - before == (laid_out.order.number % USUAL.every == 0)
    assert collective.all_reduce(np.ones(2)).tolist() == [communicator.size] * 2


def test_errors_of_mpi_are_exceptions_on_every_communicator(communicator: Communicator) -> None:
    mpi = importlib.import_module("mpi4py.MPI")
    laid_out = lay_out(communicator, "each")
    with communicator.split(0) as own:
        for one in (communicator, own, own.node, laid_out, laid_out.node, laid_out.open_lane()):
            assert one is not None
            assert one.mpi.Get_errhandler() == mpi.ERRORS_RETURN


def test_a_message_that_is_too_long_names_the_calls_of_all_ranks(communicator: Communicator) -> None:
    """Between nodes MPI may find that out before a comparison, where an earlier call was another one."""
    own = communicator.split(0)
    rank, size = own.rank, own.size
    mpi = importlib.import_module("mpi4py.MPI")

    def call() -> None:
        with own.order.enter("a call", 7, None, meets=False) as order:
            order.is_under_way = True
            raise mpi.Exception(mpi.ERR_TRUNCATE)

    with pytest.raises(MismatchError, match=r"got a call 7 at \S*test_call_order.py:\d+\.") as caught:
        call()
    for other in range(size):
        assert (f"rank {other} of " in str(caught.value)) == (other != rank)
    assert not is_shared(caught.value)
    own.order.broken = ""
    communicator.barrier()
    own.close()


def test_a_last_batch_that_is_empty_on_one_rank(communicator: Communicator) -> None:
    """The last of 41 rows in batches of 2 gives the first rank a row and the others none."""
    strategy = in_node_memory(ArenaStrategy(communicator))
    rows = [np.ones((2, 1)), np.ones((1 if communicator.rank == 0 else 0, 1))]
    for _ in range(20):
        strategy.reduce("SUM", rows[0], axis=None)
    assert strategy.reduce("SUM", rows[1], axis=0) == 1
    with pytest.raises(MismatchError, match=r"\(1, 1\).*\(0, 1\)"):
        strategy.reduce("SUM", rows[1], axis=None)
    assert strategy.reduce("SUM", 1.0, axis=None) == communicator.size


@pytest.mark.parametrize("what", ["rate", "step"])
def test_numbers_of_a_step_that_differ(communicator: Communicator, what: str) -> None:
    """A rank's own schedule, or a step that it has made alone: no parameter changes."""
    strategy = ArenaStrategy(communicator)
    odd = communicator.rank == communicator.size - 1
    with strategy.scope():
        variable: Any = mpidist.Variable(np.zeros(100, np.float32), name="w")
        optimizer = SGD(lambda step: 0.5 if odd and what == "rate" and step == 30 else 0.25)
    gradient = np.ones(100, np.float32)
    for _ in range(30):
        optimizer.apply_gradients([(gradient, variable)])
    if what == "step":
        optimizer.iterations += odd
    before = variable.numpy()
    with pytest.raises(MismatchError, match=r"learning rate 0.25.*(learning rate 0.5|step 32)"):
        optimizer.apply_gradients([(gradient, variable)])
    np.testing.assert_array_equal(variable.numpy(), before)


def test_an_accumulated_call_that_differs(communicator: Communicator) -> None:
    """A variable for which one rank has a gradient in none of the calls is missed at the update."""
    strategy = ArenaStrategy(communicator)
    with strategy.scope():
        variables: list[Any] = [mpidist.Variable(np.zeros(5, np.float32), name=name) for name in ("a", "b")]
        optimizer = SGD(1.0, gradient_accumulation_steps=2)
    optimizer.build(variables)
    given = variables[:1] if communicator.rank == communicator.size - 1 else variables
    optimizer.apply_gradients([(np.ones(5, np.float32), variable) for variable in given])
    with pytest.raises(MismatchError, match=r"after 2 calls.*none for 'b'"):
        optimizer.apply_gradients([(np.ones(5, np.float32), variable) for variable in given])
    assert all((variable.numpy() == 0).all() for variable in variables)


@pytest.mark.parametrize("on", ["all", "one"])
def test_a_call_left_in_the_middle_is_refused_from_then_on(communicator: Communicator, tmp_path: Path, on: str) -> None:
    """An update that raises and is caught: step, reduction, write and save refuse, also on ranks that it waited for."""
    own = communicator.split(0)
    strategy = ArenaStrategy(own)
    with strategy.scope():
        variable: Any = mpidist.Variable(np.full(4000, 1e38, np.float32), name="w")
        optimizer = SGD(1.0)
    optimizer.apply_gradients([(np.ones(4000, np.float32), variable)])
    gradient = np.zeros(4000, np.float32)
    gradient[slice(None) if on == "all" else slice(0, 1)] = -3e38
    with np.errstate(over="raise"), pytest.raises(
        (FloatingPointError, InterruptedCallError), match="overflow" if own.rank == 0 or on == "all" else "on rank 0"
    ):
        optimizer.apply_gradients([(gradient, variable)])
    for call in (
        lambda: optimizer.apply_gradients([(gradient, variable)]),
        lambda: strategy.reduce("SUM", 1.0, axis=None),
        lambda: variable.assign(np.zeros(4000)),
        lambda: mpidist.Checkpoint(variable=variable).save(tmp_path / "never"),
    ):
        with pytest.raises(InterruptedCallError, match="apply_gradients was left in the middle by FloatingPointError"):
            call()
    assert not list(tmp_path.iterdir())
    own.order.broken = ""
    communicator.barrier()
    own.close()


def test_a_handler_that_raises_where_a_step_waits_for_others(communicator: Communicator) -> None:
    """The others take this rank for one that has come, and would wait for it in the middle of the step."""
    own = communicator.split(0)
    strategy = ArenaStrategy(own)
    with strategy.scope():
        variable: Any = mpidist.Variable(np.zeros(4000, np.float32), name="w")
        optimizer = SGD(1.0)
    gradient = np.ones(4000, np.float32)
    # The first steps compare by messages, too.
    for _ in range(5):
        optimizer.apply_gradients([(gradient, variable)])
    ticks = 0

    def raise_in_the_step(_: int, __: object) -> None:
        """Handle a signal: raise where the step is under way, and has had the time to come to its wait."""
        nonlocal ticks
        ticks += bool(own.order.is_under_way)
        if ticks == 20:
            raise ArithmeticError("the program has a handler of its own")

    if own.rank == 0:
        before = signal.signal(signal.SIGALRM, raise_in_the_step)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    else:
        # Rank 0 has left the step.
        communicator.mpi.recv(source=0, tag=77)
    with pytest.raises(
        (ArithmeticError, InterruptedCallError), match="handler of its own" if own.rank == 0 else "on rank 0"
    ):
        optimizer.apply_gradients([(gradient, variable)])
    if own.rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        for other in range(1, communicator.size):
            communicator.mpi.send(None, other, tag=77)
    with pytest.raises(InterruptedCallError, match="apply_gradients was left in the middle by ArithmeticError"):
        own.all_gather_object(1)
    own.order.broken = ""
    communicator.barrier()
    own.close()


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_other_axes_are_errors(communicator: Communicator, op: str) -> None:
    """What is left of a square array has the same shape."""
    strategy = in_node_memory(ArenaStrategy(communicator))
    odd = communicator.rank == communicator.size - 1
    square = np.arange(4.0).reshape(2, 2)
    for _ in range(20):
        strategy.reduce(op, square, axis=0)
    with pytest.raises(MismatchError, match=r"after reduce along axes \(0,\).*after reduce along axes \(1,\)"):
        strategy.reduce(op, square, axis=int(odd))
    np.testing.assert_array_equal(
        strategy.reduce(op, square, axis=-2), square.sum(0) * communicator.size if op == "SUM" else square.mean(0)
    )


def test_writes_to_other_variables_and_other_metrics_are_errors(communicator: Communicator) -> None:
    """They look alike, and would leave one variable unchanged, or add up what does not belong together."""
    strategy = in_node_memory(ArenaStrategy(communicator))
    odd = communicator.rank == communicator.size - 1
    with strategy.scope():
        first, second = (mpidist.Variable(np.zeros(3, np.float32)) for _ in range(2))
        loss, accuracy = (mpidist.metrics.Mean() for _ in range(2))
    for _ in range(20):
        strategy.reduce("SUM", 1.0, axis=None)
    with pytest.raises(MismatchError, match=r"assign to variable number 1 at .*assign to variable number 2 at"):
        (second if odd else first).assign(np.ones(3))
    with pytest.raises(MismatchError, match=r"assign_add to variable number 1 at .*assign to variable number 1 at"):
        (first.assign if odd else first.assign_add)(np.ones(3))
    with pytest.raises(MismatchError, match=r"assign_add to variable number 1 at .*assign_sub to variable number 1 at"):
        (first.assign_sub if odd else first.assign_add)(np.ones(3))
    with pytest.raises(MismatchError, match=r"after assign to variable number 3 .*after assign to variable number 4 "):
        (accuracy if odd else loss).sums.assign(np.zeros(2))
    loss.reset_state()
    accuracy.reset_state()
    loss.update_state(1.0)
    accuracy.update_state(5.0)
    with pytest.raises(MismatchError, match=r"after value of variable number 3 .*after value of variable number 4"):
        (accuracy if odd else loss).result()
    assert loss.result() == 1


def test_exchanges_of_different_calls_are_an_error_on_every_rank(communicator: Communicator) -> None:
    """Both send objects, which would be taken for what the other call waits for."""
    odd = communicator.rank == communicator.size - 1
    for one, other in (
        (communicator.calls.during("gather_object"), communicator.calls.during("save")),
        (communicator.calls.during("save"), communicator.calls.during("restore")),
    ):
        with pytest.raises(MismatchError, match=r"got .* at \S*test_call_order.py:\d+ on rank.*; .* on rank") as caught:
            exchange(communicator, other if odd else one)
        assert is_shared(caught.value)
    # The root of a broadcast needs nothing from the others: its bytes would wait for a call that takes them.
    with pytest.raises(MismatchError, match=r"got load at .*; agreement between ranks at .* on rank") as caught:
        broadcast(communicator, 3) if communicator.rank == 0 else communicator.all_reduce_max(3)
    assert is_shared(caught.value)
    with pytest.raises(MismatchError, match="broadcast of an object at") as caught:
        communicator.broadcast_object(1, root=int(odd))
    assert is_shared(caught.value)
    assert communicator.broadcast_object({communicator.rank}, root=1) == {1}
    assert communicator.all_gather_object(1) == [1] * communicator.size
    assert communicator.all_reduce_max(-5) == -5


def exchange(communicator: Communicator, call: AbstractContextManager[None]) -> None:
    """Exchange objects inside a call."""
    with call:
        communicator.all_gather_object({"rank": communicator.rank})


def broadcast(communicator: Communicator, value: int) -> int:
    """Broadcast an object inside a call."""
    with communicator.calls.during("load"):
        return communicator.broadcast_object(value)


def test_ranks_continue_together_after_an_exchange_met_a_signed_call(communicator: Communicator) -> None:
    """Of the two calls one is counted before the exchange in it: from then on the ranks' counts would differ."""
    collective = selection.choose(communicator.split(0), CommunicationOptions())
    order = collective.communicator.order

    def gather() -> None:
        collective.communicator.all_gather_object("no signed call")

    def reduce() -> None:
        collective.all_reduce(np.ones(3))

    for number in range(3):
        call = gather if communicator.rank == number % communicator.size else reduce
        with pytest.raises(MismatchError, match=r"exchange between ranks at .* on rank"):
            call()
        assert len(set(communicator.all_gather_object((order.number, order.mark)))) == 1
        assert collective.all_reduce(np.ones(3)).tolist() == [communicator.size] * 3
    assert order.difference() == ""


def test_a_rank_shows_the_text_of_its_call_when_its_checksum_is_gone(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank that has all texts may be in its next call at once, and compares it with the call before."""
    ranks: Any = selection.choose(communicator.split(0), CommunicationOptions()).communicator
    order, page = ranks.order, ranks.order.page
    shown: list[int] = []

    def write(about: int, number: int, text: str, *, original: Callable[..., None] = page.write) -> None:
        shown.append(page.shown(order.number) & HASH)
        original(about, number, text)

    monkeypatch.setattr(page, "write", write)
    array = np.ones(4 if communicator.rank else 2)

    def begin() -> None:
        with order.enter("all_reduce", ReduceOp.SUM, array):
            order.show_call()
            assert page.shown(order.number) & HASH
            ranks.mpi.Barrier()
            order.look_ahead()

    with pytest.raises(MismatchError, match=r"float64 \(2,\).*float64 \(4,\)"):
        begin()
    assert shown == [0]


def test_two_threads_in_one_strategy(communicator: Communicator) -> None:
    own = communicator.split(0)
    collective = selection.choose(own, CommunicationOptions())
    for _ in range(20):
        collective.all_reduce(np.ones(1))
    begun, ended = threading.Event(), threading.Event()

    def stay() -> None:
        with own.order.enter("a long call", None, None, meets=False):
            begun.set()
            ended.wait(20)

    thread = threading.Thread(target=stay)
    thread.start()
    begun.wait(20)
    with pytest.raises(RuntimeError, match="another thread of this program is in a call on the same ranks"):
        collective.all_reduce(np.ones(1))
    with pytest.raises(RuntimeError, match="exchange between ranks: another thread of this program is in a call"):
        own.all_gather_object(1)
    ended.set()
    thread.join()
    # Handing over between calls is allowed.
    results: list[AnyArray] = []
    thread = threading.Thread(target=lambda: results.append(collective.all_reduce(np.ones(1))))
    thread.start()
    thread.join()
    assert results == [own.size]
    assert collective.all_reduce(np.ones(1)) == own.size
    own.close()


def test_a_save_of_another_thread_is_told_what_it_meets(communicator: Communicator, tmp_path: Path) -> None:
    strategy = ArenaStrategy(communicator)
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(value=mpidist.Variable(1.0))
    texts = []

    def save() -> None:
        try:
            checkpoint.save(tmp_path / "c")
        except RuntimeError as error:
            texts.append(str(error))

    with communicator.order.enter("a long call", None, None, meets=False) as order:
        order.is_under_way = AT_ONCE
        thread = threading.Thread(target=save)
        thread.start()
        thread.join(20)
    assert [text.partition(" is in")[0] for text in texts] == ["save: another thread of this program"]
    assert strategy.reduce("SUM", 1.0, axis=None) == communicator.size


def test_errors_that_touch_nothing_leave_the_strategy_usable(collective: CollectiveFront) -> None:
    for _ in range(3):
        with pytest.raises(TypeError, match="booleans"):
            collective.all_reduce(np.array([True]))
        with pytest.raises(ValueError, match="root"):
            collective.broadcast(np.ones(1), 99)
    assert collective.all_reduce(np.ones(1)) == collective.communicator.size
