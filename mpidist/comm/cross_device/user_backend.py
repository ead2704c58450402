"""Backends made by the user: the hooks of `CrossDeviceOps`, and any object with a collective's methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
from typing_extensions import override

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.exact import is_checked
from mpidist.comm.arithmetic.slices import slices_of
from mpidist.comm.backend import Backend
from mpidist.comm.collective import Collective, check_reducible
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.front.sparse import reduce_slices
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import end_all
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import CommunicationOptions, ReduceOp


class Hooks(Protocol):
    """The methods that subclasses of `CrossDeviceOps` override. They are documented there."""

    @property
    def takes_device_arrays(self) -> bool:
        """Local. Whether the hooks take CuPy arrays. Otherwise they get copies in host memory."""
        ...

    @property
    def is_of_library(self) -> bool:
        """Local. Whether the hooks are known to make the operation that they are asked for."""
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
        """Collective. Give rank 0's array to all ranks."""
        ...


class UserBackend(Backend):
    """A backend that reduces in the user's way. It divides means itself, and only one thread may use it.

    Args:
        communicator: The ranks.
        maker: The user's object.

    Attributes:
        maker: The constructor's argument.
    """

    takes_device_arrays = True
    divides_means = True
    makes_calls = True
    wraps_integers = True

    def __init__(self, communicator: Communicator, maker: object) -> None:
        self.communicator = communicator
        self.maker = maker

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.maker).__name__}, {self.communicator!r})"


class CollectiveBackend(UserBackend):
    """A backend made of any object with the methods of `Collective`.

    Args:
        communicator: The ranks.
        own: The object, over the same ranks.
    """

    def __init__(self, communicator: Communicator, own: Collective) -> None:
        super().__init__(communicator, own)
        self._own = own

    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. See `Backend.all_reduce`."""
        total[...] = self._own.all_reduce(source, op)

    def reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        """Collective. See `Backend.reduce`."""
        result = self._own.reduce(source, op, root)
        if result is not None:
            total[...] = result

    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. See `Backend.reduce_scatter`."""
        # A collective cuts evenly by rows. Cut into rows of the counts' common divisor, the array is cut as the counts
        # say.
        rows = source.reshape(-1, math.gcd(*counts))
        mine[...] = self._own.reduce_scatter(rows, op).reshape(-1)

    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. See `Backend.broadcast`."""
        result = self._own.broadcast(data, root)
        if result is not data:
            data[...] = result

    @override
    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        """Collective. See `Backend.all_gather`."""
        gathered[...] = self._own.all_gather(mine)

    def all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        """Collective. See `Backend.all_to_all`."""
        received = self._own.all_to_all([sent[piece] for piece in slices_of(sent_counts)])
        for piece, data in zip(slices_of(got_counts), received, strict=True):
            got[piece] = data


class HookBackend(UserBackend):
    """A backend made of the hooks of `CrossDeviceOps`. They reduce and broadcast, the library's backend does the rest.

    Args:
        ops: The object that has the hooks.
        default: The library's collective over the same ranks.
        options: The options that the hooks get.

    Attributes:
        ops, default, options: The constructor's argument.
    """

    def __init__(self, ops: Hooks, default: CollectiveFront, options: CommunicationOptions) -> None:
        super().__init__(default.communicator, ops)
        self.ops = ops
        self.default = default
        self.options = options
        self.wraps_integers = not ops.is_of_library

    def all_reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp) -> None:
        """Collective. See `Backend.all_reduce`."""
        shown = self.show(source)
        total[...] = self.take(self.ops.reduce_implementation(op, shown, shown, self.options), shown, total)

    def reduce(self, source: AnyArray, total: AnyArray, op: ReduceOp, root: int) -> None:
        """Collective. See `Backend.reduce`."""
        self.all_reduce(source, total if self.communicator.rank == root else source.copy(), op)

    def reduce_scatter(self, source: AnyArray, mine: AnyArray, counts: Sequence[int], op: ReduceOp) -> None:
        """Collective. See `Backend.reduce_scatter`."""
        total = arrays.namespace(source).empty_like(source)
        self.all_reduce(source, total, op)
        mine[...] = total[slices_of(counts)[self.communicator.rank]]

    def broadcast(self, data: AnyArray, root: int) -> None:
        """Collective. See `Backend.broadcast`."""
        if root:
            # The hook always broadcasts from the first replica.
            self.default.backend.broadcast(data, root)
            return
        shown = self.show(data)
        result = self.take(self.ops.broadcast_implementation(shown, shown), shown, data)
        if self.communicator.rank != root:
            data[...] = result

    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        """Collective. See `Backend.all_gather`."""
        self.default.backend.all_gather(mine, gathered, counts)

    def all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        """Collective. See `Backend.all_to_all`."""
        self.default.backend.all_to_all(sent, sent_counts, got, got_counts)

    def _end(self, *, is_collective: bool) -> None:
        end_all([self.default], is_collective=is_collective)

    def show(self, array: AnyArray) -> AnyArray:
        """Local. The array for a hook: a read-only view, since it may be the user's own array."""
        if arrays.is_cupy(array):
            return array if self.ops.takes_device_arrays else cast(AnyArray, cast(Any, array).get())
        view: AnyArray = array.view()
        view.flags.writeable = False
        return view

    def take(self, result: Any, shown: AnyArray, like: AnyArray) -> AnyArray:
        """Local. The array that a hook returned, on the device of `like`.

        Raises:
            ValueError: It does not have the shape of `shown`, the array that the hook got.
        """
        shape = getattr(result, "shape", None)
        if shape != shown.shape:
            # The hook has done its work: ranks have met, and nothing is left in the middle.
            self.communicator.order.is_under_way = False
            raise ValueError(
                f"a hook of {type(self.ops).__name__} must return an array of the shape of its argument, "
                f"{shown.shape}, got {type(result).__name__}" + ("" if shape is None else f" of shape {tuple(shape)}")
            )
        return cast(AnyArray, arrays.namespace(like).asarray(arrays.lend(result), shown.dtype))


