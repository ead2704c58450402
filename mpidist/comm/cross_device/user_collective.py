"""The collective over hooks: a user's reduce and broadcast, with the checks and conversions of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.agreement import same_on_all
from mpidist.comm.arithmetic.slices import slices_of
from mpidist.comm.collective import check_reducible
from mpidist.comm.front.front import ArrayCollective
from mpidist.comm.front.sparse import reduce_slices
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import CommunicationOptions, ReduceOp


class Hooks(Protocol):
    """What `CrossDeviceOps` subclasses override; documented there."""

    @property
    def takes_device_arrays(self) -> bool:
        """Local. Whether the hooks take CuPy's arrays; else they get copies in host memory."""
        ...

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: AnyArray, destinations: Any, options: CommunicationOptions
    ) -> AnyArray:
        """Collective. Combine arrays."""
        ...

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[AnyArray, Any]],
        options: CommunicationOptions,
    ) -> list[AnyArray]:
        """Collective. Combine several arrays."""
        ...

    def broadcast_implementation(self, tensor: AnyArray, destinations: Any) -> AnyArray:
        """Collective. Give rank 0's array to all."""
        ...


class UserCollective(ArrayCollective):
    """Cross-device operations as a collective: the hooks reduce and broadcast, a default one does the rest.

    Collective. Args:
        ops: Whose hooks.
        default: Over the ranks.
        options: Of the communication.
    """

    takes_device_arrays = True

    def __init__(self, ops: Hooks, default: ArrayCollective, options: CommunicationOptions) -> None:
        super().__init__(default.communicator, options)
        self.ops = ops
        self.default = default
        self._options = options

    def reduce_values(
        self,
        op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None,
        *,
        batch: bool,
    ) -> list[Any]:
        """Collective. See `CrossDeviceOps.batch_reduce`; `batch` says which hook is called."""
        pairs = [(as_array(value), where) for value, where in pairs]
        results: list[Any] = [
            reduce_slices(self, op, value) if isinstance(value, IndexedSlices) else None for value, _ in pairs
        ]
        dense = [number for number, (value, _) in enumerate(pairs) if not isinstance(value, IndexedSlices)]
        lent = {number: self._lend(pairs[number][0]) for number in dense}
        self.log.note("reduce", op, next(iter(lent.values()), np.empty(0)))
        same_on_all(
            self.communicator, "the values of cross_device_ops",
            (op.name, [(array.shape, array.dtype.name) for array in lent.values()]),
            "Make the same calls with arrays of the same shapes and dtypes on all ranks.",
        )
        given: list[tuple[AnyArray, Any]] = []
        for number, array in lent.items():
            check_reducible(array, op)
            own = arrays.namespace(array).ascontiguousarray(array, self._combined_dtype(array.dtype, op))
            given.append((self._shown(own.reshape(array.shape)), pairs[number][1]))
        calls = [pair for pair in given if pair[0].size]
        made = iter(self._call(op, calls, options or self._options, batch=batch))
        for number, (shown, _) in zip(dense, given, strict=True):
            result = self._taken(next(made), shown, lent[number]) if shown.size else shown
            if not (result.flags.owndata and result.flags.c_contiguous):
                # A hook may return what it got, or a view of it.
                result = result.copy()
            results[number] = arrays.give_back(self._finished(result, op, lent[number].dtype), pairs[number][0])
        return results

    def _call(
        self, op: ReduceOp, pairs: list[tuple[AnyArray, Any]], options: CommunicationOptions, *, batch: bool
    ) -> Sequence[Any]:
        if not batch:
            return [self.ops.reduce_implementation(op, value, where, options) for value, where in pairs]
        made = self.ops.batch_reduce_implementation(op, pairs, options) if pairs else []
        if not isinstance(made, (list, tuple)) or len(made) != len(pairs):
            raise ValueError(
                f"{type(self.ops).__name__}.batch_reduce_implementation must return a list of {len(pairs)} arrays, got "
                f"{len(made) if isinstance(made, (list, tuple)) else type(made).__name__}"
            )
        return made

    def _all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        shown = self._shown(source)
        total[...] = self._taken(self.ops.reduce_implementation(op, shown, shown, self._options), shown, total)

    def _reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        self._all_reduce(source, total if self.communicator.rank == root else source.copy(), op)

    def _reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        total = arrays.namespace(source).empty_like(source)
        self._all_reduce(source, total, op)
        mine[...] = total[slices_of(counts)[self.communicator.rank]]

    def _broadcast_array(self, data: AnyArray, root: int) -> None:
        if root:
            # The hook knows the first replica only.
            super()._broadcast_array(data, root)
            return
        shown = self._shown(data)
        result = self._taken(self.ops.broadcast_implementation(shown, shown), shown, data)
        if self.communicator.rank != root:
            data[...] = result

    def _broadcast(self, data: AnyArray, root: int) -> None:
        self.default._broadcast(data, root)

    def _all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        self.default._all_gather(mine, gathered, counts)

    def _all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        self.default._all_to_all(sent, sent_counts, got, got_counts)

    def _divided(self, total: Any, op: ReduceOp) -> Any:
        # The hook has done it.
        return total

    def _shown(self, array: AnyArray) -> AnyArray:
        """What a hook sees of an array: it may be the user's own, so it is read-only."""
        if arrays.is_cupy(array):
            return array if self.ops.takes_device_arrays else cast(AnyArray, cast(Any, array).get())
        view: AnyArray = array.view()
        view.flags.writeable = False
        return view

    def _taken(self, result: Any, shown: AnyArray, like: AnyArray) -> AnyArray:
        """The array that a hook has returned, on the device of `like`."""
        shape = getattr(result, "shape", None)
        if shape != shown.shape:
            raise ValueError(
                f"a hook of {type(self.ops).__name__} must return an array of the shape that it got, {shown.shape}; "
                f"got {type(result).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")
            )
        return cast(AnyArray, arrays.namespace(like).asarray(arrays.lend(result), shown.dtype))

    def __repr__(self) -> str:
        return f"UserCollective({type(self.ops).__name__}, {self.communicator!r})"


def as_array(value: Any) -> Any:
    """Local. A Python number as an array; anything else as it is."""
    return np.asarray(value) if isinstance(value, (bool, int, float, complex)) else value
