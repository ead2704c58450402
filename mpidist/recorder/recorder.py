"""The recorder: the calls of this process on all communicators, each with its place in the page of the rank.

On a worker also the closure that it runs. No other rank makes that call, so it is not in the page. And the bytes of
messages that this process has sent for each closure.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import NamedTuple

from mpidist.observe.trace import TRACE
from mpidist.recorder.calls import PLACE_WORDS, Call, Calls, byte_count, new_words
from mpidist.recorder.stacks import line_of_call

# The number of updates that are kept.
_UPDATES = 10_000


class _TracedCalls(Calls):
    """Calls that are part of a timeline, those inside others too."""

    def __init__(self, identity: int, members: Sequence[Hashable], rank: int, words: memoryview) -> None:
        super().__init__(identity, members, rank, words)
        self._begun: list[tuple[str, int, int, str]] = []

    def enter(self, name: str, call: Call = "", code: int = 0, owner: int = 0) -> None:
        """Local. See `Calls.enter`."""
        super().enter(name, call, code, owner)
        where = "" if self._begun else line_of_call(get_ident())
        self._begun.append((name, byte_count(call), TRACE.now(), where))

    def note_inner(self, name: str, call: Call, code: int) -> None:
        """Local. See `Calls.note_inner`; a step says there how many bytes it combines."""
        super().note_inner(name, call, code)
        if self._begun and self._begun[-1][0] == name and len(call) == 2:
            _, _, begin, where = self._begun[-1]
            self._begun[-1] = name, int(getattr(call[1], "nbytes", 0)), begin, where

    def leave(self) -> None:
        """Local. See `Calls.leave`."""
        super().leave()
        name, size, begin, where = self._begun.pop()
        if self._begun and self._begun[-1][0] == name:
            # A save, or a step, notes itself where it begins and where its ranks compare it.
            return
        TRACE.add(
            name, begin, thread=get_ident(), size=size, where=where, depth=len(self._begun), communicator=self.identity,
            number=self.number,
        )


@dataclass
class ClosureCall:
    """A closure that this worker runs.

    Attributes:
        number: The number of the closure.
        attempt: The number of times that it was given to a worker.
        find: A function that returns the closure's function; it returns None until that was read from its message.
        since: The time of its beginning, by the monotonic clock.
    """

    number: int
    attempt: int
    find: Callable[[], object]
    since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return describe_closure(self.number, name_of_function(self.find()), self.attempt)


class Update(NamedTuple):
    """An update of a closure that counts, as the coordinator has decided. Each makes the next version of the variables.

    Attributes:
        closure: The number of the closure.
        attempt: Which attempt counts.
        worker: The rank that has computed it.
        read: A lower bound of the versions that its worker has read.
        before: The version before it: `before - read` updates came between. In a synchronous round it is that of the
            round.
        is_late: Whether its gradients were dropped, since the round in which it has read was over.
    """

    closure: int
    attempt: int
    worker: int
    read: int
    before: int
    is_late: bool = False


def name_of_function(function: object) -> str:
    """Local. The name of a function, or of another callable, for display; empty for None."""
    called = function.func if isinstance(function, functools.partial) else function
    return "" if called is None else str(getattr(called, "__qualname__", type(called).__qualname__))


def describe_closure(number: int, function: str, attempt: int) -> str:
    """Local. A closure in words: "closure 5 of step, attempt 1"."""
    return f"closure {number}{' of ' * bool(function)}{function}, attempt {attempt}"


class Recorder:
    """The communicating calls of this process. There is one object of a process, `RECORDER`.

    Attributes:
        page: The words that other ranks of the node can read, or words of this process alone.
        closure: The closure that this process runs; None if it runs none.
        updates: On a coordinator the last updates that count, in their order.
    """

    def __init__(self) -> None:
        self.page = new_words(0)
        self.closure: ClosureCall | None = None
        self.updates: deque[Update] = deque(maxlen=_UPDATES)
        self._open: list[weakref.ref[Calls] | None] = []

    def show(self, words: memoryview) -> None:
        """Local. Write calls into these words from now on; before the first communicator is opened.

        Args:
            words: The words of eight bytes, zero, `PLACE_WORDS` for each communicator.
        """
        self.page = words
        self._open = [None] * (len(words) // PLACE_WORDS)

    def open(self, identity: int, members: Sequence[Hashable], rank: int) -> Calls:
        """Local. The calls on a new communicator. Its place is reused when the object is deleted.

        Args:
            identity: The identity of the communicator, the same on all its ranks; positive.
            members: The processes of its ranks, in their order.
            rank: This rank among them.
        """
        kind = Calls if TRACE.folder is None else _TracedCalls
        for index, one in enumerate(self._open):
            if one is None or one() is None:
                place = self.page[PLACE_WORDS * index : PLACE_WORDS * (index + 1)]
                calls = kind(identity, members, rank, place)
                self._open[index] = weakref.ref(calls)
                return calls
        # The page has no space for this communicator: other ranks cannot read its calls.
        return kind(identity, members, rank, new_words(PLACE_WORDS))

    @contextlib.contextmanager
    def during_closure(self, number: int, attempt: int, find: Callable[[], object]) -> Iterator[None]:
        """Local. Note a closure that lasts as long as the body of the `with`; arguments as of `ClosureCall`."""
        self.closure = ClosureCall(number, attempt, find)
        begin = TRACE.now()
        try:
            yield
        finally:
            self.closure = None
            if TRACE.folder is not None:
                name = name_of_function(find()) or "closure"
                TRACE.add_closure(name, begin, get_ident(), number=number, attempt=attempt)

    def opened(self) -> list[Calls]:
        """Local. The calls on all communicators that others can see."""
        return [calls for one in self._open if one is not None and (calls := one()) is not None]


RECORDER = Recorder()
