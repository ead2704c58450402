"""What adapters of frameworks call: in either context, on any one thread, with arrays of any library."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mpidist
from mpidist.comm.calls.schedule import USUAL
from mpidist.comm.group.communicator import Communicator
from mpidist.data import Dataset
from mpidist.errors import InterruptedCallError, MismatchError
from mpidist.failures.interrupts import INTERRUPTS
from mpidist.options import CommunicationImplementation, CommunicationOptions
from mpidist.strategy.base import Strategy
from mpidist.strategy.chosen import chosen_strategy
from tests.helpers.leaks import clear_broken_calls
from tests.parallel.layouts import make_strategy
from tests.parallel.strategy.hybrid.making import make_hybrid
from tests.parallel.strategy.tpu.making import make_tpu

pytestmark = pytest.mark.mpi


@pytest.fixture(params=["node", "private", "first"])
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> Iterator[Strategy]:
    with make_strategy(communicator, request.param) as made:
        yield made


@pytest.fixture
def own(communicator: Communicator) -> Iterator[Strategy]:
    """A strategy on a communicator of its own, which a test may leave torn."""
    ranks = communicator.split(0)
    yield make_strategy(ranks, "node")
    clear_broken_calls()


def maker(library: str) -> Callable[[Any, str], Any]:
    """A function that makes arrays of a library."""
    if library == "numpy":
        return lambda value, dtype: np.asarray(value).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    if library == "torch":
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        return lambda value, dtype: torch.tensor(value, dtype=getattr(torch, dtype))
    made: Any = pytest.importorskip("jax", reason="JAX is not installed").numpy.asarray
    return made  # type: ignore[no-any-return]  # a function of JAX


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_results_are_in_the_library_of_each_leaf(strategy: Strategy, library: str) -> None:
    make, extended = maker(library), strategy.extended
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    total = n * (n + 1) // 2

    def reduce() -> tuple[Any, Any]:
        nest = {
            "float": make([rank + 1.0, 2.0], "float32"), "half": [make([[rank + 1.0] * 3], "bfloat16")],
            "int": make(rank + 1, "int32"), "numpy": np.arange(3) * (rank + 1), "number": (rank + 1, 0.5, 2.5),
        }
        return nest, extended.all_reduce("SUM", nest)

    for given, got in (reduce(), strategy.run(reduce)):
        assert list(got) == list(given)
        pairs = [(given[name], got[name]) for name in ("float", "int")]
        for one, made in [*pairs, (given["half"][0], got["half"][0])]:
            # NumPy has scalars for arrays without dimensions.
            assert type(made) is type(one) or library == "numpy"
            assert made.dtype == one.dtype
            assert made.shape == one.shape
        assert np.asarray(got["float"]).tolist() == [total, 2.0 * n]
        assert [float(one) for one in got["half"][0][0]] == [total] * 3
        assert int(got["int"]) == total
        assert got["numpy"].tolist() == [0, total, 2 * total]
        assert got["number"] == (total, 0.5 * n, 2.5 * n)
        assert [type(one) for one in got["number"]] == [int, float, float]
    mean = strategy.run(lambda: extended.all_reduce("mean", make([rank, rank + 1], "int32")))
    assert np.asarray(mean).tolist() == [(n - 1) / 2, (n + 1) / 2]
    sent = strategy.run(lambda: extended.broadcast([make([rank + 1.0] * 2, "bfloat16"), rank, 0.1 + rank]))
    assert (str(sent[0].dtype).rpartition(".")[2], [float(one) for one in sent[0]]) == ("bfloat16", [1.0, 1.0])
    assert sent[1:] == [0, 0.1]
    gathered = extended.all_gather({"a": make([[rank, rank]] * (rank + 1), "int32")}, 0)["a"]
    assert np.asarray(gathered).tolist() == [[r, r] for r in range(n) for _ in range(r + 1)]
    mine = extended.reduce_scatter("SUM", make(np.arange(5.0).reshape(1, 5).tolist(), "float32"), 1)
    assert np.asarray(mine).tolist() == [(np.arange(5.0) * n)[extended.rows(5)].tolist()]
    assert extended.all_gather_object((rank, "x")) == [(r, "x") for r in range(n)]


@pytest.mark.mpi(min_size=2)
def test_batches_that_differ_are_found_in_the_next_call(communicator: Communicator) -> None:
    # In memory all ranks hear of it: a rank that waits in MPI already would not.
    in_memory = CommunicationOptions(implementation=CommunicationImplementation.NODE)
    own = make_strategy(communicator.split(0), "node", options=in_memory)
    extended, rank = own.extended, communicator.rank
    number = extended.number_dataset()
    assert extended.number_dataset() == number + 1
    extended.all_reduce("SUM", np.ones(1))
    extended.note_batch(number, 0, 1)
    extended.all_reduce("SUM", np.ones(1))
    if rank == 1:
        extended.note_batch(number, 0, 2)

    def compared() -> None:
        for _ in range(USUAL.every + 1):
            extended.all_reduce("SUM", np.ones(1))

    with pytest.raises(MismatchError, match=f"after batch 2 of pass 1 of distributed dataset number {number}"):
        compared()


def test_a_parameter_of_pytorch_counts_as_its_values(strategy: Strategy) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    total = n * (n + 1) / 2
    parameter = torch.nn.Parameter(torch.full((3,), rank + 1.0))
    turned = torch.full((3, 4), rank + 1.0).t()
    (made,) = strategy.extended.all_reduce("SUM", [parameter])
    assert (made.tolist(), made.requires_grad, parameter.tolist()) == ([total] * 3, False, [rank + 1.0] * 3)
    versions = parameter._version, turned._version
    assert strategy.extended.all_reduce("SUM", [parameter, turned], in_place=True)[0] is parameter
    assert (parameter.tolist(), turned.tolist()) == ([total] * 3, [[total] * 3] * 4)
    assert (parameter._version > versions[0], turned._version > versions[1]) == (True, True), "graphs must notice"
    flat = torch.from_numpy(strategy.extended.allocate(1000, "float32")).fill_(rank + 1)
    strategy.run(lambda: strategy.extended.all_reduce("MEAN", flat, in_place=True, name="gradients"))
    assert set(flat.tolist()) == {(n + 1) / 2}


def test_in_place(strategy: Strategy) -> None:
    extended, n, rank = strategy.extended, strategy.num_replicas_in_sync, strategy.communicator.rank
    total = n * (n + 1) / 2
    mine = [np.full(count, rank + 1.0, np.float32) for count in (3, 40_000, 1, 20_000)]
    base = np.full((6, 4), rank + 1.0)
    given = {"list": mine, "part": base[::2, 1:3]}
    assert extended.all_reduce("SUM", given, in_place=True, name="all") is given
    assert {float(one) for array in mine for one in array} == {total}
    expected = np.full((6, 4), rank + 1.0)
    expected[::2, 1:3] = total
    np.testing.assert_array_equal(base, expected)
    memory = extended.allocate((4, 3), "bfloat16")
    assert (memory.shape, memory.dtype.name, bool(memory.any())) == ((4, 3), "bfloat16", False)
    memory[...] = rank + 1
    assert extended.all_reduce("SUM", memory, in_place=True) is memory
    assert (memory == total).all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("others_are_right", [True, False])
@pytest.mark.parametrize(
    "case", ["read-only", "number", "twice", "overlap", "int mean", "jax", "text", "in_place", "op"]
)
def test_what_cannot_be_reduced_is_refused_on_all_ranks(own: Strategy, case: str, others_are_right: bool) -> None:
    array, extended = np.zeros(4), own.extended
    fixed = np.zeros(4)
    fixed.flags.writeable = False
    cases: dict[str, Any] = {
        "read-only": ("SUM", [fixed], {"in_place": True}, "can be written"),
        "number": ("SUM", [1.0], {"in_place": True}, "writes into arrays, got"),
        "twice": ("SUM", [array, array], {"in_place": True}, "share memory"),
        "overlap": ("SUM", [array[:3], array[2:]], {"in_place": True}, "share memory"),
        "int mean": ("MEAN", [np.arange(3)], {"in_place": True}, "is float64 and cannot"),
        "jax": ("SUM", None, {"in_place": True}, "arrays of JAX"),
        "text": ("SUM", ["text"], {}, "expected arrays or numbers"),
        "in_place": ("SUM", [array], {"in_place": 1}, "`in_place` must be"),
        "op": ("NONE", [array], {}, "reduce_op"),
    }
    op, given, options, why = cases[case]
    if case == "jax":
        given = [maker("jax")([1.0], "float32")]
    if others_are_right and own.communicator.rank != 1:
        op, given, options = "SUM", [array], {"in_place": True}
    with pytest.raises((TypeError, ValueError, MismatchError), match=why) as caught:
        extended.all_reduce(op, given, **options)
    kinds = own.communicator.all_gather_object(type(caught.value).__name__)
    assert (set(kinds) == {"MismatchError"}) is others_are_right


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("method", "what"),
    [(method, what) for method in ("all_reduce", "broadcast") for what in ("shape", "dtype", "key", "nesting", "count")]
    + [("all_reduce", "name"), ("all_reduce", "op")],
)
def test_differences_between_ranks_are_one_error(own: Strategy, method: str, what: str) -> None:
    odd, extended = own.communicator.rank % 2, own.extended
    array = np.zeros(3)
    nests: dict[str, tuple[Any, Any]] = {
        "shape": ([array], [np.zeros(2)]), "dtype": ([array], [array.astype("f4")]),
        "key": ({"a": array}, {"b": array}), "nesting": ([[array], array], [array, [array]]),
        "count": ([array], [array, array.copy()]),
    }
    nest, options, op = [array], {}, "SUM"
    if what in nests:
        nest = nests[what][odd]
    elif what == "name":
        options = {"name": "ab"[odd]}
    else:
        op = ("SUM", "MAX")[odd]
    arguments = (op, nest) if method == "all_reduce" else (nest,)
    with pytest.raises(MismatchError) as caught:
        getattr(extended, method)(*arguments, **options)
    assert len(set(own.communicator.all_gather_object(str(caught.value)))) == 1


@pytest.mark.mpi(min_size=2)
def test_allocate_is_agreed_on(own: Strategy) -> None:
    with pytest.raises(MismatchError, match="allocate: shape and dtype must be the same"):
        own.extended.allocate((2, own.communicator.rank), "float32")
    with pytest.raises(ValueError, match=r"allocate failed on rank 1 .*whole numbers of at least 0, got -1"):
        own.extended.allocate(-1 if own.communicator.rank == 1 else 1)
    with pytest.raises(TypeError, match="must be a dtype of numbers, got"):
        own.extended.allocate(3, object)


def test_rows_are_those_of_a_distributed_dataset(strategy: Strategy) -> None:
    for count in (0, 1, 2, 7, 12):
        rows = strategy.extended.rows(count)
        everyone = strategy.gather_object((rows.start, rows.stop))
        assert [0, *(stop for _, stop in everyone)] == [*(start for start, _ in everyone), count]
        if count:
            data = Dataset.from_tensor_slices(np.arange(count)).batch(count)
            (batch,) = strategy.experimental_distribute_dataset(data)
            assert batch.tolist() == list(range(count))[rows]
    assert strategy.extended.cores_per_replica >= 1
    with pytest.raises(ValueError, match="`n` must be an integer of at least 0, got -1"):
        strategy.extended.rows(-1)


class Framework:
    """A framework that works ahead: it makes calls on a thread of its own, when it comes to them."""

    def __init__(self, strategy: Strategy) -> None:
        self.results: list[Any] = []
        self.errors: list[BaseException] = []
        self._strategy = strategy
        self._work: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while (function := self._work.get()) is not None:
            try:
                self.results.append(function())
            except BaseException as error:
                self.errors.append(error)
            self._work.task_done()

    def put(self, function: Callable[[], Any]) -> None:
        self._work.put(function)

    def wait(self) -> None:
        """For `before_calls`."""
        if threading.current_thread() is not self.thread:
            self._work.join()

    def end(self) -> None:
        self._work.put(None)
        self.thread.join()


@pytest.fixture
def framework(strategy: Strategy) -> Iterator[Framework]:
    made = Framework(strategy)
    yield made
    made.end()


def test_calls_of_a_frameworks_thread(strategy: Strategy, framework: Framework) -> None:
    n, extended = strategy.num_replicas_in_sync, strategy.extended
    one = np.ones(3)

    def reduce() -> float:
        return float(extended.all_reduce("SUM", one)[0])

    framework.put(reduce)
    framework.wait()
    with extended.step("train"):
        # The program waits for it inside its own step.
        framework.put(reduce)
        framework.wait()
        assert reduce() == n
    extended.before_calls(framework.wait)
    for number in range(6):
        for _ in range(number % 3):
            framework.put(reduce)
        # Each of these comes after what the framework has begun, on all ranks.
        assert strategy.reduce("SUM", 1.0, axis=None) == n
        framework.put(reduce)
        assert strategy.gather_object(n) == [n] * n
        framework.put(reduce)
        assert reduce() == n
        framework.put(reduce)
        with extended.step("train"):
            framework.put(reduce)
            assert extended.broadcast(number) == number
    framework.wait()
    assert framework.errors == []
    assert set(framework.results) == {n}
    assert len(framework.results) == 2 + 6 + 4 * 6


@pytest.mark.parametrize("call", ["of an adapter", "of the strategy"])
def test_a_call_comes_after_all_that_a_framework_has_begun(strategy: Strategy, framework: Framework, call: str) -> None:
    """Also where the framework's thread is in a call at that moment, and has another one to make."""
    extended, entered, may_end = strategy.extended, threading.Event(), threading.Event()
    made: list[str] = []

    class Held:
        """An object whose pickling, which is inside the call, waits for the program."""

        def __reduce__(self) -> tuple[Any, ...]:
            entered.set()
            may_end.wait(5)
            return int, (1,)

    def wait() -> None:
        if threading.current_thread() is not framework.thread:
            may_end.set()
        framework.wait()

    extended.before_calls(wait)
    framework.put(lambda: made.append(f"first {len(extended.all_gather_object(Held()))}"))
    framework.put(lambda: made.append(f"second {extended.all_reduce('SUM', 1)}"))
    entered.wait()
    if call == "of an adapter":
        extended.all_reduce("SUM", 2)
    else:
        strategy.reduce("SUM", 2, axis=None)
    made.append("third")
    framework.wait()
    n = strategy.num_replicas_in_sync
    assert made == [f"first {n}", f"second {n}", "third"]


