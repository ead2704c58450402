"""The lead of a group: the increments that it expects of the others, until these come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidist.strategy.hybrid.outer import Flat, Place

# So many windows of each other group at most are expected. A group that is stopped sends none.
_WINDOWS = 2


class Lead:
    """The increments that other groups are expected to make, for each piece of a part.

    The outer parameters contain an n-th of a group's way, until the others' increments come. A group that went back to
    them would go the same way again in its next window, and so would the others: together they would go too far, the
    farther the later increments come. So it continues as if each other group made the increment that it has made
    itself. What has come is not expected any more. What is expected is sent to nobody.

    Args:
        pieces: The pieces.

    Attributes:
        flat: The sum of the expected increments; empty where none is expected.
    """

    def __init__(self, pieces: Sequence[Place]) -> None:
        self.flat: Flat = []
        self._pieces = pieces
        # Windows of other groups, for each piece.
        self._expected = [0.0] * len(pieces)

    def expect(self, increments: Flat, other_count: int) -> None:
        """Local. Expect the increments that this group has made of so many other groups."""
        if not self.flat:
            self.flat = [np.zeros_like(increment) for increment in increments]
        most = _WINDOWS * other_count
        for piece, (section, start, stop) in enumerate(self._pieces):
            flat = self.flat[section][start:stop]
            flat += increments[section][start:stop] * flat.dtype.type(other_count)
            expected = self._expected[piece] + other_count
            if expected > most:
                flat *= flat.dtype.type(most / expected)
            self._expected[piece] = min(expected, most)

    def note_arrival(self, piece: int, windows: int) -> None:
        """Local. Subtract increments that have come, of a number of windows, from the expected ones."""
        expected = self._expected[piece]
        if not expected:
            return
        section, start, stop = self._pieces[piece]
        left = max(0.0, expected - windows)
        flat = self.flat[section][start:stop]
        np.multiply(flat, flat.dtype.type(left / expected), out=flat)
        self._expected[piece] = left

    def clear(self) -> None:
        """Local. Expect nothing: all groups hold the same parameters."""
        self._expected = [0.0] * len(self._pieces)
        self.flat = []
