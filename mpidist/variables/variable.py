"""The variable, an array with a policy for writes and reads, and its home, which makes it: each names the other."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from mpidist import arrays
from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import Resource
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.recorder.calls import Calls
from mpidist.variables.array_like import ArrayLike
from mpidist.variables.coercion import coerced
from mpidist.variables.scatter import Scatter
from mpidist.variables.whole_numbers import SUBTRACT

if TYPE_CHECKING:
    from mpidist.variables.update.arithmetic import UpdateSettings
    from mpidist.variables.update.kernel import Kernel, LayerKernel
    from mpidist.variables.update.options import OptimizerOptions

Read = Callable[[int, int], AnyArray]
Gradient = npt.ArrayLike | IndexedSlices


class BaseVariable(ArrayLike, Scatter, ABC):
    """An array that is written by `assign` and read like a NumPy array.

    Arithmetic, NumPy functions, comparison and indexing work on the value and give plain arrays.

    Attributes:
        name: A name for display and errors; it need not be unique.
        shape: The shape of the value, which never changes.
        dtype: The dtype of the value, which never changes.
        trainable: Whether `trainable_variables` lists it.
        synchronization: ON_WRITE or ON_READ.
        aggregation: The way to combine the replicas' values.
        home: The home of its strategy's variables.
        sparse_gradient: Whether its gradients are `IndexedSlices`; see `mpidist.Variable`.
        is_per_replica: Whether there is no common value: each replica's component is saved and restored by itself.
        bounds: The limits of the parts, where each rank of the group can read only some: part i has the elements
            [bounds[i], bounds[i + 1]) of the flattened array. None where every rank can read all.
        owners: The rank of each part; it may have several. Part 0 is rank 0's. None: part r is rank r's.
        number: Its number among the variables of its home, the same on every rank; None where they have no numbers.
        restored_by: Number of the restore that last set it. Waiting values of earlier restores do not set it again.
        saved_as: Its path in the checkpoint last restored into it, where its optimizer state is found; empty if none.
    """

    home: Home
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    trainable: bool
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    is_per_replica: bool = False
    sparse_gradient: bool = False
    bounds: tuple[int, ...] | None = None
    owners: tuple[int, ...] | None = None
    number: int | str | None = None
    restored_by: int = 0
    saved_as: str = ""

    @property
    def saved_dtype(self) -> np.dtype[Any]:
        """Local. The dtype of the elements that `reader` reads."""
        return self.dtype

    @property
    def group(self) -> Communicator:
        """Local. The ranks that have the variable."""
        return self.home.communicator

    @property
    def calls(self) -> Calls:
        """Local. The record of these ranks' collective calls."""
        return self.group.calls

    @property
    def distribute_strategy(self) -> Any:
        """Local. The strategy in whose scope the variable was made, None without one."""
        return self.home.strategy

    @property
    def device(self) -> str:
        """Local. The place of the value: host memory, or one of the visible GPUs."""
        return "/device:CPU:0"

    @abstractmethod
    def value(self) -> AnyArray:
        """Local, or Collective for ON_READ variables in cross-replica context. The value, a read-only array of `shape`.

        On a GPU it is a CuPy array; do not write to it. For an ON_WRITE variable it is a live view, valid until the
        next write or optimizer step; for an ON_READ variable in cross-replica context the aggregate over the replicas.
        """

    def assign(
        self, value: npt.ArrayLike, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> BaseVariable:
        """Collective for ON_WRITE variables, and in cross-replica context; else Local. Set the value.

        In cross-replica context the first replica's value counts (under `CommunicationOptions(check=True)` differing
        values are an error); in replica context the replicas' values are aggregated first.

        Args:
            value: An array of the variable's shape, of a dtype that NumPy's "same_kind" rule casts to the variable's.
            use_locking: Kept for code written for tf.distribute; it changes nothing.
            name: Kept for code written for tf.distribute; it changes nothing.
            read_value: Kept for code written for tf.distribute; the variable is returned in any case.

        Returns:
            The variable.

        Raises:
            ValueError: `value` has another shape.
            TypeError: The dtype of `value` does not cast.
            OverflowError: The variable's dtype does not hold an integer of `value`.
        """
        self.write_array(self.coerce(value))
        return self

    def assign_add(
        self, delta: npt.ArrayLike, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> BaseVariable:
        """Collective or Local as `assign`. Add to the value, once, whatever the number of replicas.

        Raises:
            ValueError: See `assign`; in cross-replica context also for an ON_READ variable with aggregation SUM, which
                would add `delta` once for each replica.
            TypeError: See `assign`.
            OverflowError: See `assign`; also where a sum of integers does not fit. Collective calls raise it on every
                rank, and change nothing then.
        """
        self.add_array(self.coerce(delta))
        return self

    def assign_sub(
        self, delta: npt.ArrayLike, use_locking: bool = False, name: str | None = None, read_value: bool = True
    ) -> BaseVariable:
        """Collective or Local as `assign`. Subtract from the value; see `assign_add`.

        Raises:
            ValueError, OverflowError: See `assign_add`.
            TypeError: See `assign`; also for a variable of booleans.
        """
        if self.dtype.kind == "b":
            raise TypeError(
                f"variable {self.name!r}: assign_sub is not defined for booleans. Use assign, for instance with "
                "np.logical_xor(variable, delta)"
            )
        self.add_array(np.negative(self.coerce(delta)), SUBTRACT)
        return self

    @abstractmethod
    def write_array(self, array: AnyArray) -> None:
        """Collective or Local as `assign`. Set the value to an array that `coerce` has made."""

    @abstractmethod
    def add_array(self, array: AnyArray, method: str = "assign_add") -> None:
        """Collective or Local as `assign`. Add an array that `coerce` has made.

        Args:
            array: The array; under `whole_numbers.SUBTRACT` the negative of what is subtracted.
            method: The name of the method that the program has called, for errors.
        """

    @abstractmethod
    def reader(self) -> Read:
        """Collective. Open for reading what a checkpoint stores, for `load`.

        Returns:
            A Local function: `read(start, stop)` gives the elements [start, stop) of the flattened array in host
            memory; do not change them. They are the same on every rank or, where `is_per_replica`, of this rank's
            component. A rank may read any of them or, where there are `bounds`, those of its parts.
        """

    @abstractmethod
    def load(self, read: Read) -> None:
        """Collective. Set the value to an array that `reader` once gave, on any number of ranks.

        Args:
            read: A function: `read(start, stop)` returns the elements [start, stop) of the flattened array (where
                `is_per_replica`, of this rank's component). Each rank asks only for the elements that it writes.
        """

    def numpy(self) -> AnyArray:
        """Local or Collective, as `value()` is. A copy of the value in host memory."""
        value = self.value()
        return arrays.to_host(value) if arrays.is_cupy(value) else np.array(value)

    def read_value(self) -> AnyArray:
        """Local or Collective, as `value()` is. The same as `numpy()`."""
        return self.numpy()

    def read_rows(self, rows: AnyArray) -> AnyArray:
        """Local or Collective, as `value()` is. See `Scatter.read_rows`."""
        value = self.value()
        found: AnyArray = value[arrays.move(rows, arrays.namespace(value))]
        return found

    @property
    def parts(self) -> tuple[BaseVariable, ...]:
        """Local. The variables of which each is on one server: this variable, or its shards."""
        return (self,)

    @property
    def whole(self) -> BaseVariable:
        """Local. The variable of which this one is a part, or itself."""
        return self

    @property
    def ndim(self) -> int:
        """Local. Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Local. Number of elements."""
        return int(math.prod(self.shape))

    def coerce(self, value: npt.ArrayLike) -> AnyArray:
        """Local. `value` as an array of this variable's shape and dtype.

        Raises:
            ValueError: `value` has another shape.
            TypeError: The dtype of `value` does not cast.
            OverflowError: The dtype cannot hold an integer of `value`.
        """
        return coerced(self.name, self.shape, self.dtype, value)


# One kind of an optimizer's state: of all variables in order, or of some by number.
Slot: TypeAlias = Sequence[BaseVariable] | Mapping[int, BaseVariable]


def by_number(slot: Slot) -> Mapping[int, BaseVariable]:
    """Local. A slot by the numbers of the optimizer's variables."""
    return slot if isinstance(slot, Mapping) else dict(enumerate(slot))


class UpdatePlan(Protocol):
    """The part of a home that serves one optimizer: gradients and state of its variables, and its updates.

    Variables are numbered in the order of the list that the plan was made for; lists of state have the same order.
    """

    @property
    def variables(self) -> Sequence[BaseVariable]:
        """Local. The variables in their order."""

    @property
    def slots(self) -> Mapping[str, Slot]:
        """Local. The state by name."""

    def during(self) -> AbstractContextManager[object]:
        """Local. Surround an update and what is counted with it: an interrupt waits for the end, on all ranks."""

    def gradient(self, number: int) -> AnyArray:
        """Local. A writable view in the shape of a variable with dense gradients; `apply` does not copy it."""

    def accumulate(self, gradients: Mapping[int, Gradient], factor: float, *, is_summed: bool) -> None:
        """Local. Keep gradients for the next `apply`; only under `gradient_accumulation_steps`.

        Args:
            gradients: This replica's gradients, by the numbers of their variables.
            factor: The factor of the gradients.
            is_summed: Whether the gradients are the sums over all replicas already.
        """
        ...

    def apply(self, gradients: Mapping[int, Gradient], settings: UpdateSettings) -> bool:
        """Collective. Sum gradients over all replicas, with those accumulated, and update the variables and the state.

        Args:
            gradients: This replica's gradients, by the numbers of their variables.
            settings: The settings of this update.

        Returns:
            False, on every replica, if a gradient was not finite and nothing was updated; else True.
        """
        ...

    def flush(self, count: int, settings: UpdateSettings) -> bool:
        """Collective. As `apply`, of the mean over `count` accumulated calls, which ranks compare; for 0 nothing."""

    def take_average(self, numbers: tuple[int, ...], moves: int = 0) -> None:
        """Collective. Set variables to their moving average after `moves` further steps of it; only under `use_ema`."""

    def state(self) -> dict[str, Any]:
        """Local. The tree of what a checkpoint stores besides `slots`.

        Under `gradient_accumulation_steps` every home uses the same names, see `update.options`, so that one can take
        over from another: sums are ON_READ variables in `slots[ACCUMULATED]`, and `ACCUMULATES` is 1 for each variable
        that has one.
        """
        ...

    def load(self, saved: Mapping[str, Any]) -> None:
        """Collective. Take back what `state` once gave, on any number of ranks; names that are not its own are ignored.

        Raises:
            CheckpointError: The state does not fit the plan.
        """
        ...


@runtime_checkable
class Home(Resource, Protocol):
    """The place of one strategy's variables. It makes them and plans their updates. The strategy closes it.

    Attributes:
        communicator: The ranks that have the variables, and save them together.
        strategy: The strategy of the variables, None without one.
        strategy_number: Its number among those on the same ranks; 0 where these are not numbered.
        saves_once: Whether several groups have the variables, and one of them saves them for all.
    """

    communicator: Communicator
    strategy: Any
    strategy_number: int = 0
    saves_once: bool = False

    def create_variable(  # tf.Variable's arguments
        self,
        initial_value: npt.ArrayLike | BaseVariable | Callable[[], npt.ArrayLike],
        *,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        trainable: bool | None = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
        sparse_gradient: bool = False,
    ) -> BaseVariable:
        """Collective. Make a variable; its value is the first replica's. See `mpidist.Variable`.

        A `name` that is given must be the same on every rank.

        Returns:
            The variable; for ON_READ an `on_read.OnReadVariable`.
        """

    def plan(
        self, variables: Sequence[BaseVariable], kernel: Kernel | LayerKernel, options: OptimizerOptions
    ) -> UpdatePlan:
        """Collective. Reserve gradients and state for the variables of an optimizer.

        Args:
            variables: ON_WRITE variables of this home, each once, the same list on every rank.
            kernel: The optimizer's arithmetic.
            options: The options of the optimizer.

        Raises:
            MismatchError: The lists differ between ranks.
        """

    def set_strategy(self, strategy: object) -> None:
        """Local. Take the strategy that has been made over this home; called once, by its constructor."""
        self.strategy = strategy

    def after_run(self) -> None:
        """Collective. Called under `CommunicationOptions(check=True)` when a replica has come back from `run`."""
        return

    def save_once(self, write: Callable[[Mapping[int, Any]], float], told: object) -> float:
        """Collective. Under `saves_once`, call `write`, which saves variables, in one group; it gets what all told."""
        return write({0: told})

    def colocated(self, variable: BaseVariable) -> AbstractContextManager[None]:
        """Local. A context that makes new variables where this one of the home is; in a home of one place, nothing."""
        return nullcontext()


def common_home(variables: Sequence[BaseVariable]) -> Home:
    """Local. The one home of all these variables.

    Raises:
        ValueError: There are no variables, they are of several homes, or one occurs twice.
    """
    if not variables:
        raise ValueError("an optimizer needs at least one variable, got an empty list")
    if len(set(variables)) < len(variables):
        raise ValueError(f"a variable appears twice in the list {[v.name for v in variables]}")
    home = variables[0].home
    for variable in variables:
        if variable.home is not home:
            raise ValueError(
                f"variables {variables[0].name!r} and {variable.name!r} belong to different strategies: create all "
                "variables of a model in the scope of one strategy"
            )
    return home
