"""The text of a shell script, cut into its commands and comments, and these into words; nothing is run.

It knows quotes over several lines, continued lines, here-documents, and what `&` lets run behind the script. What it
does not know it takes for letters: a text that is no script is cut, too.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field

_BLANKS = " \t\r\v\f"
# What stands between commands; and letters of a word that need no look at each of them.
_OPERATOR = re.compile(r"&&|\|\||;;&?|;&|\|&|[;&|()]")
_LETTERS = re.compile(r"[^\s'\"\\;&|()<>]+")
_ANSI_QUOTED = re.compile(r"(?:[^'\\]|\\.)*'", re.DOTALL)
_IN_DOUBLE_QUOTES = re.compile(r"[\"\\]")
_ESCAPED = re.compile(r"\\([\\\"$`\n])")
# "<<" of a here-document with its name, and not "<<<".
_DOCUMENT = re.compile(r"(?<!<)<<(-?)[ \t]*('[^'\n]*'|\"[^\"\n]*\"|(?:\\.|[^\s;&|()<>'\"\\])+)")
_OPENERS = frozenset({"{", "if", "for", "while", "until", "case", "select"})
_CLOSERS = frozenset({"}", "fi", "done", "esac"})


@dataclass
class ShellPiece:
    """A command, or a comment.

    Attributes:
        line: Its first line, from 1.
        text: The text of the word in the script.
        words: Its words, without quotes; a comment has none.
        runs_behind: Whether the shell continues while it runs: `&` stands behind it, or behind the group that has it.
        begins_line: Whether nothing stands in front of a comment, no blanks either.
    """

    line: int
    text: str
    words: list[str] = field(default_factory=list)
    runs_behind: bool = False
    begins_line: bool = True


def read_shell(text: str) -> list[ShellPiece]:
    """Local. The commands and the comments of a script, in their order.

    Args:
        text: The script.
    """
    return _Reader(text.replace("\r\n", "\n")).pieces()


class _Reader:
    """Reads one script from its first character to its last.

    Args:
        text: The script.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._pieces: list[ShellPiece] = []
        # The command that is being read.
        self._words: list[str] = []
        self._begin = 0
        # The first piece that a `&` would let run behind, here and around each open group.
        self._first = 0
        self._groups: list[int] = []
        # The brackets in words that are open, as `$(`: here, and around each `(` that is a group.
        self._brackets = [0]
        # The names of here-documents that begin with the next line, and whether tabs stand in front of their ends.
        self._documents: list[tuple[str, bool]] = []
        self._line_begins: dict[bool, dict[str, list[int]]] = {}
        # Whether quotes end with their line: from one on that nothing closes.
        self._is_one_line = False
        # How far lines are counted, and the line there.
        self._counted = (0, 1)

    def pieces(self) -> list[ShellPiece]:
        while self._at < len(self._text):
            character = self._text[self._at]
            if character == "\n":
                self._end_command()
                self._first = len(self._pieces)
                self._at += 1
                self._skip_documents()
            elif character in _BLANKS:
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif character == "#":
                self._read_comment()
            elif operator := self._operator():
                self._end_command()
                self._at += len(operator)
                self._operate(operator)
            else:
                self._begin = self._begin if self._words else self._at
                self._words.append(self._word())
        self._end_command()
        return self._pieces

    def _line(self, at: int) -> int:
        """The line of a place, which is not in front of the last one that was asked for."""
        before, line = self._counted
        self._counted = (at, line + self._text.count("\n", before, at))
        return self._counted[1]

    def _line_end(self) -> int:
        end = self._text.find("\n", self._at)
        return len(self._text) if end < 0 else end

    def _read_comment(self) -> None:
        end = self._line_end()
        if not self._words:
            begins = self._text[self._at - 1 : self._at] in ("", "\n")
            self._pieces.append(ShellPiece(self._line(self._at), self._text[self._at : end], begins_line=begins))
        self._at = end

    def _operator(self) -> str:
        """The operator that ends a command here; empty where there is none, as at the "&" of "2>&1" and "&>log"."""
        match = _OPERATOR.match(self._text, self._at)
        if match is None:
            return ""
        operator = match[0]
        if operator in "&|" and self._text[self._at - 1 : self._at] in ("<", ">"):
            return ""
        if operator == "&" and self._text.startswith(">", match.end()):
            return ""
        # It closes `$(`, or stands behind a pattern of `case`.
        is_letter = operator == ")" and (self._brackets[-1] or len(self._brackets) == 1)
        return "" if is_letter else operator

    def _operate(self, operator: str) -> None:
        if operator == "(":
            self._open()
            self._brackets.append(0)
        elif operator == ")":
            self._brackets.pop()
            self._close()
        elif operator == "&":
            for piece in self._pieces[self._first :]:
                piece.runs_behind = True
            self._first = len(self._pieces)
        elif operator.startswith(";"):
            self._first = len(self._pieces)

    def _end_command(self) -> None:
        if not self._words:
            return
        text = self._text[self._begin : self._at].rstrip()
        piece = ShellPiece(self._line(self._begin), text, self._words)
        self._words = []
        if piece.words[0] in _CLOSERS:
            self._close()
        # "do", "then" and "else" may stand in front, and the name of a function.
        elif _OPENERS & set(piece.words[:2]) or "{" in piece.words[:3]:
            self._open()
        self._pieces.append(piece)

    def _open(self) -> None:
        self._groups.append(self._first)
        self._first = len(self._pieces)

    def _close(self) -> None:
        if self._groups:
            self._first = self._groups.pop()

    def _word(self) -> str:
        parts: list[str] = []
        while self._at < len(self._text):
            match = _LETTERS.match(self._text, self._at)
            character = self._text[self._at]
            if match is not None:
                parts.append(match[0])
                self._at = match.end()
            elif character in "'\"":
                parts.append(self._quoted(character))
            elif character == "\\":
                parts.append(self._text[self._at + 1 : self._at + 2].replace("\n", ""))
                self._at += 2
            elif character in _BLANKS or character == "\n" or (character != "(" and self._operator()):
                break
            else:
                parts.append(self._sign(character))
        return "".join(parts)

    def _sign(self, character: str) -> str:
        """Another character of a word: a bracket, a part of a redirection, or a blank that the shell does not know."""
        match = _DOCUMENT.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
            self._documents.append((re.sub(r"['\"\\]", "", match[2]), bool(match[1])))
            return match[0]
        self._at += 1
        if character == "(":
            self._brackets[-1] += 1
        elif character == ")" and self._brackets[-1]:
            self._brackets[-1] -= 1
        return character

    def _quoted(self, quote: str) -> str:
        """The text in quotes; the quote itself, as a letter, where nothing closes it."""
        begin = self._at + 1
        is_ansi = quote == "'" and self._text[self._at - 1 : self._at] == "$"
        for is_one_line in (self._is_one_line, True):
            self._is_one_line = is_one_line
            end = self._find_quote(quote, begin, self._line_end() if is_one_line else len(self._text), is_ansi)
            if end >= 0:
                self._at = end + 1
                inside = self._text[begin:end]
                return _ESCAPED.sub(_unescaped, inside) if quote == '"' else inside
        self._at = begin
        return quote

    def _find_quote(self, quote: str, begin: int, limit: int, is_ansi: bool) -> int:
        if is_ansi:
            match = _ANSI_QUOTED.match(self._text, begin, limit)
            return -1 if match is None else match.end() - 1
        if quote == "'":
            return self._text.find(quote, begin, limit)
        while (match := _IN_DOUBLE_QUOTES.search(self._text, begin, limit)) is not None:
            if match[0] == quote:
                return match.start()
            begin = match.start() + 2
        return -1

    def _skip_documents(self) -> None:
        """Go behind the here-documents of the line that has ended; one without an end is none."""
        for name, has_tabs in self._documents:
            begins = self._begins(has_tabs).get(name, [])
            found = bisect_left(begins, self._at)
            if found < len(begins):
                self._at = begins[found]
                self._at = min(self._line_end() + 1, len(self._text))
        self._documents = []

    def _begins(self, has_tabs: bool) -> dict[str, list[int]]:
        """The places at which lines begin, by their text."""
        if has_tabs not in self._line_begins:
            begins: dict[str, list[int]] = {}
            at = 0
            for line in self._text.split("\n"):
                begins.setdefault(line.lstrip("\t") if has_tabs else line, []).append(at)
                at += len(line) + 1
            self._line_begins[has_tabs] = begins
        return self._line_begins[has_tabs]


def _unescaped(match: re.Match[str]) -> str:
    return "" if match[1] == "\n" else match[1]
