"""The order of calls on a communicator: one at a time, the same on all ranks, each one to its end.

All ranks must make the same calls in the same order, or results are silently wrong. Each call is signed: a checksum of
its name, operation, dtype and shape, of the number of its strategy, and of all calls before it. `CallComparison`
compares the checksums.

An interrupt is sent with the checksums: all ranks raise it at the end of the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mpidist.comm.calls.comparison import CallComparison
from mpidist.comm.calls.schedule import USUAL
from mpidist.comm.calls.signature_page import FLAG, HASH
from mpidist.comm.calls.text import AT_ONCE, HINT, Checksums, is_of_other_size, refuse_inside, told
from mpidist.errors import MismatchError, MpidistError, is_shared
from mpidist.failures.deaths import WATCH, Process
from mpidist.failures.interrupts import INTERRUPTS
from mpidist.failures.watchdog import WATCHDOG
from mpidist.recorder.calls import CODES, NEXT, SPREAD, STATE, WHICH, Calls

if TYPE_CHECKING:
    from mpidist.arrays import AnyArray
    from mpidist.comm.calls.turns import Turns

# Number of calls whose checksums one message compares between nodes. Reading this name takes less time than `has`.
_EVERY = USUAL.every


class _PastCall(tuple[Any, ...]):
    """A key that equals no other, so that the next call counts as new. Its elements can still be read."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True


