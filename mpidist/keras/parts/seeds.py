"""Seeds: each replica draws its own numbers, for dropout, from a state that is the same on all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from mpidist.keras.derive import binding_of

if TYPE_CHECKING:
    from keras.random import SeedGenerator as _Generator
else:
    _Generator = object

# Between the seeds of neighbours; any number that differs for each replica would do.
_STRIDE = 7919


class DistributedSeedGenerator(_Generator):  # type: ignore[misc]
    """A seed generator that adds the replica's number to what it gives out, not to what it saves."""

    def next(self, ordered: bool = True) -> Any:
        """Local. As in Keras, for this replica."""
        seed, binding = super().next(ordered), binding_of(self)
        if binding is None or binding.rank == 0:
            return seed
        return seed + keras.ops.convert_to_tensor(np.array([binding.rank * _STRIDE, 0]), dtype=seed.dtype)
