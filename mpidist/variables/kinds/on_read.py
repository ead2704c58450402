"""The ON_READ variable as an interface: what metrics need of it, whatever its home."""

from __future__ import annotations

from abc import abstractmethod

from mpidist.arrays import AnyArray
from mpidist.variables.variable import BaseVariable


class OnReadVariable(BaseVariable):
    """A variable of which every replica has its own component (ON_READ), as metrics use it."""

    @property
    @abstractmethod
    def component(self) -> AnyArray:
        """Local. This replica's own value, read-only, whatever the context."""

    @abstractmethod
    def aggregate(self) -> AnyArray:
        """Collective. The components of all replicas, combined; in either context. A copy, read-only.

        Raises:
            ValueError: The aggregation is NONE.
        """

    @abstractmethod
    def accumulate(self, delta: AnyArray) -> None:
        """Local. Add to this replica's own component, whatever the context."""

    @abstractmethod
    def clear(self) -> None:
        """Local. Set this replica's own component to zero, whatever the context."""