@pytest.mark.mpi(min_size=2)
def test_a_call_of_the_main_thread_waits_for_one_of_a_frameworks_thread(
    strategy: Strategy, framework: Framework
) -> None:
    n, extended, communicator = strategy.num_replicas_in_sync, strategy.extended, strategy.communicator
    entered = threading.Event()

    class Late:
        """An object that tells when it is pickled, which is inside the call."""

        def __reduce__(self) -> tuple[Any, ...]:
            entered.set()
            return int, (7,)

    framework.put(lambda: extended.all_gather_object(Late()))
    entered.wait()
    assert strategy.reduce("SUM", 1.0, axis=None) == n
    framework.wait()
    assert (framework.errors, framework.results) == ([], [[7] * n])
    assert communicator.all_reduce_max(1) == 1


@pytest.mark.mpi(min_size=2)
def test_two_threads_at_once_are_an_error(strategy: Strategy, framework: Framework) -> None:
    extended, rank = strategy.extended, strategy.communicator.rank
    other = Framework(strategy)
    waits, may_go = threading.Event(), threading.Event()

    class Slow:
        def __reduce__(self) -> tuple[Any, ...]:
            waits.set()
            may_go.wait()
            return int, (1,)

    framework.put(lambda: extended.all_gather_object(Slow()))
    waits.wait()
    other.put(lambda: extended.all_reduce("SUM", 1.0))
    other.wait()
    may_go.set()
    framework.wait()
    other.end()
    (error,) = other.errors
    assert isinstance(error, RuntimeError)
    assert "another thread of this program is in a call on the same ranks" in str(error)
    assert framework.results == [[1] * strategy.num_replicas_in_sync], rank


