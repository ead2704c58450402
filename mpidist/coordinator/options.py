"""The options of a coordinator: there is one coordinator of a strategy, so that later calls must give the same."""

from __future__ import annotations

from typing import NamedTuple

from mpidist.arguments import flag, number, whole
from mpidist.parameter_server.queue.closures import QUEUE_SIZE
from mpidist.parameter_server.queue.work import MAX_DEATHS


class CoordinatorOptions(NamedTuple):
    """The options, with their defaults; see `ClusterCoordinator`."""

    closure_timeout: float | None = None
    prefetch: bool = False
    queue_size: int = QUEUE_SIZE
    max_deaths: int = MAX_DEATHS

    def checked(self, *, is_synchronous: bool) -> CoordinatorOptions:
        """Local. These options, after a check of their types and ranges.

        Args:
            is_synchronous: Whether the strategy makes synchronous steps.

        Raises:
            TypeError: An option of a wrong type.
            ValueError: An option out of range.
        """
        if self.closure_timeout is not None and not number("closure_timeout", self.closure_timeout, least=0):
            raise ValueError("`closure_timeout` must be above 0 seconds, got 0: every worker would be declared lost")
        if flag("prefetch", self.prefetch) and is_synchronous:
            raise ValueError(
                "`prefetch` must be False with synchronous=True: a function starts only after the update before it"
            )
        whole("queue_size", self.queue_size, least=1)
        whole("max_deaths", self.max_deaths, least=1)
        return self

    def require_same(self, first: CoordinatorOptions) -> None:
        """Local. Raise ValueError unless these are the options of the first call, or defaults."""
        for name, given, used, default in zip(self._fields, self, first, CoordinatorOptions(), strict=True):
            if given not in (used, default):
                raise ValueError(
                    f"`{name}` must be {used!r}, as when the ClusterCoordinator of this strategy was made, got "
                    f"{given!r}: a strategy has one coordinator. Pass its options where it is first created"
                )
