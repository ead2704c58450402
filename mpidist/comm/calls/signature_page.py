"""The page of a node: its ranks show each other which call they are in, and what went wrong there."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from threading import Lock

# The bytes of a rank in the page: words and a text. No two ranks write to one cache line in a call.
PAGE_BYTES = 640
_WORDS = PAGE_BYTES // 8
# The words: two for calls, with even and with odd numbers; two for barriers; what the text is about, and the number of
# the call that it tells of; whether the rank has left a call in the middle; whether a rank calls all others out of
# what they wait in (of the first rank; all write there); and whether this rank has come out. On further cache lines:
# the release of a barrier in a tree; SLEEPS words behind the word of a barrier, until which count the parent sleeps,
# and behind the release, until which the rank itself does; and of the first rank, where all write, whether any rank
# has left a call in the middle, and the words of `wide_page.py`.
_CALL_WORDS, _BARRIER_WORD, FLAGGED, _TEXT_WORD, _NUMBER_WORD, _BROKEN_WORD = 0, 2, 1, 4, 5, 6
_CALLED_WORD, _OUT_WORD, _RELEASE_WORD, SLEEPS, _ANY_BROKEN_WORD, WIDE_WORDS, _TEXT_BEGIN = 7, 8, 9, 8, 16, 18, 192
# A word is the number of a call, in 41 bits; a flag for an interrupt; and the checksum of this call and all before it.
# So few bits are enough: if checksums of different calls happen to be equal, the next ones are not.
_HASH_BITS = 22
HASH = (1 << _HASH_BITS) - 1
FLAG = 1 << _HASH_BITS
NUMBER = 1 << _HASH_BITS + 1
# The number of a barrier, as no call has it: there ranks may be in calls of different numbers.
MEETINGS = 1 << 63
# In place of the number of a call: that rank still waits in it.
_WAITS = MEETINGS + MEETINGS - 1
# A difference that a waiting rank sees counts when it has lasted so long.
_DIFFERENCE_SECONDS = 0.5
# The other ranks are in the same call, or on their way: their texts come within this time.
_TEXT_SECONDS = 2.0


def order_stores() -> None:
    """Local. Let all ranks see this rank's stores before it looks at any other word.

    x86 may move a load in front of an earlier store to another address (Intel SDM 3A, 9.2.3.4), but not in front of an
    atomic operation, such as taking a lock.
    """
    # A new lock: taking one that another thread holds, or that a signal handler has interrupted, could block.
    Lock().acquire()


class CallPage:
    """The memory in which the ranks of a node show their calls on one communicator.

    A rank has a word for calls with even numbers and one for calls with odd numbers: a fast rank may be in the next
    call while a slow one still reads the words of this one. The word for barriers is on the same cache line, which the
    ranks pass to and fro in each call.

    Args:
        memory: `PAGE_BYTES` for each rank, zero at first.
        ranks: The ranks of the node, as the communicator numbers them.
        place: This rank's number among them.

    Attributes:
        memory: The constructor's argument.
        ranks: The constructor's argument.
        words: The memory as words of eight bytes, each of which is read and written in one piece.
        own: By the parity of a call's number: where this rank's word is.
        others: By the parity: where the other ranks' words are.
        looked_at: By the parity: the words that are the same as this rank's at the end of a call, or are looked at
            closely.
        own_barrier, others_barriers: Where this rank's and the others' words for barriers are. FLAGGED words further is
            the count of the last barrier in which a rank has shown an interrupt.
        barriers, releases: Where all ranks' words for barriers and releases are.
        is_wide: Whether there are so many ranks that none looks at all others in each call.
    """

    is_wide = False

    def __init__(self, memory: memoryview, ranks: Sequence[int], place: int) -> None:
        self.memory = memory
        self.ranks = tuple(ranks)
        self.words = memory.cast("Q")
        even, self.own_barrier = place * _WORDS + _CALL_WORDS, place * _WORDS + _BARRIER_WORD
        self.own = (even, even + 1)
        others = [other * _WORDS for other in range(len(ranks)) if other != place]
        self.others = (tuple(one + _CALL_WORDS for one in others), tuple(one + _CALL_WORDS + 1 for one in others))
        self.looked_at = self.others
        self.others_barriers = tuple(one + _BARRIER_WORD for one in others)
        self.barriers = [one * _WORDS + _BARRIER_WORD for one in range(len(ranks))]
        self.releases = [one * _WORDS + _RELEASE_WORD for one in range(len(ranks))]
        self._place = place
        self._differs_since = math.inf

    def shown(self, number: int) -> int:
        """Local. This rank's word for calls of this parity, as it was shown: `sign` may have changed the mark since."""
        return self.words[self.own[number & 1]]

    def differs(self, number: int, mark: int) -> bool:
        """Local. Whether another rank has shown a call of this number, and it is another one than this rank's.

        Others may be behind this rank, or ahead of a call in which ranks do not meet.
        """
        return any((mark ^ other) & HASH for other in self._marks(number))

    def tell(self, number: int) -> None:
        """Local. Nothing where every rank looks at all others; see `WidePage.tell`."""

    def sees_difference(self, number: int, mark: int) -> bool:
        """Local. As `differs`, in a rank that waits: a difference that it alone has seen counts, too."""
        return self.differs(number, mark)

    def settle(self, number: int) -> None:
        """Local. Show no checksum any more: all ranks know that those of the call of this number differ."""
        self.words[self.own[number & 1]] = number * NUMBER

    def differing_ranks(self, number: int) -> list[int]:
        """Local. The ranks that have shown a call of this number, as this rank has, and it is another one."""
        own = self.shown(number)
        ranks = [rank for place, rank in enumerate(self.ranks) if place != self._place]
        shown = [self.words[place] for place in self.others[number & 1]]
        return [
            rank for rank, word in zip(ranks, shown, strict=True)
            if own // NUMBER == word // NUMBER == number and (own ^ word) & HASH
        ]

    def differs_for_long(self, number: int, mark: int) -> bool:
        """Local. Whether `differs` is true, or a rank has left a call in the middle, and this was so before.

        Such a rank may be about to raise an error that all ranks share; therefore a difference must last.
        """
        if not (self.sees_difference(number, mark) or self.broken_ranks()):
            self._differs_since = math.inf
            return False
        self._differs_since = min(self._differs_since, time.monotonic())
        return time.monotonic() > self._differs_since + _DIFFERENCE_SECONDS

    def is_flagged(self, number: int, mark: int) -> bool:
        """Local. Whether another rank has shown this call, and an interrupt with it."""
        return (mark | FLAG) in self._marks(number)

    def _marks(self, number: int) -> list[int]:
        """The marks that other ranks have shown of the call of this number."""
        words = [self.words[place] for place in self.others[number & 1]]
        return [word % NUMBER for word in words if word // NUMBER == number]

    def has_written(self, about: int) -> bool:
        """Local. Whether this rank has shown a text about this; see `write`."""
        return self.words[self._place * _WORDS + _TEXT_WORD] == about

    def write(self, about: int, number: int, text: str) -> None:
        """Local. Show a text about this rank's last call.

        Args:
            about: The number of the call, or of the barrier: the same on all ranks that write and read.
            number: The number of the call.
            text: To show.
        """
        begin, content = self._place * PAGE_BYTES + _TEXT_BEGIN, text.encode()[: PAGE_BYTES - _TEXT_BEGIN - 1] + b"\0"
        self.memory[begin : begin + len(content)] = content
        self.words[self._place * _WORDS + _NUMBER_WORD] = number
        self.words[self._place * _WORDS + _TEXT_WORD] = about

    def write_for_others(self, number: int, text: str) -> None:
        """Local. Show a text about the call of this number, in which this rank waits and has seen no difference yet.

        Args:
            number: The number of the call.
            text: To show.
        """
        # Who reads it must not take this rank for one that raises the same error.
        self.write(number, _WAITS, text)

    def texts(self, about: int, number: int) -> tuple[dict[int, str], bool]:
        """Local. The texts of all ranks by rank, without those that do not come in time.

        That of a rank that has left a call in the middle is about this.

        Args:
            about: See `write`.
            number: See `write`.

        Returns:
            The texts, and whether all of them tell of calls of this number.
        """
        end = time.monotonic() + _TEXT_SECONDS
        texts: dict[int, str] = {}
        numbers: set[int] = set()
        for place, rank in enumerate(self.ranks):
            while not (is_there := self._has_text(place, about)) and time.monotonic() < end:
                # Many ranks that look often would keep the last ones from writing theirs.
                time.sleep(0.0005 * max(1, len(self.ranks) // 8))
            if is_there:
                numbers.add(self.words[place * _WORDS + _NUMBER_WORD])
                texts[rank] = self.text(rank)
        return texts, numbers == {number}

    def break_off(self, number: int, mark: int, why: str) -> None:
        """Local. Show that this rank has left the call of this number and mark in the middle; the first one counts."""
        if not self.words[self._place * _WORDS + _BROKEN_WORD]:
            self.write(number, number, why)
            self.words[self._place * _WORDS + _BROKEN_WORD] = 1
            self.words[_ANY_BROKEN_WORD] = 1
            # Ranks that wait for this one see that it is not in their call.
            self.words[self.own[number & 1]] = number * NUMBER + (mark ^ 1)

    @property
    def is_called_out(self) -> bool:
        """Local. Whether a rank has failed that makes no further call, and all are to come out of what they wait in."""
        return self.words[_CALLED_WORD] > 0

    def call_out(self) -> None:
        """Local. Call all ranks out of what they wait in, and show that this one has come out."""
        self.words[self._place * _WORDS + _OUT_WORD] = 1
        self.words[_CALLED_WORD] = 1

    def are_out(self) -> bool:
        """Local. Whether all ranks have come out."""
        return all(self.words[place * _WORDS + _OUT_WORD] for place in range(len(self.ranks)))

    def end_call(self) -> None:
        """Local. Take the call back; this rank is in no hurry any more."""
        self.words[self._place * _WORDS + _OUT_WORD] = 0
        self.words[_CALLED_WORD] = 0

    def text(self, rank: int) -> str:
        """Local. The last text of a rank; empty if there is none."""
        place = self.ranks.index(rank)
        content = bytes(self.memory[place * PAGE_BYTES + _TEXT_BEGIN : (place + 1) * PAGE_BYTES])
        return content.split(b"\0")[0].decode(errors="replace")

    def text_about(self, rank: int, number: int) -> str:
        """Local. The text that a rank has shown about the call of this number; empty if there is none."""
        return self.text(rank) if self._has_text(self.ranks.index(rank), number) else ""

    def _has_text(self, place: int, about: int) -> bool:
        """Whether a rank has shown a text about this, or its last one."""
        words = self.words[place * _WORDS : (place + 1) * _WORDS]
        return words[_TEXT_WORD] == about or words[_BROKEN_WORD] > 0

    def broken_ranks(self) -> list[int]:
        """Local. The ranks that have left a call in the middle."""
        if not self.words[_ANY_BROKEN_WORD]:
            return []
        return [rank for place, rank in enumerate(self.ranks) if self.words[place * _WORDS + _BROKEN_WORD]]