@pytest.mark.parametrize("makes_calls", [True, False])
def test_a_step_that_an_exception_leaves_is_torn(own: Strategy, makes_calls: bool) -> None:
    extended = own.extended
    with contextlib.suppress(KeyError), extended.step("fine"):
        extended.all_reduce("SUM", 1.0)
    assert extended.all_reduce("SUM", 1.0) == own.num_replicas_in_sync

    def leave() -> None:
        with extended.step("train"):
            if makes_calls:
                extended.all_reduce("SUM", 1.0)
            raise KeyError("of the program")

    with pytest.raises(KeyError, match="of the program"):
        leave()
    calls: list[Callable[[], Any]] = [
        lambda: extended.all_reduce("SUM", 1.0), lambda: own.reduce("SUM", 1.0, axis=None),
        lambda: extended.step("next").__enter__(), lambda: extended.broadcast(1.0),
    ]
    for call in calls:
        with pytest.raises(InterruptedCallError, match="step 'train' was left in the middle by KeyError: 'of the"):
            call()


@pytest.mark.mpi(min_size=2)
def test_a_step_that_one_rank_leaves_is_torn_for_all(own: Strategy) -> None:
    options = CommunicationOptions(implementation=CommunicationImplementation.NODE)
    extended, rank = make_strategy(own.communicator, "node", options=options).extended, own.communicator.rank
    # In messages, by which the first calls are compared, a rank would wait until the watchdog ends the job.
    for _ in range(USUAL.first):
        extended.all_reduce("SUM", 1.0)
    with contextlib.suppress(KeyError), extended.step("train"):
        extended.all_reduce("SUM", 1.0)
        if rank == 0:
            raise KeyError("of rank 0")
    with pytest.raises(InterruptedCallError, match="left in the middle by KeyError"):
        extended.all_reduce("SUM", 1.0)


