"""The texts about calls: a rank's call, its line in the program, and the differences between ranks."""

from __future__ import annotations

import inspect
import pickle
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any, NoReturn, cast

from mpidist.errors import InterruptedCallError, MismatchError, mark_shared
from mpidist.recorder.calls import THREADS, Calls, describe

# Number of different calls whose checksums are kept.
_KEPT = 1024
HINT = "Give `axis=0` to reduce a batch whose size differs between ranks, and make the same calls on all ranks."

OWNERS_HINT = (
    "Strategies are numbered in the order in which they were made. Use them in one order on all ranks: keep them in a "
    "list or a dictionary, since a `set` has another order in each process."
)
_TAKEN_HINT = (
    "Examples would be repeated or skipped: call `next(iterator)` equally often on every rank, also to look at a batch "
    "(`element_spec` tells shapes and dtypes without one)."
)
# Control characters around the number of a strategy, and around the last batch, in the text of a call. Errors include
# these parts only if ranks differ in them.
_OWNER, _TAKEN = re.compile("\x1f([^\x1f]*)\x1f?"), re.compile("\x1e([^\x1e]*)\x1e?")

# The text of a rank whose call is not known.
UNKNOWN = "another call"

# `CallOrder.is_under_way` in a call that makes no others.
AT_ONCE = 2
_NESTED = (
    "this rank is in the middle of another call. A signal handler, a `__del__` or a callback of the garbage collector "
    "runs at any moment, and on each rank at another one: let it set a flag, and make the call where all ranks look at "
    "the flag together"
)


def refuse_inside(name: str, thread: int) -> NoReturn:
    """Local. Raise RuntimeError: a call begins in the middle of another one.

    Args:
        name: The name of the call.
        thread: The thread that is in the other call.
    """
    raise RuntimeError(f"{name}: {_NESTED if thread == get_ident() else THREADS}")


def left_in_the_middle(name: str, broken: str, last_checkpoint: str) -> InterruptedCallError:
    """Local. The error of a call after another one that was left in the middle.

    Args:
        name: The name of the call.
        broken: The call that was left, and the reason.
        last_checkpoint: The last checkpoint that these ranks have saved; empty if there is none.
    """
    good = f"The last good checkpoint is {last_checkpoint}. " if last_checkpoint else ""
    return InterruptedCallError(
        f"{name} is refused: {broken.rstrip('.')}. Variables and results may be half updated, and ranks may be one "
        f"call apart. {good}Start the program again, and let it restore a checkpoint that was saved before"
    )


class Checksums(dict[tuple[Any, ...], int]):
    """The checksums of calls, the same on every rank.

    Attributes:
        has_new: Whether a checksum was made since this was set to False; at the same call on every rank.
    """

    has_new = False

    def __missing__(self, key: tuple[Any, ...]) -> int:
        if len(self) >= _KEPT:
            self.clear()
        self.has_new = True
        value = self[key] = zlib.crc32(describe(key).encode())
        return value


