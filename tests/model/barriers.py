"""Barriers in the tree of a node's ranks, and the comparison of calls there, in random orders of all looks and changes.

Rules:

    ahead      no rank leaves a barrier before all have entered it
    verdict    all ranks get the same verdict of a barrier or a call, and it is that of their marks
    stuck      somebody can always go on: nobody sleeps who should have been woken

`BARRIER_MUTANTS` break one each.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

from mpidist.comm.calls import wide_page
from mpidist.comm.calls.signature_page import FLAG, HASH, NUMBER, PAGE_BYTES, SLEEPS
from mpidist.comm.calls.wide_page import WidePage
from mpidist.comm.memory import tree_barrier
from mpidist.comm.memory.tree_barrier import TreeBarrier
from tests.model.parties import BrokenError
from tests.model.shared_words import Machine


class Tree(NamedTuple):
    """What is explored.

    Attributes:
        size: The number of ranks.
        rounds: The number of barriers, or of calls.
        kind: The class of the barrier, or of the page.
        sleeps: Whether a rank that waits sleeps at once; else it looks again and again.
        orders: Whether a rank makes its changes visible where it says so.
    """

    size: int
    rounds: int = 3
    kind: type[TreeBarrier] | type[WidePage] = TreeBarrier
    sleeps: bool = True
    orders: bool = True


def go_one_way(tree: Tree, seed: int) -> None:
    """Go through the barriers or calls of a tree once.

    Raises:
        BrokenError: A rule does not hold.
    """
    machine = Machine(tree.size, tree.size * PAGE_BYTES // 8, seed)
    order_stores = machine.order_stores if tree.orders else lambda: None
    meet = _Calls(tree, machine, seed) if issubclass(tree.kind, WidePage) else _Barriers(tree, machine, seed)
    barriers, pages = (patch.object(module, "order_stores", order_stores) for module in (tree_barrier, wide_page))
    with barriers, pages:
        machine.run(meet.go)


class _Rounds:
    """The marks of all ranks, round after round: the same ones, or another one on one rank, or with an interrupt."""

    def __init__(self, tree: Tree, machine: Machine, seed: int) -> None:
        self.tree, self.machine = tree, machine
        chance = random.Random(-1 - seed)
        self.marks: list[list[int]] = []
        self.expected: list[tuple[bool, bool]] = []
        for number in range(1, 1 + tree.rounds):
            marks = [number * 31] * tree.size
            differs, is_flagged = chance.random() < 0.4, chance.random() < 0.4
            if differs:
                for rank in chance.sample(range(tree.size), chance.choice((1, 1, 2))):
                    marks[rank] ^= chance.randrange(1, 1 << 20)
            if is_flagged:
                marks[chance.randrange(tree.size)] |= FLAG
            self.marks.append(marks)
            self.expected.append((differs, is_flagged))
        self.entered = [0] * tree.size

    def page(self, kind: type[WidePage], rank: int) -> WidePage:
        page = kind(memoryview(bytearray(self.tree.size * PAGE_BYTES)), range(self.tree.size), rank)
        words: Any = self.machine
        page.words = words
        return page


class _Barriers(_Rounds):
    """Barriers, each of which a rank enters as soon as it has left the one before."""

    def go(self, rank: int) -> None:
        machine: Any = self.machine
        met: list[bool] = []
        order: Any = SimpleNamespace(
            mark=0, look=lambda has_met: None, meet=lambda count, differs: met.append(differs)
        )
        node: Any = SimpleNamespace(size=self.tree.size, rank=rank, mpi=SimpleNamespace(Iprobe=lambda: False))
        kind: Any = self.tree.kind
        barrier = kind(node, self.page(WidePage, rank), order, 1)
        barrier._sleepers = machine
        barrier._yields = 0.0 if self.tree.sleeps else 1e9
        for number, (marks, (differs, is_flagged)) in enumerate(zip(self.marks, self.expected, strict=True), 1):
            order.mark = marks[rank]
            self.entered[rank] = number
            met.clear()
            barrier()
            if min(self.entered) < number:
                raise BrokenError(f"ahead: rank {rank} has left barrier {number}, others are in {self.entered}")
            if met != [differs] * (differs or is_flagged):
                raise BrokenError(f"verdict: rank {rank} hears {met} in barrier {number}, where marks are {marks}")


class _Calls(_Rounds):
    """Calls of MPI that no rank leaves before all have entered them, compared in the page."""

    def go(self, rank: int) -> None:
        kind: Any = self.tree.kind
        page = self.page(kind, rank)
        for number, (marks, expected) in enumerate(zip(self.marks, self.expected, strict=True), 1):
            page.words[page.own[number & 1]] = number * NUMBER + marks[rank]
            page.tell(number)
            self.entered[rank] = number
            self.machine.wait_until(lambda number=number: min(self.entered) >= number)  # type: ignore[misc]
            differs = page.differs(number, marks[rank])
            # Where calls differ, nobody asks further.
            seen = differs, expected[1] if differs else page.is_flagged(number, marks[rank]) or marks[rank] > FLAG
            if seen != expected:
                raise BrokenError(f"verdict: rank {rank} sees {seen} in call {number}, where marks are {marks}")


class ReleasesAtOnce(TreeBarrier):
    """Waits for no children."""

    def _wait(self, place: int, least: int, sleeps: int) -> int:
        return least + self._order.mark if place in self._children else super()._wait(place, least, sleeps)


class KeepsVerdict(TreeBarrier):
    """Does not tell those below it."""

    def _show(self, place: int, word: int, least: int, sleeps: tuple[int, ...]) -> None:
        super()._show(place, least if place == self._release else word, least, sleeps)


class ShowsFirst(TreeBarrier):
    """Looks who sleeps before it changes the word."""

    def _show(self, place: int, word: int, least: int, sleeps: tuple[int, ...]) -> None:
        wakes = any(self._words[one] == least for one in sleeps)
        self._words[place] = word
        if wakes:
            self._sleepers.wake(place)


class HidesParts(TreeBarrier):
    """Shows its own mark though ranks below it differ."""

    def _show(self, place: int, word: int, least: int, sleeps: tuple[int, ...]) -> None:
        is_own = place == self._own
        super()._show(place, least + self._order.mark | word & FLAG if is_own else word, least, sleeps)


class SleepsTogether(TreeBarrier):
    """Says that it sleeps in the word of all children."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self._parent_release is not None:
            self._sleeps = self._parent_release + SLEEPS
        self._children_sleep = (self._release + SLEEPS,)


class ComparesUpwards(WidePage):
    """Compares its call with that of its parent only."""

    def _sees(self, number: int, mark: int) -> bool:
        parents = self._near[number & 1][: 1 if self._place else 0]
        seen = [self.words[place] for place in parents]
        return any((word ^ mark) & HASH and word // NUMBER == number for word in seen)


BARRIER_MUTANTS = {
    "releases-at-once": ("ahead", Tree(11, kind=ReleasesAtOnce)),
    "keeps-verdict": ("verdict", Tree(11, kind=KeepsVerdict)),
    "hides-parts": ("verdict", Tree(11, kind=HidesParts)),
    "shows-first": ("stuck", Tree(11, kind=ShowsFirst)),
    "sleeps-together": ("stuck", Tree(3, 6, kind=SleepsTogether)),
    "does-not-order-wakes": ("stuck", Tree(3, orders=False)),
    "compares-upwards": ("verdict", Tree(11, kind=ComparesUpwards)),
    "does-not-order-calls": ("verdict", Tree(3, kind=WidePage, orders=False)),
}
