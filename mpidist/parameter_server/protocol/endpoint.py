"""The station: a process in a group of coordinator, workers and servers, with its window.

A rank has one role. A process without a launcher has all three, and sends messages to itself. Each kind of message has
one receiver in a process, so that no order of roles decides which role gets a message.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from mpidist.comm.windows.window import Window
from mpidist.errors import DeadRankError
from mpidist.failures.deaths import IS_SILENT, WATCH, Process
from mpidist.failures.peers import Key
from mpidist.parameter_server.protocol.awaited_ranks import Awaited
from mpidist.parameter_server.protocol.messages import Call, CallAnswer, Discard, Left, Message, Send
from mpidist.parameter_server.protocol.wire import decode, encode

# Work in the background is looked after as often.
_BACKGROUND_SECONDS = 0.001
# The time in which the last messages leave this process.
_LAST_SECONDS = 0.2
_CLOSED = (
    "this ParameterServerStrategy is closed: its servers have ended, and its variables with them. Read them before, "
    "save a checkpoint, or close the strategy at the end of the program"
)

# The key that selects the receiver of a message: its class, and for some classes the word in it.
Kind: TypeAlias = "type[Message] | tuple[type[Message], str]"
# Does what a message asks for: gets the rank that has sent it, and the message.
Take: TypeAlias = Callable[[int, Message], None]


class Station:
    """A process of the group.

    Args:
        window: The window to the other processes.
        name_of: A function that returns the name of a rank: "worker 1".
        key_of: The process of a rank.
        needed: The ranks without which training cannot continue: coordinator and servers.
        whole: A context manager for work that no interrupt may divide; on the chief a `Whole`.

    Attributes:
        window: The constructor's argument.
        name_of: The constructor's argument.
        lost: The ranks that are dead, or count as dead.
        left: The ranks that are alive and do not serve any more, with the reason.
        awaited: A context manager for waits for others, which the watchdog then observes.
        reserved: The number of bytes with memory, by server and slot, where that is not `layout.FIRST_BYTES`.
        whole: The constructor's argument.
    """

    def __init__(
        self, window: Window, name_of: Callable[[int], str], key_of: Callable[[int], Key], needed: frozenset[int],
        whole: contextlib.AbstractContextManager[None] | None = None,
    ) -> None:
        self.window = window
        window.explain_end(_CLOSED)
        self.name_of = name_of
        self.lost: set[int] = set()
        self.left: dict[int, str] = {}
        self.awaited = Awaited(name_of, key_of)
        self.reserved: dict[tuple[int, int], int] = {}
        self.whole = contextlib.nullcontext() if whole is None else whole
        self._background: Callable[[], None] | None = None
        self._takers: dict[Kind, Take] = {Left: self._take_left, CallAnswer: self._take_answer}
        self._needed = needed
        self._key_of = key_of
        self._answers: dict[int, CallAnswer | None] = {}
        self._again: list[tuple[int, Message]] = []
        self._number = 0

    def route(self, kinds: Iterable[Kind], take: Take) -> None:
        """Local. Set the receiver in this process of messages of some kinds.

        Args:
            kinds: The classes of the messages; `Call` and `Discard` with the name in them.
            take: A function that gets each message with its sender.

        Raises:
            RuntimeError: One of them has a receiver already.
        """
        for kind in kinds:
            if kind in self._takers:
                raise RuntimeError(f"two roles of one process take {kind!r}")
            self._takers[kind] = take

    def go_on_with(self, background: Callable[[], None] | None) -> None:
        """Local. Set a function that works between the messages, in short pieces; None ends that."""
        self._background = background

    def send(self, send: Send) -> None:
        """Local. Send a message."""
        self.window.ring(send.rank, encode(send.message))

    def step(self, seconds: float = 0.0) -> bool:
        """Local. Process one message, if one comes within this time; return whether one came.

        Raises:
            DeadRankError: The coordinator or a server is dead, or has left.
        """
        with self.whole:
            return self._step(seconds)

    def put_back(self, messages: Sequence[tuple[int, Message]]) -> None:
        """Local. Process messages once more, before all others.

        Args:
            messages: The messages with their senders, in their order.
        """
        self._again[:0] = messages

    def leave(self, reason: str) -> None:
        """Local. Notify all others that this process does not serve any more, and end its window.

        Args:
            reason: The error that has ended its service.
        """
        self.left[self.window.rank] = reason
        gone = self.lost | self.window.lost() | {self.window.rank}
        for rank in range(self.window.size):
            if rank not in gone:
                self.send(Send(rank, Left(reason)))
        # Messages are sent on while this process is in the window.
        self.window.poll(_LAST_SECONDS)
        self.window.drop()

    def _step(self, seconds: float) -> bool:
        if self._background is not None:
            self._background()
            seconds = min(seconds, _BACKGROUND_SECONDS)
        if self._again:
            sender, message = self._again.pop(0)
        else:
            got = self.window.poll(seconds)
            if got is None:
                self.require_needed()
                return False
            sender, message = got[0], decode(got[1])
        kind: Kind = type(message)
        if isinstance(message, Call):
            kind = Call, message.name
        elif isinstance(message, Discard):
            kind = Discard, message.kind
        take = self._takers.get(kind)
        if take is None:
            raise RuntimeError(f"{self.name_of(sender)} sends {message!r}, for which this process has no role")
        take(sender, message)
        return True

    def _take_left(self, sender: int, message: Message) -> None:
        if isinstance(message, Left):
            self.left[sender] = message.reason
            self.require_needed()

    def _take_answer(self, _: int, message: Message) -> None:
        # No call waits any more for the answer to an interrupted one.
        if isinstance(message, CallAnswer) and message.call in self._answers:
            self._answers[message.call] = message

    def require_needed(self) -> None:
        """Local. Raise DeadRankError if the coordinator or a server is dead, or has left."""
        lost = self.window.lost()
        if not lost and not self.left:
            return
        for rank in self._needed & self.left.keys():
            raise DeadRankError(
                f"{self.name_of(rank)} (rank {rank}) stopped serving after an error: {self.left[rank]}. Training "
                "cannot continue without it. Start the job again: a program that saves checkpoints resumes from the "
                "last one"
            )
        dead = lost & self._needed
        if dead:
            # The program gets time to handle the error.
            WATCH.note_raised()
            names = ", ".join(map(self._why_gone, sorted(dead)))
            raise DeadRankError(
                f"{names}; training cannot continue without it. Start the job again: a program that saves checkpoints "
                "resumes from the last one, also with another number of servers"
            )

    def _why_gone(self, rank: int) -> str:
        is_silent = WATCH.dead.get(Process(*self._key_of(rank)), "").endswith(IS_SILENT)
        why = "cannot be reached: its host does not respond" if is_silent else "has died"
        return f"{self.name_of(rank)} (rank {rank}) {why}"

    def call(self, rank: int, name: str, *arguments: Any) -> Any:
        """Local. Ask another process, and wait for its answer.

        Args:
            rank: The process.
            name: The name of the call.
            arguments: The arguments of the call, picklable.

        Raises:
            Exception: The error that the other process raised.
            DeadRankError: The coordinator or a server is dead, or has left.
        """
        number = self.post(rank, name, *arguments)
        try:
            return self.wait(rank, name, number)
        finally:
            self._answers.pop(number, None)

    def post(self, rank: int, name: str, *arguments: Any) -> int:
        """Local. Ask another process, as `call`, and do not wait for its answer; returns the number for `wait`."""
        self._number += 1
        self._answers[self._number] = None
        self.send(Send(rank, Call(self._number, name, pickle.dumps(arguments))))
        return self._number

    def wait(self, rank: int, name: str, number: int) -> Any:
        """Local. Wait for the answer to a call of `post`.

        Args:
            rank: The process.
            name: The name of the call.
            number: The number that `post` has returned. If this call is interrupted it can be waited for again.

        Raises:
            Exception: See `call`.
        """
        with self.awaited((rank,), f"answer {name!r}"):
            while (answer := self._answers[number]) is None:
                self.step(0.05)
        del self._answers[number]
        return self.value_of(rank, answer.value, answer.traceback)

    def is_awaiting(self, number: int) -> bool:
        """Local. Whether `wait` has not returned the answer to a call of `post` yet."""
        return number in self._answers

    def value_of(self, rank: int, data: bytes, text: str) -> Any:
        """Local. The object that another process has made.

        Args:
            rank: The process.
            data: The pickled value, or exception.
            text: The traceback of an exception, empty for a value.

        Raises:
            Exception: The error that the other process raised.
        """
        value = pickle.loads(data)
        if text:
            if hasattr(value, "add_note"):
                value.add_note(f"Raised on {self.name_of(rank)}:\n{text}")
            raise value
        return value

    def answer(self, sender: int, call: Call, function: Callable[..., Any]) -> None:
        """Local. Answer a call by what a function returns or raises.

        Args:
            sender: The rank that has asked.
            call: The call.
            function: A function of the call's arguments.
        """
        try:
            value, text = function(*pickle.loads(call.arguments)), ""
        except Exception as error:  # it is the other process's to raise
            value, text = error, traceback.format_exc()
        try:
            data = pickle.dumps(value)
        except Exception as error:
            data, text = pickle.dumps(TypeError(f"the answer to {call.name!r} cannot be pickled: {error}")), str(error)
        self.send(Send(sender, CallAnswer(call.call, data, text)))
