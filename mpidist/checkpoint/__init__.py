"""Checkpoints: a tree of arrays, agreed on by a group of ranks, in one HDF5 file."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpidist.missing import no_attribute

if TYPE_CHECKING:
    from mpidist.checkpoint.reader import verify as verify
    from mpidist.checkpoint.walk.registered import PerReplica as PerReplica
    from mpidist.checkpoint.walk.registered import register as register

# Public name -> the module that has it. Loaded at first use: each of them loads most of the package.
_HOMES = {
    "PerReplica": "mpidist.checkpoint.walk.registered",
    "register": "mpidist.checkpoint.walk.registered",
    "verify": "mpidist.checkpoint.reader",
}

__all__ = ["PerReplica", "register", "verify"]


# Hidden from type checkers, which would take any name for one of the module's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            no_attribute("mpidist.checkpoint", name)
        return getattr(importlib.import_module(_HOMES[name]), name)
