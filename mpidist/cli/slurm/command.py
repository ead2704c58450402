"""One command of a job script: what it starts, and with which options of srun; nothing is run."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from mpidist.cli.slurm.shell_words import read_shell

_LONG_NAMES = {
    "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "a": "array", "J": "job-name", "o": "output",
    "t": "time", "K": "kill-on-bad-exit", "m": "distribution", "w": "nodelist", "p": "partition",
}
# The short options of srun and sbatch without a value, which another one may follow in the same word, as in -lK.
_FLAGS = "EHOQVXZhjklsuv"
# Those of srun whose value, if they have one, stands in the same word.
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
CONTAINERS = ("apptainer", "singularity", "docker", "podman")
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
# What may stand in front of the name of a program.
_IN_FRONT = frozenset({
    "!", "do", "elif", "else", "exec", "if", "nohup", "sudo", "then", "time", "until", "while", "{",
})
_ASSIGNMENT = re.compile(r"\w+\+?=.*", re.DOTALL)


@dataclass(frozen=True)
class Option:
    """One option of `#SBATCH`, or of a command.

    Attributes:
        line: Its line, from 1.
        name: Its long name, without dashes.
        value: "" where it has none.
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
        text: The text of the command in the script.
        words: Its words, without quotes, and with the texts of variables that the script sets once.
        runs_behind: Whether the shell continues while it runs: `&` stands behind it.
    """

    line: int
    text: str
    words: tuple[str, ...]
    runs_behind: bool = False

    @functools.cached_property
    def is_srun(self) -> bool:
        """Local. Whether srun starts a Python program here."""
        return self.names(SRUN) and _starts_python(self._words_of_program)

    @functools.cached_property
    def is_mpirun(self) -> bool:
        """Local. Whether mpirun starts a Python program here."""
        return self.names(MPIRUN) and _starts_python(self.words)

    @functools.cached_property
    def is_python(self) -> bool:
        """Local. Whether the line starts a Python program."""
        return _names_python(self.words)

    @functools.cached_property
    def options(self) -> dict[str, str]:
        """Local. The options that stand between srun and the program, by their long names."""
        begin, end = self._begin_of_options, len(self.words) - len(self._words_of_program)
        return {option.name: option.value for option in read_options(self.words[begin:end], self.line)}

    @property
    def has_unknown_options(self) -> bool:
        """Local. Whether a variable stands between srun and the program, of which the script does not tell the text."""
        end = len(self.words) - len(self._words_of_program)
        return any(word.startswith("$") for word in self.words[self._begin_of_options : end])

    @property
    def container(self) -> str:
        """Local. The name of the program that starts a container for Python here; empty if there is none."""
        if not self.is_python or not {"exec", "run", "shell"} & set(self.words):
            return ""
        return next((_base(word) for word in self.words if _base(word) in CONTAINERS), "")

    @property
    def container_words(self) -> tuple[str, ...]:
        """Local. The words between the name of a container program and the program that it starts."""
        begin = next((at for at, word in enumerate(self.words) if _base(word) in CONTAINERS), len(self.words)) + 1
        end = next((at for at, word in enumerate(self.words) if at >= begin and _is_program(word)), len(self.words))
        return self.words[begin:end]

    @property
    def has_launcher_inside(self) -> bool:
        """Local. Whether ranks are started inside of a container."""
        return any(_base(word) in (*SRUN, *MPIRUN) for word in self.container_words)

    def names(self, programs: Sequence[str]) -> bool:
        """Local. Whether the line has one of these programs, and starts it as far as can be seen."""
        return not _is_about_names(self.words) and any(_base(word) in programs for word in self.words)

    @functools.cached_property
    def _begin_of_options(self) -> int:
        return next((at for at, word in enumerate(self.words) if _base(word) in SRUN), -1) + 1

    @functools.cached_property
    def _words_of_program(self) -> tuple[str, ...]:
        """The words behind srun and its options."""
        at = self._begin_of_options
        while at < len(self.words) and self.words[at][:1] in ("-", "$") and not _is_program(self.words[at]):
            at += 2 if _has_value_behind(self.words[at]) else 1
        return self.words[at:]


def _has_value_behind(word: str) -> bool:
    """Whether the value of this option of srun is the next word."""
    if word.startswith("--"):
        return "=" not in word and word[2:] not in _LONG_ALONE
    return word.startswith("-") and len(word[1:].lstrip(_SHORT_ALONE)) == 1


def _first(words: Sequence[str]) -> str:
    """The name of the program that a line starts, as far as can be seen."""
    for word in words:
        if word not in _IN_FRONT and not _ASSIGNMENT.fullmatch(word):
            return _base(word)
    return ""


def _is_about_names(words: Sequence[str]) -> bool:
    first = _first(words)
    return first in _HANDLERS or (first in _MANAGERS and "run" not in words)


def _names_python(words: Sequence[str]) -> bool:
    return not _is_about_names(words) and any(map(_is_program, words))


def _starts_python(words: Sequence[str]) -> bool:
    """Whether a line starts a Python program, or a shell that does so by the text of its `-c`."""
    texts = [
        word for before, option, word in zip(words, words[1:], words[2:], strict=False)
        if _base(before) in _SHELLS and re.fullmatch("-[a-z]*c", option)
    ]
    return _names_python(words) or any(_names_python(piece.words) for text in texts for piece in read_shell(text))


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


def _base(word: str) -> str:
    # The first word of `$(...)` has its bracket in front.
    return PurePath(re.split(r"[`(]", word)[-1]).name


def _is_program(word: str) -> bool:
    return not word.startswith("-") and (_PYTHON.fullmatch(_base(word)) is not None or word.endswith(".py"))
