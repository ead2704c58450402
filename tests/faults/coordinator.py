"""Deliberate faults of the coordinator."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS: tuple[Fault, ...] = ()
