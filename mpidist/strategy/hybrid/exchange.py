"""The exchange between the leaders of groups: increments, for which no group waits, and meetings, for which all wait.

Everything travels as messages of a window. `get`, `put` and `flush` wait for the other rank, and that one may be
stopped. One increment at most is unacknowledged for each other group. What is made meanwhile is added up in one buffer
for that group, so a group that is stopped costs the others one buffer, and gets all that it has missed as one message.
"""

from __future__ import annotations

import pickle
import struct
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import Resource
from mpidist.comm.windows.window import open_window
from mpidist.errors import CollectiveTimeoutError, MismatchError, mark_shared
from mpidist.failures.deaths import IS_SILENT, WATCH
from mpidist.observe.output import say
from mpidist.options import WindowOptions
from mpidist.recorder.time_limits import LIMIT_VARIABLE, limit_seconds, warn_seconds
from mpidist.strategy.hybrid.outer import Flat, Place

# The kind of a message, the numbers of the part and of the piece, and of how many windows it is the sum. What follows
# begins at a multiple of 16.
_HEADER = struct.Struct("<B3xIII")
_INCREMENT, _ACKNOWLEDGED, _WORD, _HEARD, _LEFT = range(5)
# Seconds between two looks for deaths, in a meeting.
_LOOK_SECONDS = 0.05
_ADVICE = "build the same optimizers, and call `finish` and `save` equally often, in every group"
# A leader that leaves gives its last message so much time; a group that is stopped does not take it.
_LAST_SECONDS = 0.2


class Receiver(Protocol):
    """The receiver of other groups' increments.

    Attributes:
        pieces: The pieces in which its flat arrays travel.
    """

    pieces: Sequence[Place]

    def take(self, piece: int, increment: memoryview, windows: int) -> None:
        """Local. Add a piece of the increments of some windows to the parameters."""
        ...


class _Outbox:
    """The increments that one other group has not received yet."""

    def __init__(self) -> None:
        # By the number of the part; and its pieces in which there is something, in the order of sending.
        self.sums: dict[int, Flat] = {}
        # The numbers of the windows that are in them.
        self.waiting: dict[tuple[int, int], int] = {}
        self.is_under_way = False

    def discard(self, number: int) -> None:
        """Local. Drop the increments of a part."""
        self.sums.pop(number, None)
        self.waiting = {key: windows for key, windows in self.waiting.items() if key[0] != number}

    def begin_sending(self) -> tuple[int, int, int]:
        """Local. The next part and piece, which count as being sent from now on, and the number of windows in it."""
        number, piece = next(iter(self.waiting))
        self.is_under_way = True
        return number, piece, self.waiting.pop((number, piece))

    def note_acknowledged(self) -> None:
        """Local. Note that the other group has acknowledged the piece that was being sent."""
        self.is_under_way = False


