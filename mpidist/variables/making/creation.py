"""The creation of a variable of the right kind in an arena, with tf.Variable's arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from mpidist import arrays
from mpidist.arguments import flag
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import named_dtype
from mpidist.comm.group.agreement import exchange, require_same
from mpidist.options import VariableAggregation, VariableSynchronization, parse_enum
from mpidist.variables.coercion import default_array
from mpidist.variables.kinds.mirrored import MirroredVariable, create_mirrored
from mpidist.variables.kinds.sync_on_read import SyncOnReadVariable
from mpidist.variables.memory.arena_memory import SAME_MODEL, ArenaMemory
from mpidist.variables.variable import BaseVariable


def create_variable(  # noqa: PLR0913  # tf.Variable's arguments
    arena: ArenaMemory,
    initial_value: npt.ArrayLike | BaseVariable | Callable[[], npt.ArrayLike],
    *,
    name: str | None = None,
    dtype: npt.DTypeLike | None = None,
    trainable: bool | None = None,
    synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
    aggregation: VariableAggregation | str = VariableAggregation.NONE,
    sparse_gradient: bool = False,
    kind: Callable[..., MirroredVariable] = MirroredVariable,
) -> BaseVariable:
    """Collective. Create a variable over the arena's ranks; its value is the first replica's.

    Args:
        arena: The arena of the variable.
        initial_value: An array, a number, nested lists, or a function without arguments that gives one.
        name: A name for display and errors; default "Variable". If it is given it must be the same on every rank:
            variables of one shape that some ranks make in another order would be read swapped. Default names are not
            compared.
        dtype: The dtype. Default: of an array its own; Python floats become float32, ints int32.
        trainable: Default: True for ON_WRITE; False for ON_READ, which cannot be trained.
        synchronization: AUTO is ON_WRITE.
        aggregation: How replicas' values are combined.
        sparse_gradient: Whether its gradients are `IndexedSlices`; see `mpidist.Variable`.
        kind: A function that makes an ON_WRITE variable; it takes the arguments of `MirroredVariable`.

    Returns:
        The variable.

    Raises:
        ValueError: The synchronization does not exist or is NONE; MEAN of a dtype that has no fractions; sparse
            gradients of a scalar or of an ON_READ variable; a trainable ON_READ variable, or one of booleans with SUM.
        TypeError: The initial value is no array of numbers, or an argument has another type.
        MismatchError: Shape, dtype, a name that was given, or another argument but the value differs between ranks.
    """
    given_name = name
    name = "Variable" if name is None else name
    traits: Traits | None = None
    initial: AnyArray | None = None
    error: Exception | None = None
    try:
        traits = traits_of(f"variable {name!r}: ", trainable, synchronization, aggregation, sparse_gradient)
        initial = initial_array(
            initial_value, dtype, name, traits.aggregation, has_rows=traits.sparse_gradient,
            is_on_read=traits.is_on_read,
        )
    except Exception as caught:
        error = caught
    _agree(arena, name, given_name, traits, initial, error)
    traits, initial = cast(Traits, traits), cast(AnyArray, initial)
    arena.require_open()
    if traits.is_on_read:
        return SyncOnReadVariable(arena, initial, name=name, aggregation=traits.aggregation)
    make = partial(
        kind, name=name, trainable=traits.trainable, aggregation=traits.aggregation,
        sparse_gradient=traits.sparse_gradient,
    )
    return create_mirrored(arena, initial, arena.place(initial.shape, initial.dtype), make)


def _agree(
    arena: ArenaMemory, name: str, given_name: str | None, traits: Traits | None, initial: AnyArray | None,
    error: Exception | None,
) -> None:
    """Collective. One round in which the ranks compare all that must be the same, and learn which memory is free."""
    mine = None
    if traits is not None and initial is not None:
        # Plain values, which are pickled in a tenth of the time of the objects.
        kind = traits.is_on_read, traits.aggregation.name, traits.trainable, traits.sparse_gradient
        mine = given_name, kind, (initial.shape, initial.dtype.name)
    released = arena.take_released()
    try:
        everyone = exchange(
            arena.communicator, f"computing the initial value of variable {name!r}", (mine, released), error
        )
    except BaseException:
        arena.give_back_released(released)
        raise
    arena.reuse([numbers for _, numbers in everyone])
    theirs = [cast(Any, given) for given, _ in everyone]
    if theirs.count(theirs[0]) == len(theirs):
        return
    require_same(
        [given for given, *_ in theirs], "the name of a variable",
        "Make variables in the same order on every rank: it may be a `set` that has another order in each process.",
    )
    require_same(
        [Traits(kind[0], VariableAggregation[kind[1]], *kind[2:]) for _, kind, _ in theirs],
        f"the arguments of variable {name!r}", "Build the same model on every rank.",
    )
    require_same([what for *_, what in theirs], f"shape and dtype of variable {name!r}", SAME_MODEL)


class Traits(NamedTuple):
    """The kind of a variable, without its value: the same on every rank."""

    is_on_read: bool
    aggregation: VariableAggregation
    trainable: bool
    sparse_gradient: bool

    def __repr__(self) -> str:
        kind = "ON_READ" if self.is_on_read else "ON_WRITE"
        return (
            f"({kind}, {self.aggregation.name}, trainable={self.trainable}, sparse_gradient={self.sparse_gradient})"
        )


def traits_of(
    owner: str, trainable: bool | None, synchronization: VariableSynchronization | str,
    aggregation: VariableAggregation | str, sparse_gradient: bool,
) -> Traits:
    """Local. The kind of a variable, by the arguments of `mpidist.Variable`.

    Args:
        owner: The beginning of errors: "variable 'w': ".
        trainable: See `create_variable`.
        synchronization: AUTO is ON_WRITE.
        aggregation: How replicas' values are combined.
        sparse_gradient: Whether its gradients are `IndexedSlices`.

    Raises:
        ValueError: There is no such synchronization or aggregation, or the arguments contradict each other.
        TypeError: An argument has another type.
    """
    sync = parse_enum(VariableSynchronization, synchronization, "synchronization", owner)
    chosen = parse_enum(VariableAggregation, aggregation, "aggregation", owner)
    is_sparse = flag("sparse_gradient", sparse_gradient, owner=owner)
    trains = None if trainable is None else flag("trainable", trainable, owner=owner)
    if sync is VariableSynchronization.NONE:
        raise ValueError(
            f"{owner}synchronization NONE is not supported with a strategy; use ON_WRITE or ON_READ"
        )
    is_on_read = sync is VariableSynchronization.ON_READ
    if is_on_read and trains:
        raise ValueError(
            f"{owner}trainable=True is for variables that optimizers update, which are ON_WRITE, got ON_READ; leave "
            "it out"
        )
    if is_on_read and is_sparse:
        raise ValueError(
            f"{owner}sparse_gradient=True is for variables that optimizers update, which are ON_WRITE, got "
            "ON_READ; leave it out"
        )
    return Traits(is_on_read, chosen, not is_on_read and trains is not False, is_sparse)


def initial_array(
    value: Any, dtype: npt.DTypeLike | None, name: str, aggregation: VariableAggregation, *, has_rows: bool,
    is_on_read: bool = False,
) -> AnyArray:
    """Local. An initial value as a whole array in the machine's byte order, if it fits a variable of this kind.

    Args:
        value: An array, a number, nested lists, or a function without arguments that gives one.
        dtype: Default: see `default_array`.
        name: The name of the variable, for the errors.
        aggregation: The aggregation of the variable.
        has_rows: Whether its gradients are rows.
        is_on_read: Whether reading it aggregates.

    Raises:
        ValueError: MEAN of a dtype that has no fractions, SUM of booleans on reading, or rows of a scalar.
        TypeError: The value is no array of numbers.
    """
    try:
        dtype = None if dtype is None else named_dtype(dtype)
    except (TypeError, ValueError):
        raise TypeError(f"variable {name!r}: `dtype` must be a dtype, for instance 'float32', got {dtype!r}") from None
    try:
        given = value() if callable(value) else value
        array = default_array(given.value() if isinstance(given, BaseVariable) else given, dtype)
    except OverflowError as error:
        raise OverflowError(f"initial value of variable {name!r}: {error}") from None
    # The dtypes of ml_dtypes have the kind V, too, and types of their own.
    if array.dtype.kind not in "biufcV" or array.dtype.type is np.void:
        raise TypeError(
            f"expected an array of numbers as initial value of variable {name!r}, got dtype {array.dtype} "
            f"from {type(value).__name__}"
        )
    if aggregation is VariableAggregation.MEAN and array.dtype.kind in "iub":
        raise ValueError(
            f"variable {name!r}: aggregation MEAN needs a floating dtype, got {array.dtype}; use dtype='float32'"
        )
    if is_on_read and aggregation is VariableAggregation.SUM and array.dtype.kind == "b":
        raise ValueError(
            f"variable {name!r}: ON_READ with aggregation SUM cannot be read as {array.dtype}, whose sum is not "
            "defined; use dtype='int32', or aggregation ONLY_FIRST_REPLICA"
        )
    if has_rows and not array.shape:
        raise ValueError(
            f"variable {name!r}: sparse_gradient=True is for variables of at least one dimension, got a scalar; leave "
            "it out"
        )
    # Arrays from files may have another byte order; slabs and MPI know only the machine's own.
    return cast(AnyArray, arrays.namespace(array).asarray(array, array.dtype.newbyteorder("="), order="C"))
