"""Copies on a GPU of variables that are in host memory, for replicas that compute there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.gpu.staging_copier import Ticket
from mpidist.indexed_slices import IndexedSlices
from mpidist.variables.memory.slab import Slab, SlabRange
from mpidist.variables.variable import Gradient


class DeviceCopies:
    """Local. Copies between a rank's GPU and variables in host memory.

    A variable is copied to the GPU at its first use after a write. The copy serves until the next write.

    Args:
        cuda: The module `comm.gpu.cuda`, with this rank's GPU current.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._copies: dict[int | str, tuple[AnyArray, Ticket]] = {}

    def lock_pages(self, slab: Slab) -> Slab:
        """Local. Register the memory of a slab with CUDA, so that the GPU accesses it directly; returns the slab."""
        memory = slab.writable
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        self._cuda.lock_pages(memory)
        return slab

    def value(self, address: SlabRange, shape: tuple[int, ...]) -> AnyArray:
        """Local. The value of a variable as an array on the GPU; do not change it."""
        if address.number not in self._copies:
            self._copies[address.number] = self._cuda.send(address.writable.reshape(shape))
        return self._copies[address.number][0]

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Local. Inside, variables are written; afterwards copies are renewed at their next use."""
        # The GPU may still read what is about to be written.
        for _, ticket in self._copies.values():
            ticket.synchronize()
        try:
            yield
        finally:
            self._copies.clear()

    def on_host(
        self, gradients: Mapping[int, Gradient], view: Callable[[int], AnyArray] | None = None
    ) -> dict[int, Gradient]:
        """Local. Gradients in host memory; it waits until the GPU has computed them.

        Args:
            gradients: The gradients by the numbers of their variables, in the memory of either kind.
            view: A function that returns the place of a variable's dense gradient, into which the GPU then writes.
                None: new memory.
        """
        return {number: self._fetched(given, number, view) for number, given in gradients.items()}

    def _fetched(self, given: Gradient, number: int, view: Callable[[int], AnyArray] | None) -> Gradient:
        # Rows are in host memory, wherever they were given.
        if type(given) is np.ndarray or isinstance(given, IndexedSlices):
            return given
        array = arrays.as_array(given)
        if not arrays.is_cupy(array):
            return given
        place = None if view is None else view(number)
        if place is None or (place.shape, place.dtype) != (array.shape, array.dtype):
            return arrays.to_host(array)
        self._cuda.fetch(array, place)
        return place
