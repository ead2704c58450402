"""Peers: the other ranks, as far as this one can see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpidist.recorder import inner_calls
from mpidist.recorder.calls import NEXT, Calls, names_of
from mpidist.recorder.details import tell
from mpidist.recorder.rank_page import Page
from mpidist.recorder.stacks import stack_of_process
from mpidist.recorder.time_limits import ANSWER_SECONDS, CLOCK, TICK_SECONDS, Clock

# Less than any time, which a claim is at first.
_CLAIMED = 1

# One that gets no core may need so much longer for its answer.
_BUSY_SECONDS = 5.0
# A watchdog that has not looked for so long cannot: its process is stopped, or holds the interpreter.
STALE_SECONDS = 3.0
# The number of ranks that are listed in a report.
LISTED = 8


class Key(NamedTuple):
    """The process of a rank: its host, its number there, and the name space of that number."""

    host: str
    number: int
    namespace: str


class Peer:
    """Another rank, of this node.

    Args:
        key: Its process.
        name: What to call it: "rank 1 of 4 (process 77 on n3)".
        order: Lower ones speak first.
        page: What it shows; None where it cannot be seen.
        path: The path of the file behind the page.
        clock: By which its watchdog looks.
    """

    # Whether it is on another host; what is seen of it there may be some seconds old.
    is_far = False

    def __init__(
        self, key: Key, name: str, order: int, page: Page | None, path: str, clock: Clock = CLOCK
    ) -> None:
        self.key = key
        self.name = name
        self.order = order
        self.page = page
        self._path = path
        self._clock = clock

    def state(self, identity: int) -> int | None:
        """Local. Its state on a communicator; None if that is not known."""
        return None if self.page is None else self.page.state(identity)

    def inner(self, identity: int) -> list[int]:
        """Local. The words about its inner calls on a communicator (`inner_calls`); empty if they are not known."""
        return [] if self.page is None else self.page.inner(identity)

    def is_fresh(self) -> bool:
        """Local. Whether its watchdog has looked a moment ago."""
        return self.page is not None and self._clock.ns() - self.page.beat < STALE_SECONDS * 1e9

    def is_stuck(self) -> bool:
        """Local. Whether its watchdog cannot look: the process is stopped, holds the interpreter, or gets no core."""
        return self.page is not None and not self.is_fresh() and not self.why_gone()

    def details(self) -> dict[str, Any]:
        """Local. The last words of its watchdog, empty if they are old."""
        return self.page.read() if self.page is not None and self.is_fresh() else {}

    def has_ended(self) -> bool:
        """Local. Whether its program has ended."""
        return self.page is not None and self.page.ended

    def has_died(self) -> bool:
        """Local. Whether its process has ended, and the program had not."""
        return self.page is not None and not self.page.ended and _life(self.key.number) in ("", "Z", "X")

    def has_died_at_end(self) -> bool:
        """Local. Whether its process has ended after the program, and before MPI had."""
        return self.page is not None and not self.page.left and _life(self.key.number) in ("", "Z", "X")

    def why_gone(self) -> str:
        """Local. The reason for which it can take part in nothing any more; empty if it can."""
        return "has ended" if self.has_ended() else "has died" if self.has_died() else ""

    def may_speak(self, *, ends: bool = True) -> bool:
        """Local. Whether it may tell why the job ends: it waits, or it is dead, and its own word may have ended it.

        Args:
            ends: Whether anything ends the job. Else a dead rank has said nothing.
        """
        waits = bool(self.details().get("calls")) and not self.has_ended()
        # Only where that decides: it opens a file.
        return waits if waits == ends else ends if self.has_died() else waits

    def claim(self) -> int:
        """Local. Its claim to end the job (`Page.claim`); 0 if it cannot, since it is dead or stopped."""
        claim = 0 if self.page is None else self.page.claim
        return claim if claim and self.is_fresh() and not self.has_died() else 0

    def ask(self) -> None:
        """Local. Ask for its stack."""
        if self.page is not None:
            self.page.asked = self._clock.ns()

    def tell(self, identities: Iterable[int] = ()) -> str:
        """Local. Tell where it is: a line, and its stack below it where it is in no call.

        Args:
            identities: The identities of communicators. It may have entered a call on one of them and not have written
                about it yet.
        """
        if self.page is None:
            return f"{self.name} cannot be seen from here"
        why_gone = self.why_gone()
        if why_gone:
            return f"{self.name} {why_gone}"
        if _life(self.key.number) in ("T", "t"):
            return f"{self.name} is stopped: `kill -CONT {self.key.number}` resumes it"
        if not self.is_fresh():
            number = self.page.signal
            text = stack_of_process(self.key.number, number, self._path) if number else ""
            return f"{self.name} holds the interpreter lock (GIL), or gets no core\n{text}".rstrip()
        state = self.call_untold(identities)
        if state:
            names = names_of(state % NEXT)
            return f"{self.name} is in {names[0] if names else 'another call'}, call {state // NEXT}"
        return f"{self.name} {tell(self.details())}"

    def call_untold(self, identities: Iterable[int]) -> int:
        """Local. The state of a call that this rank is in on one of some communicators, and has not written about."""
        if self.page is None or self.details().get("calls"):
            return 0
        states = (self.state(identity) for identity in identities)
        return next((state for state in states if state is not None and state % NEXT), 0)


def where_are(peers: Sequence[Peer], clock: Clock = CLOCK) -> list[str]:
    """Local. Ask ranks where they are; a text for each."""
    if not peers:
        return []
    for peer in peers:
        peer.ask()
    clock.sleep(ANSWER_SECONDS)
    end = clock.now() + _BUSY_SECONDS
    while any(peer.is_fresh() and not peer.details() for peer in peers) and clock.now() < end:
        clock.sleep(TICK_SECONDS / 10)
    return [peer.tell() for peer in peers]


def indented(texts: Iterable[str]) -> str:
    """Local. The lines of some texts below another one."""
    return "".join(f"\n  {line}" for text in texts for line in text.split("\n"))


def tell_some(peers: Sequence[Peer], identities: Iterable[int]) -> list[str]:
    """Local. Tell where the first ones of some ranks are, and how many there are besides.

    Args:
        peers: The ranks.
        identities: See `Peer.tell`.
    """
    told = [peer.tell(identities) for peer in peers[:LISTED]]
    return [*told, f"and {len(peers) - LISTED} more ranks"] if len(peers) > LISTED else told


def others_of(calls: Calls, peers: Mapping[Key, Peer]) -> list[Peer]:
    """Local. The other ranks of a communicator, as far as they are known."""
    return [peers[key] for key in calls.members if key in peers]  # type: ignore[index]  # members are keys


def missing(state: int, others: Sequence[Peer], identity: int) -> list[Peer]:
    """Local. Those that have not come to a call yet.

    Args:
        state: The one in which this rank waits.
        others: The other ranks of the communicator.
        identity: The identity of the communicator.
    """
    late = []
    for peer in others:
        other = peer.state(identity)
        if other is not None and other // NEXT < state // NEXT:
            late.append(peer)
    return late


def elsewhere(state: int, others: Sequence[Peer], identity: int) -> list[Peer]:
    """Local. Those that are in another call instead of this one; arguments as for `missing`."""
    found = []
    for peer in others:
        other = peer.state(identity)
        if other is not None and other // NEXT == state // NEXT and other % NEXT not in (0, state % NEXT):
            found.append(peer)
    return found


def unlike_inside(state: int, mine: Sequence[int], others: Sequence[Peer], identity: int) -> list[Peer]:
    """Local. Those that were in inner calls of the same names, and of another kind; arguments as `elsewhere_inside`."""
    number = state // NEXT
    return [
        peer for peer in others if (theirs := peer.inner(identity)) and inner_calls.are_unlike(mine, number, theirs)
    ]


def has_left(other: int | None, state: int) -> bool:
    """Local. Whether a rank with a state on a communicator has left the call of another rank's state there."""
    number = state // NEXT
    return other is not None and (other // NEXT > number or other == number * NEXT)


def elsewhere_inside(
    state: int, mine: Sequence[int], others: Sequence[Peer], identity: int
) -> tuple[list[Peer], list[Peer]]:
    """Local. Those that were in other calls inside this one.

    Args:
        state: The call in which this rank waits.
        mine: The words about this rank's inner calls.
        others: The other ranks of the communicator.
        identity: The identity of the communicator.

    Returns:
        Those that were in another one instead; those that have left this call without this rank's last inner one.
    """
    number, code = divmod(state, NEXT)
    different, gone_on = [], []
    for peer in others:
        other = peer.state(identity)
        # After the state: a rank that has left a call writes nothing more about it.
        theirs = peer.inner(identity)
        if other is None or not theirs or theirs == mine:
            continue
        if inner_calls.differ(mine, number, code, theirs):
            different.append(peer)
        elif has_left(other, state) and inner_calls.are_missing(mine, number, theirs):
            gone_on.append(peer)
    return different, gone_on


def is_left_behind(me: Key, state: int, others: Sequence[Peer], identity: int) -> bool:
    """Local. Whether those of the others that are not in this rank's call have left it, and wait for this rank.

    They have sent all that the call needs, and are in MPI again. What has not come after a while went to another call.

    Args:
        me: This rank.
        state: The call in which it waits.
        others: The other ranks of the communicator.
        identity: The identity of the communicator.
    """
    gone_on = [peer for peer in others if peer.state(identity) != state]
    awaited = WaitsOfOthers(me, {peer.key: peer for peer in others})
    return bool(gone_on) and all(me in awaited.by(peer) for peer in gone_on)


def _unknown(identity: int) -> int | None:
    del identity
    return None


class WaitsOfOthers:
    """The ranks that other ranks wait for, by what these have written; of one look.

    Args:
        me: This rank.
        peers: All others.
        mine: The state of this rank on a communicator, by its identity.
    """

    def __init__(
        self, me: Key, peers: Mapping[Key, Peer], mine: Callable[[int], int | None] = _unknown
    ) -> None:
        self._peers = peers
        self._state_of: dict[Key, Callable[[int], int | None]] = {me: mine}
        self._found: dict[Key, dict[str, Any]] = {}

    def _details(self, peer: Peer) -> dict[str, Any]:
        if peer.key not in self._found:
            self._found[peer.key] = peer.details()
        return self._found[peer.key]

    def by(self, peer: Peer) -> list[Key]:
        """Local. The ranks that a rank waits for. It may have left that to its leader, which is in the same call."""
        details = self._details(peer)
        found = [Key(*one) for one in details.get("missing", ())]
        for identity, state, key in details.get("leaders", ()):
            leader = self._peers.get(Key(*key))
            if leader is not None and leader.state(identity) == state == peer.state(identity):
                found += [Key(*one) for one in self._details(leader).get("missing", ())]
        # What it has written may be some seconds old: one of them may have come.
        calls = [(identity, peer.state(identity) or 0) for identity in details.get("on", ())]
        return [key for key in dict.fromkeys(found) if not calls or self._is_missing(key, calls)]

    def _is_missing(self, key: Key, calls: Sequence[tuple[int, int]]) -> bool:
        peer = self._peers.get(key)
        state_of = self._state_of.get(key, _unknown) if peer is None else peer.state
        return any((state_of(identity) or 0) // NEXT < state // NEXT for identity, state in calls)


def circle(
    me: Key, late: Sequence[Peer], peers: Mapping[Key, Peer], mine: Callable[[int], int | None] = _unknown
) -> list[Peer]:
    """Local. Ranks that wait for one another and at last for this one: none of them can continue.

    Args:
        me: This rank.
        late: The ranks that this rank waits for.
        peers: All others.
        mine: The state of this rank on a communicator, by its identity.
    """
    paths = [[peer] for peer in late]
    seen: set[Key] = set()
    awaited = WaitsOfOthers(me, peers, mine)
    while paths:
        path = paths.pop()
        for key in awaited.by(path[-1]):
            if key == me:
                return path
            if key in peers and key not in seen:
                seen.add(key)
                paths.append([*path, peers[key]])
    return []


def _life(number: int) -> str:
    """The state of a process (`man 5 proc`), empty if there is none."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def rivals(peers: Iterable[Peer]) -> list[Peer]:
    """Local. Those of some ranks that may see what this rank sees, where each rank of other hosts sees a few only.

    Args:
        peers: The ranks that may speak.
    """
    return [peer for peer in peers if not peer.is_far or peer.details().get("missing")]


def claim(page: Page, others: Iterable[Peer], clock: Clock = CLOCK) -> bool:
    """Local. Claim to end the job; whether this rank is the one that does.

    The earliest claim holds. Who has it waits a moment first: another rank may have read the clock before, and not have
    written its claim yet.

    Args:
        page: This rank's.
        others: The ranks that may claim it, too.
        clock: By which they claim it.
    """
    page.claim = mine = clock.ns()
    clock.sleep(TICK_SECONDS / 5)
    if any(0 < other.claim() <= mine for other in others):
        page.claim = 0
        return False
    page.claim = _CLAIMED
    return True
