"""A job script of Slurm as text: its options and its commands, each with its line; nothing is run.

Words are those of the standard library's `shlex`. What is rarer than quotes, here-documents and groups is not known,
and the rules are silent about a script whose quotes do not end.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

_LONG_NAMES = {
    "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "a": "array", "J": "job-name", "o": "output",
    "t": "time", "K": "kill-on-bad-exit", "m": "distribution", "w": "nodelist", "p": "partition",
}
# The short options of srun and sbatch without a value, which another one may follow in the same word, as in -lK.
_FLAGS = "EHOQVXZhjklsuv"
# Those of srun whose value, if they have one, is in the same word.
_SHORT_ALONE = "EHIKOQVXZhjklsuv"
_LONG_ALONE = frozenset({
    "compress", "contiguous", "disable-status", "exact", "exclusive", "help", "hold", "immediate", "kill-on-bad-exit",
    "label", "multi-prog", "nice", "no-allocate", "no-kill", "overcommit", "overlap", "oversubscribe", "preserve-env",
    "propagate", "pty", "quiet", "quit-on-interrupt", "reboot", "resv-ports", "send-libs", "spread-job", "unbuffered",
    "usage", "use-min-nodes", "verbose", "version", "whole",
    # Of the plugin Pyxis, for containers.
    *(f"{no}container-{name}" for no in ("", "no-") for name in ("entrypoint", "mount-home", "remap-root")),
    "container-readonly", "container-writable",
})
SRUN = ("srun",)
MPIRUN = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun")
_SHELLS = ("bash", "dash", "ksh", "sh", "zsh")
_PYTHON = re.compile(r"python[0-9.]*(-[a-z]\w*)?|pytest[0-9.-]*|mpidist|\$\{?\w*python\w*\}?", re.IGNORECASE)
# These take names of programs and files for texts, and start none of them.
_HANDLERS = frozenset({
    ".", "alias", "awk", "basename", "cat", "cd", "chmod", "chown", "command", "cp", "curl", "diff", "dirname", "du",
    "echo", "export", "file", "find", "git", "grep", "hash", "head", "ldd", "ln", "logger", "ls", "md5sum", "mkdir",
    "ml", "module", "mv", "pip", "pip3", "pkill", "printf", "rm", "rsync", "sbatch", "sbcast", "scp", "sed",
    "sha256sum", "sort", "source", "spack", "stat", "tail", "tar", "test", "touch", "trap", "type", "unset", "wc",
    "wget", "which", "[", "[[",
})
# So do these, without "run".
_MANAGERS = frozenset({"conda", "mamba", "micromamba", "poetry", "uv"})
# What may precede the name of a program.
_IN_FRONT = frozenset({
    "!", "do", "elif", "else", "exec", "if", "nohup", "sudo", "then", "time", "until", "while", "{",
})
_ASSIGNMENT = re.compile(r"(\w+)(\+?)=(.*)", re.DOTALL)
_DECLARERS = frozenset({"declare", "export", "local", "readonly", "typeset"})
# A word that is a variable and no more: $OPTIONS, ${OPTIONS} or ${OPTIONS[@]}.
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})")
# The text of a here-document, with the line that ends it.
_DOCUMENT = re.compile(r"(?<!<)<<-?[ \t]*(['\"]?)([A-Za-z_]\w*)\1[^\n]*\n(.*?^\t*\2$)", re.DOTALL | re.MULTILINE)
_SIGNS = "();<>|&\n"
_OPERATOR = re.compile(r"&>>?|[<>]&|>\||<<<|<<|>>|&&|\|\||\|&|;;&?|;&|[();<>|&\n]")
_CLOSERS = frozenset({"}", "fi", "done", "esac"})
# Marks in the text: of a "#" that begins no comment, and of the end of a line that continues.
_NUMBER_SIGN, _GOES_ON = "\1", "\2"


@dataclass(frozen=True)
class Option:
    """One option of `#SBATCH`, or of a command.

    Attributes:
        line: Its line, from 1.
        name: Its long name, without dashes.
        value: The value; "" without one.
        component: The component of a heterogeneous job, from 0.
    """

    line: int
    name: str
    value: str
    component: int = 0


@dataclass(frozen=True)
class Command:
    """One command of the shell.

    Attributes:
        line: Its first line, from 1.
        words: Its words, without quotes and redirections, and with the texts of variables that the script sets once.
        runs_behind: Whether the shell may continue while it runs: `&` follows it, or a group that has it.
    """

    line: int
    words: tuple[str, ...]
    runs_behind: bool = False

    @functools.cached_property
    def is_srun(self) -> bool:
        """Local. Whether srun starts a Python program here."""
        at = next((at for at, word in enumerate(self.words) if base_name(word) in SRUN), -1) + 1
        return self.names(SRUN) and _starts_python(self.words[at + len(self._words_of_options) :])

    @functools.cached_property
    def is_mpirun(self) -> bool:
        """Local. Whether mpirun starts a Python program here."""
        return self.names(MPIRUN) and _starts_python(self.words)

    @functools.cached_property
    def is_python(self) -> bool:
        """Local. Whether the line starts a Python program."""
        return _names_python(self.words)

    @property
    def is_run(self) -> bool:
        """Local. Whether `mpidist run` starts a program here: it starts srun, or mpirun."""
        pairs = zip(self.words, self.words[1:], strict=False)
        return any((base_name(one), other) == ("mpidist", "run") for one, other in pairs)

    @functools.cached_property
    def options(self) -> dict[str, str]:
        """Local. The options between srun and the program, by their long names."""
        return {option.name: option.value for option in read_options(self._words_of_options, self.line)}

    @property
    def has_unknown_options(self) -> bool:
        """Local. Whether there is a variable between srun and the program whose value the script does not contain."""
        return any(word.startswith("$") for word in self._words_of_options)

    def names(self, programs: Sequence[str]) -> bool:
        """Local. Whether the line has one of these programs, and starts it as far as can be seen."""
        return not _is_about_names(self.words) and any(base_name(word) in programs for word in self.words)

    @functools.cached_property
    def _words_of_options(self) -> tuple[str, ...]:
        """The words between srun and its program."""
        begin = next((at for at, word in enumerate(self.words) if base_name(word) in SRUN), -1) + 1
        at = begin
        while at < len(self.words) and self.words[at][:1] in ("-", "$") and not is_program(self.words[at]):
            at += 2 if _has_value_behind(self.words[at]) else 1
        return self.words[begin:at]


@dataclass(frozen=True)
class JobScript:
    """A script for `sbatch`.

    Attributes:
        options: The options that Slurm reads.
        late_options: The lines of those below the first command, which Slurm ignores.
        misplaced_options: The lines of those that Slurm takes for comments.
        commands: The shell's commands.
    """

    options: list[Option] = field(default_factory=list)
    late_options: list[int] = field(default_factory=list)
    misplaced_options: list[int] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)

    def find(self, name: str) -> Option | None:
        """Local. The last option of this name, as for Slurm."""
        return next((option for option in reversed(self.options) if option.name == name), None)

    def count(self, name: str, component: int = 0) -> int | None:
        """Local. The number that an option of a component has, of "2-4" the first; None where there is none."""
        found = [o.value for o in self.options if (o.name, o.component) == (name, component)]
        match = re.fullmatch(r"([0-9]+)(-[0-9]+)?", found[-1], re.ASCII) if found else None
        return None if match is None else int(match[1])

    @property
    def components(self) -> int:
        """Local. The number of components of the job."""
        return 1 + max((option.component for option in self.options), default=0)

    @functools.cached_property
    def environment(self) -> dict[str, str]:
        """Local. The variables that a command sets, with the last text of each; empty where it is no simple one."""
        found = (re.findall(r"\b(\w+)=([\w.-]*)", " ".join(command.words)) for command in self.commands)
        return {name: text for one in found for name, text in one}


class _Source:
    """A script as shlex reads it, a character at a time, with what it leaves out: lines and comments."""

    def __init__(self, text: str) -> None:
        self.line = 1
        # Those without a command in front: line, text, and whether no blanks are there either.
        self.comments: list[tuple[int, str, bool]] = []
        self._text, self._at = text, 0

    def read(self, _size: int, /) -> str:
        character = self._text[self._at : self._at + 1]
        self._at += 1
        self.line += character in ("\n", _GOES_ON)
        return character

    def readline(self) -> None:
        """Go to the end of a comment, which stays: it ends a command."""
        begin, end = self._at - 1, self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end
        in_front = self._text[self._text.rfind("\n", 0, begin) + 1 : begin]
        if not in_front.strip():
            self.comments.append((self.line, self._text[begin : self._at], not in_front))

    def close(self) -> None:
        """Nothing is open."""


class _Reader:
    """Reads one script from its first word to its last."""

    def __init__(self, text: str) -> None:
        self.source = _Source(_prepared(text))
        self.commands: list[Command] = []
        self.variables: dict[str, list[str]] = {}
        self._unclear: set[str] = set()
        self._words: list[str] = []
        self._line = 1
        # The first command that a `&` would run in the background, and whether a bracket was closed since.
        self._first = 0
        self._is_closed = False
        self._is_target = False
        # The variable whose list is being read.
        self._list = ""

    def read(self) -> None:
        """Read it all; a quote that does not end is a ValueError."""
        lexer = shlex.shlex(self.source, posix=True, punctuation_chars=_SIGNS)
        lexer.whitespace, lexer.whitespace_split = f" \t\r\v\f{_GOES_ON}", True
        line = self.source.line
        for token in lexer:
            if token and not token.strip(_SIGNS):
                for operator in _OPERATOR.findall(token):
                    self._operate(operator)
            elif self._is_target:
                self._is_target = False
            else:
                self._line = self._line if self._words else line
                self._words.append(token.replace(_NUMBER_SIGN, "#"))
            line = self.source.line
        self._operate("\n")
        for name in self._unclear:
            self.variables.pop(name, None)

    def _operate(self, operator: str) -> None:
        self._is_target = operator[0] in "<>" or operator in ("&>", "&>>")
        if self._is_target:
            # The number of the file in "2>log" is a word of its own.
            if self._words and self._words[-1].isdecimal():
                self._words.pop()
        elif self._list:
            if operator == ")":
                self._assign(self._list, self._words)
                self._list, self._words = "", []
        elif operator == "(" and self._words and re.fullmatch(r"\w+\+?=", self._words[-1]):
            self._list, self._words = self._words[-1], []
        else:
            self._end_command(operator)

    def _end_command(self, operator: str) -> None:
        if self._words:
            self.commands.append(Command(self._line, tuple(self._words)))
            names = self._words[1:] if self._words[0] in _DECLARERS else self._words
            if len(names) == 1 and (match := _ASSIGNMENT.fullmatch(names[0])):
                self._assign(names[0].removesuffix(match[3]), match[3].split())
            self._words = []
        self._is_closed = self._is_closed or operator == ")"
        if operator == "&":
            behind = range(self._first, len(self.commands))
            if self._is_closed or any(self.commands[at].words[0] in _CLOSERS for at in behind):
                # Where the group began is not known.
                behind = range(len(self.commands))
            for at in behind:
                self.commands[at] = replace(self.commands[at], runs_behind=True)
        if operator in ("&", "\n") or operator[0] == ";":
            self._first, self._is_closed = len(self.commands), False

    def _assign(self, name: str, words: list[str]) -> None:
        """Keep the words of a variable that has one text in the whole script, which may be added to."""
        is_added, name = name.endswith("+="), name.rstrip("+=")
        if name in self.variables and not is_added:
            self._unclear.add(name)
        self.variables.setdefault(name, []).extend(words)


def _prepared(text: str) -> str:
    """The script as shlex can read it, with the same lines: texts of here-documents are blank."""
    text = text.replace("\r\n", "\n")
    text = _DOCUMENT.sub(lambda found: found[0].removesuffix(found[3]) + "\n" * found[3].count("\n"), text)
    return re.sub(r"(?<=[^\s;&|()])#", _NUMBER_SIGN, text).replace("\\\n", _GOES_ON)


def _read(text: str) -> _Reader:
    reader = _Reader(text)
    try:
        reader.read()
    except ValueError:
        reader.commands.clear()
    return reader


def read_job_script(text: str) -> JobScript:
    """Local. Read a script; of one whose quotes do not end only the options.

    Args:
        text: The script.
    """
    reader = _read(text.removeprefix("\ufeff"))
    script = JobScript(commands=[
        replace(command, words=tuple(_expanded(command.words, reader.variables))) for command in reader.commands
    ])
    component, first = 0, reader.commands[0].line if reader.commands else reader.source.line
    for line, comment, begins in reader.source.comments:
        is_option = comment.startswith("#SBATCH")
        if is_option and line > first:
            script.late_options.append(line)
        elif is_option and begins:
            try:
                given = shlex.split(comment.removeprefix("#SBATCH"), comments=True)
            except ValueError:
                given = comment.split()[1:]
            component += given[:1] in (["hetjob"], ["packjob"])
            script.options.extend(read_options(given, line, component))
        elif is_option or re.match(r"#sbatch\s+-", comment, re.IGNORECASE):
            script.misplaced_options.append(line)
    return script


def _expanded(words: Sequence[str], variables: dict[str, list[str]]) -> Iterable[str]:
    for word in words:
        match = _VARIABLE.fullmatch(word)
        yield from variables.get(match[1] or match[2], [word]) if match else [word]


def _has_value_behind(word: str) -> bool:
    """Whether the value of this option of srun is the next word."""
    if word.startswith("--"):
        return "=" not in word and word[2:] not in _LONG_ALONE
    return word.startswith("-") and len(word[1:].lstrip(_SHORT_ALONE)) == 1


def _is_about_names(words: Sequence[str]) -> bool:
    """Whether the program that a line starts, as far as can be seen, takes names of programs for texts."""
    programs = (base_name(word) for word in words if word not in _IN_FRONT and not _ASSIGNMENT.fullmatch(word))
    first = next(programs, "")
    return first in _HANDLERS or (first in _MANAGERS and "run" not in words)


def _names_python(words: Sequence[str]) -> bool:
    return not _is_about_names(words) and any(map(is_program, words))


def _starts_python(words: Sequence[str]) -> bool:
    """Whether a line starts a Python program, or a shell that does so by the text of its `-c`."""
    texts = [
        word for before, option, word in zip(words, words[1:], words[2:], strict=False)
        if base_name(before) in _SHELLS and re.fullmatch("-[a-z]*c", option)
    ]
    return _names_python(words) or any(_names_python(one.words) for text in texts for one in _read(text).commands)


def read_options(words: Sequence[str], line: int, component: int = 0) -> Iterator[Option]:
    """Local. The options among words: `--name=value`, `--name value`, `-n 4`, `-n4` and `-ln4`.

    Args:
        words: The words of `#SBATCH`, or those of a command that are options.
        line: Their line.
        component: Their component of a heterogeneous job.
    """
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("-") else ""
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            if name:
                yield Option(line, name, value if "=" in word else following, component)
        elif word.startswith("-"):
            letters = word[1:].lstrip(_FLAGS)
            if letters[:1] in _LONG_NAMES:
                yield Option(line, _LONG_NAMES[letters[0]], letters[1:].removeprefix("=") or following, component)


def base_name(word: str) -> str:
    """Local. The name of a program, without its folder."""
    # The first word of `$(...)` has its bracket in front.
    return PurePath(re.split(r"[`(]", word)[-1]).name


def is_program(word: str) -> bool:
    """Local. Whether a word is the name of a Python program, or of Python itself."""
    return not word.startswith("-") and (_PYTHON.fullmatch(base_name(word)) is not None or word.endswith(".py"))
