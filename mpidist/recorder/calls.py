"""The calls of this rank on one communicator: the last ones, and the one that it is in.

A call notes itself and writes one word to the rank's page, which the other ranks of its node can read: what a rank is
in can be seen even when it holds the interpreter or is dead.

`enter` and `leave` together take 0.3 us. The user's line would take another 0.5 us in each call: it is read from the
stack of a rank that waits, when it has waited for a while.
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from threading import get_ident
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from mpidist.options import ReduceOp
from mpidist.recorder import inner_calls

# The number of calls on a communicator that are kept.
KEPT_CALLS = 256
# A state is the number of the last call on a communicator times this, and the code of its name while a rank is in it.
NEXT = inner_calls.NEXT
# The offsets in a communicator's place in a page, and its size, in words of eight bytes: its identity, this rank's
# state, and its inner calls.
IDENTITY, STATE, INNER = 0, 1, 2
PLACE_WORDS = INNER + inner_calls.WORDS
_RING, _KEPT = INNER + inner_calls.RING, inner_calls.KEPT
_HALF, _HALF_BITS = inner_calls.HALF, inner_calls.HALF_BITS
# The identity of the calls that open a communicator: its own is not known yet.
START = 1

# The calls that do nothing but send and receive: where all others have left one, it needs nothing more from them.
EXCHANGES = frozenset({
    "barrier", "exchange between ranks", "broadcast of an object", "agreement between ranks",
    "duplicating a communicator", "splitting a communicator",
})

THREADS = (
    "another thread of this program is in a call on the same ranks. MPI matches calls by their order, which two "
    "threads do not keep: make one call after the other (a strategy may be handed from thread to thread), or give each "
    "thread a strategy over a communicator of its own"
)

# A call: its name, or that with an operation or a root, and with the dtype and the shape of an array.
Call = str | tuple[Any, ...]

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="HasCalls")


class _Codes(dict[str, int]):
    """A number for each name, the same on every rank; never 0."""

    def __missing__(self, name: str) -> int:
        code = self[name] = zlib.crc32(name.encode()) % (NEXT - 1) + 1
        return code


CODES = _Codes()
# The number of low bits of a call's code that distinguish calls of one name.
WHICH = 0xFFFF
# Strategies on the same ranks are numbered from 1: this factor makes long numbers of theirs, which are added to
# the signs of their calls.
SPREAD = 0x9E3779B1


def code_of(name: str, sign: int) -> int:
    """Local. A number for a whole call, the same on every rank; never 0.

    Args:
        name: The name of the call.
        sign: A checksum of the arguments that must be the same on all ranks, and of the call's owner.
    """
    return CODES[name] ^ (sign & WHICH) or 1


def names_of(code: int) -> list[str]:
    """Local. The names that calls of this code may have."""
    return [name for name, known in CODES.items() if may_have_one_name(known, code)]


def may_have_one_name(code: int, other: int) -> bool:
    """Local. Whether calls of these codes may have one name."""
    return code & ~WHICH == other & ~WHICH


class Calls:
    """This rank's calls on one communicator; `RECORDER.open` makes it.

    Every communicating call is between `enter` and `leave` (in a `finally`). A call inside another one on the same
    communicator does not count: the outer one is what the program called. Note only calls that all ranks of the
    communicator make, in the same order on all of them: their numbers are compared.

    Args:
        identity: The identity of the communicator, the same on all its ranks; positive.
        members: The processes of its ranks, in their order.
        rank: This rank among them.
        words: This communicator's place in the page of this rank.

    Attributes:
        identity: The constructor's argument.
        members: The constructor's argument.
        rank: The constructor's argument.
        words: The constructor's argument.
        recent: The last calls, newest last.
        inner: The innermost call inside the current one; empty if there is none, or one has just ended.
        thread: The thread that made the last call.
        depth: The number of nested calls that this rank is in.
        state: The number of the last call, times `NEXT`.
        note: A function that keeps a call.
        owner: The number of the strategy whose call this rank is in; 0: no strategy's.
        on_begin: A function that is called before each call that is inside no other one, or None.
        limit_seconds: The longest wait of the current call in seconds; None: no limit.
        is_timed: Whether the current call watches the time itself.
    """

    def __init__(self, identity: int, members: Sequence[Hashable], rank: int, words: memoryview) -> None:
        self.identity = identity
        self.members = tuple(members)
        self.rank = rank
        self.words = words
        self.inner = ""
        self._inner_call: Call = ""
        # The state of the last call with inner ones; with their count; and their sign.
        self._outer, self._inner_state, self._inner_sign = -1, 0, 0
        self.recent: deque[Call] = deque(maxlen=KEPT_CALLS)
        self.thread = 0
        self.limit_seconds: float | None = None
        self.is_timed = False
        # When it last waited in a barrier of a node's memory, by the monotonic clock.
        self.in_barrier = -math.inf
        self.note = self.recent.append
        self.depth = 0
        self.on_begin: Callable[[], None] | None = None
        self.state = self.owner = 0
        words[STATE] = 0
        words[INNER:PLACE_WORDS] = inner_calls.NOTHING
        words[IDENTITY] = identity

    def enter(self, name: str, call: Call = "", code: int = 0, owner: int = 0) -> None:
        """Local. Note that a call begins.

        Args:
            name: The name of the called function, the same on all ranks.
            call: The description of the call, if it has more than a name. It is kept: the same object again takes no
                memory.
            code: The code of the whole call; by default that of its name and its owner.
            owner: The number of the strategy whose call it is; 0: no strategy's.

        Raises:
            RuntimeError: Another thread is in a call.
        """
        if self.on_begin is not None:
            self.on_begin()
        if self.depth:
            if self.thread != get_ident():
                raise RuntimeError(f"{name}: {THREADS}")
            self.depth += 1
            self.note_inner(name, call, code or CODES[name] ^ owner * SPREAD & WHICH or 1)
            return
        self.depth = 1
        self.owner = owner
        self.thread = get_ident()
        self.note(call or name)
        self.state = state = self.state + NEXT
        # `code_of`, in place. One aligned word, which is written in one piece.
        self.words[STATE] = state + (code or CODES[name] ^ owner * SPREAD & WHICH or 1)

    def note_inner(self, name: str, call: Call, code: int) -> None:
        """Local. Note a call inside the current one, until the next one begins or ends there.

        Args:
            name: See `enter`.
            call: See `enter`.
            code: See `enter`.
        """
        self.inner = name
        self._inner_call = call
        if self._outer != self.state:
            # The words are those of another call, and do not count from now on.
            self.words[INNER] = self._outer = self._inner_state = self.state
            self._inner_sign = 0
        self._inner_state = state = self._inner_state + 1
        before = self._inner_sign
        names, whole = (before >> _HALF_BITS) * 31 + CODES[name] & _HALF, (before & _HALF) * 31 + code & _HALF
        self._inner_sign = sign = names << _HALF_BITS | whole
        words = self.words
        # First: a reader that finds the new count must find the new sign, too.
        words[_RING + state % _KEPT] = sign
        words[INNER] = state

    def leave(self) -> None:
        """Local. Note that the call has ended, well or not."""
        if self.depth > 1:
            self.depth -= 1
            self.inner = ""
            return
        self.depth = 0
        self.words[STATE] = self.state

    def fail(self) -> None:
        """Local. Note that the call ends with an exception: no rank in another one can meet this rank in it."""
        if self.depth == 1:
            self.words[INNER + inner_calls.FAILED] = self.words[STATE]
        self.leave()

    def go_on_at(self, number: int) -> None:
        """Local. Set the number of calls, as all ranks do, to at least that of every rank; also within a call."""
        within = self.words[STATE] % NEXT if self.depth else 0
        self.state = max(self.number, number) * NEXT
        self.words[STATE] = self.state + within
        # All ranks count inner calls from 0.
        self._outer = -1

    @property
    def name(self) -> str:
        """Local. The name of the last call."""
        call = self.recent[-1] if self.recent else ""
        return call if isinstance(call, str) else str(call[0])

    @property
    def number(self) -> int:
        """Local. The number of the last call."""
        return self.state // NEXT

    @property
    def code(self) -> int:
        """Local. The name of the last call and whose it is, as a number that is the same on every rank."""
        return code_of(self.name, self.owner * SPREAD)

    @property
    def is_exchange(self) -> bool:
        """Local. Whether the current call does nothing but move messages: of an array, or without one."""
        innermost = self.innermost
        is_array = isinstance(innermost, tuple) and len(innermost) == 4
        return is_array or (self.inner or self.name) in EXCHANGES

    @property
    def innermost(self) -> Call:
        """Local. The description of the innermost call that this rank is in, if it has more than a name."""
        return self._inner_call if self.inner else self.recent[-1] if self.recent else ""

    def before(self, count: int) -> list[str]:
        """Local. The last calls before the present one, at most `count`, in words, oldest first."""
        kept = len(self.recent)
        # By index: another thread may append meanwhile.
        return [describe(self.recent[place]) for place in range(max(0, kept - 1 - count), kept - 1)]

    def limited(self, seconds: float | None, owner: int = 0) -> Calls:
        """Local. These calls, with a time limit for waits.

        Args:
            seconds: The longest wait in seconds; None: no limit.
            owner: See `enter`.
        """
        is_same = (seconds is None and not owner) or isinstance(self, LoneCalls)
        return self if is_same else _OwnCalls(self, seconds, owner)

    @contextlib.contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Local. Note a call that lasts as long as the body of the `with`; where 3 us do not matter."""
        self.enter(name)
        try:
            yield
        except BaseException:
            self.fail()
            raise
        self.leave()

    def __repr__(self) -> str:
        return f"Calls({self.name!r}, number {self.number}, of {len(self.members)} ranks)"


