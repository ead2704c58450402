"""Exploration: every state of a job breadth first, with the shortest way to one that breaks a rule; and random ways."""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any, NamedTuple

from tests.model.parties import BrokenError
from tests.model.world import Job, State, World


class Explored(NamedTuple):
    """The finds of an exploration.

    Attributes:
        broken: The rule that does not hold, or an empty string.
        way: What happened before, the shortest way.
        states: The number of different states.
        outcomes: What the user can see in those of them where nothing moves any more.
        seconds: How long it took.
    """

    broken: str
    way: list[str]
    states: int
    outcomes: frozenset[Any]
    seconds: float


def explore(job: Job, limit: int = 10_000_000) -> Explored:
    """Go through all states of a job.

    Raises:
        MemoryError: There are more states than `limit`.
    """
    begun = time.perf_counter()
    world = World(job)
    first = world.initial()
    # Hashes of 64 bits stand for states: a collision among a million is a matter of 10^-7.
    before: dict[int, tuple[int, tuple[Any, ...]] | None] = {hash(first): None}
    waiting = deque([first])
    outcomes: set[Any] = set()

    def found(broken: str, key: int) -> Explored:
        way = []
        while (link := before[key]) is not None:
            key, label = link
            way.append(" ".join(map(str, label)))
        return Explored(broken, way[::-1], len(before), frozenset(outcomes), time.perf_counter() - begun)

    while waiting:
        state = waiting.popleft()
        here = hash(state)
        moves = 0
        try:
            world.check(state)
            for label, is_certain, after in world.steps(state):
                moves += is_certain
                key = hash(after)
                if key not in before:
                    before[key] = (here, label)
                    waiting.append(after)
            if not moves:
                world.check_rest(state)
                outcomes.add(world.outcome(state))
        except BrokenError as broken:
            return found(str(broken), here)
        if len(before) > limit:
            raise MemoryError(f"more than {limit} states of {job}")
    return Explored("", [], len(before), frozenset(outcomes), time.perf_counter() - begun)


def wander(world: World, seed: int) -> Explored:
    """Go one random way to a state where nothing moves any more. What need not happen is drawn less often."""
    begun = time.perf_counter()
    drawn = random.Random(seed)
    state: State = world.initial()
    way: list[str] = []
    while True:
        try:
            world.check(state)
            steps = list(world.steps(state))
            if not any(is_certain for _, is_certain, _ in steps):
                world.check_rest(state)
                return Explored("", way, len(way), frozenset([world.outcome(state)]), time.perf_counter() - begun)
        except BrokenError as broken:
            return Explored(str(broken), way, len(way), frozenset(), time.perf_counter() - begun)
        label, _, state = drawn.choices(steps, [8 if is_certain else 1 for _, is_certain, _ in steps])[0]
        way.append(" ".join(map(str, label)))
