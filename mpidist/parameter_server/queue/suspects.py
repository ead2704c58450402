"""Suspects: closures whose workers were lost while they ran. Each may be the reason, as one that runs out of memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpidist.errors import FatalFunctionError
from mpidist.parameter_server.protocol.references import arguments_label
from mpidist.parameter_server.protocol.sent_errors import portable
from mpidist.parameter_server.queue.work import Closure

# Another worker gets the closure so much later. Hydra, MPICH's launcher, ends the job if the next worker terminates
# while it still deals with the last one.
SETTLED_SECONDS = 1.0


@dataclass
class Suspects:
    """The closures that wait until the loss of their last worker is settled, with the times when it is."""

    _held: list[tuple[float, int]] = field(default_factory=list)

    def __len__(self) -> int:
        """The number of closures that wait."""
        return len(self._held)

    def hold(self, closure: int, now: float) -> None:
        """Local. Let a closure wait, whose worker is lost."""
        self._held.append((now + SETTLED_SECONDS, closure))

    def settled(self, now: float) -> list[int]:
        """Local. The closures that have waited for long enough; they are none of these any more."""
        settled = [closure for until, closure in self._held if until <= now]
        self._held = [one for one in self._held if one[0] > now]
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
