"""Waits for what happens on virtual hosts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tests.helpers.waiting import until
from tests.hosts.virtual_hosts import VirtualHosts

# Not the launcher's own processes, in whose command lines the program is, too.
_RANK = re.compile(r"\S*python\S* (?:-m tests\.helpers\.messages \S+ )?\S+/program\.py")


def until_no_rank_is_left(hosts: VirtualHosts, names: Iterable[str] | None = None) -> None:
    """Wait until no rank of a `program.py` is left on any host, or on some."""
    chosen = list(hosts.names if names is None else names)
    until(lambda: not any(_RANK.match(line) for name in chosen for line in hosts.processes(name)), "no rank is left")
