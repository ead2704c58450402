"""The command line as one whole: a line for each command, JSON for programs, colors on a terminal, completion."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mpidist.cli.main import main
from tests.helpers.launching import launch_environment
from tests.helpers.markdown import ROOT

PAGE = (ROOT / "docs" / "command-line.md").read_text()
PROGRAM = [sys.executable, "-c", "from mpidist.cli.main import main; main(prog_name='mpidist')"]


def commands(group: click.Group = main, way: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        yield (*way, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*way, name))


def test_each_command_is_one_line_in_a_narrow_terminal() -> None:
    text = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    listed = text.split("Commands:\n")[1].splitlines()
    assert dict(line.split(None, 1) for line in listed) == {
        name: command.short_help for name, command in main.commands.items()
    }


@pytest.mark.parametrize("words", [[], ["checkpoint"]])
def test_without_a_command_they_are_listed(words: list[str]) -> None:
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, result.output) == (0, CliRunner().invoke(main, [*words, "--help"]).output)


def test_each_option_says_what_it_is() -> None:
    options = [(way, one) for way, command in commands() for one in command.params if isinstance(one, click.Option)]
    assert len(options) > 30
    assert [(way, one.name) for way, one in options if not re.fullmatch(r"[A-Z]\S.* .*\.", one.help or "")] == []


def test_the_page_has_all_commands_and_those_with_json() -> None:
    listed = dict(re.findall(r"^\| `([\w-]+)` \| (.*?) \|", PAGE, re.MULTILINE))
    assert listed == {name: command.short_help for name, command in main.commands.items()}
    told = re.search(r"`--json` makes the output of (.*?) one JSON", PAGE, re.DOTALL)
    assert told is not None
    have = {way[0] for way, command in commands() if any("--json" in one.opts for one in command.params)}
    assert set(re.findall(r"`([\w-]+)`", told[1])) == have


def test_findings_of_a_script_for_programs(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\ntrue\n#SBATCH --nodes=2\n")
    result = CliRunner().invoke(main, ["lint", str(script), "--json"])
    assert result.exit_code == 1
    first, *_ = json.loads(result.output)
    assert first == {"script": str(script), "line": 3, "text": first["text"]}
    script.write_text("#!/bin/bash\ntrue\n")
    assert json.loads(CliRunner().invoke(main, ["lint", str(script), "--json"]).output) == []


def test_a_launch_line_for_programs() -> None:
    result = subprocess.run(
        [*PROGRAM, "launch-line", "-n", "3", "--json", "python", "x.py", "a b"], capture_output=True, text=True,
        check=False, env=launch_environment(), timeout=60,
    )
    if result.returncode:
        # No MPI: the error says so, and stdout, which a program reads, is empty.
        assert (result.stdout, "Error: " in result.stderr) == ("", True)
        return
    found = json.loads(result.stdout)
    assert found["words"][-3:] == ["python", "x.py", "a b"]
    assert found["ranks"] == 3


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_their_completion(shell: str) -> None:
    assert f"_MPIDIST_COMPLETE={shell}_source mpidist" in PAGE
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "_MPIDIST_COMPLETE": f"{shell}_source"}
    if shell == "bash":
        # Click asks a bash for its version.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "_MPIDIST_COMPLETE": "bash_complete",
                       "COMP_WORDS": "mpidist tr", "COMP_CWORD": "1"}
    result = subprocess.run(PROGRAM, capture_output=True, text=True, check=False, env=environment, timeout=60)
    assert ("plain,trace" if shell == "bash" else "mpidist") in result.stdout, result.stderr


@pytest.mark.parametrize("plain", [False, True])
def test_states_have_colors_on_a_terminal_only(plain: bool) -> None:
    show = (
        "from mpidist.cli.doctor.finding import Finding, Report; "
        "Report(as_json=False, is_shown=True).add([Finding('a', 'ok', 'b')])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "NO_COLOR": "1" if plain else ""}
    leader, follower = pty.openpty()
    subprocess.run([sys.executable, "-c", show], stdout=follower, env=environment, check=True, timeout=60)
    os.close(follower)
    with open(leader, "rb") as file:
        assert file.readline().startswith(b"ok " if plain else b"\x1b[32mok ")
    piped = subprocess.run([sys.executable, "-c", show], capture_output=True, env=environment, check=True, timeout=60)
    assert piped.stdout.startswith(b"ok ")
