"""The methods of `extended` for adapters of frameworks, in either context and on any one thread at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np

from mpidist import context
from mpidist.arguments import described, whole
from mpidist.arrays import AnyArray
from mpidist.comm.cores import count_cores, own_cores
from mpidist.comm.first_use import at_first_use
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import Resource
from mpidist.options import ReduceOp
from mpidist.strategy.replica import Owner, mixing
from mpidist.strategy.threads import fair_threads

if TYPE_CHECKING:
    from mpidist.comm.arithmetic.stores import store
    from mpidist.strategy.adapters.calls import AdapterCalls
    from mpidist.strategy.adapters.ending import fail
else:
    store = at_first_use("mpidist.comm.arithmetic.stores", "store")
    AdapterCalls = at_first_use("mpidist.strategy.adapters.calls", "AdapterCalls")
    fail = at_first_use("mpidist.strategy.adapters.ending", "fail")

T = TypeVar("T")


class AdapterMethods(Resource):
    """The methods of `extended` for adapters of frameworks, in either context; calls also from a framework's threads.

    Args:
        container_strategy: The strategy.
    """

    def __init__(self, container_strategy: Owner) -> None:
        self._owner = container_strategy
        self._calls: AdapterCalls | None = None

    def all_reduce(self, reduce_op: ReduceOp | str, nest: Any, *, in_place: bool = False, name: str = "") -> Any:
        """Collective. Combine a nest of arrays over all replicas, in either context, and on any one thread at a time.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PROD, or the name in any case.
            nest: This replica's component: any nest of arrays of NumPy, CuPy, PyTorch and JAX, numbers and
                IndexedSlices, of the same structure, shapes and dtypes on every replica. A parameter of PyTorch counts
                as its values. Small arrays are packed.
            in_place: Whether to write the results into the arrays, each of which must be given once. Not for arrays of
                JAX.
            name: A name of the call, which must be the same on all ranks.

        Returns:
            The same structure: arrays of the libraries of the given ones, and Python numbers for Python numbers; with
            `in_place` the given arrays. The MEAN of integers is float64.

        Raises:
            MismatchError: Structures, shapes, dtypes, operations or names differ between ranks; or other ranks refuse
                their arguments.
            TypeError, ValueError: A leaf is no array of numbers, or cannot be written in place.
            OverflowError: A sum or product of integers does not fit their dtype; on every rank.
            RuntimeError: Another strategy is current, the strategy is closed, or two threads call at once.
            InterruptedCallError: An earlier step or call was left in the middle.
        """
        return self._adapter_calls().all_reduce(reduce_op, nest, in_place=in_place, name=name)

    def broadcast(self, nest: Any) -> Any:
        """Collective. Give every rank the first replica's values, as new arrays of their libraries; see `all_reduce`.

        Raises:
            MismatchError, TypeError, ValueError, RuntimeError, InterruptedCallError: See `all_reduce`.
        """
        return self._adapter_calls().broadcast(nest)

    def all_gather(self, nest: Any, axis: int = 0) -> Any:
        """Collective. Concatenate the arrays of all replicas along `axis`, in their order; see `all_reduce`.

        Args:
            nest: Any nest of arrays of at least one dimension. Sizes may differ between replicas along `axis` only.
            axis: The dimension along which to concatenate.

        Raises:
            MismatchError, TypeError, ValueError, RuntimeError, InterruptedCallError: See `all_reduce`.
        """
        return self._adapter_calls().all_gather(nest, axis)

    def reduce_scatter(self, reduce_op: ReduceOp | str, nest: Any, axis: int = 0) -> Any:
        """Collective. Combine arrays as `all_reduce` does; each replica gets its slice of the results along `axis`.

        Args:
            reduce_op: See `all_reduce`.
            nest: Any nest of arrays of at least one dimension, of the same shapes and dtypes on every replica.
            axis: The dimension that is cut, as `rows` does.

        Raises:
            MismatchError, TypeError, ValueError, OverflowError, RuntimeError, InterruptedCallError: See `all_reduce`.
        """
        return self._adapter_calls().reduce_scatter(reduce_op, nest, axis)

    def all_gather_object(self, value: T) -> list[T]:
        """Collective. The picklable values of all replicas, in their order; see `all_reduce`.

        Raises:
            TypeError: A value cannot be pickled; on every rank.
            RuntimeError, InterruptedCallError: See `all_reduce`.
        """
        return self._adapter_calls().all_gather_object(value)

    def allocate(self, shape: Sequence[int] | int, dtype: Any = np.float32) -> AnyArray:
        """Collective. Zeros in the memory that `all_reduce` combines in place with the fewest copies; see `all_reduce`.

        Args:
            shape: The shape of the array, the same on every rank.
            dtype: The dtype of the array, the same on every rank; also "bfloat16".

        Returns:
            This rank's array, of NumPy. `torch.from_numpy` makes a tensor over the same memory.

        Raises:
            MismatchError: Shapes or dtypes differ between ranks.
            OSError: There is no room; on every rank.
            TypeError, ValueError: `shape` is no shape, or `dtype` no dtype of numbers; on every rank.
            RuntimeError, InterruptedCallError: See `all_reduce`.
        """
        return self._adapter_calls().allocate(shape, dtype)

    def store(self, array: AnyArray, values: AnyArray) -> None:
        """Local. Copy values into an array of `allocate`, which a later reduction reads: where large, past the cache.

        Args:
            array: The array, or a part of it, in host memory.
            values: An array of NumPy of the same shape and dtype, of other memory.

        Raises:
            TypeError: One of them is no array of NumPy.
            ValueError: They have different shapes.
        """
        for name, one in (("array", array), ("values", values)):
            if not isinstance(one, np.ndarray):
                raise TypeError(f"`{name}` must be an array of NumPy, got {described(one)}")
        if array.shape != values.shape:
            raise ValueError(f"`values` must have the shape of `array`, {array.shape}, got {values.shape}")
        store(array, values, self._owner.replicas.communicator.node.size)

    @property
    def cores_per_replica(self) -> int:
        """Local. Number of cores, at least 1, on which a replica computes: its share of the node's."""
        return self._cores_of(self._owner.replicas.everyone)

    def _cores_of(self, ranks: Communicator) -> int:
        """The cores of this rank, if these ranks compute."""
        return fair_threads(count_cores([own_cores()]), ranks.core_count, ranks.node.size)

    def rows(self, n: int) -> slice:
        """Local. The rows of this replica in a global batch, cut as distributed datasets cut it (`numpy.array_split`).

        Args:
            n: Number of rows of the global batch.

        Returns:
            A slice of the rows. The numbers of rows of two replicas differ by at most one, and the first replicas have
            more.

        Raises:
            TypeError, ValueError: `n` is no whole number of at least 0.
        """
        replicas = self._owner.replicas.communicator
        size, rest = divmod(whole("n", n, least=0), replicas.size)
        begin = size * replicas.rank + min(replicas.rank, rest)
        return slice(begin, begin + size + (replicas.rank < rest))

    def number_dataset(self) -> int:
        """Collective. A number for a source of batches, for `note_batch`; the same on all replicas.

        Raises:
            RuntimeError: See `all_reduce`.
        """
        return self._adapter_calls().number_dataset()

    def note_batch(self, number: int, iteration: int, position: int) -> None:
        """Local. Note that the program has taken a batch: if replicas have taken others, their next call raises.

        It counts only on the thread that makes the calls before and after: two threads have no order.

        Args:
            number: The number that `number_dataset` returned.
            iteration: The number of the pass, starting at 0.
            position: Number of batches taken in this pass; -1 at its end.

        Raises:
            TypeError: An argument is no integer.
            ValueError: An argument is too small.
        """
        self._open_calls().note_batch(
            whole("number", number, least=0), whole("iteration", iteration, least=0),
            whole("position", position, least=-1),
        )

    def step(self, name: str) -> AbstractContextManager[None]:
        """Collective. Surround a training step by `with`: SIGINT, and notices of the job's end, wait until it is left.

        If an exception leaves it, the step is half done: the next collective call of the strategy raises, on all ranks.

        Args:
            name: A name of the step, the same on all ranks.

        Raises:
            RuntimeError, InterruptedCallError: See `all_reduce`.
        """
        return self._adapter_calls().step(name)

    def fail(self, error: BaseException) -> NoReturn:
        """Local. End the job with an error's traceback, from any thread, as an uncaught one of the main thread does."""
        fail(error)

    def on_close(self, function: Callable[[], object]) -> None:
        """Local. See `Strategy.on_close`."""
        self._open_calls().on_close(function)

    def before_calls(self, function: Callable[[], object]) -> None:
        """Local. Call `function` before each collective call on the strategy's ranks, on any thread, until it closes.

        A framework may have work under way that makes calls: the function waits for it. On a thread of the framework it
        must return at once. It is not called before calls that are inside others.
        """
        self._open_calls().before_calls(function)

    def _adapter_calls(self) -> AdapterCalls:
        """The calls of adapters, if they can be made here."""
        self._require_own_context()
        context.require_collectives()
        return self._calls or self._open_calls()

    def _open_calls(self) -> AdapterCalls:
        if self._calls is None:
            self._calls = AdapterCalls(self._owner.replicas)
        return self._calls

    def _require_own_context(self) -> context.Entry | None:
        """Raise where another strategy is current; else return the innermost entry."""
        entry = context.innermost()
        if entry is not None and entry.strategy is not self._owner:
            raise RuntimeError(mixing(entry.strategy, self._owner))
        return entry
