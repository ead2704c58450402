"""Closures that wait: for a worker, for the results that they take, or until the loss of their worker is settled."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from mpidist.errors import FatalFunctionError
from mpidist.parameter_server.protocol.references import arguments_label
from mpidist.parameter_server.protocol.sent_errors import portable
from mpidist.parameter_server.queue.work import Closure

# The delay before another worker gets the closure. Hydra, MPICH's launcher, ends the job if the next worker terminates
# while it still deals with the last one.
SETTLED_SECONDS = 1.0


@dataclass
class Waiting:
    """The queue. A closure that is bound to a worker waits for it alone; the key None is for any worker.

    Below it the key is the data that the closures take: of a few iterators at a time.

    Attributes:
        count: The number of closures that wait.
    """

    _heaps: dict[int | None, dict[tuple[int, ...], list[tuple[float, int]]]] = field(default_factory=dict)
    count: int = 0

    def put(self, closure: int, priority: float, worker: int | None, data: tuple[int, ...] = ()) -> None:
        """Local. Add a closure.

        Args:
            closure: The number of the closure; of equal priorities the lowest number is first, also one that comes
                back.
            priority: The priority; the highest is first.
            worker: The only worker that may take it; None: any.
            data: See `Work`.
        """
        heapq.heappush(self._heaps.setdefault(worker, {}).setdefault(data, []), (-priority, closure))
        self.count += 1

    def take(self, worker: int, may_take: Callable[[tuple[int, ...]], bool]) -> int | None:
        """Local. Remove and return the next closure for this worker; None if there is none.

        Args:
            worker: The worker.
            may_take: A function that returns whether it may take a closure of this data that others may take, too.
        """
        heads = [
            (heap[0], key, data)
            for key in (None, worker) if key in self._heaps
            for data, heap in self._heaps[key].items() if key is not None or not data or may_take(data)
        ]
        if not heads:
            return None
        (_, closure), key, data = min(heads, key=itemgetter(0))
        heaps = self._heaps[key]
        heapq.heappop(heaps[data])
        if not heaps[data]:
            del heaps[data]
        if not heaps:
            del self._heaps[key]
        self.count -= 1
        return closure

    def unbind(self, worker: int) -> None:
        """Local. Let any worker take the closures that wait for this one, which is lost."""
        for data, heap in self._heaps.pop(worker, {}).items():
            to = self._heaps.setdefault(None, {}).setdefault(data, [])
            for item in heap:
                heapq.heappush(to, item)

    def clear(self) -> list[int]:
        """Local. Remove all closures; returns their numbers in order."""
        closures = sorted(closure for heaps in self._heaps.values() for heap in heaps.values() for _, closure in heap)
        self._heaps.clear()
        self.count = 0
        return closures


@dataclass
class Awaiting:
    """Closures that cannot begin yet, and the present results for them.

    Attributes:
        inputs: The closures whose results a waiting closure takes, by its number, with the present results.
        takers: The closures that take the result of a closure that has not ended, by its number.
    """

    inputs: dict[int, dict[int, bytes | None]] = field(default_factory=dict)
    takers: dict[int, list[int]] = field(default_factory=dict)

    def add(self, closure: int, inputs: Sequence[int]) -> None:
        """Local. Let a closure wait.

        Args:
            closure: The number of the closure.
            inputs: The closures whose results it takes, each once.
        """
        self.inputs[closure] = dict.fromkeys(inputs)
        for number in inputs:
            self.takers.setdefault(number, []).append(closure)

    def note(self, ended: int, result: bytes) -> list[tuple[int, list[bytes]]]:
        """Local. Note the result of a closure. Returns the closures that can begin, with their inputs in their order.

        Args:
            ended: The number of the closure.
            result: The pickled result.
        """
        complete = []
        for closure in self.takers.pop(ended, ()):
            inputs = self.inputs.get(closure)
            if inputs is None:
                # It ended with another input that has no result.
                continue
            inputs[ended] = result
            results = [one for one in inputs.values() if one is not None]
            if len(results) == len(inputs):
                del self.inputs[closure]
                complete.append((closure, results))
        return complete

    def give_up(self, ended: int) -> list[int]:
        """Local. Forget and return the closures that wait for one that has no result."""
        takers = [closure for closure in self.takers.pop(ended, ()) if closure in self.inputs]
        for closure in takers:
            del self.inputs[closure]
        return takers

    def clear(self) -> list[int]:
        """Local. Forget and return all closures that wait."""
        closures = list(self.inputs)
        self.inputs.clear()
        self.takers.clear()
        return closures


@dataclass
class Suspects:
    """The closures that wait until the loss of their last worker is settled.

    Attributes:
        held: The closures, each with the time at which its loss is settled.
    """

    held: list[tuple[float, int]] = field(default_factory=list)

    def hold(self, closure: int, now: float) -> None:
        """Local. Let a closure wait, whose worker is lost."""
        self.held.append((now + SETTLED_SECONDS, closure))

    def settled(self, now: float) -> list[int]:
        """Local. Remove and return the closures that have waited for long enough."""
        settled = [closure for until, closure in self.held if until <= now]
        self.held = [one for one in self.held if one[0] > now]
        return settled

    def clear(self) -> list[int]:
        """Local. Remove all closures, and return them."""
        return self.settled(float("inf"))


def name_of(number: int, closure: Closure) -> str:
    """Local. A closure with its arguments: "function step(3, 0.5), closure 7,"."""
    return f"function {closure.work.label}{arguments_label(closure.work.arguments)}, closure {number},"


def give_up(number: int, closure: Closure) -> bytes:
    """Local. The pickled error of a closure that has lost too many workers."""
    return portable(FatalFunctionError(
        f"{name_of(number, closure)} was given up: workers were lost {len(closure.deaths)} times while they ran it, "
        f"and `max_deaths` is {closure.rules.max_deaths}. {tell_deaths(closure)}. Look in their output for the cause, "
        "such as a lack of memory. If the function is not the cause, give it a larger `max_deaths`"
    ))


def tell_deaths(closure: Closure) -> str:
    """Local. The workers that were lost with a closure."""
    return f"Lost: {'; '.join(closure.deaths)}"
