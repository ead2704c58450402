"""Whether a job that has ended is started again; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mpidist.failures.restart.notes import FAILED, FINISHED, INTERRUPTED, PREEMPTED

DIED = "died"
# The restarts in a row after which no new state was saved: of a program that saves, and of one that never does.
MOST_IN_VAIN, MOST_WITHOUT_SAVES = 2, 3


class JobOutcome(NamedTuple):
    """The end of a start.

    Attributes:
        kind: `DIED`, or a kind of `notes.Word`.
        code: The exit code for it.
        text: What happened, for people.
        has_saved: Whether the job has saved a new state since this start.
        knows_saves: Whether it has saved or restored one at all.
        was_told_to_end: The signal by which `run` was told to end it; 0: by none.
    """

    kind: str
    code: int
    text: str
    has_saved: bool = False
    knows_saves: bool = False
    was_told_to_end: int = 0


@dataclass
class RestartRules:
    """The rules by which a job is restarted.

    Attributes:
        max_restarts: The number of restarts in all.
        restarts_errors: Whether an exception of the program is followed by a restart.
        restarts: The number of restarts so far.
        in_vain: The number of restarts since the last save.
        knows_saves: Whether the program saves at all.
    """

    max_restarts: int = 10
    restarts_errors: bool = False
    restarts: int = 0
    in_vain: int = 0
    knows_saves: bool = False

    def why_not(self, outcome: JobOutcome) -> str | None:
        """Local. The reason why the job is not started again, empty if it needs none; None if it is started again.

        Args:
            outcome: How it has ended; each one is passed once.
        """
        self.knows_saves = self.knows_saves or outcome.knows_saves or outcome.has_saved
        if outcome.kind in (FINISHED, PREEMPTED, INTERRUPTED) or outcome.was_told_to_end:
            return ""
        if outcome.kind == FAILED and not self.restarts_errors:
            return "" if self.restarts == 0 else f"it is not restarted after an error: {outcome.text}"
        if self.restarts >= self.max_restarts:
            return f"it was restarted {self.restarts} times, the most that --max-restarts allows"
        if outcome.has_saved:
            self.in_vain = 0
        most = MOST_IN_VAIN if self.knows_saves else MOST_WITHOUT_SAVES
        if self.in_vain >= most:
            what = "in a row without a new checkpoint in between" if self.knows_saves else "and never saved anything"
            return f"it was restarted {self.in_vain} times {what}, and would probably die again"
        self.restarts += 1
        self.in_vain += 1
        return None
