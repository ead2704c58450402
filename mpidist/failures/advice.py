"""Advice: the last lines of a report about ranks that wait, and of errors of processes that are ranks no more."""

from __future__ import annotations

from mpidist.recorder.time_limits import LIMIT_VARIABLE

RULE = (
    "All ranks must make the same calls in the same order: look for a call under `if rank == 0`, a loop that ends "
    "earlier on one rank, or an early exit"
)
ENDS = f"{LIMIT_VARIABLE}=SECONDS ends a job that waits longer"
PATIENCE = f"A rank that computes comes later. {ENDS}"
HELD_UP = "Their messages do not arrive: a rank is stopped in the call, or a cable between hosts is cut"
UNSEEN = (
    "The ranks of other hosts are not seen: they may be late or stopped, or behind a cable that is cut. "
    "MPIDIST_JOB_DIR=DIRECTORY, on a file system of all hosts, shows them"
)
SOME_SEEN = "In a large job a rank sees its own host and the hosts before it: other reports may say who is late"

FORKED = (
    "this process was forked from a rank, and is none itself: it would meet the other ranks in its parent's place. "
    "Let the parent make all collective calls, or start the child anew (`multiprocessing` with the method \"spawn\")"
)
LEFT = (
    "the program has come to its end on all ranks. An exit function that makes collective calls must be registered "
    "after `import mpidist`; a `__del__` at the end of the interpreter can make none"
)


def of_wait(*, are_late: bool, are_seen: bool, sees_some: bool, ends: bool) -> str:
    """Local. The advice about a long wait.

    Args:
        are_late: Ranks have not come. One that has come may have been stopped in the call.
        are_seen: All ranks are seen.
        sees_some: The job directory shows some of them.
        ends: The job ends.
    """
    if are_late:
        return RULE if ends else PATIENCE
    way_out = HELD_UP if are_seen else SOME_SEEN if sees_some else UNSEEN
    return way_out if ends else f"{way_out}. {ENDS}"
