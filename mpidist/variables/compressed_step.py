"""A step of one part whose gradients are compressed: they are summed variable by variable, small ones as they are.

Where an optimizer skips a step because some sum is not finite, what was sent of the other variables is lost with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpidist.comm.collective import AnyArray
from mpidist.comm.compression import Compression, Memory
from mpidist.variables.part import Part, Update
from mpidist.variables.part_step import PartStep, update_all


class CompressedStep(PartStep):
    """What one rank does in a step for one private part and one selection of its variables.

    Args:
        part: Of a plan.
        gradients: This rank's, by the numbers of the variables, increasing; in their shapes.
        compression: Sums gradients that are worth it.
        memories: What was left out earlier, by number; kept up to date.
    """

    def __init__(
        self,
        part: Part,
        gradients: Mapping[int, AnyArray],
        compression: Compression,
        memories: dict[int, Memory],
    ) -> None:
        super().__init__(part, list(gradients))
        self._compression = compression
        self._compressed = [
            (gradient, memories.setdefault(number, {})) for number, gradient in gradients.items()
            if compression.compresses(gradient.shape, gradient.dtype)
        ]
        exact = [n for n, g in gradients.items() if not compression.compresses(g.shape, g.dtype)]
        self._exact = PartStep(part, exact) if exact else None

    def apply(self, update: Update) -> None:
        """Collective. Reduce the gradients and apply `update`."""
        self.reduce()
        for _, blocks in self._chunks:
            update_all(blocks, update)

    def reduce(self) -> None:
        """Collective. Put the sums into this rank's gradients."""
        if self._exact is not None:
            self._exact.reduce()
        for gradient, memory in self._compressed:
            self._compression.all_reduce(self._arena.collective, gradient, memory)
