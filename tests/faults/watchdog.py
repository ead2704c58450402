"""Deliberate faults of who watches waiting ranks."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS: tuple[Fault, ...] = ()