class CallOrder(CallComparison):
    """The calls of this rank on one communicator. `with order.enter(...)` surrounds a call, which may contain others.

    Args:
        calls: The record of the calls.
        processes: The processes of the ranks.
        is_alone: Whether no other rank makes these calls.

    Attributes:
        is_under_way: Whether the call has moved or changed data. If it then ends with an exception, it was left in the
            middle. `AT_ONCE` if it makes no further calls: a signal handler must not make calls then, either.
        is_alone: Whether no other rank makes these calls.
        is_part: Whether these calls are made inside others, or by a background thread, and so raise no interrupts.
        left, identity: The number and the text of a call that an exception has left; the communicator's identity.
        turns: The calls of frameworks, on any threads; None where no framework has made one.
    """

    __slots__ = (
        "__weakref__", "_code", "_dealt", "_is_plain", "_note", "_processes", "_sign", "_signs", "_state", "identity",
        "is_alone", "is_part", "is_under_way", "left", "turns",
    )

    def __init__(self, calls: Calls, processes: Sequence[Process], *, is_alone: bool = False) -> None:
        super().__init__(calls)
        self.is_alone = is_alone
        self.is_under_way: int = False
        self.is_part = False
        self.left = (-1, "")
        self._processes, self.identity = processes, calls.identity
        self._is_plain = type(calls) is Calls and not is_alone
        self._note, self._state = calls.note, calls.words
        self._sign = self._code = 0
        self._dealt: dict[str, int] = {}
        self._signs = Checksums()
        self.turns: Turns | None = None
        INTERRUPTS.add(self)

    @property
    def is_inside(self) -> bool:
        """Local. Whether this rank is in a call."""
        return self._depth > 0

    def deal(self, kind: str) -> int:
        """Collective. A number for a strategy or a dataset on these ranks, the same on all of them, starting at 1.

        Strategies on the same ranks share one order of calls, and their calls may be alike. The number in each call's
        signature identifies the strategy.

        Args:
            kind: The kind of object, "strategy" or "dataset".
        """
        self._dealt[kind] = number = self._dealt.get(kind, 0) + 1
        return number

    def note_batch(self, dataset: int, iteration: int, position: int) -> None:
        """Local. Include a batch that the program has taken in the signature of the next call.

        All ranks must take the batch between the same two calls. This is checked only if the thread that takes it also
        makes the calls before and after: two threads have no defined order.

        Args:
            dataset: The number of the dataset; see `deal`.
            iteration: The number of the pass.
            position: Number of batches taken in this pass; -1 at the end.
        """
        if self._calls.thread == get_ident():
            self._batch = batch = dataset, iteration, position
            self._taken = self._taken * 31 + hash(batch) & HASH

    def enter(
        self,
        name: str,
        detail: object,
        array: AnyArray | None,
        owner: int = 0,
        *,
        meets: bool = True,
        only_dtype: bool = False,
        sign: int | None = None,
    ) -> CallOrder:
        """Local, and Collective between nodes. Sign a call that begins.

        Args:
            name: The name of the call.
            detail: An object that must be the same on all ranks, as an operation or a root; hashable, with a `str` that
                is the same on all ranks. Its attribute `subject`, if there is one, names it in errors.
            array: An array whose dtype and shape must be the same on all ranks; None if there is none.
            owner: The number of the strategy that makes the call, see `deal`; 0: no strategy.
            meets: Whether no rank leaves this call before all have entered it.
            only_dtype: Whether the shape may differ between ranks.
            sign: A checksum of the detail; default: one is computed and cached.

        Raises:
            InterruptedCallError: An earlier call was left in the middle.
            RuntimeError: Another thread is in a call, or this one is in the middle of one.
        """
        calls = self._calls
        is_wrong = calls.depth and (calls.thread != get_ident() or self.is_under_way == AT_ONCE)
        if is_wrong or self.broken or WATCH.dead or calls.on_begin:
            self._require_ready(name)
        if array is None:
            key: tuple[Any, ...] = (name, detail)
        else:
            key = (name, detail, array.dtype) if only_dtype else (name, detail, array.dtype, array.shape)
        if self.is_alone:
            self.key = key
        else:
            if sign is not None:
                # `_sign_as`, inlined: each metric has another sign.
                sign += owner * SPREAD
                self._step = self.key = key
                self._sign, self.owner, self._code = sign, owner, CODES[name] ^ sign & WHICH or 1
                sign, self._taken = sign + self._taken * (calls.thread == get_ident()), 0
            elif key == self.key and owner == self.owner and not self._taken:
                sign = self._sign
            else:
                sign = self._sign_as(name, key, owner)
            key = self.key
            self.number = number = self.number + 1
            self._mark_before = before = self.mark
            self.mark = before * 31 + sign & HASH
            self._meets = meets
            if self.is_across:
                if number % _EVERY == 0 or self._signs.has_new:
                    return self._enter_compared(name, owner)
            elif self.is_asked:
                self.mark += FLAG
        if calls.depth or not self._is_plain:
            calls.enter(name, key, self._code, owner)
            self._depth += 1
            return self
        # `Calls.enter`, inlined: calling a method takes a tenth of the time of `enter`.
        self._depth = calls.depth = 1
        calls.owner = owner
        calls.thread = get_ident()
        self._note(key)
        calls.state = state = calls.state + NEXT
        self._state[STATE] = state + self._code
        return self

    def _enter_compared(self, name: str, owner: int) -> CallOrder:
        """Collective. Enter a call that is compared between nodes; a new call is compared before it sends anything.

        Where sizes differ, MPICH 5.0 ends the job inside most collective calls, and names neither call.
        """
        is_new, self._signs.has_new = self._signs.has_new and not self._is_compared, False
        self._calls.enter(name, self.key, self._code, owner)
        self._depth += 1
        try:
            if is_new or self.number % _EVERY == 0:
                self._compare_across()
            if is_new:
                self._complete()
        except BaseException as error:
            self.fail(error)
            raise
        return self

    def _sign_as(self, name: str, key: tuple[Any, ...], owner: int) -> int:
        """Note a call that differs from the last one; returns its sign, with its strategy and the batches before it."""
        sign = self._signs[key] + owner * SPREAD
        self._sign, self.owner, self._code = sign, owner, CODES[name] ^ sign & WHICH or 1
        if key != self.key:
            # An equal key stays the same object: each strategy's front recognizes the call by its identity.
            self.key = key
        taken, self._taken = self._taken, 0
        return sign + taken * (self._calls.thread == get_ident())

    def sign_step(self, name: str, detail: object, owner: int, *, sign: int, meets: bool) -> None:
        """Local. Sign a step inside `during`; `compare_across` must follow before the step sends anything.

        Args:
            name: See `enter`.
            detail: See `enter`.
            owner: See `enter`.
            meets: See `enter`.
            sign: A checksum of the detail, different for each step.

        Raises:
            InterruptedCallError: An earlier call was left in the middle.
        """
        if self.broken or WATCH.dead:
            self._require_ready(name)
        self._step = self.key = (name, detail)
        if self.is_alone:
            return
        sign += owner * SPREAD
        self._sign, self.owner, self._code = sign, owner, CODES[name] ^ sign & WHICH or 1
        sign, self._taken = sign + self._taken, 0
        self.number += 1
        self._mark_before = before = self.mark
        self.mark = before * 31 + sign & HASH
        self._meets = meets
        # The comparison that follows covers all calls up to this one.
        self._signs.has_new = False
        if self.is_asked and not self.is_across:
            self.mark += FLAG
        # Other ranks may be in the same call and make no step: their watchdogs see the difference in the inner calls.
        self._calls.note_inner(name, self.key, self._code)

    def surround(self) -> CallOrder:
        """Local. Name this call in errors of the calls inside it, and return it."""
        self._step = self.key
        return self

    def commit(self, name: str) -> None:
        """Local. Let an exception that leaves this operation, which has such a name in errors, refuse later calls."""
        self.is_under_way, self.key = True, (name, None)

    def restart(self, *, keeps_call: bool = False) -> None:
        """Local. See `CallComparison.restart`; all ranks also regard the same calls as new again."""
        super().restart(keeps_call=keeps_call)
        self._signs.clear()
        self.key = _PastCall(self.key)

    def sign(self, name: str, detail: object, array: AnyArray, owner: int) -> None:
        """Local. Sign an operation that another thread does later: ranks that begin another one differ from now on.

        Args:
            name: The name of the operation. It gets no number: a rank that omits it is not one call behind.
            detail: See `enter`.
            array: See `enter`.
            owner: See `enter`.
        """
        sign = self._signs[name, detail, array.dtype, array.shape] + owner * SPREAD
        self.mark = self.mark * 31 + sign & HASH

    def _require_ready(self, name: str) -> None:
        if self.turns is not None:
            self.turns.prepare(name, self._depth, is_at_once=self.is_under_way == AT_ONCE)
        elif self._depth and (self._calls.thread != get_ident() or self.is_under_way == AT_ONCE):
            refuse_inside(name, self._calls.thread)
        self.require_whole(name)
        # A call of MPI in a group that has lost a rank may never return.
        if WATCH.dead:
            WATCH.require_alive(self._processes, name)

    def during(self, name: str, owner: int = 0) -> CallOrder:
        """Local. Begin an operation of several calls, or of none, on all ranks; an interrupt waits for its end.

        Args:
            name: The name of the operation.
            owner: See `enter`.

        Raises:
            InterruptedCallError, RuntimeError: See `enter`.
        """
        calls = self._calls
        if self._depth or self.broken or calls.on_begin:
            self._require_ready(name)
        if calls.depth or not self._is_plain:
            calls.enter(name, owner=owner)
            self._depth += 1
            return self
        thread = get_ident()
        if calls.thread != thread:
            # Two threads have no defined order; see `note_batch`.
            self._taken = 0
        self._depth = calls.depth = 1
        calls.owner = owner
        calls.thread = thread
        self._note(name)
        calls.state = state = calls.state + NEXT
        self._state[STATE] = state + (CODES[name] ^ owner * SPREAD & WHICH or 1)
        return self

    def leave(self) -> None:
        """Local, and Collective with ranks that make another call. Compare, and end the call.

        Raises:
            MismatchError: Ranks of this node make another call.
            KeyboardInterrupt: A rank was interrupted; on all ranks that are in this call, once it is done.
        """
        if self._awaits and (words := self._words) is not None:
            # If nothing differs, the comparison is done here, without the time of a call.
            word = self._word
            for place in self._others[self.number & 1]:
                if words[place] != word:
                    break
            else:
                self._awaits = word & FLAG > 0
        if self._awaits:
            try:
                self._compare()
            except BaseException as error:
                self.fail(error)
                raise
        calls = self._calls
        if calls.depth == 1 and self._is_plain:
            calls.depth = 0
            self._state[STATE] = calls.state
        else:
            calls.leave()
        self._depth = depth = self._depth - 1
        if depth:
            self.is_under_way = self.is_under_way > 0
            return
        self.is_under_way = False
        if self._is_interrupted:
            self._is_interrupted = False
            # A barrier outside calls must not show it again.
            self.mark &= HASH
            INTERRUPTS.deliver(is_own=self.is_alone)

    def fail(self, error: BaseException) -> None:
        """Local, and Collective with ranks that make another call. End the call that an exception leaves.

        Raises:
            MismatchError: Ranks make another call, which explains the error.
        """
        try:
            if is_shared(error):
                # The ranks have detected different calls. An overflow or a wrong argument is another error: each rank
                # finds it in its own values, while others may still compare this call.
                if not isinstance(error, OverflowError):
                    self.restart(keeps_call=not isinstance(error, MpidistError))
            elif self.is_under_way and not self.broken:
                what = f"{type(error).__name__}: {error}".rstrip(": ")
                # An error of MPI may come from different calls.
                if isinstance(error, Exception):
                    self._compare()
                is_other = is_of_other_size(error)
                # This must run while this rank still shows its own call.
                others = WATCHDOG.tell_late() if is_other else ""
                self.broken = f"{self.key[0]} was left in the middle by {what}"
                if self.page is not None:
                    self.page.break_off(self.number, self.mark, self.broken)
                if is_other:
                    raise MismatchError(f"ranks are in different calls, got {told(self._text())}. {HINT}{others}")
            else:
                self.left = self.number, f"{self.key[0]} was left by {type(error).__name__}: {error}"
        finally:
            self._calls.fail()
            self._depth -= 1
            self.is_under_way = self._depth > 0 and self.is_under_way > 0

    def __enter__(self) -> CallOrder:
        """Local. This object: `enter` has entered the call."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Local, and Collective with ranks that make another call. See `leave` and `fail`."""
        # A step that was signed inside the call ends here, too.
        self._calls.inner = ""
        if error is None:
            self.leave()
        else:
            self.fail(error)

    def interrupt(self) -> bool:
        """Local. Raise KeyboardInterrupt at the end of the outermost call; False if that was requested already."""
        was_interrupted, self._is_interrupted = self._is_interrupted, True
        return not was_interrupted
