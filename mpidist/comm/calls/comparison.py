"""The comparison of calls: the checksums that ranks show each other, and the errors if they differ.

The ranks of a node compare checksums in their barrier, whose words contain them, or, after a call without that barrier,
in the page of the node. Ranks on different nodes send their checksums at intervals, and in every step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mpidist.comm.calls import text as call_text
from mpidist.comm.calls.signature_page import FLAG, HASH, MEETINGS, NUMBER, CallPage
from mpidist.comm.calls.text import HINT, UNKNOWN, mismatch, owned_by, taken, told, where_called
from mpidist.errors import MismatchError, RankError, mark_shared
from mpidist.recorder.calls import Calls, describe

if TYPE_CHECKING:
    from mpidist.comm.calls.messages import CallMessages
from mpidist.recorder.stacks import line_of_call


class CallComparison:
    """The last call of this rank on a communicator, as the other ranks see it.

    Attributes:
        broken: The call that was left in the middle, empty if there is none. Later calls are refused.
        number: The number of the last call.
        key: The last call: its name, its detail that must be the same on all ranks, dtype and shape. It stays the same
            object as long as calls repeat.
        is_across: Whether there are ranks with which this one shares no memory.
        is_asked: Whether this rank was interrupted, and not all ranks are notified yet.
        last_checkpoint: The last checkpoint that these ranks have saved, for the text of errors.
        owner: The number of the strategy that made the last call; 0: no strategy.
        mark: The checksum of this call and all before it, and a flag for an interrupt; a barrier shows it.
        is_shown, page, barrier: Whether `show` was called, and its arguments.
    """

    # With more than 30 attributes Python would use a dictionary, which takes a tenth of the time of a call.
    __slots__ = (
        "_awaits", "_batch", "_calls", "_depth", "_is_compared", "_is_interrupted", "_mark_before", "_meets",
        "_messages", "_others", "_own", "_shown", "_step", "_taken", "_tell", "_word", "_words", "barrier", "broken",
        "is_across", "is_asked", "is_shown", "key", "last_checkpoint", "mark", "number", "owner", "page",
    )

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.is_across = self.is_shown = self.is_asked = self._is_interrupted = self._meets = self._awaits = False
        self._is_compared = False
        self.broken = self.last_checkpoint = ""
        # The last call that was shown, and its word.
        self.number = self.owner = self.mark = self._mark_before = self._depth = self._shown = self._word = 0
        self.key: tuple[Any, ...] = ("a call",)
        self._step: tuple[Any, ...] = ()
        # The batch that the program took last, and a checksum of the batches that it took since the last call.
        self._batch, self._taken = (0, 0, 0), 0
        self.page: CallPage | None = None
        self.barrier: Callable[[], None] | None = None
        self._tell: Callable[[int], None] | None = None
        self._words: memoryview | None = None
        self._own = (0, 0)
        self._others: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def show(
        self, page: CallPage | None, barrier: Callable[[], None] | None, messages: CallMessages | None
    ) -> None:
        """Local. Compare calls from now on.

        Args:
            page: The page of this rank's node; None where the ranks share no memory.
            barrier: The barrier of this rank's node, on that page.
            messages: The messages between nodes; None where this rank shares memory with all ranks.
        """
        self.is_shown = True
        self.barrier = barrier
        if messages is not None:
            self._messages, self.is_across = messages, True
        if page is not None:
            self.page, self._words, self._own, self._others = page, page.words, page.own, page.looked_at
            self._tell = page.tell if page.is_wide else None

    def show_call(self) -> None:
        """Local. Show this call, so that its end compares it: all ranks enter it, but not by the node's barrier."""
        if (words := self._words) is not None:
            number = self.number
            is_first = self._shown < number - 1
            if is_first:
                # A rank that stays one call behind compares the previous call.
                words[self._own[1 - (number & 1)]] = (number - 1) * NUMBER + self._mark_before
            self._shown = number
            words[self._own[number & 1]] = self._word = number * NUMBER + self.mark
            self._awaits = self._meets
            if (tell := self._tell) is not None:
                if is_first:
                    tell(number - 1)
                tell(number)

    def show_refusal(self) -> None:
        """Local. Show that this rank refuses its call, and the reason: ranks that wait in the call then leave it."""
        self.show_call()
        self._awaits = False
        if self.page is not None:
            self.page.write(self.number, self.number, self._text())

    def look_ahead(self) -> None:
        """Local. Show this call, and compare it with the calls that the node's ranks have shown, before MPI is called.

        A call of MPI whose messages do not match may end the job without a report, or never return. Ranks that enter at
        the same time may not see each other's call, and compare at the end.

        Raises:
            MismatchError: A rank makes another call; only on the later rank, so that the job ends.
        """
        self.show_call()
        if (words := self._words) is not None:
            number, word = self.number, self._word
            is_compared = not word & FLAG
            for place in self._others[number & 1]:
                if (seen := words[place]) != word:
                    is_compared = False
                    if seen // NUMBER == number:
                        self._compare_closely()
            if is_compared:
                self._awaits = False

    def meet(self, count: int, *, differs: bool) -> None:
        """Collective over the node. Handle a barrier in which the marks of the ranks differ.

        On several nodes the next message between them compares, so that all ranks raise the same error.

        Args:
            count: The number of the barrier.
            differs: Whether ranks are in different calls; if not, one of them was interrupted.

        Raises:
            MismatchError, InterruptedCallError: The calls differ; on every rank of the node.
        """
        if not differs:
            self._is_interrupted = True
        elif self.page is not None and not self.is_across:
            self._refuse(self.page, MEETINGS + count)

    def look(self, has_met: Callable[[], bool]) -> None:
        """Local. Compare this call with the calls of the node's ranks; a rank that waits calls this repeatedly.

        A rank may never arrive if it is in another call, has left a call in the middle, or has failed.

        Args:
            has_met: A function that returns whether all ranks have arrived: one may have failed after this call.

        Raises:
            MismatchError, InterruptedCallError: See `meet`.
            RankError: A rank that this one waits for has failed, and will not arrive; on every rank of the node.
        """
        page, number = self.page, self.number
        self._calls.in_barrier = time.monotonic()
        if page is not None and page.is_called_out and not has_met():
            text = told(self._text())
            raise mark_shared(RankError(f"{text} is abandoned: another rank has failed and will not make it"))
        if page is not None and page.differs_for_long(number, self.mark if self._depth else page.shown(number)):
            self._refuse(page, number)

    def difference(self) -> str:
        """Local. The difference of the ranks' last calls; empty if this rank sees none."""
        if self.page is None or not self.page.differs(self.number, self.mark):
            return ""
        return f"ranks have made different calls: some of them not {told(self._text())}, or others before it. {HINT}"

    def differing(self) -> tuple[Sequence[int], str]:
        """Local. The ranks that have shown another call than this rank, or left one in the middle; and a description.

        Any thread may call this, since a rank that waits in MPI neither compares nor shows the text of its call.
        Another rank may have seen the difference and need that text: this shows it.
        """
        page = self.page
        if page is None:
            return (), ""
        if ranks := page.broken_ranks():
            return ranks, f"on rank {ranks[0]}, {told(page.text(ranks[0])) or 'a call was left in the middle'}"
        ranks = page.differing_ranks(number := self.number)
        if not ranks:
            return (), ""
        where, _, _ = line_of_call(self._calls.thread).rpartition(" (")
        mine = self._text(f" at {where}" if where else "")
        if not page.has_written(number):
            page.write_for_others(number, mine)
        texts = {self._calls.rank: mine, **{rank: page.text_about(rank, number) or UNKNOWN for rank in ranks}}
        return ranks, str(self._mismatch(texts, self.key))

    def compare_across(self) -> None:
        """Collective where ranks share no memory, else Local. Compare this call, and all before it, between nodes.

        Raises:
            MismatchError: Ranks make other calls; on every rank.
        """
        if self.is_across:
            self._compare_across()
            self._complete()

    @contextlib.contextmanager
    def compared(self) -> Iterator[None]:
        """Local. A context whose calls are compared in another way before they send anything, or send nothing."""
        before, self._is_compared = self._is_compared, True
        try:
            yield
        finally:
            self._is_compared = before

    def require_whole(self, name: str) -> None:
        """Local. Raise if a call was left in the middle.

        Raises:
            InterruptedCallError: See `broken`.
        """
        if self.broken:
            raise call_text.left_in_the_middle(name, self.broken, self.last_checkpoint)

    def restart(self, *, keeps_call: bool = False) -> None:
        """Local. Reset the checksums, after all ranks have detected that these differed.

        Args:
            keeps_call: Whether the last call was the same on all ranks, so that some may still compare it.
        """
        self.mark = self._taken = 0
        self._awaits = False
        if self.page is not None and not keeps_call:
            self.page.settle(self.number)
        if self.is_across:
            self._messages.forget()

    def listen(self, look: Callable[[], None] | None) -> None:
        """Collective. Call a function while this rank waits for a comparison between nodes.

        Args:
            look: The function, which may raise an error that all ranks share. None: no function.
        """
        if self.is_across:
            self._messages.look = look

    def meet_across(self) -> None:
        """Collective where ranks share no memory, else Local. Wait for all ranks if `listen` has set a function."""
        if self.is_across and self._messages.look is not None:
            self._complete()
            self._messages.begin(0, is_asked=False)
            self._complete()

    @property
    def comparisons(self) -> int:
        """Local. The number of comparisons between nodes that this rank has begun."""
        return self._messages.count if self.is_across else 0

    def catch_up(self, comparisons: int) -> None:
        """Collective. End all comparisons between nodes when ranks have begun different numbers of them.

        Args:
            comparisons: The largest of these numbers.
        """
        if self.is_across:
            self._messages.catch_up(comparisons)

    def go_on_at(self, number: int, noted: int) -> None:
        """Local. Set the number of the last call; all ranks do so after some ranks have given up a call.

        Args:
            number: Number of signed calls, not smaller than on any rank.
            noted: Number of all calls, not smaller than on any rank.
        """
        self.number = self._shown = number
        self.restart()
        if self._words is not None:
            self._words[self._own[1 - (number & 1)]] = max(0, number - 1) * NUMBER
        self._calls.go_on_at(noted)

    def _compare(self) -> None:
        """Collective with ranks that make another call. Compare calls that were shown."""
        if self._awaits and (words := self._words) is not None:
            self._awaits = False
            if (word := self._word) & FLAG:
                self._is_interrupted = True
            for place in self._others[self.number & 1]:
                if words[place] != word:
                    self._compare_closely()
                    break

    def _compare_closely(self) -> None:
        if (page := self.page) is not None:
            self._is_interrupted = self._is_interrupted or page.is_flagged(self.number, self.mark)
            before = self.number - 1
            if page.differs(self.number, self.mark) or page.differs(before, page.shown(before)):
                self._refuse(page, self.number)

    def _compare_across(self) -> None:
        """Collective. Begin to compare after the previous comparison; an interrupt from that one is not sent again."""
        self._complete()
        self._messages.begin(self.mark & HASH, is_asked=self.is_asked and not self._is_interrupted)

    def _complete(self) -> None:
        agrees, is_interrupted = self._messages.complete()
        if not agrees:
            texts = dict(enumerate(self._messages.gather(self._text())))
            error = mismatch(self.key, self.number, texts, "this call, or one shortly before it")
            self.restart()
            raise mark_shared(error)
        self._is_interrupted = self._is_interrupted or is_interrupted

    def _refuse(self, page: CallPage, place: int) -> NoReturn:
        """Collective over the node. Raise an error with the calls of all its ranks.

        The ranks' texts are about `place`; see `CallPage.write`.

        Raises:
            MismatchError: The calls differ.
            InterruptedCallError: A rank has left its call in the middle.
        """
        key, text = self.key, self._text()
        # Before the text: a rank that has all texts may compare its next call, and must not see this one's checksum.
        self.restart()
        page.write(place, self.number, text)
        texts, is_in_step = page.texts(place, self.number)
        for rank in page.broken_ranks():
            self.broken = self.broken or f"on rank {rank}, {told(texts.get(rank, 'a call was left in the middle'))}"
        self.require_whole("continuing")
        missing = dict.fromkeys(sorted(set(page.ranks) - set(texts)), UNKNOWN)
        error = self._mismatch({**texts, **missing}, key)
        if is_in_step and not missing and not self.is_across:
            raise mark_shared(error)
        self.broken = f"ranks have made different calls: {error}"
        raise error

    def _mismatch(self, texts: Mapping[int, str], key: tuple[Any, ...]) -> MismatchError:
        return mismatch(key, self.number, texts, "this call, or one before it")

    def _text(self, where: str | None = None) -> str:
        """The text of this rank's call for the other ranks. `where` is its line, by default the line of this thread."""
        where = where_called() if where is None else where
        step = f", after {describe(self._step)}" if self._step and self._step != self.key else ""
        # The reason is no part of the signature: ranks may refuse a call for different reasons.
        reason = getattr(self.key[1], "reason", "") if len(self.key) > 1 else ""
        why = f": {reason}" if reason else ""
        return f"{describe(self.key)}{owned_by(self.owner)}{why}{where}{step}{taken(*self._batch)}"
