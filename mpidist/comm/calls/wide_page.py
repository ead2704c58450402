"""The page of a node with many ranks, none of which looks at all others in a call.

Before a rank sends anything, it compares its call with the calls of its neighbours in the tree of ranks, and with the
first call that was shown. If they differ, it sets a word that every rank reads at the end of the call. Thus all ranks
see a difference at the end of the same call: where calls differ, two neighbours differ; the later one of them sees the
other's word before it enters MPI; and no rank leaves before all have entered.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.comm.calls.rank_tree import children_of, parent_of
from mpidist.comm.calls.signature_page import FLAG, HASH, NUMBER, PAGE_BYTES, WIDE_WORDS, CallPage, order_stores


class WidePage(CallPage):
    """Local. The page of many ranks, with words that all ranks write. It takes the arguments of `CallPage`.

    The first rank's part of the page has these words, each by the parity of a call's number: the first call that was
    shown; the number of a call in which ranks differ; and a call in which a rank was interrupted.
    """

    is_wide = True

    def __init__(self, memory: memoryview, ranks: Sequence[int], place: int) -> None:
        super().__init__(memory, ranks, place)
        self._first, self._differing, self._flagged = (
            (WIDE_WORDS + kind, WIDE_WORDS + kind + 1) for kind in (0, 2, 4)
        )
        # This word never equals a call's word, so each call is compared closely, which reads this word only.
        self.looked_at = ((self._differing[0],), (self._differing[1],))
        parent = parent_of(place)
        near = [*([] if parent is None else [parent]), *children_of(place, len(ranks))]
        even = [one * PAGE_BYTES // 8 for one in near]
        self._near = (tuple(even), tuple(one + 1 for one in even))
        # The last call after which all ranks reset their checksums: words about it are ignored.
        self._settled = 0

    def tell(self, number: int) -> None:
        """Local. Compare the call that this rank has just shown, and show a difference or an interrupt to all ranks.

        Args:
            number: The number of the call.
        """
        words, parity = self.words, number & 1
        word = self.shown(number)
        if word & FLAG:
            words[self._flagged[parity]] = word
        # At least one of two neighbours sees the other's word.
        order_stores()
        if words[self._first[parity]] // NUMBER < number:
            # If several ranks write it at the same time, the comparison of neighbours still finds the difference.
            words[self._first[parity]] = word
        if self._sees(number, word):
            words[self._differing[parity]] = number * NUMBER

    def differs(self, number: int, mark: int) -> bool:
        """Local. Whether a rank has shown that ranks differ in the call of this number; see `tell`."""
        del mark  # any difference between ranks counts, whichever of the calls is this rank's
        return number > self._settled and self.words[self._differing[number & 1]] // NUMBER == number

    def sees_difference(self, number: int, mark: int) -> bool:
        """Local. See `CallPage.sees_difference`; a difference to a neighbour or to the first call counts, too."""
        return self.differs(number, mark) or (number > self._settled and self._sees(number, mark))

    def settle(self, number: int) -> None:
        """Local. See `CallPage.settle`."""
        super().settle(number)
        self._settled = number

    def is_flagged(self, number: int, mark: int) -> bool:
        """Local. Whether a rank has shown this call with an interrupt."""
        return self.words[self._flagged[number & 1]] == number * NUMBER + (mark | FLAG)

    def differs_for_long(self, number: int, mark: int) -> bool:
        """Local. See `CallPage.differs_for_long`; this then shows the difference to all ranks."""
        is_long = super().differs_for_long(number, mark)
        if is_long:
            self.words[self._differing[number & 1]] = number * NUMBER
        return is_long

    def break_off(self, number: int, mark: int, why: str) -> None:
        """Local. See `CallPage.break_off`."""
        super().break_off(number, mark, why)
        self.words[self._differing[number & 1]] = number * NUMBER

    def _sees(self, number: int, mark: int) -> bool:
        """Whether a neighbour, or the first rank to show a call of this number, has shown another call."""
        for place in (*self._near[number & 1], self._first[number & 1]):
            word = self.words[place]
            if (word ^ mark) & HASH and word // NUMBER == number:
                return True
        return False
