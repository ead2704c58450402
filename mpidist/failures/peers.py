"""Peers: the other ranks that this rank can see, and their states."""

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

# The value of a confirmed claim, less than any time; a claim is the time at which it was made until it is confirmed.
_CLAIMED = 1

# Additional time for the answer of a rank that gets no core.
_BUSY_SECONDS = 5.0
# A watchdog that has not run for this time is stuck: its process is stopped, or holds the interpreter lock.
STALE_SECONDS = 6 * TICK_SECONDS
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
        name: Its name in reports: "rank 1 of 4 (process 77 on n3)".
        order: Its place among the ranks: those of lower order report first.
        page: Its page; None if this rank cannot read it.
        path: The path of the file behind the page.
        clock: The clock of its watchdog.
    """

    # Whether it is on another host, whose information may be some seconds old.
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
        """Local. Its state on a communicator; None if the state is not known."""
        return None if self.page is None else self.page.state(identity)

    def inner(self, identity: int) -> list[int]:
        """Local. The words about its inner calls on a communicator (`inner_calls`); empty if they are not known."""
        return [] if self.page is None else self.page.inner(identity)

    def is_fresh(self) -> bool:
        """Local. Whether its watchdog has run within the last seconds."""
        return self.page is not None and self._clock.ns() - self.page.beat < STALE_SECONDS * 1e9

    def is_stuck(self) -> bool:
        """Local. Whether its watchdog cannot run: the process is stopped, holds the GIL, or gets no core."""
        return self.page is not None and not self.is_fresh() and not self.why_gone()

    def details(self) -> dict[str, Any]:
        """Local. The last details that its watchdog has written, empty if they are old."""
        return self.page.read() if self.page is not None and self.is_fresh() else {}

    def has_ended(self) -> bool:
        """Local. Whether its program has ended."""
        return self.page is not None and self.page.ended

    def has_died(self) -> bool:
        """Local. Whether its process has ended before its program."""
        return self.page is not None and not self.page.ended and _life(self.key.number) in ("", "Z", "X")

    def has_died_at_end(self) -> bool:
        """Local. Whether its process has ended after its program, but before MPI was finalized."""
        return self.page is not None and not self.page.left and _life(self.key.number) in ("", "Z", "X")

    def why_gone(self) -> str:
        """Local. The reason why it can take part in no further call; empty if it can."""
        return "has ended" if self.has_ended() else "has died" if self.has_died() else ""

    def may_speak(self, *, ends: bool = True) -> bool:
        """Local. Whether it may report why the job ends: it waits, or it is dead and may have reported before.

        Args:
            ends: Whether a report ends the job. If not, a dead rank has reported nothing.
        """
        waits = bool(self.details().get("calls")) and not self.has_ended()
        # `has_died` opens a file: it is called only where it decides.
        return waits if waits == ends else ends if self.has_died() else waits

    def claim(self) -> int:
        """Local. Its claim to end the job (`Page.claim`); 0 if it cannot end it because it is dead or stopped."""
        claim = 0 if self.page is None else self.page.claim
        return claim if claim and self.is_fresh() and not self.has_died() else 0

    def ask(self) -> None:
        """Local. Request its stack."""
        if self.page is not None:
            self.page.asked = self._clock.ns()

    def tell(self, identities: Iterable[int] = ()) -> str:
        """Local. A description of its place in the program: a line, followed by its stack if it is in no call.

        Args:
            identities: The identities of communicators on which it may be in a call that it has not described yet.
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
        """Local. The state of a call on one of some communicators that this rank is in and has not described yet."""
        if self.page is None or self.details().get("calls"):
            return 0
        states = (self.state(identity) for identity in identities)
        return next((state for state in states if state is not None and state % NEXT), 0)


def where_are(peers: Sequence[Peer], clock: Clock = CLOCK) -> list[str]:
    """Local. Request the stacks of ranks; returns a description of each rank."""
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
    """Local. The lines of some texts, indented, to be appended to another text."""
    return "".join(f"\n  {line}" for text in texts for line in text.split("\n"))


def tell_some(peers: Sequence[Peer], identities: Iterable[int]) -> list[str]:
    """Local. Descriptions of the first `LISTED` of some ranks, and the number of the others.

    Args:
        peers: The ranks.
        identities: See `Peer.tell`.
    """
    told = [peer.tell(identities) for peer in peers[:LISTED]]
    return [*told, f"and {len(peers) - LISTED} more ranks"] if len(peers) > LISTED else told


