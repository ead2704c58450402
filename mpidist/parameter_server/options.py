"""Options of parameter servers: their memory, the transport, and the limits on the order of updates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mpidist.arguments import flag, python_numbers, whole
from mpidist.options import WindowOptions

_DEFAULT_HEAP_BYTES = 256 << 20


@dataclass(frozen=True)
class ServerOptions:
    """Options of parameter servers: their memory, and the transport to them.

    Attributes:
        heap_bytes: Bytes of the heap of each server. It holds two copies of each variable, its optimizer's state, and
            the slots: in all twice the variables, the state, and 2 x (workers + 1) x slot_bytes.
        slot_bytes: Bytes that one closure may push to one server. Default: all slots take half of the heap.
        window: Options of the transport.
        copy_bytes: The number of bytes that a server copies at most while a checkpoint is saved: values that updates
            change before they are saved. Further updates wait.
        consistency: The consistency of reads. "whole": a function reads one version of a variable. "relaxed": a read
            may have parts of two versions, and never waits for a server whose variable changes all the time.

    Raises:
        ValueError: An option is out of range.
        TypeError: An option has a wrong type.
    """

    heap_bytes: int = _DEFAULT_HEAP_BYTES
    slot_bytes: int | None = None
    window: WindowOptions = field(default_factory=WindowOptions)
    copy_bytes: int = 64 << 20
    consistency: Literal["whole", "relaxed"] = "whole"

    def __post_init__(self) -> None:
        whole("heap_bytes", self.heap_bytes, least=1 << 16)
        if self.slot_bytes is not None:
            whole("slot_bytes", self.slot_bytes, least=1 << 12)
        whole("copy_bytes", self.copy_bytes, least=0)
        python_numbers(self)
        if not isinstance(self.window, WindowOptions):
            raise TypeError(f"`window` must be WindowOptions, got {self.window!r}")
        if self.consistency not in ("whole", "relaxed"):
            raise ValueError(f"`consistency` must be 'whole' or 'relaxed', got {self.consistency!r}")


class Pace(NamedTuple):
    """The limits on the order of updates; see `ParameterServerStrategy`."""

    staleness: int | None = None
    synchronous: bool = False
    backup_workers: int = 0

    def require_workers(self, count: int) -> None:
        """Local. Raise an error if there are not enough workers.

        Args:
            count: The number of workers.

        Raises:
            ValueError: All workers would be backups.
        """
        if self.backup_workers >= count:
            raise ValueError(
                f"`backup_workers` must be less than the number of workers, which is {count}, got "
                f"{self.backup_workers}: the updates of {count} - backup_workers of them make a version"
            )


def pace_of(staleness: int | None, synchronous: bool, backup_workers: int) -> Pace:
    """Local. Check the user's arguments.

    Args:
        staleness: See `ParameterServerStrategy`.
        synchronous: See `ParameterServerStrategy`.
        backup_workers: See `ParameterServerStrategy`.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of range, or they contradict each other.
    """
    least = None if staleness is None else whole("staleness", staleness, least=0)
    synchronous = flag("synchronous", synchronous)
    whole("backup_workers", backup_workers, least=0)
    if synchronous and least is not None:
        raise ValueError(
            f"`staleness` must be None with synchronous=True, got {least}: what a synchronous update has read is never "
            "older than the version that it changes"
        )
    if backup_workers and not synchronous:
        raise ValueError(
            f"`backup_workers` must be 0 unless synchronous=True, got {backup_workers}: without it no update is dropped"
        )
    return Pace(least, synchronous, backup_workers)