class LoneCalls(Calls):
    """The calls of a rank that is alone: no other rank waits for it."""

    def __init__(self) -> None:
        super().__init__(0, (), 0, new_words(PLACE_WORDS))

    def enter(self, name: str, call: Call = "", code: int = 0, owner: int = 0) -> None:
        """Local. Note the caller."""
        del name, call, code, owner  # they are not needed
        self.thread = get_ident()

    def leave(self) -> None:
        """Local. Note nothing."""

    def fail(self) -> None:
        """Local. Note nothing."""


class _OwnCalls(Calls):
    """Calls of one strategy, whose outermost ones may have a time limit."""

    def __init__(self, calls: Calls, seconds: float | None, owner: int) -> None:
        self._calls = calls
        self._seconds = seconds
        self._owner = owner

    def enter(self, name: str, call: Call = "", code: int = 0, owner: int = 0) -> None:
        """Local. See `Calls.enter`; the owner is always the same."""
        calls = self._calls
        if not calls.depth:
            calls.limit_seconds = self._seconds
        calls.enter(name, call, code, owner or self._owner)

    def leave(self) -> None:
        """Local. See `Calls.leave`."""
        calls = self._calls
        calls.leave()
        if not calls.depth:
            calls.limit_seconds = None

    def fail(self) -> None:
        """Local. See `Calls.fail`."""
        calls = self._calls
        calls.fail()
        if not calls.depth:
            calls.limit_seconds = None