def others_of(calls: Calls, peers: Mapping[Key, Peer]) -> list[Peer]:
    """Local. The known other ranks of a communicator."""
    return [peers[key] for key in calls.members if key in peers]  # type: ignore[index]  # members are keys


def missing(state: int, others: Sequence[Peer], identity: int) -> list[Peer]:
    """Local. The ranks that have not arrived at a call yet.

    Args:
        state: The state of this rank, which waits in the call.
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
    """Local. The ranks that are in another call of the same number; arguments as for `missing`."""
    found = []
    for peer in others:
        other = peer.state(identity)
        if other is not None and other // NEXT == state // NEXT and other % NEXT not in (0, state % NEXT):
            found.append(peer)
    return found


def unlike_inside(state: int, mine: Sequence[int], others: Sequence[Peer], identity: int) -> list[Peer]:
    """Local. Ranks whose inner calls had the same names, but differ; arguments as for `elsewhere_inside`."""
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
    """Local. The ranks that were in other calls inside this one.

    Args:
        state: The state of this rank, which waits in the call.
        mine: The words about this rank's inner calls.
        others: The other ranks of the communicator.
        identity: The identity of the communicator.

    Returns:
        The ranks that were in another inner call; the ranks that have left this call without this rank's last inner
        call.
    """
    number, code = divmod(state, NEXT)
    different, gone_on = [], []
    for peer in others:
        other = peer.state(identity)
        # Read after the state: a rank that has left a call writes no more inner calls of it.
        theirs = peer.inner(identity)
        if other is None or not theirs or theirs == mine:
            continue
        if inner_calls.differ(mine, number, code, theirs):
            different.append(peer)
        elif has_left(other, state) and inner_calls.are_missing(mine, number, theirs):
            gone_on.append(peer)
    return different, gone_on


def is_left_behind(me: Key, state: int, others: Sequence[Peer], identity: int) -> bool:
    """Local. Whether all ranks that are not in this rank's call have left it, and wait for this rank.

    They have sent all messages of the call, and are in MPI again. A message that has not arrived after some time went
    to another call.

    Args:
        me: This rank.
        state: The state of this rank, which waits in the call.
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
    """The ranks that other ranks wait for, according to their pages; to be used in one look only.

    Args:
        me: This rank.
        peers: All other ranks.
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
        """Local. The ranks that a rank waits for. Its page may name its leader, in the same call, in place of them."""
        details = self._details(peer)
        found = [Key(*one) for one in details.get("missing", ())]
        for identity, state, key in details.get("leaders", ()):
            leader = self._peers.get(Key(*key))
            if leader is not None and leader.state(identity) == state == peer.state(identity):
                found += [Key(*one) for one in self._details(leader).get("missing", ())]
        # The page may be some seconds old: one of these ranks may have arrived.
        calls = [(identity, peer.state(identity) or 0) for identity in details.get("on", ())]
        return [key for key in dict.fromkeys(found) if not calls or self._is_missing(key, calls)]

    def _is_missing(self, key: Key, calls: Sequence[tuple[int, int]]) -> bool:
        peer = self._peers.get(key)
        state_of = self._state_of.get(key, _unknown) if peer is None else peer.state
        return any((state_of(identity) or 0) // NEXT < state // NEXT for identity, state in calls)


def circle(
    me: Key, late: Sequence[Peer], peers: Mapping[Key, Peer], mine: Callable[[int], int | None] = _unknown
) -> list[Peer]:
    """Local. A chain of ranks, each of which waits for the next, and the last for this rank: none can continue.

    Args:
        me: This rank.
        late: The ranks that this rank waits for.
        peers: All other ranks.
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
    """The state of a process (`man 5 proc`), empty if the process does not exist."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def rivals(peers: Iterable[Peer]) -> list[Peer]:
    """Local. Ranks that may see the same as this rank, in a job where a rank of another host sees few ranks.

    Args:
        peers: The ranks that may report.
    """
    return [peer for peer in peers if not peer.is_far or peer.details().get("missing")]


def claim(page: Page, others: Iterable[Peer], clock: Clock = CLOCK) -> bool:
    """Local. Claim to end the job. Returns whether the claim holds, so that this rank ends it.

    The earliest claim holds. The rank first waits shortly: another one may have read the clock earlier, and not have
    written its claim yet.

    Args:
        page: This rank's page.
        others: The other ranks that may make a claim.
        clock: The clock of all these ranks.
    """
    page.claim = mine = clock.ns()
    clock.sleep(TICK_SECONDS / 5)
    if any(0 < other.claim() <= mine for other in others):
        page.claim = 0
        return False
    page.claim = _CLAIMED
    return True
