"""Deliberate faults of how deaths are noticed and told."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS: tuple[Fault, ...] = ()
