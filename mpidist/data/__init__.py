"""The input: datasets, their options, and how they are shared out over ranks."""

from __future__ import annotations

from mpidist.data.dataset import AUTOTUNE, Dataset
from mpidist.data.element import ArraySpec
from mpidist.data.options import DistributeOptions, Options
from mpidist.data.stream import INFINITE, UNKNOWN
from mpidist.options import AutoShardPolicy

INFINITE_CARDINALITY = INFINITE
UNKNOWN_CARDINALITY = UNKNOWN

__all__ = [
    "AUTOTUNE",
    "INFINITE",
    "INFINITE_CARDINALITY",
    "UNKNOWN",
    "UNKNOWN_CARDINALITY",
    "ArraySpec",
    "AutoShardPolicy",
    "Dataset",
    "DistributeOptions",
    "Options",
]