def where_called() -> str:
    """Local. The line of the program that has called the library, as " at file:line"; nothing at the program's end."""
    frame = inspect.currentframe()
    while frame is not None and _is_of_library(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


def _is_of_library(module: str) -> bool:
    # Threads of the library and of the program both begin in `threading`; a program's own frames are found first.
    return module in ("mpidist", "threading") or module.startswith("mpidist.")


def owned_by(owner: int) -> str:
    """Local. The part of a call's text that names the strategy; `mismatch` reads it."""
    return f"\x1f{owner}\x1f"


def taken(dataset: int, iteration: int, position: int) -> str:
    """Local. The part of a call's text about the batch that the program took last; see `CallOrder.note_batch`."""
    if not dataset:
        return ""
    place = "the end" if position < 0 else f"batch {position}"
    return f"\x1e, after {place} of pass {iteration + 1} of distributed dataset number {dataset}\x1e"


def told(text: str, *, has_owners: bool = True, has_taken: bool = True) -> str:
    """Local. The text of a call for an error.

    Args:
        text: The text with the parts of `owned_by` and `taken`.
        has_owners: Whether to name the strategy.
        has_taken: Whether to name the batch that was taken before.
    """
    return _TAKEN.sub(r"\1" if has_taken else "", _OWNER.sub(_named_owner if has_owners else "", text))


def mismatch(key: tuple[Any, ...], number: int, texts: Mapping[int, str], what: str) -> MismatchError:
    """Local. The error of ranks whose calls differ.

    Args:
        key: The key of this rank's call. Its detail may have a `subject`, which names it.
        number: The number of the call.
        texts: The texts of the ranks' calls.
        what: The call in which they differ.
    """
    has_owners, has_taken = _differ(_OWNER, texts), _differ(_TAKEN, texts)
    hint = OWNERS_HINT if has_owners else _TAKEN_HINT if has_taken else HINT
    if len(set(texts.values())) == 1 and _TAKEN.search(texts[min(texts)]):
        # The texts name only the last batch of each rank: one rank may have taken an additional batch before it.
        has_taken, what, hint = True, f"{what}, or in the batches taken before it", f"{HINT} {_TAKEN_HINT}"
    by_text: dict[str, list[int]] = {}
    for rank, shown in texts.items():
        text = told(shown, has_owners=has_owners, has_taken=has_taken)
        by_text.setdefault(text, []).append(rank)
    listed = "; ".join(
        f"{text} on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
        for text, ranks in list(by_text.items())[:4]
    )
    subject = getattr(key[1], "subject", "the collective call, its shape and dtype")
    return MismatchError(
        f"{subject} must be the same on all ranks, got {listed} (call {number} of these ranks; they differ in {what}). "
        f"{hint}"
    )


def _differ(part: re.Pattern[str], texts: Mapping[int, str]) -> bool:
    """Whether ranks differ in a part of their texts. Unknown texts do not count."""
    found = [part.search(text) for text in texts.values() if text != UNKNOWN]
    return len({one.group(1) if one else "" for one in found}) > 1


def is_of_other_size(error: BaseException) -> bool:
    """Local. Whether an error of MPI says that a message was longer than what this rank's call takes."""
    # The class of the error cannot be imported without MPI; both MPICH's and Open MPI's texts contain this word.
    return type(error).__module__.startswith("mpi4py") and "truncate" in str(error).lower()


def _named_owner(found: re.Match[str]) -> str:
    return "" if found.group(1) in ("", "0") else f" of strategy number {found.group(1)}"


def differing_calls(
    calls: Calls, signed: int, gather: Callable[[tuple[str, int, int]], Sequence[tuple[str, int, int]]],
    go_on_at: Callable[[int, int], None],
) -> MismatchError:
    """Collective. The error of ranks whose exchange belongs to different calls of the program.

    Args:
        calls: This rank's calls.
        signed: The number of this rank's last signed call: some ranks may have signed theirs, and others not yet.
        gather: A function that is Collective and gathers from all ranks a text and the numbers of both kinds.
        go_on_at: A function that sets the numbers of the last signed call, and of the last call.
    """
    try:
        told, signed_numbers, numbers = zip(*gather((_text(calls), signed, calls.number)), strict=True)
    except (pickle.UnpicklingError, EOFError):
        return other_call(calls)
    error = mark_shared(_mismatch(calls, dict(enumerate(told)), "this call"))
    go_on_at(max(signed_numbers), max(numbers))
    return cast(MismatchError, error)


def other_call(calls: Calls) -> MismatchError:
    """Local. The error of a rank that got messages of a call that it did not make: MPI matches messages by order."""
    texts = {rank: _text(calls) if rank == calls.rank else UNKNOWN for rank in range(len(calls.members))}
    return _mismatch(calls, texts, "this call, or one before it")


def _mismatch(calls: Calls, texts: Mapping[int, str], what: str) -> MismatchError:
    return mismatch((calls.name, None), calls.number, texts, what)


def _text(calls: Calls) -> str:
    return f"{calls.name}{owned_by(calls.owner)}{where_called()}"
