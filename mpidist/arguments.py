"""Checks of arguments: each gives the value back, or an error that says what was expected and what was given."""

from __future__ import annotations

import contextlib
import math
import operator
import reprlib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from numbers import Number
from typing import Any


def number(argument: str, value: Any, *, least: float = -math.inf, most: float = math.inf) -> float:
    """Local. A finite number as a Python float.

    Args:
        argument: The name of the caller's argument, for the error.
        value: A number of Python or NumPy.
        least: The smallest number allowed.
        most: The largest number allowed.

    Raises:
        TypeError: `value` is no number; texts are not read as numbers.
        ValueError: It is NaN, infinite, or out of range.
    """
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        given = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"`{argument}` must be a number, got {described(value)}") from None
    if math.isfinite(given) and least <= given <= most:
        return given
    if most < math.inf:
        limits = f"must be between {least} and {most}"
    elif least > -math.inf:
        limits = "must not be negative" if least == 0 else f"must be at least {least}"
    else:
        limits = "must be a number"
    raise ValueError(f"`{argument}` {limits}{'' if math.isfinite(given) else ', and must be finite'}, got {value!r}")


def whole(argument: str, value: Any, *, least: int | None = None, owner: str = "") -> int:
    """Local. A whole number as a Python int.

    Args:
        argument: The name of the caller's argument, for the error.
        value: An integer of Python or NumPy.
        least: The smallest number allowed.
        owner: The beginning of the error, where several things have such an argument: "batch: ".

    Raises:
        TypeError: `value` is no integer; floats and booleans are none.
        ValueError: It is below `least`.
    """
    limit = "" if least is None else f" of at least {least}"
    try:
        if isinstance(value, bool):
            raise TypeError
        given = operator.index(value)
    except TypeError:
        raise TypeError(f"{owner}`{argument}` must be an integer{limit}, got {described(value)}") from None
    if least is not None and given < least:
        raise ValueError(f"{owner}`{argument}` must be an integer{limit}, got {value!r}")
    return given


def flag(argument: str, value: Any, *, owner: str = "") -> bool:
    """Local. True or False as a Python bool.

    Args:
        argument: The name of the caller's argument, for the error.
        value: A bool of Python or NumPy.
        owner: See `whole`.

    Raises:
        TypeError: `value` is neither True nor False.
    """
    # NumPy's booleans are known by their dtype: to import NumPy here would load it in every import of a resolver.
    is_numpy = getattr(getattr(value, "dtype", None), "kind", "") == "b" and getattr(value, "shape", None) == ()
    if not isinstance(value, bool) and not is_numpy:
        raise TypeError(f"{owner}`{argument}` must be True or False, got {described(value)}")
    return bool(value)


def python_numbers(given: object) -> None:
    """Local. Put Python's numbers in the place of those of NumPy in a dataclass, which may be frozen; else do nothing.

    NumPy's numbers carry a dtype: one of float64 widens float32 arithmetic, one of float16 rounds it, and a small
    integer overflows.
    """
    for field in fields(given) if is_dataclass(given) else ():
        value = getattr(given, field.name)
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            object.__setattr__(given, field.name, value.item())


def described(value: object) -> str:
    """Local. A short text about a value for an error: never all elements of an array or a list."""
    kind = type(value).__name__
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None:
        return f"an array of shape {shape!r} and dtype {dtype}, of type {kind}"
    return f"{reprlib.repr(value)} of type {kind}"


@contextlib.contextmanager
def named(subject: str) -> Iterator[None]:
    """Local. Put what the user called in front of the texts of TypeErrors and ValueErrors raised inside."""
    try:
        yield
    except (TypeError, ValueError) as error:
        # Not the type of `error`, which may be a subclass with other arguments.
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{subject}: {error}") from error


def settings_of(given: object) -> str:
    """Local. An object with those of its values that are not the defaults, the same text on every rank.

    Args:
        given: The object; without a dataclass only its class is known.
    """
    values = [
        f"{field.name}={value.item() if hasattr(value, 'item') else value!r}"
        for field in (fields(given) if is_dataclass(given) else ())
        if _is_plain(value := getattr(given, field.name)) and value != field.default
    ]
    return f"{type(given).__name__}({', '.join(values)})"


def _is_plain(value: object) -> bool:
    """Whether a text of a value is the same on every rank; that of most objects has their address."""
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, (Number, str))
