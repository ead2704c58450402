"""Numerics: all that the bits of a computation depend on besides its input, such as libraries and processor."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from mpidist.variables.memory.slab import ALIGNMENT

logger = logging.getLogger("mpidist")


@dataclass(frozen=True)
class Numerics:
    """A record of libraries, processor, threads and alignment. With equal records equal input gives equal bits.

    Attributes:
        machine: The processor's architecture.
        numpy: NumPy's version.
        cpu_features: The instruction sets that NumPy has found; it chooses its loops by them.
        blas: Each BLAS library that is loaded: its kind, its version, and the processor that it is tuned for.
        blas_threads: The number of threads that BLAS may use.
        alignment: The alignment of micro-batches and variables in bytes.
    """

    machine: str
    numpy: str
    cpu_features: str
    blas: str
    blas_threads: int
    alignment: int = ALIGNMENT

    def differences(self, other: Numerics) -> list[str]:
        """Local. The fields that differ from an earlier record, in words; empty where all are equal."""
        return [
            f"{field.name} was {getattr(other, field.name)!r} and is {getattr(self, field.name)!r}"
            for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)
        ]

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())


class NumericsRecord:
    """A record of `Numerics` that a checkpoint can hold: `Checkpoint(model=model, numerics=strategy.numerics)`.

    A restore compares the saved record with that of this process, and logs a warning about each difference.

    Attributes:
        present: The record of this process; None before the first call of `Strategy.gradients`.
    """

    def __init__(self) -> None:
        self.present: Numerics | None = None
        self._saved: Numerics | None = None

    def state(self) -> dict[str, Any]:
        """Local. The tree that a checkpoint stores."""
        return {} if self.present is None else {"numerics": asdict(self.present)}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Local. Compare a checkpoint's record with this process's, now or when the latter is known."""
        if "numerics" in saved:
            read = {name: value.numpy().item() for name, value in saved["numerics"].items()}
            texts: dict[str, Any] = {
                name: value.decode() if isinstance(value, bytes) else value for name, value in read.items()
            }
            self._saved = Numerics(**texts)
            self._compare()

    def note(self, present: Numerics) -> bool:
        """Local. Keep a new record of this process, and return whether it differs from the one before."""
        if present == self.present:
            return False
        self.present = present
        self._compare()
        return True

    def _compare(self) -> None:
        if self.present is None or self._saved is None:
            return
        differences = self.present.differences(self._saved)
        if differences:
            logger.warning(
                "bits may differ from those of the run that saved the checkpoint: %s", "; ".join(differences)
            )
        self._saved = None

    def __repr__(self) -> str:
        return f"<NumericsRecord {self.present}>"


def look(controller: ThreadpoolController, blas_threads: int) -> Numerics:
    """Local. The record of this process."""
    libraries = sorted(
        " ".join(str(one.get(key) or "?") for key in ("internal_api", "version", "architecture"))
        for one in controller.info() if one["user_api"] == "blas"
    )
    return Numerics(
        platform.machine(), np.__version__, " ".join(cpu_features()), "; ".join(libraries) or "none", blas_threads
    )


def cpu_features() -> list[str]:
    """Local. Names of the instruction sets that NumPy has found on this processor."""
    config: Any = np.show_config(mode="dicts")
    simd = config.get("SIMD Extensions", {})
    return [*simd.get("baseline", []), *simd.get("found", [])]
