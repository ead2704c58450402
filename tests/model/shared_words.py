"""Ranks that share words, in threads of which one runs at a time: any other may go on before each look or change.

A change of a word stays with its rank for a while, as in the store buffer of an x86 core: the others see a rank's
changes in their order, late. A rank that asks for it, or calls the system, has made all of its changes visible.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable

from tests.model.parties import BrokenError

_MOST_TURNS = 200_000


class Machine:
    """The words of some ranks, and the order in which these go on.

    Args:
        size: The number of ranks.
        words: The number of words.
        seed: Of the order.
    """

    def __init__(self, size: int, words: int, seed: int) -> None:
        self.size = size
        self.words = [0] * words
        self._stores: list[deque[tuple[int, int]]] = [deque() for _ in range(size)]
        self._random = random.Random(seed)
        # A rank that is slow is seldom chosen.
        self._delay = self._random.choice((0.5, 0.95))
        self._weights = [self._random.choice((1, 1, 8)) for _ in range(size)]
        self._goes_on = [threading.Semaphore(0) for _ in range(size)]
        self._turn = threading.Semaphore(0)
        self._asleep: dict[int, int] = {}
        self._waiting: dict[int, Callable[[], bool]] = {}
        self._running = set(range(size))
        self._errors: list[BaseException] = []
        self._own = threading.local()
        self._is_ended = False

    def run(self, program: Callable[[int], None]) -> None:
        """Run a program on all ranks, to its end.

        Raises:
            BrokenError: A rule does not hold, or nobody can go on.
        """
        threads = [threading.Thread(target=self._go, args=(program, rank), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(_MOST_TURNS):
                ready = self._ready()
                if self._errors or not self._running:
                    break
                if not ready:
                    raise BrokenError(f"stuck: ranks {sorted(self._running)} do not go on, asleep are {self._asleep}")
                rank = self._random.choices(ready, [self._weights[one] for one in ready])[0]
                self._goes_on[rank].release()
                self._turn.acquire()
                self._write_some()
        finally:
            self._is_ended = True
            for one in self._goes_on:
                one.release()
            for thread in threads:
                thread.join()
        if self._errors:
            raise self._errors[0]

    def _ready(self) -> list[int]:
        if len(self._running) == len(self._asleep):
            # What is on its way arrives at last.
            for rank in range(self.size):
                self.order_stores(rank)
        return [
            rank for rank in self._running
            if rank not in self._asleep and (rank not in self._waiting or self._waiting[rank]())
        ]

    def _go(self, program: Callable[[int], None], rank: int) -> None:
        self._own.rank = rank
        self._goes_on[rank].acquire()
        try:
            if not self._is_ended:
                program(rank)
        except BaseException as error:
            if not self._is_ended:
                self._errors.append(error)
        finally:
            self._running.discard(rank)
            self._turn.release()

    def _pause(self) -> int:
        """Let others go on; returns this rank."""
        rank: int = self._own.rank
        self._turn.release()
        self._goes_on[rank].acquire()
        if self._is_ended:
            raise SystemExit
        return rank

    def _write_some(self) -> None:
        for stores in self._stores:
            while stores and self._random.random() > self._delay:
                place, word = stores.popleft()
                self.words[place] = word

    def order_stores(self, rank: int | None = None) -> None:
        """Make a rank's changes visible, or this one's."""
        stores = self._stores[self._own.rank if rank is None else rank]
        while stores:
            place, word = stores.popleft()
            self.words[place] = word

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait in another way than in words, as for a message: behind it all changes are visible."""
        self.order_stores()
        self._waiting[self._own.rank] = holds
        del self._waiting[self._pause()]

    def __getitem__(self, place: int) -> int:
        rank = self._pause()
        own = [word for one, word in self._stores[rank] if one == place]
        return own[-1] if own else self.words[place]

    def __setitem__(self, place: int, word: int) -> None:
        self._stores[self._pause()].append((place, word))

    def sleep(self, place: int, seen: int, _seconds: float) -> None:
        """As `Sleepers.sleep`, but without an end."""
        rank = self._pause()
        self.order_stores()
        if self.words[place] & 0xFFFFFFFF == seen & 0xFFFFFFFF:
            self._asleep[rank] = place
            self._pause()

    def wake(self, place: int) -> None:
        """As `Sleepers.wake`."""
        self._pause()
        self.order_stores()
        for rank in [rank for rank, slept in self._asleep.items() if slept == place]:
            del self._asleep[rank]
