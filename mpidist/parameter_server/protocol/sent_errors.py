"""Errors as they are sent to the coordinator: of their own class there, whatever its constructor takes."""

from __future__ import annotations

import contextlib
import pickle
from types import FunctionType, MethodDescriptorType
from typing import Any

from mpidist.parameter_server.protocol.references import describing_handle_of, dump_arguments


def portable(error: BaseException) -> bytes:
    """Local. The pickled exception; a RuntimeError with its text if it cannot be sent, or ends programs."""
    kind = type(error).__name__
    if isinstance(error, SystemExit):
        # It would end the coordinator's program, and look like a good end.
        called = f"the function has called sys.exit({error.code!r})"
        return pickle.dumps(RuntimeError(f"{called}, which ends no worker: let it return, or raise an error"))
    text = "it has no text"
    # All of this may be the program's own code, which may do anything.
    for sent in _forms(error):
        with contextlib.suppress(BaseException):
            data = dump_arguments(sent, describing_handle_of)
            loaded = pickle.loads(data)
            # A call for its text must not raise another error.
            str(loaded)
            if isinstance(loaded, BaseException):
                return data
    with contextlib.suppress(BaseException):
        text = str(error)
    return pickle.dumps(RuntimeError(f"{kind}: {text}"))


def _forms(error: BaseException) -> list[BaseException | _Parts]:
    """The ways of sending an exception, the best one first."""
    kind = type(error)
    if not isinstance(kind.__reduce__, MethodDescriptorType) or "__getstate__" in vars(kind):
        # Its class says itself how.
        return [error]
    has_constructor = isinstance(kind.__init__, FunctionType)
    return [_Parts(error), error] if has_constructor else [error, _Parts(error)]


class _Parts:
    """An exception as its class, its arguments and its attributes: the constructor is not called when it is loaded.

    pickle gives the constructor `args`, which are what it has handed on to Exception, not what it was called with. What
    cannot be sent is left out; of an argument its text stays.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Any, ...]:
        args = tuple(map(_sendable, self._error.args))
        state = {name: value for name, value in vars(self._error).items() if _can_be_sent(value)}
        return _rebuilt, (type(self._error), args, state)


def _rebuilt(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    vars(error).update(state)
    return error


def _sendable(given: Any) -> Any:
    """An argument of an exception; a group has others in a list."""
    if isinstance(given, (list, tuple)):
        return type(given)(map(_sendable, given)) if type(given) in (list, tuple) else repr(given)
    if isinstance(given, BaseException) and (hasattr(given, "exceptions") or type(given).__module__ != "builtins"):
        return _Parts(given)
    return given if _can_be_sent(given) else repr(given)


def _can_be_sent(given: object) -> bool:
    try:
        dump_arguments(given, describing_handle_of)
    except Exception:  # the program's own code
        return False
    return True
