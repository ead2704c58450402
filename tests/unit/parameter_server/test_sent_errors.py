"""Errors of functions: of their own class on the coordinator, whatever their constructor takes or they carry."""

from __future__ import annotations

import builtins
import pickle
import sys
import threading
from typing import Any

import pytest

from mpidist.parameter_server.protocol.sent_errors import portable


class TwoArgumentsError(Exception):
    """Hands one text on to Exception."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class OptionalArgumentError(ValueError):
    """pickle would call it with its text for a code."""

    def __init__(self, code: int, text: str = "no text") -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class LockedError(Exception):
    """Carries what cannot be sent, among its arguments and its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__(text, threading.Lock())
        self.lock, self.count = threading.Lock(), 3


class OwnPicklingError(Exception):
    """Says itself how it is pickled."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnPicklingError, (self.code + 1, "again")


class HopelessError(Exception):
    """Cannot be made without its constructor."""

    def __new__(cls, *args: object) -> HopelessError:
        del args
        raise RuntimeError("no way")


def sent(error: BaseException) -> BaseException:
    found = pickle.loads(portable(error))
    assert isinstance(found, BaseException)
    return found


@pytest.mark.parametrize(("error", "text", "attributes"), [
    (TwoArgumentsError(5, "five"), "5: five", {"code": 5}),
    (OptionalArgumentError(7), "7: no text", {"code": 7}),
    (OwnPicklingError(1, "once"), "again", {"code": 2}),
    (KeyError("key"), "'key'", {}),
    (FileNotFoundError(2, "no file", "name"), "[Errno 2] no file: 'name'", {"filename": "name", "errno": 2}),
    (UnicodeDecodeError("utf8", b"a", 0, 1, "why"), "'utf8' codec can't decode byte 0x61 in position 0: why", {}),
])
def test_errors_arrive_as_they_are(error: Exception, text: str, attributes: dict[str, object]) -> None:
    found = sent(error)
    assert type(found) is type(error)
    assert str(found) == text
    assert {name: getattr(found, name) for name in attributes} == attributes


def test_what_cannot_be_sent_is_left_out() -> None:
    found = sent(LockedError("held"))
    assert isinstance(found, LockedError)
    assert found.args[0] == "held"
    assert found.args[1].startswith("<unlocked _thread.lock")
    assert vars(found) == {"count": 3}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="groups of exceptions are of Python 3.11")
def test_a_group_keeps_its_errors() -> None:
    kind: Any = vars(builtins)["ExceptionGroup"]
    group: Any = sent(kind("several", [TwoArgumentsError(1, "one"), ValueError(2)]))
    first, second = group.exceptions
    assert type(first) is TwoArgumentsError
    assert (str(first), first.code, str(second)) == ("1: one", 1, "2")


def test_an_error_that_nobody_can_make_is_told() -> None:
    hopeless = Exception.__new__(HopelessError, "text")
    found = sent(hopeless)
    assert type(found) is RuntimeError
    assert str(found) == "HopelessError: text"
