"""Awaiting: closures whose arguments take the results of others, which have not ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Awaiting:
    """Closures that cannot begin yet, and the results for them that are there."""

    _inputs: dict[int, dict[int, bytes | None]] = field(default_factory=dict)
    _takers: dict[int, list[int]] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of closures that wait for results."""
        return len(self._inputs)

    def add(self, closure: int, inputs: Sequence[int]) -> None:
        """Local. Let a closure wait.

        Args:
            closure: Its number.
            inputs: The closures whose results it takes, each once.
        """
        self._inputs[closure] = dict.fromkeys(inputs)
        for number in inputs:
            self._takers.setdefault(number, []).append(closure)

    def note(self, ended: int, result: bytes) -> list[tuple[int, list[bytes]]]:
        """Local. A closure has a result. Returns the closures that can begin, with their inputs in their order.

        Args:
            ended: Its number.
            result: The pickled result.
        """
        complete = []
        for closure in self._takers.pop(ended, ()):
            inputs = self._inputs.get(closure)
            if inputs is None:
                # It ended with another input that has no result.
                continue
            inputs[ended] = result
            results = [one for one in inputs.values() if one is not None]
            if len(results) == len(inputs):
                del self._inputs[closure]
                complete.append((closure, results))
        return complete

    def give_up(self, ended: int) -> list[int]:
        """Local. A closure has no result: forget and return those that wait for it."""
        takers = [closure for closure in self._takers.pop(ended, ()) if closure in self._inputs]
        for closure in takers:
            del self._inputs[closure]
        return takers

    def clear(self) -> list[int]:
        """Local. Forget and return all closures that wait."""
        closures = list(self._inputs)
        self._inputs.clear()
        self._takers.clear()
        return closures
