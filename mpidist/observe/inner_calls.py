"""Inner calls: what ranks show each other of the calls inside their current one, so that a difference there is seen.

A call of the program contains others: `assign` inside `run` adds values up first, outside it does not. Ranks that
differ there are in one call of one number, and can never meet. Each shows the signs of its last inner calls. A sign
goes over the names of an inner call and of all before it in the same outer one.
"""

from __future__ import annotations

from collections.abc import Sequence

# So many inner calls are shown: between ranks that meet, one can hardly be further ahead.
KEPT = 4
# The words of a communicator: the number of the outer call that the others are about; the code of that call, if this
# rank has left it by an exception; and the last inner calls, each with its count and its sign.
OF, FAILED, RING = 0, 1, 2
WORDS = RING + KEPT
SIGN_BITS = 39
SIGN = (1 << SIGN_BITS) - 1
NOTHING = memoryview(bytes(8 * WORDS)).cast("q")


def differ(mine: Sequence[int], number: int, code: int, theirs: Sequence[int]) -> bool:
    """Local. Whether another rank was in other calls inside the same one, or left that one as another call.

    Args:
        mine: The words of this rank.
        number: Of its call.
        code: Of its name.
        theirs: The words of the other rank.
    """
    if theirs[OF] == number and theirs[FAILED] not in (0, code):
        return True
    own = _signs(mine, number)
    return any(own.get(count, sign) != sign for count, sign in _signs(theirs, number).items())


def are_missing(mine: Sequence[int], number: int, theirs: Sequence[int]) -> bool:
    """Local. Whether another rank, which has left a call, was not in the last one of this rank inside it.

    Args:
        mine: The words of this rank.
        number: Of its call.
        theirs: The words of the other rank, read after it has left.
    """
    # Words about a later call say nothing about this one.
    return theirs[OF] <= number and max(_signs(mine, number), default=0) > max(_signs(theirs, number), default=0)


def _signs(words: Sequence[int], number: int) -> dict[int, int]:
    """The signs of the inner calls of a call that are shown, by their count, which begins at 1."""
    shown = words[RING:] if words[OF] == number else ()
    return {word >> SIGN_BITS: word & SIGN for word in shown if word}
