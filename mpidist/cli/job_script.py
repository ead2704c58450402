"""A job script of Slurm as text: its options and its commands, each with its line."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from mpidist.cli.shell import read_shell

_LONG_NAMES = {
    "N": "nodes", "n": "ntasks", "c": "cpus-per-task", "G": "gpus", "a": "array", "J": "job-name", "o": "output",
    "t": "time", "K": "kill-on-bad-exit", "m": "distribution", "w": "nodelist", "p": "partition",
}
# The short options of srun and sbatch without a value, which another one may follow in the same word, as in -lK.
_FLAGS = "EHOQVXZhjklsuv"
_SRUN = ("srun",)
_MPIRUN = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun")
_CONTAINERS = ("apptainer", "singularity", "docker", "podman")
_SHELLS = ("bash", "dash", "ksh", "sh", "zsh")


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
        text: As it stands in the script.
        words: Its words, without quotes.
        runs_behind: Whether the shell goes on while it runs: `&` stands behind it.
    """

    line: int
    text: str
    words: tuple[str, ...]
    runs_behind: bool = False

    @functools.cached_property
    def is_srun(self) -> bool:
        """Local. Whether srun starts a Python program here."""
        return self._starts(_SRUN) and (self.is_python or self._is_python_quoted)

    @functools.cached_property
    def is_mpirun(self) -> bool:
        """Local. Whether mpirun starts a Python program here."""
        return self._starts(_MPIRUN) and (self.is_python or self._is_python_quoted)

    @functools.cached_property
    def is_python(self) -> bool:
        """Local. Whether the line starts a Python program."""
        return any(_is_program(word) for word in self.words)

    @property
    def _is_python_quoted(self) -> bool:
        """Whether a shell starts a Python program here, by the text of its `-c`."""
        texts = [
            word for before, option, word in zip(self.words, self.words[1:], self.words[2:], strict=False)
            if _base(before) in _SHELLS and re.fullmatch("-[a-z]*c", option)
        ]
        return any(_is_program(word) for text in texts for word in text.split())

    @functools.cached_property
    def options(self) -> dict[str, str]:
        """Local. The options that stand between srun and the program, by their long names."""
        begin = next((at for at, word in enumerate(self.words) if _base(word) in _SRUN), 0) + 1
        stops = (
            at for at, word in enumerate(self.words) if _is_program(word) or _base(word) in (*_CONTAINERS, *_SHELLS)
        )
        end = next((at for at in stops if at >= begin), len(self.words))
        return {option.name: option.value for option in _options(self.words[begin:end], self.line)}

    @property
    def container(self) -> str:
        """Local. The name of the program that starts a container for Python here; empty if there is none."""
        return next((_base(word) for word in self.words if _base(word) in _CONTAINERS and self.is_python), "")

    @property
    def container_words(self) -> tuple[str, ...]:
        """Local. The words between the name of a container program and the program that it starts."""
        begin = next((at for at, word in enumerate(self.words) if _base(word) in _CONTAINERS), len(self.words)) + 1
        end = next((at for at, word in enumerate(self.words) if at >= begin and _is_program(word)), len(self.words))
        return self.words[begin:end]

    @property
    def has_launcher_inside(self) -> bool:
        """Local. Whether ranks are started inside of a container."""
        return any(_base(word) in (*_SRUN, *_MPIRUN) for word in self.container_words)

    def _starts(self, names: tuple[str, ...]) -> bool:
        return any(_base(word) in names for word in self.words)


@dataclass(frozen=True)
class JobScript:
    """A script for `sbatch`.

    Attributes:
        options: Those that Slurm reads.
        late_options: The lines of those that stand below the first command, which Slurm ignores.
        commands: Those of the shell.
    """

    options: list[Option] = field(default_factory=list)
    late_options: list[int] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)

    def find(self, name: str) -> Option | None:
        """Local. The last option of this name, as for Slurm."""
        return next((option for option in reversed(self.options) if option.name == name), None)

    def count(self, name: str, component: int = 0) -> int | None:
        """Local. The number that an option of a component has; None where it is missing or no number."""
        found = [o.value for o in self.options if (o.name, o.component) == (name, component)]
        return int(found[-1]) if found and found[-1].isdecimal() else None

    @property
    def components(self) -> int:
        """Local. The number of components of the job."""
        return 1 + max((option.component for option in self.options), default=0)

    def sets(self, variable: str) -> bool:
        """Local. Whether a command sets the variable."""
        return variable in self._set_variables

    @functools.cached_property
    def _set_variables(self) -> frozenset[str]:
        return frozenset(name for command in self.commands for name in re.findall(r"\b(\w+)=", command.text))


def read_job_script(text: str) -> JobScript:
    """Local. Read a script.

    Args:
        text: The script.
    """
    script = JobScript()
    component = 0
    for piece in read_shell(text):
        if piece.words:
            script.commands.append(Command(piece.line, piece.text, tuple(piece.words), piece.runs_behind))
        elif not piece.text.startswith("#SBATCH"):
            continue
        elif script.commands:
            script.late_options.append(piece.line)
        else:
            words = _words(piece.text.removeprefix("#SBATCH"))
            if words[:1] in (["hetjob"], ["packjob"]):
                component += 1
            script.options.extend(_options(words, piece.line, component))
    return script


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        # A quote that nothing closes.
        return text.split()


def _options(words: Sequence[str], line: int, component: int = 0) -> Iterator[Option]:
    """`--name=value`, `--name value`, `-n 4`, `-n4` and `-ln4`."""
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
    return PurePath(word).name


def _is_program(word: str) -> bool:
    return _base(word).startswith(("python", "pytest")) or word.endswith(".py")
