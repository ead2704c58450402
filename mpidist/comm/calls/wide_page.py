"""The page of a node with many ranks, none of which looks at all others in a call.

Before a rank sends anything it compares its call with those of its neighbours in the tree of ranks, and with the first
one that was shown; where they differ, it says so in a word that every rank reads at the end of the call. Thus all ranks
see a difference at the end of the same call: where calls differ, two neighbours differ; the later one of them sees the
other's word before it enters MPI; and no rank leaves before all have entered.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.comm.calls.rank_tree import children_of, parent_of
from mpidist.comm.calls.signature_page import FLAG, HASH, NUMBER, PAGE_BYTES, WIDE_WORDS, CallPage, order_stores


class WidePage(CallPage):
    """The page of many ranks; the first rank has words that all of them write, each by the parity of a call's number.

    They are: the first call that was shown; the number of a call in which ranks differ; and a call in which a rank was
    interrupted.

    Local. It takes the arguments of `CallPage`.
    """

    is_wide = True

    def __init__(self, memory: memoryview, ranks: Sequence[int], place: int) -> None:
        super().__init__(memory, ranks, place)
        self._first, self._differing, self._flagged = (
            (WIDE_WORDS + kind, WIDE_WORDS + kind + 1) for kind in (0, 2, 4)
        )
        # It is the word of no call, so each call is looked at closely; that is a look at it.
        self.looked_at = ((self._differing[0],), (self._differing[1],))
        parent = parent_of(place)
        near = [*([] if parent is None else [parent]), *children_of(place, len(ranks))]
        even = [one * PAGE_BYTES // 8 for one in near]
        self._near = (tuple(even), tuple(one + 1 for one in even))
        # The last call after which all ranks began again from 0: what was shown of it is ignored.
        self._settled = 0

    def tell(self, number: int) -> None:
        """Local. Compare the call that this rank has just shown, and say where it differs or the rank was interrupted.

        Args:
            number: The number of the call.
        """
        words, parity = self.words, number & 1
        word = self.shown(number)
        if word & FLAG:
            words[self._flagged[parity]] = word
        # Of two neighbours one at least sees the other's word.
        order_stores()
        if words[self._first[parity]] // NUMBER < number:
            # Where several ranks write it at the same moment, what neighbours see remains.
            words[self._first[parity]] = word
        if self._sees(number, word):
            words[self._differing[parity]] = number * NUMBER

    def differs(self, number: int, mark: int) -> bool:
        """Local. Whether a rank has said that ranks differ in the call of this number; see `tell`."""
        del mark  # which one of the calls this rank's is
        return number > self._settled and self.words[self._differing[number & 1]] // NUMBER == number

    def sees_difference(self, number: int, mark: int) -> bool:
        """Local. See `CallPage.sees_difference`; if so, it lasts, and others should see it, too."""
        return self.differs(number, mark) or (number > self._settled and self._sees(number, mark))

    def settle(self, number: int) -> None:
        """Local. See `CallPage.settle`."""
        super().settle(number)
        self._settled = number

    def is_flagged(self, number: int, mark: int) -> bool:
        """Local. Whether a rank has shown this call, and an interrupt with it."""
        return self.words[self._flagged[number & 1]] == number * NUMBER + (mark | FLAG)

    def differs_for_long(self, number: int, mark: int) -> bool:
        """Local. See `CallPage.differs_for_long`; the others see it then, too."""
        is_long = super().differs_for_long(number, mark)
        if is_long:
            self.words[self._differing[number & 1]] = number * NUMBER
        return is_long

    def break_off(self, number: int, mark: int, why: str) -> None:
        """Local. See `CallPage.break_off`."""
        super().break_off(number, mark, why)
        self.words[self._differing[number & 1]] = number * NUMBER

    def _sees(self, number: int, mark: int) -> bool:
        """Whether a neighbour, or the rank that was first, has shown a call of this number, and it is another one."""
        for place in (*self._near[number & 1], self._first[number & 1]):
            word = self.words[place]
            if (word ^ mark) & HASH and word // NUMBER == number:
                return True
        return False
