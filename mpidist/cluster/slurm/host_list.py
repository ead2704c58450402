"""Slurm's host lists: `n[1-3,07]` means n1, n2, n3 and n07; pure.

Slurm's grammar, as `scontrol show hostnames` reads it: names are separated by commas or blanks, and may be empty. Each
has any number of brackets, which hold numbers and ranges. The numbers of a range are padded to the width of its first
one. Beyond Slurm's, a name may continue after its last bracket (`n[1-2]-ib`), and brackets may hold further ones, a few
deep.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MOST_HOSTS = 65536
"""As in Slurm: a longer list is a mistake, and would fill the memory."""

_BLANKS = ", \t\n"
# Brackets in brackets, and digits of a number.
_MOST_DEEP = 8
_MOST_DIGITS = 18
# The number of characters of a malformed list that errors show.
_MOST_SHOWN = 1000
_NUMBERED = re.compile(r"(.*?)([0-9]+)", re.DOTALL)


def expand(text: str) -> list[str]:
    """Local. The hosts of a list, in Slurm's order; a host that is listed twice is returned twice.

    Args:
        text: Such as "rack[1-2]n[01-03],login".

    Raises:
        ValueError: The list is malformed, or has more than `MOST_HOSTS` hosts; the text names the position.

    Example:
        >>> expand("a[1-2]b[08-10,7],login")
        ['a1b08', 'a1b09', 'a1b10', 'a1b7', 'a2b08', 'a2b09', 'a2b10', 'a2b7', 'login']
    """
    return _Reader(text).hosts()


def compress(hosts: Iterable[str]) -> str:
    """Local. A short list that `expand` and Slurm read as these hosts in this order.

    Args:
        hosts: Names without commas, blanks and brackets.

    Raises:
        ValueError: A name is empty, or has such a character.

    Example:
        >>> compress(["n1", "n2", "n3", "n007", "login"])
        'n[1-3,007],login'
    """
    parts: list[tuple[str, list[tuple[str, str]]]] = []
    for host in hosts:
        if not host or any(character in _BLANKS + "[]" for character in host):
            raise ValueError(f"expected a host name without commas, blanks and brackets, got {host!r}")
        match = _NUMBERED.fullmatch(host)
        prefix, number = match.groups() if match else (host, "")
        if not number or not parts or parts[-1][0] != prefix or not parts[-1][1]:
            parts.append((prefix, [(number, number)] if number else []))
            continue
        ranges = parts[-1][1]
        first, last = ranges[-1]
        if number == str(int(last) + 1).zfill(len(first)):
            ranges[-1] = (first, number)
        else:
            ranges.append((number, number))
    return ",".join(_written(prefix, ranges) for prefix, ranges in parts)


def _written(prefix: str, ranges: list[tuple[str, str]]) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return prefix + ranges[0][0]
    inside = ",".join(first if first == last else f"{first}-{last}" for first, last in ranges)
    return f"{prefix}[{inside}]" if ranges else prefix


class _Reader:
    """Reads one list from its first character to its last.

    Args:
        text: The list.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def hosts(self) -> list[str]:
        found: list[str] = []
        while self._at < len(self._text):
            if self._text[self._at] in _BLANKS:
                self._at += 1
                continue
            begin = self._at
            found += self._name(begin)
            if len(found) > MOST_HOSTS:
                raise self._error(f"more than {MOST_HOSTS} hosts", "a list of the hosts of one job", begin)
        return found

    def _name(self, begin: int) -> list[str]:
        """The hosts of one name with its brackets."""
        # "a[1-2]b" is ["a"], ["1", "2"], ["b"]; the bracket is number 1.
        pieces: list[list[str]] = []
        brackets: list[int] = []
        count = 1
        while self._at < len(self._text) and self._text[self._at] not in _BLANKS:
            if self._text[self._at] == "[":
                brackets.append(len(pieces))
                pieces.append(self._bracket())
                count *= len(pieces[-1])
                if count > MOST_HOSTS:
                    raise self._error(f"more than {MOST_HOSTS} hosts", "a list of the hosts of one job", begin)
            else:
                pieces.append([self._plain()])
        return _combined(pieces, brackets)

    def _plain(self) -> str:
        begin = self._at
        while self._at < len(self._text) and self._text[self._at] not in _BLANKS + "[":
            if self._text[self._at] == "]":
                raise self._error("a closing bracket", "an opening one before it", self._at)
            self._at += 1
        return self._text[begin : self._at]

    def _bracket(self) -> list[str]:
        opened = self._at
        self._depth += 1
        if self._depth > _MOST_DEEP:
            raise self._error(f"a bracket in {_MOST_DEEP} others", "a number", opened)
        self._at += 1
        numbers: list[str] = []
        while True:
            numbers += self._item()
            if len(numbers) > MOST_HOSTS:
                raise self._error(f"more than {MOST_HOSTS} hosts", "a list of the hosts of one job", opened)
            character = self._text[self._at : self._at + 1]
            if character not in (",", "]"):
                what = f"{character!r}" if character else f"the end, with the bracket at {opened + 1} open"
                raise self._error(what, "',' or ']'", self._at)
            self._at += 1
            if character == "]":
                self._depth -= 1
                return numbers

    def _item(self) -> list[str]:
        """A number, a range or a bracket within a bracket."""
        self._skip_spaces()
        if self._text[self._at : self._at + 1] == "[":
            numbers = self._bracket()
            self._skip_spaces()
            return numbers
        begin = self._at
        first = self._number()
        if self._text[self._at : self._at + 1] != "-":
            return [first]
        self._at += 1
        self._skip_spaces()
        last = self._number()
        low, high = int(first), int(last)
        if high < low:
            raise self._error(f"the range {first}-{last}", "its smaller number first", begin)
        if high - low >= MOST_HOSTS:
            raise self._error(f"the range {first}-{last}", f"at most {MOST_HOSTS} hosts", begin)
        return [str(number).zfill(len(first)) for number in range(low, high + 1)]

    def _number(self) -> str:
        begin = self._at
        while self._at < len(self._text) and self._text[self._at] in "0123456789":
            self._at += 1
        if self._at == begin:
            character = self._text[begin : begin + 1]
            raise self._error(f"{character!r}" if character else "the end", "a number", begin)
        number = self._text[begin : self._at]
        if len(number) > _MOST_DIGITS:
            raise self._error(f"one of {len(number)} digits", f"a number of at most {_MOST_DIGITS}", begin)
        self._skip_spaces()
        return number

    def _skip_spaces(self) -> None:
        while self._text[self._at : self._at + 1] == " ":
            self._at += 1

    def _error(self, got: str, expected: str, at: int) -> ValueError:
        return ValueError(
            f"malformed host list {_cut(self._text)}: expected {expected} at character {at + 1}, got {got}. Slurm "
            "writes such lists as n[1-3,7],login"
        )


def _cut(text: str) -> str:
    return repr(text) if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]!r} and {len(text) - _MOST_SHOWN} more"


def _combined(pieces: list[list[str]], brackets: list[int]) -> list[str]:
    """Every choice of one text per piece, joined, in Slurm's order.

    In Slurm's order the last bracket counts fastest, then the others from the first one on.
    """
    hosts = [[piece[0] for piece in pieces]]
    for bracket in [*reversed(brackets[:-1]), *brackets[-1:]]:
        hosts = [[*host[:bracket], text, *host[bracket + 1 :]] for host in hosts for text in pieces[bracket]]
    return ["".join(host) for host in hosts]