class HasCalls(Protocol):
    """An object that communicates."""

    @property
    def calls(self) -> Calls:
        """Local. Its calls on its communicator."""
        ...


def noted(name: str) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Local. Note each call of a method; where 0.2 us more matter, call `enter` and `leave` instead.

    Args:
        name: See `Calls.enter`.
    """
    def decorate(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        @functools.wraps(method)
        def wrapped(self: S, *arguments: P.args, **named: P.kwargs) -> T:
            calls = self.calls
            calls.enter(name)
            try:
                result = method(self, *arguments, **named)
            except BaseException:
                calls.fail()
                raise
            calls.leave()
            return result

        return cast(Callable[Concatenate[S, P], T], wrapped)

    return decorate


def describe(call: Call) -> str:
    """Local. A call in words: its name, the operation or the root, and dtype and shape if it has them."""
    if isinstance(call, str):
        return call
    name, *rest = call
    detail, *array = rest or [None]
    if isinstance(detail, ReduceOp):
        detail = detail.name
    what = name if detail is None else f"{name} {detail}"
    return f"{what} of {' '.join(str(one) for one in array)}" if array else what


def new_words(count: int) -> memoryview:
    """Local. An array of this many words of eight bytes, zero, which no other process reads."""
    return memoryview(bytearray(8 * count)).cast("q")


def byte_count(call: Call) -> int:
    """Local. The size of this rank's array, 0 where it is not known."""
    if len(call) < 4 or isinstance(call, str):
        return 0
    _, _, dtype, shape = call
    return int(dtype.itemsize) * math.prod(shape)
