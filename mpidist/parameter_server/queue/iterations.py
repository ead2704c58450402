"""The steps of optimizers, as commits count them: those that the program reads, sets and restores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

from mpidist.optimizers.optimizer import Optimizer


class Iterations(MutableMapping[int, int]):
    """`Optimizer.iterations`, by the number of the optimizer.

    Args:
        optimizers: That the program has not dropped.
    """

    def __init__(self, optimizers: Mapping[int, Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, number: int) -> int:
        """Local. The steps so far."""
        return self._optimizers[number].iterations

    def __setitem__(self, number: int, iterations: int) -> None:
        """Local. Set the steps so far."""
        self._optimizers[number].iterations = iterations

    def __delitem__(self, number: int) -> None:
        """Local. Refuse: optimizers go with the program's last reference."""
        raise TypeError(f"the steps of optimizer {number} cannot be deleted")

    def __iter__(self) -> Iterator[int]:
        """Local. The numbers."""
        return iter(list(self._optimizers))

    def __len__(self) -> int:
        """Local. The number of optimizers."""
        return len(self._optimizers)
