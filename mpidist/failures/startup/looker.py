"""The looker: one of the ranks that wait at the start looks for all ranks of its host; the others read its finding.

The ranks are not connected yet. The first rank that must report binds a name (`names.py`), by which the others find its
process, and read its page. If the process does not answer, for instance because it is stopped, the ranks try the next
name.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from mpidist import launch
from mpidist.failures.looks import Budget
from mpidist.failures.peers import STALE_SECONDS
from mpidist.failures.startup import finding as findings
from mpidist.failures.startup.finding import HostFinding
from mpidist.failures.startup.names import bind, holder, name_of
from mpidist.failures.startup.ranks import launcher_here, page_of, ranks_here
from mpidist.recorder.calls import Calls
from mpidist.recorder.rank_page import Page
from mpidist.recorder.time_limits import CLOCK, TICK_SECONDS, Clock

# Number of names: some lookers may be stopped, and processes of other users may have bound names.
_NAMES = 8
# The greatest age of a finding, in addition to the pause between looks.
_FRESH_SECONDS = 2 * TICK_SECONDS
# The key of the finding in the text of a page.
_ENTRY = "start"


class Looker:
    """The looks of this rank at the ranks of its host, while it waits at the start.

    Args:
        clock: The clock for the times of looks.
    """

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self._budget = Budget(clock)
        self._name: socket.socket | None = None
        self._size = 0
        self._finding: HostFinding | None = None

    def find(self, size: int, page: Page, pause: Callable[[], None]) -> HostFinding | None:
        """Local. The finding of the rank that looks; this rank looks if no other one does.

        Args:
            size: Number of ranks in the call.
            page: This rank's page.
            pause: A function that waits for the time between two ticks.

        Returns:
            The finding; None if there is none yet.
        """
        place = launch.read()
        if place is None or place.size != size:
            return findings.UNKNOWN
        if self._name is None:
            for name in self._names(size):
                with contextlib.suppress(OSError):
                    self._name = bind(name)
                    break
                if found := self._ask(name, pause):
                    return found
        self._size = size
        if self._name is None and not self._budget.is_free(size):
            # No rank looks for the others: each one looks itself, and therefore rarely.
            return None
        return self._look(page)

    def judge(
        self, calls: Calls, page: Page, pause: Callable[[], None], take_turn: Callable[[], None], *, is_over: bool
    ) -> tuple[str | None, bool]:
        """Local. Decide whether this rank reports the ranks that have not arrived, and whether it ends.

        Args:
            calls: The calls that open a communicator.
            page: See `find`.
            pause: See `find`.
            take_turn: See `finding.judge`.
            is_over: Whether the time limit has passed.

        Returns:
            See `finding.judge`.
        """
        size = len(calls.members)
        wait = findings.StartWait(size, calls.name, is_over)
        return findings.judge(wait, lambda: self.find(size, page, pause), take_turn)

    def answer(self, page: Page) -> None:
        """Local. Look again if this rank looks for others, one of which has requested it."""
        if self._name is not None:
            with contextlib.suppress(OSError):
                while True:
                    # The connecting ranks need no data: they have already read this process's number.
                    self._name.accept()[0].close()
            self._look(page)

    def shown(self) -> dict[str, HostFinding]:
        """Local. The entry with this rank's finding for the text of its page; empty if this rank does not look."""
        return {} if self._name is None or self._finding is None else {_ENTRY: self._finding}

    def stop(self) -> None:
        """Local. Stop looking: this rank no longer waits at the start."""
        if self._name is not None:
            self._name.close()
            self._name = None

    def _look(self, page: Page) -> HostFinding:
        if self._finding is None or self._budget.is_free():
            made = self._clock.ns()
            self._budget.begin()
            here = ranks_here(self._size)
            self._budget.end()
            self._finding = findings.find(here, self._size, made, self._budget.pause())
            page.write({**page.read(), **self.shown()})
        return self._finding

    @staticmethod
    def _names(size: int) -> list[str]:
        try:
            job = *launcher_here(), size
        except OSError:
            return []
        return [name_of("start", *job, number) for number in range(_NAMES)]

    def _ask(self, name: str, pause: Callable[[], None]) -> HostFinding | None:
        process = holder(name)
        page = page_of(process) if process else None
        if page is None:
            return None
        page.asked = self._clock.ns()
        end = self._clock.now() + STALE_SECONDS
        while (now := self._clock.now()) < end and now - page.beat / 1e9 < STALE_SECONDS:
            if (found := page.read().get(_ENTRY)) is not None:
                finding = HostFinding(*found)
                if now - finding.made / 1e9 < _FRESH_SECONDS + finding.pause:
                    return finding
            pause()
        return None
