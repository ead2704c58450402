"""Deliberate faults, a module for each subject: `tests/mutation.py` puts them into the package one at a time."""

from __future__ import annotations

from tests.faults import (
    checkpoint,
    cluster,
    comm,
    coordinator,
    data,
    deaths,
    endings,
    hybrid,
    interrupts,
    metrics,
    optimizers,
    servers,
    serving,
    signals,
    strategy,
    variables,
    watchdog,
    windows,
)
from tests.faults.fault import Fault

__all__ = ["FAULTS", "Fault"]

FAULTS: tuple[Fault, ...] = (
    *checkpoint.FAULTS,
    *cluster.FAULTS,
    *comm.FAULTS,
    *coordinator.FAULTS,
    *data.FAULTS,
    *deaths.FAULTS,
    *endings.FAULTS,
    *hybrid.FAULTS,
    *interrupts.FAULTS,
    *metrics.FAULTS,
    *optimizers.FAULTS,
    *servers.FAULTS,
    *serving.FAULTS,
    *signals.FAULTS,
    *strategy.FAULTS,
    *variables.FAULTS,
    *watchdog.FAULTS,
    *windows.FAULTS,
)
