"""The pace of workers under parameter servers: how far their updates may be apart."""

from __future__ import annotations

from typing import NamedTuple

from mpidist.arguments import flag, whole


class Pace(NamedTuple):
    """The distance that updates may be apart; see `ParameterServerStrategy`."""

    staleness: int | None = None
    synchronous: bool = False
    backup_workers: int = 0

    def require_workers(self, count: int) -> None:
        """Local. Raise an error if there are not workers enough.

        Args:
            count: The number of workers.

        Raises:
            ValueError: All of them would be backups.
        """
        if self.backup_workers >= count:
            raise ValueError(
                f"`backup_workers` must be less than the number of workers, which is {count}, got "
                f"{self.backup_workers}: the updates of {count} - backup_workers of them make a version"
            )


def pace_of(staleness: int | None, synchronous: bool, backup_workers: int) -> Pace:
    """Local. Check what the user has given.

    Args:
        staleness: As of `ParameterServerStrategy`.
        synchronous: Likewise.
        backup_workers: Likewise.

    Raises:
        TypeError: One is of a wrong type.
        ValueError: One is out of range, or they do not fit together.
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
