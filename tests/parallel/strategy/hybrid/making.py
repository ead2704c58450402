"""Hybrid strategies over any nodes, and what their groups must come to, computed by NumPy."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from mpidist import HybridStrategy
from mpidist.comm.group.communicator import Communicator
from mpidist.strategy.hybrid import strategy as module
from mpidist.strategy.hybrid.home import HybridArena
from tests.parallel.layouts import lay_out, limits_of, refuse_shared

Array = npt.NDArray[Any]


def halves_of(communicator: Communicator) -> list[list[int]]:
    """Two groups, of which the second has one rank more where the number is odd; a single rank is one group."""
    ranks = [*range(communicator.size)]
    half = communicator.size // 2
    return [group for group in (ranks[:half], ranks[half:]) if group]


def make_hybrid(
    communicator: Communicator, layout: str = "node", groups: Any = None, **arguments: Any
) -> HybridStrategy:
    """Collective. A strategy of two groups over the nodes of a layout."""
    ranks = lay_out(communicator, layout)
    arguments = {**limits_of(layout), **arguments}
    with mock.patch.object(module, "open_communicator", return_value=ranks):
        strategy = HybridStrategy(halves_of(communicator) if groups is None else groups, **arguments)
    if layout == "full":
        home = home_of(strategy)
        home.reserve = refuse_shared(home)  # type: ignore[method-assign]
    return strategy


def home_of(strategy: HybridStrategy) -> HybridArena:
    """The home of its variables."""
    assert isinstance(strategy.home, HybridArena)
    return strategy.home


class Outer:
    """The outer optimizer of one group, by the formulas of SGD."""

    def __init__(self, size: int, rate: float, momentum: float, *, nesterov: bool) -> None:
        self.rate, self.momentum, self.nesterov = rate, momentum, nesterov
        self.velocity = np.zeros(size)

    def increment(self, difference: Array) -> Array:
        """The increment that a difference becomes."""
        scaled = self.rate * difference
        self.velocity = self.momentum * self.velocity + scaled
        return -(scaled + self.momentum * self.velocity) if self.nesterov else -self.velocity
