"""Large gradients of a compiled step pass through memory of the strategy, one after the other.

In one call all of them would be alive at once. XLA takes memory for that from the system in each step, from 32 MB on,
and page faults then take longer than the reduction. So each gradient is copied out as soon as it is computed, and back
where its variable is updated; XLA's memory of one serves for the next.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpidist.keras.binding import ModelBinding, find
from mpidist.xla import Call

Array = np.ndarray[Any, Any]

# Of all gradients together: below it they are reduced in XLA's memory.
STAGED_BYTES = 1 << 24
# A smaller gradient costs less in the call of the reduction than in calls of its own.
_ALONE_BYTES = 1 << 16
# Elements, so that each place begins at a multiple of 64 bytes.
_STEP = 64

# The shapes and dtypes of the gradients, by the checksum that compiled steps carry.
_layouts: dict[int, list[tuple[tuple[int, ...], Any]]] = {}


class GradientStaging:
    """The passage of gradients through memory of the strategy.

    Args:
        name: The name of its calls.
        reduce: Combines arrays over the replicas in place; gets a binding, the rows, the arrays, and `is_weighed`.
    """

    def __init__(self, name: str, reduce: Callable[..., None]) -> None:
        self._name, self._reduce = name, reduce
        self._put = Call(f"{name}.put", _put, shapes=lambda *_: [jax.ShapeDtypeStruct((), np.int32)])
        self._combine = Call(f"{name}.combine", self._work)

    def __call__(
        self, binding: ModelBinding, rows: Any, gradients: list[Any], *, is_weighed: bool = False
    ) -> list[Any]:
        """Collective. Combine traced gradients over the replicas; see `jax_backend.reduce_gradients`."""
        large = [number for number, one in enumerate(gradients) if one.size * one.dtype.itemsize >= _ALONE_BYTES]
        small = [number for number in range(len(gradients)) if number not in large]
        facts = [(tuple(gradients[number].shape), gradients[number].dtype) for number in large]
        layout = zlib.crc32(repr([(shape, str(dtype)) for shape, dtype in facts]).encode()) >> 1
        _layouts[layout] = facts
        ready: Any = jnp.int32(0)
        # The last layer's gradients are computed first.
        for place in reversed(range(len(large))):
            (ready,) = self._put([_info(binding.number, layout, place), ready, gradients[large[place]]])
        head = jnp.stack([jnp.asarray(value, jnp.int32) for value in (binding.number, layout, rows, is_weighed)])
        _, ready, *reduced = self._combine([head, ready, *(gradients[number] for number in small)])
        results = dict(zip(small, reduced, strict=True))
        for place, number in enumerate(large):
            (results[number],) = _taking(self._name, *facts[place])([_info(binding.number, layout, place), ready])
        return [results[number] for number in range(len(gradients))]

    def _work(self, inputs: list[Array], outputs: list[Array]) -> None:
        number, layout, rows, is_weighed = (int(value) for value in inputs[0])
        binding = find(number)
        _, flats = _memory(binding, layout)
        self._reduce(binding, rows, [*flats, *outputs[2:]], is_weighed=bool(is_weighed))


def _info(*numbers: int) -> Any:
    return jnp.asarray(np.array(numbers, np.int32))


def _put(inputs: list[Array], outputs: list[Array]) -> None:
    number, layout, place = (int(value) for value in inputs[0])
    binding = find(number)
    binding.extended.store(_memory(binding, layout)[0][place], inputs[2])
    outputs[0][...] = place


def _take(inputs: list[Array], outputs: list[Array]) -> None:
    number, layout, place = (int(value) for value in inputs[0])
    np.copyto(outputs[0], _memory(find(number), layout)[0][place])


@functools.cache
def _taking(name: str, shape: tuple[int, ...], dtype: Any) -> Call:
    """The call whose result is a reduced gradient of this shape."""
    text = "x".join(map(str, shape))
    return Call(f"{name}.take.{dtype}.{text}", _take, shapes=lambda *_: [jax.ShapeDtypeStruct(shape, dtype)])


def _memory(binding: ModelBinding, layout: int) -> tuple[list[Array], list[Array]]:
    """Collective at the first call, else Local. The places of a layout's gradients, and the arrays that they are in."""
    if layout not in binding.memory:
        facts = _layouts[layout]
        sizes = [-(-int(np.prod(shape)) // _STEP) * _STEP for shape, _ in facts]
        flats = {
            dtype: binding.extended.allocate(
                (sum(size for size, (_, other) in zip(sizes, facts, strict=True) if other == dtype),), dtype.name
            )
            for dtype in dict.fromkeys(dtype for _, dtype in facts)
        }
        at = dict.fromkeys(flats, 0)
        places = []
        for size, (shape, dtype) in zip(sizes, facts, strict=True):
            begin = at[dtype]
            places.append(flats[dtype][begin : begin + int(np.prod(shape))].reshape(shape))
            at[dtype] = begin + size
        binding.memory[layout] = places, list(flats.values())
    places, arrays = binding.memory[layout]
    return places, arrays
