"""The watchdog: a thread that detects when this rank waits for ranks that can never arrive, and reports it.

It calls no MPI. While this rank waits, it reads the pages of the other ranks of the communicator:

- A rank has ended, is in another call of the same communicator, or waits for a rank that waits for this one: it can
  never arrive. The job ends, with a report.
- All others are alive, and some are in no call: they may compute for an hour. This rank reports the wait after
  `MPIDIST_WARN_SECONDS`, then at growing intervals. `MPIDIST_TIMEOUT` ends the job.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpidist.failures import waits
from mpidist.failures.job_directory import IDLE_SECONDS, WRITE_SECONDS, DeathNotes, OwnFile, deaths_seen
from mpidist.failures.peers import STALE_SECONDS, Key, Peer, claim, indented, missing, others_of, rivals, tell_some
from mpidist.failures.waits import Waits, limit_of, may_end_at_start
from mpidist.observe.output import flush, say
from mpidist.recorder import stacks
from mpidist.recorder.calls import NEXT, START, Calls
from mpidist.recorder.details import details_of, tell
from mpidist.recorder.rank_page import Page
from mpidist.recorder.recorder import RECORDER, Recorder
from mpidist.recorder.time_limits import ANSWER_SECONDS, CLOCK, TICK_SECONDS, Clock, limit_seconds, warn_seconds

if TYPE_CHECKING:
    from mpidist.failures.deadlocks import Differing, Reason
    from mpidist.failures.search import Search
    from mpidist.failures.startup.looker import Looker

logger = logging.getLogger("mpidist")

# Ranks that see the same take turns: the first one reports and ends the job before the others print anything.
_TURN_SECONDS = 4.0


class Watchdog:
    """The watchdog of this rank. There is one object per process, `WATCHDOG`.

    Args:
        clock: The clock of the watchdog.
        recorder: The rank's calls; default: those of this process.
        leave: A function that ends this process.

    Attributes:
        place: The name of this rank in reports.
        end: A function that ends the job; None if the watchdog only reports.
        death_notes: The file in which ranks of a large job report deaths to other hosts.
        page: The page of this rank, which the others read; None before the start.
    """

    def __init__(
        self, clock: Clock = CLOCK, recorder: Recorder | None = None, leave: Callable[[int], object] = os._exit
    ) -> None:
        self._clock, self._recorder, self._leave = clock, recorder or RECORDER, leave
        self.page: Page | None = None
        self._me = Key("", 0, "")
        self._order = 0
        self.end: Callable[[], None] | None = None
        self._is_over: Callable[[], bool] = bool
        self._peers: dict[Key, Peer] = {}
        self._looks_after = False
        self._thread: threading.Thread | None = None
        self._stops = threading.Event()
        self._main = threading.main_thread().ident or 0
        self._process = 0
        self._waits = Waits()
        self._answered = 0
        # Whether the page has a text, and whether the text describes a wait.
        self._writes = self._waited = False
        self._file: OwnFile | None = None
        self.death_notes: DeathNotes | None = None
        self._note_death: Callable[[Key, str], None] | None = None
        self._differing: Differing | None = None
        self._looks: list[weakref.WeakMethod[Callable[[float], None]]] = []
        self.place = ""

    def start(self, key: Key, place: str, order: int, page: Page, descriptor: int) -> None:
        """Local. Start the thread. Later calls may correct the arguments until other ranks are known.

        Args:
            key: This process.
            place: The name of this rank in reports.
            order: This rank.
            page: The page of this rank, which the others read.
            descriptor: The descriptor of the file behind the page, to which stacks are appended.

        Raises:
            ValueError: A variable of the environment is not a number.
        """
        if self.look_after(key, place, order, page):
            return
        page.signal = stacks.write_at_signal(descriptor)
        self._stops.clear()
        self._thread = threading.Thread(target=self._work, name="mpidist-watchdog", daemon=True)
        self._thread.start()

    def look_after(self, key: Key, place: str, order: int, page: Page) -> bool:
        """Local. Start without a thread: the caller calls `tick`. Returns whether the watchdog was started before."""
        if not self._peers:
            # MPI may have another name for this host, and another rank number.
            self._me, self.place, self._order, self.page = key, place, order, page
        if self._looks_after:
            return True
        warn_seconds()
        limit_seconds()
        self._looks_after = True
        # Loaded only here: a program of one rank never waits for other ranks.
        self._search: Search = importlib.import_module("mpidist.failures.search").Search(self._clock, self._main)
        self._looker: Looker = importlib.import_module("mpidist.failures.startup.looker").Looker(self._clock)
        self._process = os.getpid()
        page.beat = self._clock.ns()
        return False

    def end_by(
        self,
        end: Callable[[], None],
        is_over: Callable[[], bool],
        note_death: Callable[[Key, str], None],
        differing: Differing | None = None,
    ) -> None:
        """Local. Let the watchdog end the job; without this it only reports.

        Args:
            end: A function that ends all ranks.
            is_over: A function that returns whether this rank already ends for another reason.
            note_death: A function, called with each rank of another host that is found dead.
            differing: See `deadlocks.View`.
        """
        self.end = end
        self._is_over = is_over
        self._note_death, self._differing = note_death, differing

    def look_also(self, look: Callable[[float], None]) -> None:
        """Local. Call a method with the time at each look, in the watchdog's thread, while its object exists."""
        self._looks = [*(one for one in self._looks if one() is not None), weakref.WeakMethod(look)]

    def open_file(self, folder: Path, *, sees_all: bool) -> Path:
        """Local. Open this rank's file for other hosts, and that of reported deaths. Returns the file's directory."""
        if self._file is None and self._looks_after:
            try:
                self._file = OwnFile(folder, self._me, self._clock)
            except OSError as error:
                logger.warning("other hosts do not see what this rank does: %s", error)
                return folder
            self.death_notes = None if sees_all else DeathNotes(folder, self._me)
            self._tell_hosts({}, after=0.0)
            # The next look writes again: the communicator for whose ranks the file was opened opens its calls only now.
            self._writes = self._waited = True
        return folder if self._file is None else self._file.folder

    def peers(self) -> list[Peer]:
        """Local. The known other ranks."""
        return list(self._peers.values())

    def tell_late(self) -> str:
        """Local. Descriptions of ranks whose program has not ended, in indented lines."""
        return indented(waits.where_late(self.peers()))

    def others_are_inside(self, identity: int) -> bool:
        """Local. Whether this rank sees another rank in a call on a communicator."""
        return any((peer.state(identity) or 0) % NEXT for peer in self._peers.values())

    def is_first_to_end(self) -> bool:
        """Local. Whether this rank sees no lower rank whose program has ended."""
        return not any(peer.order < self._order and peer.has_ended() for peer in self._peers.values())

    def end_others(self) -> None:
        """Local. Make the watchdogs of the other ranks end their processes."""
        for peer in self._peers.values():
            if peer.page is not None:
                peer.page.ends = True
        self._clock.sleep(2 * TICK_SECONDS)

    def meet(self, peers: Sequence[Peer]) -> None:
        """Local. Add other ranks to the known ones."""
        for peer in peers:
            self._peers.setdefault(peer.key, peer)

    def knows(self, key: Key) -> bool:
        """Local. Whether a rank is known."""
        return key in self._peers or key == self._me

    def note_end(self) -> None:
        """Local. Show that the program of this rank has ended: it makes no further call."""
        if self.page is not None and self._process == os.getpid():
            self.page.ended = True
            self._tell_hosts({}, after=0.0)

    def stop(self) -> None:
        """Local. End the thread."""
        if not self._looks_after or self._process != os.getpid():
            return
        self._stops.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._file is not None:
            self._file.close()
            self._file = None
        if self.page is not None:
            self.page.left = True
            number, self.page.signal = self.page.signal, 0
            stacks.end_of_signal(number)

    def _work(self) -> None:
        while self.page is not None and not self._stops.wait(TICK_SECONDS):
            self.tick(self.page)

    def tick(self, page: Page) -> None:
        """Local. Look once; called every `TICK_SECONDS`.

        Args:
            page: This rank's page.
        """
        page.beat = now = self._clock.ns()
        # An earlier claim to end the job is void: this rank still runs.
        page.claim = 0
        if page.ends:
            # Who has set it has printed why.
            self._leave(1)
        for look in self._looks:
            if method := look():
                method(now / 1e9)
        self._waits.note_time(now / 1e9)
        waiting = self._waits.look(self._recorder.opened(), now / 1e9)
        if START not in self._waits.by_identity:
            self._looker.stop()
        if waiting or page.asked > self._answered:
            if page.asked > self._answered:
                self._answered = now
                self._looker.answer(page)
            self._look(page, waiting, now / 1e9)
            return
        closure = self._recorder.closure
        if closure is not None and now / 1e9 - closure.since > warn_seconds() / 2:
            # The coordinator may request details soon, and from another host it can read only the file.
            self._tell_hosts(details_of((), (), self._main), after=WRITE_SECONDS)
        else:
            self._tell_hosts({}, after=0.0 if self._waited else IDLE_SECONDS)
        if self._writes and (self._waited or now - self._answered > STALE_SECONDS * 1e9):
            # The wait may be over: the others must not rely on an old text.
            self._writes = self._waited = False
            page.write({})

    def _look(self, page: Page, waiting: Sequence[Calls], now: float) -> None:
        search = self._search
        shown = search.begin(waiting, self._waits, self._peers, self._order)
        details = {**details_of(waiting, list(search.late), self._main), **shown, **self._looker.shown()}
        page.write(details)
        self._tell_hosts(details, after=WRITE_SECONDS if waiting else IDLE_SECONDS)
        self._writes, self._waited = True, bool(waiting)
        if self._is_over():
            return
        if search.looks:
            if self._note_death is not None:
                self._hear_of_deaths(waiting, self._note_death)
            is_alone = self.end is None
            if seen := search.look(self._me, waiting, self._waits, self._differing, page.state, counts_deaths=is_alone):
                self._give_up(seen, waiting)
        for calls in waiting:
            self._keep_time(page, calls, waiting, now)

    def _hear_of_deaths(self, waiting: Sequence[Calls], note: Callable[[Key, str], None]) -> None:
        # A rank that waits writes every second, but may have died before it wrote its last call. So files that are not
        # fresh are examined.
        others = {one for calls in waiting for one in others_of(calls, self._peers)}
        old = {one for one in others if one.is_far and not one.is_fresh()}
        for key, name in deaths_seen(old, self.death_notes):
            note(key, name)

    def _tell_hosts(self, details: dict[str, Any], *, after: float) -> None:
        if self._file is not None:
            ended = self.page is not None and self.page.ended
            self._file.tell(self._recorder.opened(), details, ended=ended, after=after)

    def _sees_some(self, calls: Calls) -> bool:
        """Whether the job directory shows only some of the ranks, as in a large job."""
        return self._file is not None and len(others_of(calls, self._peers)) + 1 < len(calls.members)

    def _missing(self, calls: Calls) -> list[Peer]:
        return missing(self._waits.of(calls).state, others_of(calls, self._peers), calls.identity)

    def _give_up(self, seen: Reason, waiting: Sequence[Calls]) -> None:
        why, blamed = seen.why, seen.blamed
        others = [peer for calls in waiting for peer in others_of(calls, self._peers)]
        # Ranks that have continued cannot see that this rank's messages are lost.
        speakers = others if seen.seen_by_all else [one for one in others if one.key not in blamed]
        if any(map(self._sees_some, waiting)):
            speakers = rivals(speakers)
        identities = [calls.identity for calls in waiting]
        for _ in range(2):
            # A lower rank that has just arrived sees the same at its next look, and must report first.
            if any(peer.order < self._order and peer.call_untold(identities) for peer in speakers):
                self._clock.sleep(TICK_SECONDS)
        if not self._take_turn(speakers, ends=True) or not all(map(self._waits.is_same, waiting)):
            return
        text = f"{self.place} is deadlocked, {'the job ends' if self.end else 'and waits'}: {why}"
        told = dict.fromkeys([*(self._peers[key] for key in blamed), *others])
        self._report(text, list(told), waiting, waits.RULE)
        if self.end is not None:
            self.end()

    def _keep_time(self, page: Page, calls: Calls, waiting: Sequence[Calls], now: float) -> None:
        _, since, warn_at = self._waits.of(calls)
        may_end = may_end_at_start() if calls.identity == START else self.end is not None
        limit = limit_of(calls) if may_end else math.inf
        ends = now - since > limit
        # Calls that were first seen in the same look have no order: the limit of each of them holds.
        if not ends and (now < warn_at or calls is not waiting[0]):
            return
        if calls.identity == START:
            self._report_start(page, calls, now, is_over=ends)
            return
        self._waits.tell_later(calls, now)
        if self._search.is_led and not ends:
            # This rank's leader reports first.
            return
        late = self._missing(calls)
        others = others_of(calls, self._peers)
        for peer in late or others:
            peer.ask()
        self._clock.sleep(ANSWER_SECONDS)
        if ends:
            flush()
        sees_some = self._sees_some(calls)
        speaks, had_come = self._take_turn(rivals(others) if sees_some and late else others, ends=ends), not late
        late = self._missing(calls)
        if not speaks or not self._waits.is_same(calls) or (not late and not had_come):
            return
        are_seen = len(others) + 1 >= len(calls.members)
        come = f"though all ranks {'' if are_seen else 'that it sees '}have arrived"
        whose = f"for {'at least ' * sees_some}{len(late)} of {len(calls.members)} ranks" if late else come
        text = f"{self.place} has waited {now - since:.0f} s {whose}"
        if ends:
            text += f", the limit is {limit:g} s, the job ends"
        way_out = waits.advice(are_late=bool(late), are_seen=are_seen, sees_some=sees_some, ends=ends)
        self._report(text, late or others, waiting, way_out)
        if ends and self.end is not None:
            self.end()

    def _report_start(self, page: Page, calls: Calls, now: float, *, is_over: bool) -> None:
        seconds = now - self._waits.of(calls).since
        lines, ends = self._looker.judge(calls, page, self._pause, self._wait_for_turn, is_over=is_over)
        if lines is None or not self._waits.is_same(calls):
            return
        self._waits.tell_later(calls, now)
        if lines:
            text = f"{self.place} has waited {seconds:.0f} s for all ranks{', the job ends' if ends else ''}"
            self._report(text, [], [calls], lines)
        if ends:
            # This rank cannot end the others yet: the launcher does when this rank ends.
            flush()
            self._leave(1)

    def _take_turn(self, others: Sequence[Peer], *, ends: bool) -> bool:
        """Whether this rank must report: the first rank that waits does; another one if that has not ended the job."""
        before = (peer for peer in others if peer.order <= self._order)
        is_first = not any(peer.may_speak(ends=self.end is not None) for peer in before)
        if not ends or self.end is None:
            return is_first
        if not is_first:
            self._wait_for_turn()
        # Ranks that began to wait at different times may have their turns at once.
        while not self._is_over() and self.page is not None and not claim(self.page, others, self._clock):
            self._wait_for_turn()
        return not self._is_over()

    def _wait_for_turn(self) -> None:
        # At the start no peers are known.
        before = sum(peer.order < self._order for peer in self.peers()) if self._peers else self._order
        end = self._clock.now() + _TURN_SECONDS + TICK_SECONDS * before
        while self.page is not None and self._clock.now() < end:
            self._pause()

    def _pause(self) -> None:
        self._clock.sleep(TICK_SECONDS)
        if self.page is not None:
            # Show the others that the watchdog runs.
            self.page.beat = self._clock.ns()
        self._waits.note_time(self._clock.now())

    def _report(self, text: str, others: Sequence[Peer], waiting: Sequence[Calls], way_out: str) -> None:
        identities = [calls.identity for calls in waiting]
        for _ in range(2):  # a rank that has just arrived describes its call at its next look
            if any(peer.call_untold(identities) for peer in others):
                self._clock.sleep(TICK_SECONDS)
        told = [f"{self.place} {tell(details_of(waiting, (), self._main))}"]
        say(text + indented([*told, *tell_some(others, identities), way_out]))


WATCHDOG = Watchdog()
