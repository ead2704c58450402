"""A page: the memory of a rank in which the other ranks of its node read what it does.

Words of eight bytes are written in one piece, so that they can be read at any time, also when the writer is stopped or
dead. Behind them is room for a text, which the rank's watchdog writes while the rank waits or when it is asked.
"""

from __future__ import annotations

import json
from typing import Any

from mpidist.recorder.calls import IDENTITY, INNER, PLACE_WORDS, STATE

# Most of them are never touched, and take no memory.
PAGE_BYTES = 1 << 18
_HEADER_WORDS = 64
# A rank may wait for 2,000 others.
TEXT_BYTES = 1 << 17
# The words of the header. Times are those of the host's monotonic clock in nanoseconds.
_BEAT, _ENDED, _ASKED, _ENDS, _LENGTH, _VERSION, _SIGNAL, _LEFT, _CLAIM, _BELL, _REPORTED, _SAID = range(12)


class Page:
    """The page of one rank.

    Args:
        memory: `PAGE_BYTES` that all ranks of the node can write, zero at first.

    Attributes:
        places: The words for `recorder.Recorder.show`.
    """

    def __init__(self, memory: memoryview) -> None:
        words = memory[: PAGE_BYTES - TEXT_BYTES].cast("q")
        self._header = words[:_HEADER_WORDS]
        self.places = words[_HEADER_WORDS:]
        self._text = memory[PAGE_BYTES - TEXT_BYTES : PAGE_BYTES]
        self._known: dict[int, int] = {}

    @property
    def beat(self) -> int:
        """Local. The time of the watchdog's last look; 0 before it has begun."""
        return int(self._header[_BEAT])

    @beat.setter
    def beat(self, now: int) -> None:
        self._header[_BEAT] = now

    @property
    def ended(self) -> bool:
        """Local. Whether the program of the rank has ended."""
        return bool(self._header[_ENDED])

    @ended.setter
    def ended(self, value: bool) -> None:
        self._header[_ENDED] = value

    @property
    def left(self) -> bool:
        """Local. Whether no rank waits for this one any more, not even in MPI_Finalize."""
        return bool(self._header[_LEFT])

    @left.setter
    def left(self, value: bool) -> None:
        self._header[_LEFT] = value

    @property
    def asked(self) -> int:
        """Local. The time at which another rank last asked for a text."""
        return int(self._header[_ASKED])

    @asked.setter
    def asked(self, now: int) -> None:
        self._header[_ASKED] = now

    @property
    def ends(self) -> bool:
        """Local. Whether the rank is to end, since another one has given the job up and said why."""
        return bool(self._header[_ENDS])

    @ends.setter
    def ends(self, value: bool) -> None:
        self._header[_ENDS] = value

    @property
    def claim(self) -> int:
        """Local. The time at which the rank claimed to end the job, 1 once it does, 0 if it does not (`turns`)."""
        return int(self._header[_CLAIM])

    @claim.setter
    def claim(self, value: int) -> None:
        self._header[_CLAIM] = value

    @property
    def bell(self) -> int:
        """Local. The time at which another rank last told this one to look who has ended."""
        return int(self._header[_BELL])

    @bell.setter
    def bell(self, now: int) -> None:
        self._header[_BELL] = now

    @property
    def reported(self) -> bool:
        """Local. Whether the rank has reported a death for all ranks of its host; it may have ended since."""
        return bool(self._header[_REPORTED])

    @reported.setter
    def reported(self, value: bool) -> None:
        self._header[_REPORTED] = value

    @property
    def said(self) -> bool:
        """Local. Whether the rank, which a death ends, has printed why and has run its exit functions."""
        return bool(self._header[_SAID])

    @said.setter
    def said(self, value: bool) -> None:
        self._header[_SAID] = value

    @property
    def signal(self) -> int:
        """Local. The signal at which the rank writes its stack even while it holds the interpreter; 0: none."""
        return int(self._header[_SIGNAL])

    @signal.setter
    def signal(self, number: int) -> None:
        self._header[_SIGNAL] = number

    def state(self, identity: int) -> int | None:
        """Local. The rank's state on a communicator, None if it is not in this page."""
        place = self._place(identity)
        return None if place is None else int(self.places[place + STATE])

    def inner(self, identity: int) -> list[int]:
        """Local. The words about the rank's inner calls on a communicator; empty if there are none, or they change."""
        place = self._place(identity)
        if place is None:
            return []
        begin, end = place + INNER, place + PLACE_WORDS
        words = self.places[begin:end].tolist()
        return words if self.places[begin] == words[0] else []

    def _place(self, identity: int) -> int | None:
        place = self._known.get(identity)
        if place is None or self.places[place + IDENTITY] != identity:
            for place in range(0, len(self.places), PLACE_WORDS):
                if self.places[place + IDENTITY] == identity:
                    self._known[identity] = place
                    break
            else:
                return None
        return place

    def write(self, details: dict[str, Any]) -> None:
        """Local. Write the text; the rank itself does."""
        text = json.dumps(details).encode()
        while len(text) > TEXT_BYTES:
            stack, missing = details.get("stack", ""), details.get("missing", ())
            # Half a text could not be read. The current call is the most important part of it.
            shorter = {**details, "stack": stack[len(stack) // 2 + 1 :], "missing": missing[: len(missing) // 2]}
            details = shorter if stack or missing else {}
            text = json.dumps(details).encode()
        # Odd while the text is being written.
        self._header[_VERSION] += 1
        self._text[: len(text)] = text
        self._header[_LENGTH] = len(text)
        self._header[_VERSION] += 1

    def read(self) -> dict[str, Any]:
        """Local. The text; empty if there is none, or if it is just being written."""
        version = self._header[_VERSION]
        text = bytes(self._text[: self._header[_LENGTH]])
        if version % 2 or self._header[_VERSION] != version:
            return {}
        try:
            details: dict[str, Any] = json.loads(text)
        except ValueError:
            return {}
        return details
