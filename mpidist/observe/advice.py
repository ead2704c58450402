"""Advice: the last lines of a report about ranks that wait."""

from __future__ import annotations

from mpidist.observe.patience import LIMIT_VARIABLE

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
