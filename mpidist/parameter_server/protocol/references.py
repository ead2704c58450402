"""Handles: objects that functions and arguments name are sent by a name, and not by their content."""

from __future__ import annotations

import contextlib
import io
import pickle
import reprlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FunctionType
from typing import Any, cast

import cloudpickle
import numpy as np

from mpidist.variables.kinds.served import ServedHome, ServedPlace, ServedSum, ServedVariable
from mpidist.variables.kinds.sharded import ShardedVariable

# A picklable name of an object, None for an object that is sent by its content.
HandleOf = Callable[[object], tuple[Any, ...] | None]


# Nothing in them has a handle.
_PLAIN = frozenset({
    type(None), bool, int, float, complex, str, bytes, np.bool_, np.int32, np.int64, np.float32, np.float64,
})
# Deeper nests are looked at by the pickler, which knows circles.
_DEPTH = 8

# Larger arguments are not loaded for a text.
_LABELLED_BYTES = 1 << 16

# Those that were sent, by identity.
_CLASSES: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()


def _code_of(file: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    """The code of a function, with the file that tracebacks and reports name."""
    return make(*arguments).replace(co_filename=file)


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    # Since version 3.1.3 cloudpickle calls every file <dynamic-code>.
    return _code_of, (code.co_filename, *cloudpickle.Pickler.dispatch_table[CodeType](code))


class _CodePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Sends functions by their code where they cannot be imported."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({CodeType: _reduce_code})

    def __init__(self, file: io.BytesIO, handle_of: HandleOf) -> None:
        super().__init__(file)
        self._handle_of = handle_of

    def persistent_id(self, given: object) -> tuple[Any, ...] | None:
        """Local. See `pickle.Pickler.persistent_id`."""
        return self._handle_of(given)

    def reducer_override(self, given: object) -> Any:
        """Local. See `pickle.Pickler.reducer_override`."""
        reduced = super().reducer_override(given)
        slots = vars(given).get("__slots__") if isinstance(given, type) else None
        if slots and isinstance(reduced, tuple):
            # cloudpickle makes a class without slots of it, and the class here does not take the objects of that one.
            kind, *parts = reduced[1]
            if kind is type(given):
                parts[2].setdefault("__slots__", slots)
        return reduced


class _PlainPickler(pickle.Pickler):
    """A smaller and faster pickler, for data without functions."""

    def __init__(self, file: io.BytesIO, handle_of: HandleOf) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._handle_of = handle_of

    def persistent_id(self, given: object) -> tuple[Any, ...] | None:
        """Local. See `pickle.Pickler.persistent_id`."""
        return self._handle_of(given)

    def reducer_override(self, given: object) -> Any:
        """Local. Refuse functions and classes of the program itself; see `pickle.Pickler.reducer_override`.

        Workers serve inside the strategy's constructor: they have not run the lines below it.
        """
        if isinstance(given, (type, FunctionType)) and given.__module__ == "__main__":
            raise pickle.PicklingError(f"{given.__qualname__} is the program's own")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, find: Callable[[tuple[Any, ...]], Any]) -> None:
        super().__init__(file)
        self._find = find

    def persistent_load(self, handle: tuple[Any, ...]) -> Any:
        return self._find(handle)


def handle_of_variable(given: object) -> tuple[Any, ...] | None:
    """Local. The handle of a variable on servers, None for anything else."""
    if isinstance(given, ShardedVariable):
        return "sharded", given.key
    return ("variable", given.place.number) if isinstance(given, ServedVariable) else None


def handle_of_class(given: type) -> tuple[Any, ...]:
    """Local. The handle of a class in a process that is also its worker.

    Sent by its content it would come back as the same class, but with new methods, whose globals are copies.
    """
    _CLASSES[id(given)] = given
    return "class", id(given)


def class_of(number: int) -> type:
    """Local. The class of a handle."""
    return _CLASSES[number]


def describing_handle_of(given: object) -> tuple[Any, ...] | None:
    """Local. A handle that describes the variable itself, for receivers that may not have its description."""
    handle = handle_of_variable(given)
    if isinstance(given, (ServedVariable, ShardedVariable)) and handle is not None:
        return (*handle, *describe_variable(given))
    return handle


def describe_variable(variable: ServedVariable | ShardedVariable) -> tuple[Any, ...]:
    """Local. The arguments of `variable_of` without the home; for a `ShardedVariable` those of its constructor."""
    if isinstance(variable, ShardedVariable):
        return variable.variables, variable.name
    return tuple(variable.place), variable.name, variable.trainable, isinstance(variable, ServedSum)


