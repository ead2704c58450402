"""Copies that other threads make while this rank is in a step or a write: never half of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.optimizers import Optimizer
from mpidist.strategy.base import Strategy
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.update import arithmetic
from mpidist.variables.update.kernel import Update
from tests.helpers.waiting import until
from tests.parallel.layouts import make_strategy

pytestmark = pytest.mark.mpi

SIZE = 4000
COPIES: dict[str, Callable[[MirroredVariable], Any]] = {
    "numpy": lambda v: v.numpy(),
    "read_value": lambda v: v.read_value(),
    "asarray": np.asarray,
    "array": lambda v: np.array(v, np.float64),
    "rows": lambda v: v.sparse_read(np.arange(SIZE)),
    "lookup": lambda v: mpidist.embedding_lookup(v, np.arange(SIZE)),
}


class Watched:
    """A guard that tells when a thread waits for it."""

    def __init__(self, guard: Any) -> None:
        self._guard = guard
        self.is_awaited = threading.Event()

    def __enter__(self) -> None:
        if not self._guard.acquire(blocking=False):
            self.is_awaited.set()
            self._guard.acquire()

    def __exit__(self, *_: object) -> None:
        self._guard.release()


class Reader:
    """Copies a variable in another thread, as soon as it is told to."""

    def __init__(self, variable: MirroredVariable, copy: Callable[[MirroredVariable], Any]) -> None:
        self._variable = variable
        self._copy = copy
        self._pool = ThreadPoolExecutor()
        self._copies: list[Future[Any]] = []
        self.guard = Watched(variable.arena.guard)
        variable.arena.guard = self.guard  # type: ignore[assignment]

    def begin(self) -> None:
        """Begin a copy; return when it is there, or waits for the guard."""
        self._copies.append(copied := self._pool.submit(self._copy, self._variable))
        until(lambda: copied.done() or self.guard.is_awaited.is_set(), "a copy is made, or waits")
        self.guard.is_awaited.clear()

    def copies(self) -> Iterator[AnyArray]:
        """All copies, when they are there."""
        with self._pool:
            yield from (copied.result() for copied in self._copies)


@dataclass(frozen=True)
class HalfWay:
    """Subtracts 1, and looks at what others see in the middle of each block.

    Attributes:
        look: Called in the middle.
    """

    look: Callable[[], None]

    @property
    def slots(self) -> Mapping[str, float]:
        """None."""
        return {}

    @property
    def scratch_count(self) -> int:
        """None."""
        return 0

    def prepare(self, _step: int, _learning_rate: float) -> Update:
        """Local. See `Kernel.prepare`."""

        def update(
            parameter: AnyArray, _gradient: AnyArray, _slots: Sequence[AnyArray], _scratch: Sequence[AnyArray]
        ) -> None:
            half = parameter.size // 2
            parameter[:half] -= 1
            self.look()
            parameter[half:] -= 1

        return update


@pytest.fixture(params=["node", "private"])
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> Strategy:
    return make_strategy(communicator, request.param)


def make(strategy: Strategy, copy: str) -> tuple[MirroredVariable, Reader]:
    with strategy.scope():
        variable: Any = mpidist.Variable(np.full(SIZE, 2.0))
    return variable, Reader(variable, COPIES[copy])


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_in_another_thread_is_of_whole_steps(strategy: Strategy, copy: str) -> None:
    variable, reader = make(strategy, copy)
    optimizer = Optimizer(HalfWay(reader.begin), 1.0, name="HalfWay")
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(SIZE), variable)]))
    for copied in reader.copies():
        assert copied.tolist() == [1.0] * SIZE
    assert variable.numpy().tolist() == [1.0] * SIZE


def test_a_copy_in_another_thread_is_of_whole_writes(strategy: Strategy) -> None:
    variable, reader = make(strategy, "numpy")
    target = variable.address.writable

    def write() -> None:
        target[: SIZE // 2] = 5
        reader.begin()
        target[SIZE // 2 :] = 5

    variable.arena.write(variable.address.slab, write, "assign to variable number", variable.number)
    assert all(copied.tolist() == [5.0] * SIZE for copied in reader.copies())


def test_a_copy_in_another_thread_is_of_a_whole_restore(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable, reader = make(strategy, "numpy")
    real = np.copyto

    def in_two_parts(target: AnyArray, source: AnyArray) -> None:
        half = target.size // 2
        real(target[:half], source[:half])
        reader.begin()
        real(target[half:], source[half:])

    monkeypatch.setattr(np, "copyto", in_two_parts)
    variable.load(lambda start, stop: np.full(stop - start, 7.0))
    monkeypatch.undo()
    assert all(copied.tolist() == [7.0] * SIZE for copied in reader.copies())
    assert variable.numpy().tolist() == [7.0] * SIZE


def test_a_copy_in_another_thread_is_of_all_averaged_weights(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable, reader = make(strategy, "numpy")
    with strategy.scope():
        optimizer = mpidist.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(np.full(SIZE, 1 / strategy.num_replicas_in_sync), variable)]))

    def in_two_parts(parameter: AnyArray, _: AnyArray, slots: Sequence[AnyArray], __: Sequence[AnyArray]) -> None:
        half = parameter.size // 2
        parameter[:half] = slots[-1][:half]
        reader.begin()
        parameter[half:] = slots[-1][half:]

    monkeypatch.setattr(arithmetic, "take_average", in_two_parts)
    optimizer.finalize_variable_values()
    assert all(copied.tolist() == [0.5] * SIZE for copied in reader.copies())
    assert variable.numpy().tolist() == [0.5] * SIZE