class GroupExchange(Resource):
    """Collective over the leaders. The messages of this rank's group to and from others.

    Args:
        leaders: The leaders, in the order of their groups.
        options: The options of the transport.

    Attributes:
        sent_bytes: The bytes of all messages that were sent, without what MPI or the kernel add.
        received_count: The number of messages with increments that were taken.
    """

    def __init__(self, leaders: Communicator, options: WindowOptions | None = None) -> None:
        self._window = open_window(leaders, 0, options)
        self._window.explain_end("this HybridStrategy is closed: make another one, on all ranks")
        self._group = leaders.rank
        self._processes = leaders.processes
        self._parts: dict[int, Receiver] = {}
        self._outboxes = {group: _Outbox() for group in range(leaders.size) if group != leaders.rank}
        # By the number of the meeting: what groups have said, and the groups that have heard this one.
        self._words: dict[int, dict[int, tuple[str, Any]]] = {}
        self._heard_by: set[int] = set()
        self._meeting = 0
        self._missed = ""
        # Increments that were made after a meeting which this rank has not left yet.
        self._later: list[tuple[int, bytes]] = []
        self.sent_bytes = self.received_count = 0
        # Now, while nobody is stopped: the first message to a group opens a connection to it.
        self.meet("making the strategy", None)

    @property
    def groups(self) -> list[int]:
        """Local. The groups that are alive and have not left, this one included, as far as this rank knows."""
        return sorted([*self._outboxes, self._group])

    @property
    def is_first(self) -> bool:
        """Local. Whether this group is the first living one."""
        return self.groups[0] == self._group

    def register(self, number: int, part: Receiver) -> None:
        """Local. Let a part receive the increments with its number; increments that it made before are not sent."""
        self._parts[number] = part
        for outbox in self._outboxes.values():
            outbox.discard(number)

    def forget(self, numbers: Iterable[int]) -> None:
        """Local. Remove parts that no group uses any more."""
        for number in numbers:
            del self._parts[number]
            for outbox in self._outboxes.values():
                outbox.discard(number)

    def add(self, number: int, increments: Flat) -> None:
        """Local. Send increments of a part to all other groups, as soon as each of them can receive some."""
        for outbox in self._outboxes.values():
            sums = outbox.sums.get(number)
            if sums is None:
                outbox.sums[number] = [increment.copy() for increment in increments]
            else:
                for total, increment in zip(sums, increments, strict=True):
                    np.add(total, increment, out=total)
            for piece in range(len(self._parts[number].pieces)):
                outbox.waiting[number, piece] = outbox.waiting.get((number, piece), 0) + 1

    def progress(self) -> None:
        """Local. Process received messages, and send what other groups can receive, without waiting."""
        self._heed_losses()
        later, self._later = self._later, []
        for sender, message in later:
            self._take(sender, message)
        while (got := self._window.poll()) is not None:
            self._take(*got)
        for group in self._outboxes:
            self._send_next(group)

    def deliver(self) -> None:
        """Local. Wait until every living group has received and acknowledged all increments of this one.

        Raises:
            CollectiveTimeoutError: See `meet`.
        """
        subject = "the delivery of increments"
        self._require_in_step(subject)
        waits = _Wait(self, subject)
        # Also where this group has nothing to deliver: another one may wait until what came in a meeting is taken.
        self.progress()
        while late := [group for group, box in self._outboxes.items() if box.waiting or box.is_under_way]:
            waits.look(late)
            self._wait_for_message(_LOOK_SECONDS, is_meeting=False)
            self.progress()

    def meet(self, subject: str, value: object) -> dict[int, Any]:
        """Collective over the leaders of living groups. Exchange values; all increments sent before have arrived then.

        Args:
            subject: The purpose of the meeting, the same on all leaders.
            value: A picklable value.

        Returns:
            The values by group, in their order, of the groups that live.

        Raises:
            MismatchError: Groups meet for different purposes.
            CollectiveTimeoutError: A group has not come within `MPIDIST_TIMEOUT`, now or in an earlier meeting: this
                group would be in another meeting than the others.
        """
        self._require_in_step(subject)
        self._meeting += 1
        data = _HEADER.pack(_WORD, self._meeting, 0, 0) + pickle.dumps((subject, value), pickle.HIGHEST_PROTOCOL)
        for group in self._outboxes:
            self._ring(group, data)
        words = self._words.setdefault(self._meeting, {})
        words[self._group] = subject, value
        waits = _Wait(self, subject)
        # A large word is sent on in calls of the window only: this group must not leave before all have it.
        while late := [group for group in self._outboxes if group not in words or group not in self._heard_by]:
            waits.look(late)
            self._wait_for_message(_LOOK_SECONDS, is_meeting=True)
            self._heed_losses()
        # What was behind such a word in the queue of a connection has room now.
        self._wait_for_message(0.0, is_meeting=True)
        self._heard_by.clear()
        del self._words[self._meeting]
        subjects = {word for word, _ in words.values()}
        if len(subjects) > 1:
            told = "; ".join(f"{word!r} in group {group}" for group, (word, _) in sorted(words.items()))
            raise mark_shared(MismatchError(
                f"HybridStrategy: groups must meet for the same thing, got {told}. {_ADVICE.capitalize()}"
            ))
        return {group: words[group][1] for group in sorted(words)}

    def note_missed(self, what: str) -> None:
        """Local. Note that this group has left a meeting for which another one was late; it can come to no other."""
        self._missed = what

    def leave(self) -> None:
        """Local. Tell the others that this group takes no more increments, and comes to no more meetings."""
        if self.is_closed:
            return
        for group in [*self._outboxes]:
            self._ring(group, _HEADER.pack(_LEFT, 0, 0, 0))
        end = time.monotonic() + _LAST_SECONDS
        while self._outboxes and time.monotonic() < end:
            # Messages are sent on in it.
            self._window.poll(_LAST_SECONDS / 10)

    def name_of(self, group: int) -> str:
        """Local. A name of a group, for the texts of errors."""
        process = self._processes[group]
        return f"group {group} (its first rank is process {process.number} on {process.host})"

    def _require_in_step(self, subject: str) -> None:
        if self._missed:
            raise mark_shared(CollectiveTimeoutError(
                f"HybridStrategy: {subject}: not started, since this group has left {self._missed}, and would meet the "
                "others in another call than theirs. Start the job again from the last checkpoint"
            ))

    def _ring(self, group: int, message: bytes) -> None:
        self.sent_bytes += len(message)
        self._window.ring(group, message)

    def _send_next(self, group: int) -> None:
        outbox = self._outboxes[group]
        if outbox.is_under_way or not outbox.waiting:
            return
        number, piece, windows = outbox.begin_sending()
        section, start, stop = self._parts[number].pieces[piece]
        array = outbox.sums[number][section][start:stop]
        self._ring(group, b"".join((_HEADER.pack(_INCREMENT, number, piece, windows), array.data)))
        array.fill(0)

    def _wait_for_message(self, seconds: float, *, is_meeting: bool) -> None:
        got = self._window.poll(seconds)
        if got is None:
            return
        sender, message = got
        if is_meeting and message[0] == _INCREMENT and sender in self._words[self._meeting]:
            # Made after the meeting, by a group that has left it already.
            self._later.append(got)
        else:
            self._take(sender, message)

    def _take(self, sender: int, message: bytes) -> None:
        kind, number, piece, windows = _HEADER.unpack_from(message)
        if kind == _INCREMENT:
            part = self._parts.get(number)
            # Else all groups have dropped it, while this was under way.
            if part is not None:
                part.take(piece, memoryview(message)[_HEADER.size :], windows)
            self.received_count += 1
            if sender in self._outboxes:
                self._ring(sender, _HEADER.pack(_ACKNOWLEDGED, number, piece, 0))
        elif kind == _WORD:
            self._words.setdefault(number, {})[sender] = pickle.loads(message[_HEADER.size :])
            if sender in self._outboxes:
                self._ring(sender, _HEADER.pack(_HEARD, number, 0, 0))
        elif kind == _HEARD:
            self._heard_by.add(sender)
        elif kind == _LEFT:
            self._outboxes.pop(sender, None)
        elif sender in self._outboxes:
            self._outboxes[sender].note_acknowledged()

    def _heed_losses(self) -> None:
        for group in self._window.lost() & self._outboxes.keys():
            del self._outboxes[group]
            self._window.forget(group)
            text = WATCH.dead.get(self._processes[group], "")
            how = "cannot be reached" if text.endswith(IS_SILENT) else "has ended"
            say(f"HybridStrategy: {self.name_of(group)} {how}; group {self._group} continues without it")

    def _is_whole(self) -> bool:
        return not self._window.lost()

    def _end(self, *, is_collective: bool) -> None:
        # They lead to the variables, whose memory must not live as long as this object.
        self._parts.clear()
        self._outboxes.clear()
        if is_collective:
            self._window.close()
        else:
            self._window.drop()