@pytest.mark.mpi(min_size=2)
def test_steps_of_other_names_differ(own: Strategy) -> None:
    with pytest.raises(MismatchError), own.extended.step("ab"[own.communicator.rank % 2]):
        own.extended.all_reduce("SUM", 1.0)


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """The library takes them, as in a program."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, INTERRUPTS.take)
    yield
    signal.signal(signal.SIGINT, before)
    INTERRUPTS.forget()


@pytest.mark.usefixtures("_interrupts")
@pytest.mark.parametrize("asks", ["one", "all"])
def test_an_interrupt_waits_for_the_end_of_a_step(strategy: Strategy, asks: str) -> None:
    extended, ranks = strategy.extended, strategy.communicator
    done: list[int] = []

    def train() -> None:
        for number in range(60):
            with extended.step("train"):
                if number == 5 and (asks == "all" or ranks.rank == ranks.size - 1):
                    os.kill(os.getpid(), signal.SIGINT)
                for _ in range(3):
                    extended.all_reduce("SUM", np.ones(2))
                done.append(number)

    with pytest.raises(KeyboardInterrupt):
        train()
    assert set(ranks.all_gather_object(tuple(done))) == {tuple(done)}
    assert done[:6] == list(range(6))
    assert extended.all_reduce("SUM", 1) == ranks.size


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupt_in_a_frameworks_call_is_raised_in_the_main_thread(
    strategy: Strategy, framework: Framework
) -> None:
    extended, ranks = strategy.extended, strategy.communicator
    answered = threading.Event()

    def reduce() -> Any:
        if ranks.rank == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            answered.wait()
        return [extended.all_reduce("SUM", 1) for _ in range(70)]

    def wait() -> None:
        framework.put(reduce)
        try:
            while not framework.results:
                threading.Event().wait(0.01)
                if INTERRUPTS.is_asked:
                    answered.set()
        finally:
            answered.set()
        # Delivered between any two lines from here on, if it was not already.
        threading.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        wait()
    framework.wait()
    assert framework.errors == []
    assert extended.all_reduce("SUM", 1) == ranks.size


def test_functions_are_called_once_when_a_strategy_closes(communicator: Communicator) -> None:
    strategy = make_strategy(communicator, "node")
    noted: list[Any] = []

    def fails() -> None:
        noted.append("fails")
        raise ValueError("of a function")

    strategy.on_close(lambda: noted.append(strategy.extended.rows(communicator.size)))
    strategy.on_close(fails)
    strategy.on_close(lambda: noted.append("last"))
    strategy.close()
    strategy.close()
    assert noted == ["last", "fails", slice(communicator.rank, communicator.rank + 1)]
    with pytest.raises(RuntimeError, match="closed"):
        strategy.on_close(fails)
    with pytest.raises(RuntimeError, match="closed"):
        strategy.extended.all_reduce("SUM", 1.0)


@pytest.mark.mpi(min_size=2)
def test_the_strategy_of_an_adapter(communicator: Communicator) -> None:
    with pytest.raises(ValueError, match=r"fit needs a strategy, and none is open.*`strategy=`"):
        chosen_strategy(None, "fit")
    with make_strategy(communicator, "node") as first:
        assert chosen_strategy(None, "fit") is first
        with make_strategy(communicator, "private") as second:
            assert chosen_strategy(first, "fit") is first
            with second.scope():
                assert chosen_strategy(None, "fit") is second
            with pytest.raises(ValueError, match=r"fit needs a strategy, and 2 are open.*`strategy=`"):
                chosen_strategy(None, "fit")
        assert chosen_strategy(None, "fit") is first
        with pytest.raises(RuntimeError, match="closed"):
            chosen_strategy(second, "fit")
    with pytest.raises(TypeError, match="`strategy` must be a strategy"):
        chosen_strategy("all", "fit")  # type: ignore[arg-type]  # that is the point
    if communicator.size > 1:
        with pytest.raises(ValueError, match="the default strategy distributes nothing"):
            chosen_strategy(mpidist.get_strategy(), "fit")
    else:
        assert chosen_strategy(mpidist.get_strategy(), "fit") is mpidist.get_strategy()


@pytest.mark.mpi(min_size=2)
def test_outside_run_nothing_is_combined_in_silence(strategy: Strategy) -> None:
    default = mpidist.get_strategy()
    context = mpidist.get_replica_context()
    assert context is not None
    for one in (context, default.extended):
        with pytest.raises(RuntimeError, match="outside `run`, where it would combine nothing"):
            one.all_reduce("SUM", 1.0)
    with strategy.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        default.extended.all_reduce("SUM", 1.0)
    with pytest.raises(RuntimeError, match="requires being in cross-replica context"):
        strategy.run(lambda: strategy.reduce("SUM", 1.0, axis=None))


def test_replicas_of_other_strategies(communicator: Communicator) -> None:
    """One logical device is a replica; of a strategy with groups the own group counts."""
    rank, size = communicator.rank, communicator.size
    with make_tpu(communicator, devices=1) as strategy:
        assert strategy.extended.all_reduce("SUM", rank) == size * (size - 1) // 2
        assert strategy.extended.broadcast(rank) == 0
        assert strategy.extended.rows(size) == slice(rank, rank + 1)
        with strategy.extended.step("train"):
            assert strategy.run(lambda: strategy.extended.all_reduce("MAX", rank)) == size - 1
    if size % 2 == 0:
        # On a communicator of its own, which the torn step leaves unusable.
        strategy = make_tpu(communicator.split(0), devices=2)
        # Logical device d of each of them.
        replicas, device = size // 2, rank % 2
        assert strategy.extended.all_reduce("SUM", rank) == sum(2 * r + device for r in range(replicas))
        with pytest.raises(KeyError), strategy.extended.step("train"):
            raise KeyError("of the program")
        with pytest.raises(InterruptedCallError, match="step 'train' was left"):
            strategy.extended.all_reduce("SUM", rank)
        with pytest.raises(InterruptedCallError, match="step 'train' was left"):
            strategy.reduce("SUM", rank, axis=None)
        clear_broken_calls()
    with make_hybrid(communicator) as groups:
        own = groups.groups[groups.group_index]
        assert groups.extended.all_reduce("SUM", rank) == sum(own)
        assert groups.extended.rows(len(own)) == slice(own.index(rank), own.index(rank) + 1)
        assert groups.extended.cores_per_replica >= 1


def test_a_central_copy_has_replicas_too(communicator: Communicator) -> None:
    with mpidist.CentralStorageStrategy(nodes="all") as strategy:
        memory = strategy.extended.allocate(3)
        memory[...] = communicator.rank
        strategy.run(lambda: strategy.extended.all_reduce("MAX", memory, in_place=True))
        assert memory.tolist() == [communicator.size - 1] * 3
