"""The front of every collective: checks, conversions, shapes and the call log around one backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from mpidist import arrays
from mpidist.arrays import AnyArray, as_bytes
from mpidist.comm.arithmetic.combine import combined_dtype, named_dtype
from mpidist.comm.arithmetic.exact import is_checked, whole
from mpidist.comm.arithmetic.slices import even_sizes, in_bytes, slices_of
from mpidist.comm.backend import Backend
from mpidist.comm.calls.text import AT_ONCE, HINT
from mpidist.comm.collective import (
    check_axis,
    check_gatherable,
    check_in_place,
    check_movable,
    check_parts,
    check_reducible,
    check_root,
)
from mpidist.comm.front.call_log import CallLog
from mpidist.comm.front.halves import all_reduce_in_halves, is_halved
from mpidist.comm.front.integer_sums import IntegerSums
from mpidist.comm.front.plain import is_plain, plain
from mpidist.comm.group.agreement import require_same
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import Resource, end_all
from mpidist.comm.memory.show_calls import show_calls
from mpidist.options import CommunicationOptions, ReduceOp

# Up to this size copying the array and reducing the copy in place is faster than reducing into a new array: MPI has one
# argument less to examine.
_COPIED_BYTES = 1 << 14
# The number of small calls whose backend functions are kept.
_KEPT = 256
# The characters of float32 and 64 and of the integers, which every backend combines as they are.
_COMBINED_AS_THEY_ARE = "fdlqiILQbBhH"
# Looking up a member of an enumeration takes 70 ns, a name of the module 10 ns.
_MEAN = ReduceOp.MEAN


class CollectiveFront(Resource):
    """The library's `Collective`: a backend with checks, conversions and the call log. It closes the backend.

    Args:
        backend: The backend, which gets contiguous one-dimensional arrays of native dtypes, after all checks.
        options: The options. `check` compares the ranks' calls each time, `timeout_seconds` limits the wait for late
            ranks, `wire_dtype` halves the bytes of large float32 arrays in `all_reduce`; see `halves.is_halved`.
        owner: The number of the strategy whose calls they are; see `CallOrder.deal`.

    Attributes:
        communicator: The ranks.
        backend: The constructor's argument.
        log: The calls so far.
    """

    def __init__(self, backend: Backend, options: CommunicationOptions, owner: int = 0) -> None:
        self.communicator: Communicator = backend.communicator
        show_calls(backend.communicator)
        self.backend = backend
        self.log = CallLog(backend.communicator, options, owner)
        # Bound once: looking up attributes takes most of the time of a small call.
        self._order = backend.communicator.order
        self._backend_all_reduce = backend.all_reduce
        self._integers = IntegerSums(backend) if backend.communicator.size > 1 and not backend.wraps_integers else None
        self._shows_calls = not backend.compares_calls
        self._under_way = AT_ONCE if backend.communicator.size > 1 and not backend.makes_calls else True
        self._smalls: dict[tuple[Any, ...], Callable[[AnyArray], AnyArray] | None] = {}
        self._small_key: tuple[Any, ...] = ()
        self._small: Callable[[AnyArray], AnyArray] = np.copy
        self._wire_dtype = None if options.wire_dtype is None else named_dtype(options.wire_dtype)

    def _is_whole(self) -> bool:
        return self.communicator.is_whole() and not self.log.is_broken()

    def _end(self, *, is_collective: bool) -> None:
        self.log.refuse_calls()
        # They hold views of the backend's memory.
        self._smalls.clear()
        self._small_key, self._small = (), np.copy
        end_all([self.backend], is_collective=is_collective)

    def all_reduce(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM, *, in_place: bool = False) -> AnyArray:
        """Collective. See `Collective.all_reduce`."""
        if type(array) is not np.ndarray:
            lent = self.lend(array)
            result = self._all_reduce_any(lent, op, in_place)
            return array if in_place else arrays.give_back(result, array)
        log = self.log
        order = log.begin_owned("all_reduce", op, array, log.owner)
        try:
            # A small sum must take little longer than the backend itself: what was found for the last one is kept.
            if order.key is self._small_key and not in_place:
                order.is_under_way = self._under_way
                result = self._small(array)
            elif array.nbytes <= _COPIED_BYTES and not in_place and not self._shows_calls and (
                small := self._smalls.get(order.key)
            ):
                order.is_under_way, self._small_key, self._small = self._under_way, order.key, small
                result = small(array)
            else:
                result = self._all_reduce_begun(array, op, in_place)
        except BaseException as error:
            order.fail(error)
            raise
        order.leave()
        return result

    def _all_reduce_any(self, array: AnyArray, op: ReduceOp, in_place: bool) -> AnyArray:
        with self.log.begin("all_reduce", op, array):
            return self._all_reduce_converted(array, op, in_place)

    def _all_reduce_begun(self, array: AnyArray, op: ReduceOp, in_place: bool) -> AnyArray:
        dtype = array.dtype
        if not (
            dtype.char in _COMBINED_AS_THEY_ARE and op is not _MEAN and self._wire_dtype is None and array.size
            and dtype.isnative and getattr(array.flags, "aligned", True) and (in_place or array.flags.c_contiguous)
        ):
            return self._all_reduce_converted(array, op, in_place)
        if in_place:
            check_in_place(array, op)
        self.begin_moving()
        if in_place:
            result = array
        elif array.nbytes <= _COPIED_BYTES:
            small = self._find_small(array, op)
            if small is not None:
                return small(array)
            array = result = array.copy()
        else:
            result = np.empty(array.shape, dtype)
        total = result.reshape(-1)
        # Backends recognize by its identity that the result is written into the array itself.
        combine = self._backend_all_reduce if dtype.kind == "f" else self._way(dtype, op).all_reduce
        combine(total if result is array else array.reshape(-1), total, op)
        return result

    def _way(self, dtype: np.dtype[Any], op: ReduceOp) -> Backend | IntegerSums:
        return self._integers if self._integers is not None and is_checked(dtype, op) else self.backend

    def _find_small(self, array: AnyArray, op: ReduceOp) -> Callable[[AnyArray], AnyArray] | None:
        """Local, or Collective as `Backend.open_small`. The backend's function for such small arrays, if any."""
        key = self._order.key
        if key not in self._smalls:
            if len(self._smalls) == _KEPT:
                self._smalls.clear()
            self._smalls[key] = self._way(array.dtype, op).open_small(op, array.dtype, array.shape)
        return self._smalls[key]

    def _all_reduce_converted(self, array: AnyArray, op: ReduceOp, in_place: bool) -> AnyArray:
        check_reducible(array, op)
        if in_place:
            check_in_place(array, op)
        xp = arrays.namespace(array)
        dtype = self.dtype_combined(array.dtype, op)
        is_copy = dtype != array.dtype or not is_plain(array)
        source = (plain(xp, array, dtype) if is_copy else array).reshape(-1)
        # A converted or contiguous copy belongs to this call, so the result may be written into it.
        total = source if is_copy or in_place else xp.empty_like(source)
        self.begin_moving()
        if op is _MEAN and in_place and not is_copy and self._wire_dtype is None and (
            self.backend.mean_allocated(total)
        ):
            return array
        if array.size:
            wire_dtype = self._wire_dtype if op is ReduceOp.SUM or op is _MEAN else None
            if wire_dtype is not None and is_halved(array.dtype, array.nbytes, wire_dtype):
                all_reduce_in_halves(self.backend, source, total, wire_dtype)
            else:
                combine = self._backend_all_reduce if dtype.kind == "f" else self._way(dtype, op).all_reduce
                combine(source, total, op)
        else:
            self._meet_empty(dtype, op)
        result = self.finished(total.reshape(array.shape), op, array.dtype)
        if in_place and is_copy:
            array[...] = result
        return array if in_place else result

    def sum_in_halves(self, array: AnyArray, wire_dtype: np.dtype[Any]) -> None:
        """Collective. Sum a flat contiguous array in place, sent in `wire_dtype` whatever its size."""
        with self.log.begin("all_reduce", ReduceOp.SUM, array):
            self.begin_moving()
            if array.size:
                all_reduce_in_halves(self.backend, array, array, wire_dtype)
            else:
                self._meet_empty(array.dtype, ReduceOp.SUM)

    def begin_moving(self) -> None:
        """Local. Note that the call cannot be undone from here on."""
        self._order.is_under_way = self._under_way
        if self._shows_calls:
            self._order.show_call()

    def _meet_empty(self, dtype: np.dtype[Any], op: ReduceOp) -> None:
        """Collective. Combine one element: an array is empty here, and the other ranks' may have elements."""
        one = np.zeros(1, dtype)
        self._way(dtype, op).all_reduce(one, one, op)

    def all_reduce_parts(self, parts: list[AnyArray], dtype: np.dtype[Any], op: ReduceOp) -> AnyArray:
        """Collective. See `IntegerSums.all_reduce_parts`; on one rank, too."""
        with self.log.begin("all_reduce", op, parts[0]):
            self.begin_moving()
            if self._integers is None:
                return whole(parts, dtype, op)
            if parts[0].size:
                return self._integers.all_reduce_parts(parts, dtype, op)
            self._meet_empty(dtype, op)
            return whole(parts, dtype, op)

    def reduce(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM, root: int = 0) -> AnyArray | None:
        """Collective. See `Collective.reduce`."""
        lent = self.lend(array)
        check_root(root, self.communicator.size)
        with self.log.begin(f"reduce {op.name} to rank", root, lent, meets=False):
            total = self._reduce(lent, op, root)
        return None if total is None else cast(AnyArray, arrays.give_back(total, array))

    def _reduce(self, array: AnyArray, op: ReduceOp, root: int) -> AnyArray | None:
        check_reducible(array, op)
        xp = arrays.namespace(array)
        source = plain(xp, array, self.dtype_combined(array.dtype, op)).reshape(-1)
        is_root = self.communicator.rank == root
        total = xp.empty_like(source) if is_root else source
        self.begin_moving()
        if array.size:
            self._way(source.dtype, op).reduce(source, total, op, root)
        else:
            self._meet_empty(source.dtype, op)
        return self.finished(total.reshape(array.shape), op, array.dtype) if is_root else None

    def broadcast(self, array: AnyArray, root: int = 0) -> AnyArray:
        """Collective. See `Collective.broadcast`."""
        lent = self.lend(array)
        check_root(root, self.communicator.size)
        with self.log.begin("broadcast from rank", root, lent, meets=False):
            result = self._broadcast(lent, root)
        return cast(AnyArray, array if self.communicator.rank == root else arrays.give_back(result, array))

    def _broadcast(self, array: AnyArray, root: int) -> AnyArray:
        check_movable(array)
        xp = arrays.namespace(array)
        is_root = self.communicator.rank == root
        dtype = array.dtype.newbyteorder("=")
        result: AnyArray = xp.empty(array.shape, dtype)
        if is_root:
            result = xp.ascontiguousarray(array, dtype).reshape(array.shape)
        self.begin_moving()
        if array.size:
            self.backend.broadcast(result.reshape(-1), root)
        else:
            self._meet_empty(np.dtype(np.uint8), ReduceOp.MAX)
        return result

    def all_gather(self, array: AnyArray, axis: int = 0) -> AnyArray:
        """Collective. See `Collective.all_gather`."""
        lent = self.lend(array)
        with self.log.begin("all_gather", None, lent, only_dtype=True):
            gathered = self._all_gather(lent, axis)
        return cast(AnyArray, arrays.give_back(gathered, array))

    def _all_gather(self, array: AnyArray, axis: int) -> AnyArray:
        calls = self.communicator.all_gather_object(("all_gather", array.shape, array.dtype.name, axis))
        require_same([call[0] for call in calls], "the collective call", HINT)
        axis = check_gatherable([call[1:] for call in calls])
        check_movable(array)
        xp = arrays.namespace(array)
        dtype = array.dtype.newbyteorder("=")
        mine = xp.ascontiguousarray(xp.moveaxis(array, axis, 0), dtype)
        lengths = [call[1][axis] for call in calls]
        gathered = xp.empty((sum(lengths), *mine.shape[1:]), dtype)
        self.begin_moving()
        if gathered.size:
            row_bytes = gathered.nbytes // gathered.shape[0]
            self.backend.all_gather(as_bytes(mine), as_bytes(gathered), in_bytes(lengths, row_bytes))
        return cast(AnyArray, xp.moveaxis(gathered, 0, axis))

    def reduce_scatter(self, array: AnyArray, op: ReduceOp = ReduceOp.SUM) -> AnyArray:
        """Collective. See `Collective.reduce_scatter`."""
        lent = self.lend(array)
        with self.log.begin("reduce_scatter", op, lent):
            mine = self._reduce_scatter(lent, op)
        return cast(AnyArray, arrays.give_back(mine, array))

    def _reduce_scatter(self, array: AnyArray, op: ReduceOp) -> AnyArray:
        check_axis(array.shape, 0)
        check_reducible(array, op)
        xp = arrays.namespace(array)
        source = plain(xp, array, self.dtype_combined(array.dtype, op)).reshape(-1)
        rows = even_sizes(array.shape[0], self.communicator.size)
        row_size = array.size // array.shape[0] if array.shape[0] else 0
        mine = xp.empty(rows[self.communicator.rank] * row_size, source.dtype)
        self.begin_moving()
        if array.size:
            self._way(source.dtype, op).reduce_scatter(source, mine, [count * row_size for count in rows], op)
        else:
            self._meet_empty(source.dtype, op)
        return self.finished(mine.reshape((rows[self.communicator.rank], *array.shape[1:])), op, array.dtype)

    def all_to_all(self, parts: Sequence[AnyArray]) -> list[AnyArray]:
        """Collective. See `Collective.all_to_all`."""
        lent = [self.lend(part) for part in parts]
        with self.log.begin("all_to_all", None, lent[0] if lent else np.empty(0), only_dtype=True):
            got = self._all_to_all(lent)
        return [arrays.give_back(piece, parts[0]) for piece in got]

    def _all_to_all(self, parts: Sequence[AnyArray]) -> list[AnyArray]:
        size = self.communicator.size
        described = (
            (len(parts), parts[0].dtype.name, parts[0].shape[1:], tuple(part.shape[:1] for part in parts))
            if parts else (0, "", (), ())
        )
        calls = self.communicator.all_gather_object(("all_to_all", *described))
        require_same([call[0] for call in calls], "the collective call", HINT)
        require_same(
            [call[1:4] for call in calls], "all_to_all: number of parts, dtype and shape apart from the first size",
            "Only first sizes may differ.",
        )
        check_parts(parts, size)
        check_movable(parts[0])
        xp = arrays.namespace(parts[0])
        dtype = parts[0].dtype.newbyteorder("=")
        sent = xp.concatenate([xp.asarray(part, dtype) for part in parts])
        lengths = [call[4][self.communicator.rank][0] for call in calls]
        got = xp.empty((sum(lengths), *sent.shape[1:]), dtype)
        row_bytes = dtype.itemsize * int(np.prod(sent.shape[1:], dtype=np.int64))
        self.begin_moving()
        self.backend.all_to_all(
            as_bytes(sent), [len(part) * row_bytes for part in parts], as_bytes(got), in_bytes(lengths, row_bytes)
        )
        return [got[piece] for piece in slices_of(lengths)]

    def allocate(self, shape: Sequence[int], dtype: Any = np.float32) -> AnyArray:
        """Collective. Allocate zeros on each rank, placed where the backend combines arrays with the fewest copies.

        Where ranks share memory, reducing such an array in place (the whole array, or the same slice of it on all
        ranks) is faster than reducing other arrays. In everything else it is an array like any other.

        Args:
            shape: The shape of the array, the same on every rank.
            dtype: The dtype of the array, the same on every rank.

        Returns:
            This rank's array.

        Raises:
            OSError: There is no room; on every rank.
        """
        shape, dtype = tuple(shape), np.dtype(dtype)
        allocated = self.backend.allocate(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return np.zeros(shape, dtype) if allocated is None else allocated.view(dtype).reshape(shape)

    def barrier(self) -> None:
        """Collective. Return when every rank has called."""
        with self.log.begin("barrier", None, None):
            self._order.show_call()
            self.communicator.barrier()

    def dtype_combined(self, dtype: np.dtype[Any], op: ReduceOp) -> np.dtype[Any]:
        """Local. The dtype in which the backend combines arrays of the dtype `dtype`."""
        return combined_dtype(dtype, op, combines_halves=self.backend.combines_halves)

    def _divided(self, total: Any, op: ReduceOp) -> Any:
        if op is not _MEAN or self.backend.divides_means:
            return total
        return arrays.namespace(total).divide(total, self.communicator.size, out=total)

    def finished(self, total: AnyArray, op: ReduceOp, dtype: np.dtype[Any]) -> AnyArray:
        """Local. The result for the caller from a backend's: divided under MEAN, and converted back to `dtype`."""
        total = self._divided(total, op)
        keeps = total.dtype == dtype or (op is ReduceOp.MEAN and dtype.kind in "iu")
        return total if keeps else total.astype(dtype)

    def lend(self, array: Any) -> AnyArray:
        """Local. A NumPy or CuPy view of an array of any library.

        Raises:
            TypeError: `array` is not an array, or is in memory that the backend does not reach.
            ValueError: `array` is on another GPU than the current one.
        """
        if type(array) is np.ndarray:
            return array
        lent = arrays.lend(array)
        if arrays.is_cupy(lent):
            if not self.backend.takes_device_arrays:
                raise TypeError(
                    f"{self!r} combines arrays in host memory, got one in GPU memory: choose the implementation AUTO, "
                    "STAGED or NCCL, or pass a copy in host memory: array.get()"
                )
            # Before the call has begun, which would be left in the middle.
            arrays.require_current_device(lent)
        return lent

    def __repr__(self) -> str:
        return f"CollectiveFront({self.backend!r})"