class _Wait:
    """A wait for other groups: it is reported once, and ends where a time limit is set."""

    def __init__(self, exchange: GroupExchange, subject: str) -> None:
        self._exchange, self._subject = exchange, subject
        self._begin = time.monotonic()
        self._is_told = False

    def look(self, late: Sequence[int]) -> None:
        """Local. Report the wait, or raise CollectiveTimeoutError, where it is time."""
        waited, limit = time.monotonic() - self._begin, limit_seconds()
        if limit and waited > limit:
            self._exchange.note_missed(f"{self._subject} without {self._names_of(late)}")
            raise mark_shared(CollectiveTimeoutError(
                f"{self._text(late, waited)}; or set a larger {LIMIT_VARIABLE} than {limit:g}"
            ))
        if not self._is_told and waited > warn_seconds():
            self._is_told = True
            say(self._text(late, waited))

    def _names_of(self, late: Sequence[int]) -> str:
        return ", ".join(map(self._exchange.name_of, late))

    def _text(self, late: Sequence[int], waited: float) -> str:
        have = "has" if len(late) == 1 else "have"
        return (
            f"HybridStrategy: {self._subject}: {self._names_of(late)} {have} not answered for {waited:.0f} s. "
            f"Such a group is stopped, still computes, or makes other calls: {_ADVICE}"
        )
