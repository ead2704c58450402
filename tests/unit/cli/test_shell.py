"""Scripts of a shell that are cut into commands and words, as bash cuts them."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpidist.cli.slurm.shell_words import ShellPiece, read_shell
from tests.helpers.amounts import amount

SIGNS = st.sampled_from(list("ab '\"\\$#;&|()<>`\t\n=-"))
TEXTS = st.text(SIGNS, max_size=12)


def words(text: str) -> list[list[str]]:
    return [piece.words for piece in read_shell(text) if piece.words]


def test_pieces_have_their_lines_and_texts() -> None:
    text = "#!/bin/sh\n\nmodule load a; srun -K \\\n  b 'c\nd' &  # why\n#SBATCH\nwait"
    assert read_shell(text) == [
        ShellPiece(1, "#!/bin/sh"), ShellPiece(3, "module load a", ["module", "load", "a"]),
        ShellPiece(3, "srun -K \\\n  b 'c\nd'", ["srun", "-K", "b", "c\nd"], runs_behind=True),
        ShellPiece(5, "# why", begins_line=False), ShellPiece(6, "#SBATCH"), ShellPiece(7, "wait", ["wait"]),
    ]
    assert words(text.replace("\n", "\r\n")) == words(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a 2>&1 &>b >|c <&3", [["a", "2>&1", "&>b", ">|c", "<&3"]]),
        ("a && b || c | d; e", [["a"], ["b"], ["c"], ["d"], ["e"]]),
        ("(a; b) | c", [["a"], ["b"], ["c"]]),
        ("x=$(a; b) y=(c) z=$((1 << 2))\nd", [["x=$(a"], ["b)", "y=(c)", "z=$((1", "<< 2))"], ["d"]]),
        ("f() { a; }\ncase b in\nc) d;; esac", [["f()", "{", "a"], ["}"], ["case", "b", "in"], ["c)", "d"], ["esac"]]),
        ("a#b ${#c} # d", [["a#b", "${#c}"]]),
        (r"a\ b 'c\' $'d\'e' " + r'"f\"\g\$h"', [["a b", "c\\", r"$d\'e", 'f"\\g$h']]),
        ("a <<<b\nc", [["a", "<<<b"], ["c"]]),
        ("a <<B <<'C D' e\n1\nB\n2\nC D\nf", [["a", "<<B", "<<'C D'", "e"], ["f"]]),
        ("a <<-B\n\tb\n\tB\nc", [["a", "<<-B"], ["c"]]),
        # Without an end it is no document; a quote without one ends nowhere, and so do those behind it.
        ("a <<B\nb\nc", [["a", "<<B"], ["b"], ["c"]]),
        ("it's\na 'b'\nc \"d\ne", [["its\na b'"], ["c", '"d'], ["e"]]),
    ],
)
def test_commands_and_words(text: str, expected: list[list[str]]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "behind"),
    [
        ("a & b", "a"),
        ("a | b && c & d", "a b c"),
        ("a; b & c\nd", "b"),
        ("a\n(b\nc; d) & e", "b c d"),
        ("(a & b); c", "a"),
        ("a; { b; c; } & d", "{ b c }"),
        ("a; while b; do c; done & d", "while b do c done"),
        ("f() { a; }\nf & g", "f"),
    ],
)
def test_what_runs_behind(text: str, behind: str) -> None:
    assert [word for piece in read_shell(text) if piece.runs_behind for word in piece.words] == behind.split()


@given(st.lists(TEXTS.filter(bool), min_size=1, max_size=5))
def test_quoted_words_come_back(given_words: list[str]) -> None:
    assert words(f"a {shlex.join(given_words)}\nb") == [["a", *given_words], ["b"]]


@settings(max_examples=amount(60, 2000), deadline=None)
@given(st.lists(st.sampled_from(
    ["a", "'b c'", '"d e"', '"f\\"\ng"', "h\\ i", "\\\n", " ", "\n", "# j", ";", "'k\nl'"]
)))
@example(["a", "\\\n", "a"])
def test_bash_cuts_the_same_words(parts: list[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    text = "".join(f"a {part}" if part == ";" else part for part in parts)
    script = 'a() { printf "%s\\0" "$#" "$@"; }\ncommand_not_found_handle() { a "$@"; }\n' + text
    result = subprocess.run([bash, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    if result.stderr:
        # No script.
        return
    fields = result.stdout.split("\0")[:-1]
    cut: list[str] = []
    for command in words(text):
        rest = command[1:] if command[0] == "a" else command
        cut += [str(len(rest)), *rest]
    assert cut == fields


@given(st.text(SIGNS | st.sampled_from("\r\f\v\x1c\x85\u2028é{}"), max_size=60))
def test_any_text_is_cut(text: str) -> None:
    for piece in read_shell(text):
        assert piece.text.replace("\r\n", "\n") in text.replace("\r\n", "\n")
        assert 1 <= piece.line <= text.count("\n") + 1
