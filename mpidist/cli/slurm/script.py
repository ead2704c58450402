"""A job script of Slurm as text: its options and its commands, each with its line."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mpidist.cli.slurm.command import Command, Option, read_options
from mpidist.cli.slurm.shell_words import read_shell

_ASSIGNMENT = re.compile(r"(?:(?:export|local|readonly|declare|typeset)\s+(?:-\w+\s+)*)?(\w+)(\+?)=(.*)", re.DOTALL)
# A word that is a variable and no more: $OPTIONS, ${OPTIONS} or ${OPTIONS[@]}.
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})")
_GPUS = re.compile(r"(?:gres/|gres:)?gpu(?::[^,]*?)??(?::([0-9]+))?")


@dataclass(frozen=True)
class JobScript:
    """A script for `sbatch`.

    Attributes:
        options: Those that Slurm reads.
        late_options: The lines of those that stand below the first command, which Slurm ignores.
        misplaced_options: The lines of those that Slurm takes for comments.
        commands: Those of the shell.
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
    def has_one_task(self) -> bool:
        """Local. Whether the script says that the job has one task."""
        nodes, tasks, per_node = (self.count(name) for name in ("nodes", "ntasks", "ntasks-per-node"))
        is_one = tasks == 1 or (nodes == per_node == 1 and tasks is None)
        return self.components == 1 and is_one and (nodes or 1) == (per_node or 1) == 1

    def gpus_of_node(self, component: int = 0) -> int | None:
        """Local. The number of GPUs of a node, by `--gpus-per-node` or `--gres`; None where neither tells it."""
        for option in reversed(self.options):
            if option.component != component:
                continue
            if option.name == "gpus-per-node":
                number = option.value.rpartition(":")[2]
                return int(number) if number.isdecimal() else None
            found = [_GPUS.fullmatch(one) for one in option.value.split(",")] if option.name == "gres" else []
            if any(found):
                return sum(int(match[1] or 1) for match in found if match is not None)
        return None

    @property
    def components(self) -> int:
        """Local. The number of components of the job."""
        return 1 + max((option.component for option in self.options), default=0)

    def sets(self, variable: str) -> bool:
        """Local. Whether a command sets the variable."""
        return variable in self._set_variables

    def value(self, variable: str) -> str:
        """Local. The last text that a command gives to the variable; empty where it is no simple one."""
        return self._set_variables.get(variable, "")

    @functools.cached_property
    def _set_variables(self) -> dict[str, str]:
        return {
            name: text for command in self.commands
            for name, text in re.findall(r"\b(\w+)=[\"']?([\w.-]*)", command.text)
        }


def read_job_script(text: str) -> JobScript:
    """Local. Read a script.

    Args:
        text: The script.
    """
    script = JobScript()
    component = 0
    pieces = read_shell(text.removeprefix("\ufeff"))
    variables = _variables(piece.text for piece in pieces if piece.words)
    for piece in pieces:
        if piece.words:
            words = tuple(_expanded(piece.words, variables))
            script.commands.append(Command(piece.line, piece.text, words, piece.runs_behind))
        elif not piece.text.startswith("#SBATCH"):
            if re.match(r"#sbatch\s+-", piece.text, re.IGNORECASE):
                script.misplaced_options.append(piece.line)
        elif script.commands:
            script.late_options.append(piece.line)
        elif not piece.begins_line:
            script.misplaced_options.append(piece.line)
        else:
            given = _words(piece.text.removeprefix("#SBATCH"))
            if given[:1] in (["hetjob"], ["packjob"]):
                component += 1
            script.options.extend(read_options(given, piece.line, component))
    return script


def _variables(texts: Iterable[str]) -> dict[str, list[str]]:
    """The words of variables that have one text in the whole script, which may be added to."""
    found: dict[str, list[str]] = {}
    unclear: set[str] = set()
    for text in texts:
        match = _ASSIGNMENT.fullmatch(text)
        if match is None:
            continue
        name, added, value = match.groups()
        is_list = value.startswith("(")
        try:
            given = shlex.split(value.removeprefix("(").removesuffix(")") if is_list else value)
        except ValueError:
            given = None
        # More than one word are several variables, or one of a command alone; a list may continue in the next line.
        if (name in found and not added) or given is None or (is_list != value.endswith(")")):
            unclear.add(name)
        elif is_list or len(given) == 1:
            found.setdefault(name, []).extend(word for one in given for word in ([one] if is_list else one.split()))
    return {name: words for name, words in found.items() if name not in unclear}


def _expanded(words: Sequence[str], variables: dict[str, list[str]]) -> Iterable[str]:
    for word in words:
        match = _VARIABLE.fullmatch(word)
        yield from variables.get(match[1] or match[2], [word]) if match else [word]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        # A quote that nothing closes.
        return text.split()