def variable_of(
    home: ServedHome, place: tuple[Any, ...], name: str, trainable: bool, is_sum: bool
) -> ServedVariable:
    """Local. A variable that was described on another process.

    Args:
        home: The home of this process.
        place: See `ServedPlace`.
        name: The name of the variable.
        trainable: Whether the variable is trainable.
        is_sum: Whether it is the variable of a metric.
    """
    return (ServedSum if is_sum else ServedVariable)(home, ServedPlace(*place), name=name, trainable=trainable)


def dump_function(function: Callable[..., Any], handle_of: HandleOf) -> bytes:
    """Local. A function, with the objects that it captures, as bytes.

    Raises:
        TypeError: It captures an object that cannot be sent.
    """
    file = io.BytesIO()
    _CodePickler(file, handle_of).dump(function)
    return file.getvalue()


def _is_plain(given: object, depth: int = _DEPTH) -> bool:
    """Whether nothing in an object has a handle, or is the program's own: numbers, texts, arrays and nests of them."""
    kind = type(given)
    if kind in _PLAIN:
        return True
    if isinstance(given, np.ndarray):
        return kind is np.ndarray and given.dtype.kind in "biufc" and not given.dtype.metadata
    if kind is tuple or kind is list or kind is dict:
        inner: Iterable[object] = given.items() if isinstance(given, dict) else cast(Iterable[object], given)
        return depth > 0 and all(_is_plain(one, depth - 1) for one in inner)
    return False


def dump_arguments(arguments: object, handle_of: HandleOf) -> bytes:
    """Local. Arguments, by plain pickle where that is possible.

    Raises:
        TypeError: An argument cannot be sent.
    """
    if _is_plain(arguments):
        # A call of Python for each object would take most of the time.
        return pickle.dumps(arguments, pickle.HIGHEST_PROTOCOL)
    file = io.BytesIO()
    try:
        _PlainPickler(file, handle_of).dump(arguments)
    except (pickle.PicklingError, AttributeError, TypeError):
        # A function without a name, for instance. What cannot be sent at all raises again.
        file = io.BytesIO()
        _CodePickler(file, handle_of).dump(arguments)
    return file.getvalue()


def dump_result(result: object) -> bytes:
    """Local. The result of a function, as it is sent to the coordinator.

    Raises:
        TypeError: It cannot be sent.
    """
    try:
        return dump_arguments(result, describing_handle_of)
    except Exception as error:
        raise TypeError(
            f"the function has returned a value that cannot be sent to the coordinator: {error}. Return arrays, "
            "numbers, or nests of them; a value that must stay on the worker is made by create_per_worker_value"
        ) from error


def with_inputs(arguments: bytes, inputs: Sequence[bytes]) -> bytes:
    """Local. Arguments with the results that they take, whose handles are `("input", place)`.

    Args:
        arguments: See `dump_arguments`.
        inputs: The dumped results, in the order of their places.
    """
    return pickle.dumps(list(inputs)) + arguments


def arguments_label(arguments: bytes) -> str:
    """Local. Dumped arguments in words, as in a call: "(3, rate=0.5)"; never all of an array or a list.

    Args:
        arguments: The dumped tuple and dictionary of arguments; see `dump_arguments`.
    """
    if len(arguments) > _LABELLED_BYTES:
        return f"(... {len(arguments)} bytes of arguments)"
    # Objects of the program may raise whatever they like.
    with contextlib.suppress(Exception):
        given, named = load(arguments, _Named)
        texts = [_shown(one) for one in given] + [f"{name}={_shown(one)}" for name, one in named.items()]
        return f"({', '.join(texts)})"
    return "(...)"


class _Named:
    """A named object in a text about arguments."""

    def __init__(self, handle: tuple[Any, ...]) -> None:
        self._kind = handle[0]

    def __repr__(self) -> str:
        return f"<{self._kind}>"


def _shown(given: object) -> str:
    if isinstance(given, np.ndarray) and given.ndim:
        return f"<array of shape {given.shape} and dtype {given.dtype}>"
    return reprlib.repr(given)


def load(data: bytes, find: Callable[[tuple[Any, ...]], Any]) -> Any:
    """Local. Load dumped data in another process.

    Args:
        data: The data of one of the functions above.
        find: A function that returns the object of a handle.
    """
    file = io.BytesIO(data)
    loaded = _Unpickler(file, find).load()
    if file.tell() == len(data):
        return loaded
    inputs = [load(one, find) for one in loaded]
    return _Unpickler(file, lambda handle: inputs[handle[1]] if handle[0] == "input" else find(handle)).load()