class HookCollective(CollectiveFront):
    """The front over hooks, which also passes them several values, and destinations.

    Args:
        backend: The backend made of the hooks.
        owner: See `CollectiveFront`.

    Attributes:
        hooks: See `backend`.
    """

    def __init__(self, backend: HookBackend, owner: int = 0) -> None:
        super().__init__(backend, backend.options, owner)
        self.hooks = backend

    def reduce_values(
        self,
        op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None,
        *,
        batch: bool,
    ) -> list[Any]:
        """Collective. See `CrossDeviceOps.batch_reduce`. If `batch`, one call of the hook gets all values."""
        pairs = [(as_array(value), where) for value, where in pairs]
        results: list[Any] = [
            reduce_slices(self, op, value) if isinstance(value, IndexedSlices) else None for value, _ in pairs
        ]
        lent = {
            number: self.lend(value) for number, (value, _) in enumerate(pairs) if not isinstance(value, IndexedSlices)
        }
        if not self.backend.wraps_integers:
            for number in [number for number, array in lent.items() if is_checked(array.dtype, op)]:
                results[number] = arrays.give_back(self.all_reduce(lent.pop(number), op), pairs[number][0])
        described = op.name, *((array.shape, array.dtype.name) for array in lent.values())
        with self.log.begin("values of cross_device_ops:", described, None, meets=False):
            return self._reduce_values(op, pairs, options, results, lent, batch=batch)

    def _reduce_values(
        self,
        op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None,
        results: list[Any],
        lent: dict[int, AnyArray],
        *,
        batch: bool,
    ) -> list[Any]:
        # Without other ranks none can be left waiting.
        self.communicator.order.is_under_way = self.communicator.size > 1
        given: list[tuple[AnyArray, Any]] = []
        for number, array in lent.items():
            check_reducible(array, op)
            own = arrays.namespace(array).ascontiguousarray(array, self.dtype_combined(array.dtype, op))
            given.append((self.hooks.show(own.reshape(array.shape)), pairs[number][1]))
        calls = [pair for pair in given if pair[0].size]
        made = iter(self._call(op, calls, options or self.hooks.options, batch=batch))
        for number, (shown, _) in zip(lent, given, strict=True):
            result = self.hooks.take(next(made), shown, lent[number]) if shown.size else shown
            if not (result.flags.owndata and result.flags.c_contiguous):
                # A hook may return its argument, or a view of it: the user gets an array of its own.
                result = result.copy()
            results[number] = arrays.give_back(self.finished(result, op, lent[number].dtype), pairs[number][0])
        return results

    def _call(
        self, op: ReduceOp, pairs: list[tuple[AnyArray, Any]], options: CommunicationOptions, *, batch: bool
    ) -> Sequence[Any]:
        ops = self.hooks.ops
        if not batch:
            return [ops.reduce_implementation(op, value, where, options) for value, where in pairs]
        made = ops.batch_reduce_implementation(op, pairs, options) if pairs else []
        if not isinstance(made, (list, tuple)) or len(made) != len(pairs):
            raise ValueError(
                f"{type(ops).__name__}.batch_reduce_implementation must return a list of {len(pairs)} arrays, got "
                f"{len(made) if isinstance(made, (list, tuple)) else type(made).__name__}"
            )
        return made


def as_array(value: Any) -> Any:
    """Local. A Python number as an array; any other value unchanged."""
    return np.asarray(value) if isinstance(value, (bool, int, float, complex)) else value
