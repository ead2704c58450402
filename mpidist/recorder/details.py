"""Details: what a rank's watchdog writes about its rank for the others, and the same in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpidist.recorder import stacks
from mpidist.recorder.calls import Calls, describe
from mpidist.recorder.recorder import RECORDER

# The number of calls before the one in which a rank waits that are reported.
_TOLD_BEFORE = 3
# The number of letters of a call that are shown: a step names its variables.
_TOLD_OF_ONE = 120


def details_of(waiting: Sequence[Calls], missing: Sequence[tuple[Any, ...]], thread: int) -> dict[str, Any]:
    """Local. The facts about this rank that the others may want to know.

    Args:
        waiting: The calls in which it waits, the outermost one first.
        missing: The processes for which it waits.
        thread: The program's thread.
    """
    calls = [
        {"name": one.name, "number": one.number, "inner": one.inner, "before": one.before(_TOLD_BEFORE),
         "whole": _whole(one),
         "where": stacks.line_of_call(one.thread)}
        for one in waiting if one.thread == thread or len(waiting) == 1
    ]
    details: dict[str, Any] = {"calls": calls, "missing": missing}
    if not calls:
        closure = RECORDER.closure
        details.update(
            closure="" if closure is None else str(closure), line=stacks.line(thread), stack=stacks.stack(thread)
        )
    return details


def _whole(calls: Calls) -> str:
    """The rest of the current call besides its name, and its owner; the first strategy is not named."""
    call = calls.recent[-1] if calls.recent else ""
    owner = f" of strategy number {calls.owner}" if calls.owner > 1 else ""
    whole = describe(call) + owner
    return "" if whole == calls.name else whole if len(whole) <= _TOLD_OF_ONE else f"{whole[:_TOLD_OF_ONE]}...{owner}"


def tell(details: Mapping[str, Any]) -> str:
    """Local. Say where a rank is, by the text of its watchdog."""
    calls = details.get("calls", ())
    if calls:
        inner = f" ({calls[-1]['name']})" if len(calls) > 1 else f" ({calls[0]['inner']})" if calls[0]["inner"] else ""
        where = f", {calls[0]['where']}" if calls[0]["where"] else ""
        where += f" ({calls[0]['whole']})" if calls[0].get("whole") else ""
        before = f" (before it: {'; '.join(calls[0]['before'])})" if calls[0].get("before") else ""
        return f"waits in {calls[0]['name']}{inner}, call {calls[0]['number']}{where}{before}"
    where = details.get("line", "")
    what = f"runs {details['closure']}" if details.get("closure") else "is outside any call"
    return f"{what}{', ' + where if where else ''}\n{details.get('stack', '')}".rstrip()
