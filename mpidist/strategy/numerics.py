"""What the bits of a computation depend on besides its input: libraries, processor, threads and alignment."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from mpidist.variables.slab import ALIGNMENT

logger = logging.getLogger("mpidist")


@dataclass(frozen=True)
class Numerics:
    """What was pinned, and what cannot be: two runs with equal records, and equal input, have equal bits.

    Attributes:
        machine: The processor's architecture.
        numpy: NumPy's version.
        cpu_features: The instruction sets that NumPy has found, which its loops are chosen by.
        blas: Each BLAS library that is loaded: kind, version, and the processor it is tuned for.
        blas_threads: Threads that it is given.
        alignment: In bytes, of the micro-batches and of variables.
    """

    machine: str
    numpy: str
    cpu_features: str
    blas: str
    blas_threads: int
    alignment: int = ALIGNMENT

    def differences(self, other: Numerics) -> list[str]:
        """Local. What `other` has otherwise, in words: empty where nothing is different."""
        return [
            f"{field.name} was {getattr(other, field.name)!r} and is {getattr(self, field.name)!r}"
            for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)
        ]

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())


class NumericsRecord:
    """A record of `Numerics` that a checkpoint can hold: `Checkpoint(model=model, numerics=strategy.numerics)`.

    A restore compares it with what is there now, and logs a warning that names what has changed.

    Attributes:
        present: The record of this process, None before the first `Strategy.gradients`.
    """

    def __init__(self) -> None:
        self.present: Numerics | None = None
        self._saved: Numerics | None = None

    def state(self) -> dict[str, Any]:
        """Local. The tree that a checkpoint stores."""
        return {} if self.present is None else {"numerics": asdict(self.present)}

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Local. Compare with what a checkpoint holds, now or when this process's own is known."""
        if "numerics" in saved:
            read = {name: value.numpy().item() for name, value in saved["numerics"].items()}
            texts: dict[str, Any] = {
                name: value.decode() if isinstance(value, bytes) else value for name, value in read.items()
            }
            self._saved = Numerics(**texts)
            self._compare()

    def note(self, present: Numerics) -> bool:
        """Local. Keep a new record of this process; says whether it differs from the one before."""
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
