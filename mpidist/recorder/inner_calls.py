"""Inner calls: the calls inside a rank's current one, in its page, so that other ranks detect a difference.

A call of the program contains others: `assign` inside `run` adds values up first, outside it does not. Ranks that
differ there are in one call of one number, and can never meet. Each shows the signs of its last inner calls. A sign
is a hash of an inner call and all before it in the same outer one: its upper half over their names alone.
"""

from __future__ import annotations

from collections.abc import Sequence

# A state is the number of a call times this, plus a smaller number.
NEXT = 1 << 31
# The number of inner calls in the page: between ranks that meet, one can hardly be further ahead. The oldest may
# just be overwritten.
KEPT = 4
# The words of a communicator: the state of the outer call, and the count of its inner ones so far; the state of the
# last call that this rank has left by an exception, and its code; and the signs of inner calls, by their count.
OF, FAILED, RING = 0, 1, 2
WORDS = RING + KEPT
# The bits of half a sign, and how many they are.
HALF, HALF_BITS = (1 << 30) - 1, 30
NOTHING = memoryview(bytes(8 * WORDS)).cast("q")


def differ(mine: Sequence[int], number: int, code: int, theirs: Sequence[int]) -> bool:
    """Local. Whether another rank was in other calls inside the same one, or left that one as another call.

    Args:
        mine: The words of this rank.
        number: The number of its call.
        code: The code of its name.
        theirs: The words of the other rank.
    """
    if theirs[FAILED] // NEXT == number and theirs[FAILED] % NEXT != code:
        return True
    own = _signs(mine, number)
    return any((own.get(count, sign) ^ sign) >> HALF_BITS for count, sign in _signs(theirs, number).items())


def are_unlike(mine: Sequence[int], number: int, theirs: Sequence[int]) -> bool:
    """Local. Whether another rank was in inner calls that differ, if not by their names; arguments as for `differ`."""
    own = _signs(mine, number)
    return any(own.get(count, sign) != sign for count, sign in _signs(theirs, number).items())


def are_missing(mine: Sequence[int], number: int, theirs: Sequence[int]) -> bool:
    """Local. Whether another rank, which has left a call, was not in the last one of this rank inside it.

    Args:
        mine: The words of this rank.
        number: The number of its call.
        theirs: The words of the other rank, read after it has left.
    """
    # Words of a later call do not describe this one.
    return theirs[OF] // NEXT <= number and _count(mine, number) > _count(theirs, number)


def _count(words: Sequence[int], number: int) -> int:
    """The number of inner calls of a call that are in the page."""
    return words[OF] % NEXT if words[OF] // NEXT == number else 0


def _signs(words: Sequence[int], number: int) -> dict[int, int]:
    """The signs of the inner calls of a call that are shown, by their count, which begins at 1."""
    last = _count(words, number)
    return {count: words[RING + count % KEPT] for count in range(max(1, last - KEPT + 2), last + 1)}
