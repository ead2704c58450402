"""Functions and datasets as they are sent to workers: once each, with names for what is on servers and workers."""

from __future__ import annotations

import ctypes
import io
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mpidist.arguments import described
from mpidist.comm.group.resource import Resource
from mpidist.coordinator.captured import Use, Uses, captured, identity
from mpidist.coordinator.remote_value import PerWorkerValues, RemoteValue
from mpidist.data.dataset import Dataset
from mpidist.parameter_server.protocol.references import HandleOf, dump_arguments, dump_function
from mpidist.parameter_server.queue.work import Name, Work
from mpidist.recorder.recorder import name_of_function

# The largest number of functions, and their bytes, that are kept for the next use.
_MOST_FUNCTIONS = 256
_MOST_BYTES = 64 << 20


class Naming(NamedTuple):
    """The naming of objects.

    Attributes:
        handle_of: A function that returns the handle of an object, or None for an object that is sent by its content.
            It raises TypeError for an object that must not be sent.
        name_of: A function that returns the names that a worker must have received before the handle of an object, in
            order.
        note_drop: Lets workers discard a function when the object that represents it is dropped.
    """

    handle_of: HandleOf
    name_of: Callable[[object], tuple[Name, ...]]
    note_drop: Callable[[object, str, int], None]


class _NoValueError(Exception):
    """Carries the error of a function whose result is used by what is to be sent."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class _SentDataset(NamedTuple):
    """A dataset that was sent.

    Attributes:
        number: The number of the dataset.
        names: The names that a worker must have received; its own is the last.
        held: The objects that it captures.
    """

    number: int
    names: tuple[Name, ...]
    held: list[object]


class _Function:
    """A function that was sent, and what it captures."""

    def __init__(
        self, fn: Callable[..., Any], name: Name, captured: tuple[Name, ...], held: list[object], parts: list[object]
    ) -> None:
        # They stay alive, so that nothing else gets their identity.
        self.fn = fn
        self.parts = parts
        self.name = name
        self.captured = captured
        self.held = held
        self.uses = Uses(fn)
        self.label = name_of_function(fn)


def arguments_of(
    fn: object, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Local. The arguments of a function as a tuple and a dictionary.

    Args:
        fn: The function.
        args: None for none.
        kwargs: None for none.

    Raises:
        TypeError: `fn` cannot be called, `args` is no tuple or list, or `kwargs` no dictionary with names as keys.
    """
    if not callable(fn):
        raise TypeError(f"`fn` must be a function, got {described(fn)}")
    if args is not None and not isinstance(args, (tuple, list)):
        raise TypeError(f"`args` must be a tuple of the function's arguments, as args=(value,), got {described(args)}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"`kwargs` must be a dictionary of the function's arguments, got {described(kwargs)}")
    if wrong := [name for name in kwargs or () if not isinstance(name, str)]:
        raise TypeError(f"`kwargs` must have the names of the function's arguments as keys, got {described(wrong[0])}")
    return tuple(args or ()), dict(kwargs or {})


class SentFunctions:
    """The functions that were sent, by their identities.

    Args:
        naming: The naming of objects.
    """

    def __init__(self, naming: Naming) -> None:
        self._naming = naming
        self._kept: OrderedDict[tuple[Any, ...], _Function] = OrderedDict()
        self._datasets: weakref.WeakKeyDictionary[Dataset, _SentDataset] = weakref.WeakKeyDictionary()
        self._bytes = 0
        # The number of functions and datasets.
        self._count = 0
        # The names of functions, and of what has changed: that was said.
        self._said: set[tuple[str, str]] = set()

    def work(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Work, list[int]]:
        """Local. The call for a worker, and the closures whose results the arguments take.

        Raises:
            TypeError: Something cannot be sent.
        """
        function = self._function(fn)
        held: list[object] = []
        inputs: dict[int, int] = {}
        try:
            arguments = dump_arguments((args, kwargs), self._holding(held, inputs))
        except _NoValueError as error:
            raise error.error from None
        except Exception as error:
            places = [*((f"argument {number}", given) for number, given in enumerate(args)),
                      *((f"argument {name!r}", given) for name, given in kwargs.items())]
            raise self._blame(fn, places, "is given", error) from error
        data = tuple(sorted({
            one.number for one in (*function.held, *held) if isinstance(one, PerWorkerValues) and one.is_iterator
        }))
        names = self._names(held) if held else ()
        work = Work(function.name, arguments, function.captured, names, (function, *held), data, function.label)
        return work, [*inputs]

    def forget(self) -> None:
        """Local. Keep no function for its next use."""
        self._kept.clear()
        self._bytes = 0

    def _function(self, fn: Callable[..., Any]) -> _Function:
        key, parts = identity(fn)
        function = self._kept.get(key)
        if function is not None:
            changed = function.uses.changed()
            if changed is None:
                self._kept.move_to_end(key)
                return function
            self._say_changed(fn, changed)
            self._drop(key)
        function = self._kept[key] = self._send(fn, parts)
        self._bytes += len(function.name.code)
        while len(self._kept) > 1 and (len(self._kept) > _MOST_FUNCTIONS or self._bytes > _MOST_BYTES):
            self._drop(next(iter(self._kept)))
        return function

    def _drop(self, key: tuple[Any, ...]) -> None:
        self._bytes -= len(self._kept.pop(key).name.code)

    def _send(self, fn: Callable[..., Any], parts: list[object]) -> _Function:
        held: list[object] = []
        try:
            code = dump_function(fn, self._holding(held))
        except _NoValueError as error:
            raise error.error from None
        except Exception as error:
            raise self._blame(fn, list(captured(fn)), "captures", error) from error
        self._count += 1
        function = _Function(fn, Name("function", self._count, code), self._names(held), held, parts)
        self._naming.note_drop(function, "function", self._count)
        return function

    def _holding(self, held: list[object], inputs: dict[int, int] | None = None) -> HandleOf:
        """The handles of objects, which are noted in `held`; and in `inputs` the places of results that arguments take.

        Only arguments can take the result of a closure that has not ended; anything else waits for it.
        """
        handle_of = self._naming.handle_of

        def handle(given: object) -> tuple[Any, ...] | None:
            found = handle_of(given)
            if found is None and type(given) is Dataset:
                found = "dataset", self._dataset(given).number
            if found is None:
                return None
            held.append(given)
            if isinstance(given, RemoteValue):
                if found[0] == "input" and inputs is not None:
                    return "input", inputs.setdefault(given.number, len(inputs))
                try:
                    return "value", given.get()
                except Exception as error:
                    raise _NoValueError(error) from error
            return found

        return handle

    def _dataset(self, given: Dataset) -> _SentDataset:
        """Send a dataset once, as a function; later changes of it have no effect."""
        if given not in self._datasets:
            held: list[object] = []
            code = dump_arguments((given.pipeline, given.options()), self._holding(held))
            self._count += 1
            names = (*self._names(held), Name("dataset", self._count, code))
            self._datasets[given] = _SentDataset(self._count, names, held)
            self._naming.note_drop(given, "dataset", self._count)
        return self._datasets[given]

    def _names(self, held: list[object]) -> tuple[Name, ...]:
        return tuple(dict.fromkeys(
            name for given in held
            for name in (self._dataset(given).names if isinstance(given, Dataset) else self._naming.name_of(given))
        ))

    def _blame(
        self, fn: Callable[..., Any], places: list[tuple[str, object]], verb: str, error: Exception
    ) -> TypeError:
        """The error for a function or arguments that cannot be sent, which names what it is about."""
        owner = f"function {getattr(fn, '__qualname__', fn)!r}"
        for name, value in places:
            try:
                dump_arguments(value, self._holding([]))
            except Exception as found:
                is_data = isinstance(value, Dataset)
                way = "dataset(function that makes it)" if is_data else "value"
                return TypeError(
                    f"{owner} {verb} {name}, {described(value)}, which cannot be sent to a worker: {found}. Make it "
                    f"inside the function, or on each worker by `create_per_worker_{way}`"
                )
        return TypeError(f"{owner} cannot be sent to a worker: {error}")

    def _say_changed(self, fn: Callable[..., Any], changed: Use) -> None:
        name = name_of_function(fn)
        if (name, changed.name) in self._said:
            return
        self._said.add((name, changed.name))
        warnings.warn(
            f"function {name!r} uses the {changed.kind} {changed.name!r}, which has changed since the function was "
            "sent to the workers: it is sent again, now and at each further change. Pass what changes as an argument",
            RuntimeWarning, stacklevel=_depth_of_caller(),
        )


def _depth_of_caller() -> int:
    """The number of frames from the caller to the first one that is not of this package."""
    depth, frame = 1, sys._getframe(1)  # noqa: SLF001 - documented; private only to say "of this interpreter"
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("mpidist."):
        depth, frame = depth + 1, frame.f_back
    return depth


def is_of_this_process(given: object) -> bool:
    """Local. Whether an object means nothing in another process, though it may be possible to pickle it."""
    if isinstance(given, (io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)):
        return given not in (sys.stdin, sys.stdout, sys.stderr)
    if isinstance(given, ctypes.CDLL):
        # Another process may load another library by this name, or none.
        return True
    kinds = type(given).__mro__
    # Strategies and communicators; and those of MPI itself.
    return Resource in kinds or any(
        kind.__module__ == "mpi4py.MPI" and kind.__name__ in ("Comm", "File", "Request", "Session", "Win")
        for kind in kinds
    )
