"""Agreement: a step that can fail on one rank is taken by all ranks together, and all raise the same error."""

from __future__ import annotations

import builtins
import pickle
from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

from mpidist import errors
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError, RankError, is_shared, mark_shared

T = TypeVar("T")


class _Report(NamedTuple):
    """A rank's description of its failure, for the other ranks."""

    kind: str
    text: str
    errno: int | None
    host: str


def together(communicator: Communicator, step: str, function: Callable[[], T], *, may_agree: bool = False) -> T:
    """Collective. Call `function` on every rank; if it fails on any rank, raise the same error on all of them.

    Args:
        communicator: The ranks that have to agree.
        step: A name for the step, used in the error: "creating the checkpoint directory".
        function: A function that must not communicate: a rank on which it has failed cannot take part any more.
        may_agree: Whether `function` has steps of its own that ranks take together. A rank on which it has failed takes
            part in the first of these, and all ranks raise the error from there.

    Returns:
        The value that `function` returned on this rank.

    Raises:
        Exception: The error, of the type of the lowest failing rank's error if that is a built-in or one of mpidist's,
            otherwise `RankError`. The text names the rank, the host and the cause.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = function()
    # An interrupt or an exit is not caught: it ends this rank, and `ending` then ends the job.
    except Exception as caught:
        if may_agree and is_shared(caught):
            raise
        error = caught
    # Every rank gets here, failed or not. A rank that raised earlier would leave the others waiting in this call.
    if communicator.all_reduce_max(int(error is not None)) == 0:
        return result  # type: ignore[return-value]  # no error: the function has returned
    if communicator.size == 1 and error is not None:
        raise error
    mine = None if error is None else _report(error, communicator.host)
    reports = communicator.all_gather_object(mine)
    try:
        raise mark_shared(_shared_error(step, reports)) from error
    finally:
        # An error that a frame of its own traceback holds lives until the next garbage collection, and with it what
        # the callers' frames hold: node memory, for instance.
        del error


def gather_together(communicator: Communicator, step: str, function: Callable[[], T]) -> list[T]:
    """Collective. Call `function` on every rank and give every rank all results; an error of one is that of all.

    Args:
        communicator: The ranks that have to agree.
        step: A name for the step, for the error.
        function: Must not communicate. Its result must be picklable.

    Returns:
        The results in the order of the ranks.

    Raises:
        Exception: See `together`.
    """
    try:
        result = function()
    except Exception as error:
        return exchange(communicator, step, cast(T, None), error)
    return exchange(communicator, step, result)


def exchange(communicator: Communicator, step: str, value: T, error: Exception | None = None) -> list[T]:
    """Collective. Give every rank every rank's value; if any rank has an error instead, all raise the same error.

    One round, where `together` and a gathering of the values would be two.

    Args:
        communicator: The ranks that have to agree.
        step: The operation, for the error.
        value: A picklable value; it is not read if there is an error.
        error: The error of this rank.

    Returns:
        The values in the order of the ranks.

    Raises:
        Exception: See `together`.
    """
    if communicator.size == 1:
        if error is not None:
            raise error
        return [value]
    mine = None if error is None else _report(error, communicator.host)
    # A name in it may differ, and has an error of its own.
    begun = step.partition("'")[0].partition('"')[0].strip()
    reports, values, steps = zip(*communicator.all_gather_object((mine, value, begun)), strict=True)
    if steps.count(steps[0]) < len(steps):
        require_same(list(steps), "what ranks do together", "Make the same calls in the same order on every rank.")
    if reports.count(None) < len(reports):
        try:
            raise mark_shared(_shared_error(step, list(reports))) from error
        finally:
            del error  # see `together`
    return list(values)


def on_first_rank(communicator: Communicator, step: str, function: Callable[[], T]) -> T:
    """Collective. Call `function` on rank 0 alone; every rank gets its result, or raises its error.

    Args:
        communicator: The ranks that wait for rank 0.
        step: The operation, for the error.
        function: Must not communicate with these ranks. Its result must be picklable. An error that it marks as shared
            is told to all as it is: it was found together with others, and its text is whole.

    Returns:
        The value that `function` returned on rank 0.

    Raises:
        Exception: See `together`.
    """
    result: T | None = None
    error: Exception | None = None
    if communicator.rank == 0:
        try:
            result = function()
        except Exception as caught:
            error = caught
    if communicator.size == 1:
        if error is not None:
            raise error
        return cast(T, result)
    mine = None if error is None else _report(error, communicator.host)
    is_whole = error is not None and is_shared(error)
    result, report, is_whole = communicator.broadcast_object((result, mine, is_whole))
    if report is not None:
        others = [None] * (communicator.size - 1)
        made = _rebuild(report, report.text) if is_whole else _shared_error(step, [report, *others])
        try:
            raise mark_shared(made) from error
        finally:
            del error  # see `together`
    return cast(T, result)


def same_on_all(communicator: Communicator, subject: str, value: T, hint: str) -> None:
    """Collective. Raise the same error on every rank unless all ranks pass an equal value.

    Args:
        communicator: The ranks that have to agree.
        subject: A name for the value, used in the error: "shape and dtype of variable 'w'".
        value: The value: picklable, comparable by `==`, readable when printed.
        hint: The advice, the last sentence of the error.

    Raises:
        MismatchError: The values differ. The text lists the ranks by value.
    """
    if communicator.size == 1:
        return
    require_same(communicator.all_gather_object(value), subject, hint)


def require_same(values: list[T], subject: str, hint: str) -> None:
    """Local. Raise unless all values are equal.

    Args:
        values: One value per rank. Every rank passes the same list, so that either all ranks raise or none does.
        subject: See `same_on_all`.
        hint: See `same_on_all`.

    Raises:
        MismatchError: The values differ. The text lists the ranks by value.
    """
    if values.count(values[0]) == len(values):
        return
    groups: list[tuple[T, list[int]]] = []
    for rank, value in enumerate(values):
        for known, ranks in groups:
            if known == value:
                ranks.append(rank)
                break
        else:
            groups.append((value, [rank]))
    got = "; ".join(f"{value!r} on {name_ranks(ranks)}" for value, ranks in groups[:4])
    more = f"; and {len(groups) - 4} other values" if len(groups) > 4 else ""
    raise mark_shared(MismatchError(f"{subject} must be the same on all ranks, got {got}{more}. {hint}"))


def name_ranks(ranks: list[int]) -> str:
    """Local. A short name for some ranks: `rank 3`, `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _report(error: Exception, host: str) -> _Report:
    errno = error.errno if isinstance(error, OSError) else None
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return _Report(type(error).__name__, text, errno, host)


def _shared_error(step: str, reports: list[_Report | None]) -> Exception:
    failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
    _, first = failed[0]
    if len(failed) == len(reports) and all(report[:2] == first[:2] for _, report in failed):
        # A text that names the call does so once.
        text = f"{step}: {first.text.removeprefix(step.partition(':')[0] + ': ')}"
    else:
        alike = [r for r, report in failed if report[:2] == first[:2]]
        text = f"{step} failed on {name_ranks(alike)} (host {first.host}): {first.kind}: {first.text}"
        others = [r for r, _ in failed if r not in alike]
        if others:
            other = next(report for rank, report in failed if rank == others[0])
            text += f" (another failure on {name_ranks(others)}, host {other.host}: {other.kind}: {other.text})"
    return _rebuild(first, text)


def _rebuild(report: _Report, text: str) -> Exception:
    # From Python 3.14 on, what cannot be pickled is a PicklingError, and no AttributeError.
    kind = next((vars(one)[report.kind] for one in (errors, builtins, pickle) if report.kind in vars(one)), None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RankError(text)
    if issubclass(kind, OSError) and report.errno is not None:
        return kind(report.errno, text)
    try:
        return kind(text)
    except TypeError:
        # Some exceptions need more arguments than a text, for instance UnicodeDecodeError and ExceptionGroup.
        return RankError(text)
