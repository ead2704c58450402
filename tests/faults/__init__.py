"""Deliberate faults, a module for each subject: `tests/mutation.py` puts them into the package one at a time."""

from __future__ import annotations

from tests.faults import (
    adapters,
    checkpoint,
    checkpoint_parts,
    cluster,
    comm,
    coordinator,
    data,
    deaths,
    endings,
    hybrid,
    interrupts,
    jax,
    keras,
    metrics,
    optimizers,
    restarts,
    servers,
    serving,
    signals,
    strategy,
    torch,
    training,
    variables,
    watchdog,
    windows,
)
from tests.faults.fault import Fault

__all__ = ["FAULTS", "Fault"]

FAULTS: tuple[Fault, ...] = (
    *adapters.FAULTS,
    *checkpoint.FAULTS,
    *checkpoint_parts.FAULTS,
    *cluster.FAULTS,
    *comm.FAULTS,
    *coordinator.FAULTS,
    *data.FAULTS,
    *deaths.FAULTS,
    *endings.FAULTS,
    *hybrid.FAULTS,
    *interrupts.FAULTS,
    *jax.FAULTS,
    *keras.FAULTS,
    *metrics.FAULTS,
    *optimizers.FAULTS,
    *restarts.FAULTS,
    *servers.FAULTS,
    *serving.FAULTS,
    *signals.FAULTS,
    *strategy.FAULTS,
    *training.FAULTS,
    *torch.FAULTS,
    *variables.FAULTS,
    *watchdog.FAULTS,
    *windows.FAULTS,
)
