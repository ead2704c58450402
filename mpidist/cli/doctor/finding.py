"""The findings of the doctor, and its page: lines as they are found, or one JSON object at its end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import click

from mpidist.cli.texts import is_colored, write

# The states, the worst one last, and their colors on a terminal.
STATES = ("ok", "note", "wrong")
_COLORS = dict(zip(STATES, ("green", "yellow", "red"), strict=True))


@dataclass(frozen=True)
class Finding:
    """One result about this machine or this job.

    Attributes:
        subject: The subject, in a few words.
        state: "ok"; "note", which costs time, or limits what can be done; or "wrong", with which programs fail.
        text: The finding in words.
        fix: The command or advice that fixes it; empty where there is nothing to fix.
        data: The numbers and names of the text, for programs.
    """

    subject: str
    state: str
    text: str
    fix: str = ""
    data: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.line()

    def line(self, *, colored: bool = False) -> str:
        """Local. The finding, and its fix in a second line.

        Args:
            colored: Whether the state has a color.
        """
        state = f"{self.state:5}"
        lines = [f"{click.style(state, _COLORS[self.state]) if colored else state} {self.subject:18} {self.text}"]
        return "\n".join([*lines, *([f"{'':24} fix: {self.fix}"] if self.fix else [])])


class Report:
    """Local. Findings, shown by the first rank.

    Args:
        as_json: One object at the end. Otherwise lines come at once: MPI may end the process when it starts.
        is_shown: Whether this rank shows it.
    """

    def __init__(self, *, as_json: bool, is_shown: bool) -> None:
        self.findings: list[Finding] = []
        self._as_json = as_json
        self._is_shown = is_shown

    def add(self, findings: Sequence[Finding]) -> None:
        """Local. Add findings."""
        self.findings += findings
        if not self._as_json:
            colored = is_colored()
            self._show("".join(f"{finding.line(colored=colored)}\n" for finding in findings))

    def end(self) -> bool:
        """Local. Show the remaining output, and return whether nothing is wrong."""
        if self._as_json:
            self._show(json.dumps({"findings": [asdict(one) for one in self.findings]}, indent=1) + "\n")
        return not any(one.state == "wrong" for one in self.findings)

    def _show(self, text: str) -> None:
        if not self._is_shown:
            return
        try:
            write(text)
        except click.ClickException as error:
            # The other ranks continue, and so does this one; the exit code of all ranks reports the error.
            self._is_shown = False
            self.findings.append(Finding("output", "wrong", error.message, "write it to another file"))
            error.show()
