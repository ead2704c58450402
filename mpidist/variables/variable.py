"""The variable: an array with a policy for writes and reads; what all kinds share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpidist import arrays, context
from mpidist.arrays import AnyArray
from mpidist.comm.communicator import Communicator
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.variables.arena import Arena
from mpidist.variables.scatter import Scatter

Read = Callable[[int, int], AnyArray]


class Variable(NDArrayOperatorsMixin, Scatter, ABC):
    """An array that is written by `assign` and read like a NumPy array.

    Arithmetic, NumPy functions, comparison and indexing work on the value and give plain arrays.

    Attributes:
        name: For people; need not be unique.
        shape: Fixed when the variable is made.
        dtype: Fixed when the variable is made.
        trainable: Whether `trainable_variables` lists it.
        synchronization: ON_WRITE or ON_READ.
        aggregation: How replicas' values are combined.
        arena: Where its strategy's variables live.
        is_per_replica: Whether there is no common value: each replica's component is saved and restored by itself.
        restored_by: Number of the restore that last set it. Values that wait from an earlier restore are not for it.
    """

    arena: Arena
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    is_per_replica: bool = False
    restored_by: int = 0
    # CuPy's arrays have priority 100: with a higher one they leave arithmetic with a variable to the variable.
    __array_priority__ = 1000.0

    @property
    def group(self) -> Communicator:
        """Local. The ranks that have the variable."""
        return self.arena.communicator

    @property
    def distribute_strategy(self) -> Any:
        """Local. The strategy in whose scope the variable was made, None without one."""
        return self.arena.strategy

    @property
    def device(self) -> str:
        """Local. The place of the value: host memory, or one of the visible GPUs."""
        return "/device:CPU:0"

    @abstractmethod
    def value(self) -> AnyArray:
        """The value as an array of `shape`, read-only; CuPy's (not to be written to either) where it is on a GPU.

        Local for ON_WRITE variables: a live view, valid until the next write or optimizer step; `numpy()` copies.
        Collective for ON_READ variables in cross-replica context, where it is the aggregate over the replicas.
        """

    def assign(
        self, value: npt.ArrayLike, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Variable:
        """Collective for ON_WRITE variables, and in cross-replica context; else Local. Set the value.

        In cross-replica context the first replica's value counts (under `CommunicationOptions(check=True)` differing
        values are an error); in replica context the replicas' values are aggregated first.

        Args:
            value: Shape of the variable; a dtype that NumPy's "same_kind" rule casts to the variable's.
            use_locking: Not used, like the next two; they are here for code written for tf.distribute.
            name: Not used.
            read_value: Not used: the variable is returned.

        Returns:
            The variable.

        Raises:
            ValueError: Another shape.
            TypeError: A dtype that does not cast.
        """
        self.write_array(self.coerce(value))
        return self

    def assign_add(
        self, delta: npt.ArrayLike, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Variable:
        """Collective or Local as `assign`. Add to the value, once, whatever the number of replicas.

        Raises:
            ValueError: As `assign`; in cross-replica context also for an ON_READ variable with aggregation SUM, which
                would add `delta` once for each replica.
            TypeError: As `assign`.
        """
        self.add_array(self.coerce(delta))
        return self

    def assign_sub(
        self, delta: npt.ArrayLike, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> Variable:
        """Collective or Local as `assign`. Subtract from the value; see `assign_add`."""
        return self.assign_add(np.negative(self.coerce(delta)))

    @abstractmethod
    def write_array(self, array: AnyArray) -> None:
        """Collective or Local as `assign`. Set the value to an array that `coerce` has made."""

    @abstractmethod
    def add_array(self, array: AnyArray) -> None:
        """Collective or Local as `assign`. Add an array that `coerce` has made."""

    @abstractmethod
    def state(self) -> AnyArray:
        """Collective. The array of `shape` that a checkpoint stores; do not change it.

        It is the same on every rank or, where `is_per_replica`, this rank's component.
        """

    @abstractmethod
    def load(self, read: Read) -> None:
        """Collective. Set the value to an array that `state` once gave, on any number of ranks.

        Args:
            read: `read(start, stop)` gives the elements [start, stop) of the flattened array (where `is_per_replica`,
                of this rank's component). Each rank asks only for the elements that it writes.
        """

    def numpy(self) -> AnyArray:
        """A copy of `value()` in host memory; Local or Collective as that is."""
        value = self.value()
        return arrays.to_host(value) if arrays.is_cupy(value) else np.array(value)

    def read_value(self) -> AnyArray:
        """The same as `numpy()`."""
        return self.numpy()

    @property
    def ndim(self) -> int:
        """Local. Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Local. Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def coerce(self, value: npt.ArrayLike) -> AnyArray:
        """Local. `value` as an array of this variable's shape and dtype.

        Raises:
            ValueError: Another shape.
            TypeError: A dtype that does not cast.
            OverflowError: A Python number that the dtype cannot hold.
        """
        array = arrays.as_array(value)
        if array.shape != self.shape:
            raise ValueError(f"variable {self.name!r}: expected a value of shape {self.shape}, got {array.shape}")
        if array.dtype == self.dtype:
            return array
        # A Python number takes the variable's dtype, as in NumPy's own arithmetic.
        if isinstance(value, (bool, int, float, complex)) and _weak_cast(array.dtype.kind, self.dtype.kind):
            return np.asarray(value, self.dtype)
        if not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise TypeError(
                f"variable {self.name!r}: expected a value of dtype {self.dtype}, got {array.dtype}; convert it by "
                f".astype({self.dtype.name!r}) if that is meant"
            )
        return array.astype(self.dtype)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> AnyArray:
        if copy is False and (dtype is None or np.dtype(dtype) == self.dtype):
            return arrays.to_host(self.value())
        return np.array(arrays.to_host(self.value()), dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # `np.add.at` and the like were seen to write even to read-only arrays: a variable must refuse them.
        written = inputs[:1] if method == "at" else kwargs.get("out", ())
        if any(isinstance(target, Variable) for target in written):
            raise TypeError(
                f"variable {self.name!r} cannot be written by `+=` and the like, by `out=` or by `.at`: "
                "use assign, assign_add or assign_sub"
            )
        plain = [x.value() if isinstance(x, Variable) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.value()[key]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a variable without dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __float__(self) -> float:
        return float(self.value())

    def __reduce__(self) -> NoReturn:
        # A copy would share this variable's memory, which another variable takes once this one is gone.
        raise TypeError(
            f"variable {self.name!r} cannot be copied or pickled: `mpidist.Variable(v)` in the strategy's scope makes "
            "another one with its value, `v.numpy()` gives the value"
        )

    def __hash__(self) -> int:
        # Variables are told apart by identity, although `==` compares values element by element.
        return id(self)


def _weak_cast(have: str, want: str) -> bool:
    order = "biufc"
    return have in order and want in order and order.index(have) <= order.index(want)


def default_array(value: Any, dtype: npt.DTypeLike | None = None) -> AnyArray:
    """Local. An initial value as an array: Python floats become float32 and ints int32, arrays keep their dtype."""
    array = value.value() if isinstance(value, Variable) else arrays.as_array(value)
    if dtype is not None:
        return array.astype(dtype)
    if isinstance(value, (np.ndarray, np.generic, Variable)) or arrays.is_cupy(value):
        return array
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype == np.int64 and array.size and array.min() >= -(2**31) and array.max() < 2**31:
        return array.astype(np.int32)
    return array


def in_replica_context() -> bool:
    """Local. Whether this thread runs inside `run` of some strategy."""
    entry = context.innermost()
    return entry is not None and entry.replica_context is not None
