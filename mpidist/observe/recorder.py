"""The recorder: the calls of this process on all communicators, each with its place in the page of the rank."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from threading import get_ident

from mpidist.observe.calls import PLACE_WORDS, Call, Calls, byte_count, new_words
from mpidist.observe.stacks import line_of_call
from mpidist.observe.trace import TRACE


class _TracedCalls(Calls):
    """Calls that are part of a timeline, those inside others too."""

    def __init__(self, identity: int, members: Sequence[Hashable], rank: int, words: memoryview) -> None:
        super().__init__(identity, members, rank, words)
        self._begun: list[tuple[str, int, int, str]] = []

    def enter(self, name: str, call: Call = "") -> None:
        """Local. See `Calls.enter`."""
        super().enter(name, call)
        where = "" if self._begun else line_of_call(get_ident())
        self._begun.append((name, byte_count(call), TRACE.now(), where))

    def leave(self) -> None:
        """Local. See `Calls.leave`."""
        super().leave()
        name, byte_count, begin, where = self._begun.pop()
        if self._begun and self._begun[-1][0] == name:
            # A save, or a step, notes itself where it begins and where its ranks compare it.
            return
        TRACE.add(
            name=name, bytes=byte_count, begin=begin, end=TRACE.now(), where=where, thread=get_ident(),
            depth=len(self._begun), communicator=self.identity, number=self.number,
        )


class Recorder:
    """The communicating calls of this process. There is one object of a process, `RECORDER`.

    Attributes:
        page: The words that other ranks of the node can read, or words of this process alone.
    """

    def __init__(self) -> None:
        self.page = new_words(0)
        self._open: list[weakref.ref[Calls] | None] = []

    def show(self, words: memoryview) -> None:
        """Local. Let calls be seen on these words from now on; before the first communicator is opened.

        Args:
            words: Of eight bytes, zero, `PLACE_WORDS` for each communicator.
        """
        self.page = words
        self._open = [None] * (len(words) // PLACE_WORDS)

    def open(self, identity: int, members: Sequence[Hashable], rank: int) -> Calls:
        """Local. The calls on a new communicator. Its place is used again when the object is gone.

        Args:
            identity: Of the communicator, the same on all its ranks; positive.
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
        # The others do not see what this rank does on this communicator.
        return kind(identity, members, rank, new_words(PLACE_WORDS))

    def opened(self) -> list[Calls]:
        """Local. The calls on all communicators that others can see."""
        return [calls for one in self._open if one is not None and (calls := one()) is not None]


RECORDER = Recorder()
