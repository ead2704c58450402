"""What the sources of tests say about time, by their syntax: bounds on a clock from above, and sleeps that order.

A busy machine makes everything last longer. So a lower bound on time holds always, and an upper one by chance: a test
that wants to say "at once" says what has not happened yet, or counts. The plugin's time limit ends what hangs.

A `sleep` may stand in a loop that waits for an event, and elsewhere with a comment on its line that says why:

    time.sleep(0.01)  # simulates work: the reader is slower than the writer
    time.sleep(delay)  # any moment: the answer is right whenever the signal comes

The first may not stand right before something that another process is to see later (`_ACTS`), which would order the
two; a mark does that. The second needs a time that differs from run to run: it claims no order.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.helpers.clock_values import Scope, is_bound_from_above, names_of_clocks, negated

WORK = re.compile(r"#\s*simulates work: \w")
ANY_MOMENT = re.compile(r"#\s*any moment: \w")
# What a program has that looks at a clock or sleeps.
_WORDS = re.compile(
    r"\bsleep\b|Event\(\)\.wait|monotonic|perf_counter|process_time|thread_time|time\.time|Wtime|seconds_since"
)
_LONGEST_PAUSE = 1.0
# What ends a process, or tells another one something.
_ACTS = frozenset({
    "kill", "killpg", "_exit", "exit", "abort", "terminate", "send_signal", "raise_signal", "pthread_kill", "touch",
    "rename", "replace",
})
# What stands for a value that is put into a text later.
_PLACE = "_value_"


class Finding(NamedTuple):
    """A line that breaks the rule: its number, and how."""

    line: int
    what: str


def findings(source: str) -> list[Finding]:
    """What breaks the rule in a module, and in the programs that stand in its strings."""
    if not _WORDS.search(source):
        return []
    tree = ast.parse(source)
    found = _in_program(tree, source)
    for line, end, text in _texts(tree):
        program = _parsed(text)
        if program is not None:
            found += [Finding(min(line + one.line - 1, end), one.what) for one in _in_program(*program)]
    return sorted(set(found))


def files(root: Path) -> Iterator[Path]:
    """All modules of tests."""
    return iter(sorted((root / "tests").rglob("*.py")))


def _in_program(tree: ast.Module, source: str) -> list[Finding]:
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    clocks = names_of_clocks(tree)
    scope, lines = Scope(tree, parents, clocks), source.splitlines()
    sleeps = {
        alias.asname or alias.name
        for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.module in ("time", "asyncio")
        for alias in one.names if alias.name == "sleep"
    }
    found = []
    for node in parents:
        if isinstance(node, (ast.Compare, ast.If)) and _is_upper_bound(node, parents, scope):
            found.append(Finding(node.lineno, "a clock is bounded from above"))
        elif isinstance(node, ast.Call) and _is_sleep(node, sleeps):
            comment = " ".join(lines[node.lineno - 1 : node.end_lineno])
            what = _why_wrong(node, comment, parents, scope)
            found += [Finding(node.lineno, what)] if what else []
    return found


def _is_upper_bound(node: ast.Compare | ast.If, parents: dict[ast.AST, ast.AST], scope: Scope) -> bool:
    if isinstance(node, ast.Compare):
        return is_bound_from_above(node, scope) and _is_claimed(node, parents)
    # An assertion in other words: `if time.monotonic() > end: raise ...`.
    first = node.body[0]
    fails = isinstance(first, ast.Raise) or (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Call) and _called(first.value) == "fail"
    )
    return fails and isinstance(node.test, ast.Compare) and is_bound_from_above(negated(node.test), scope)


def _is_claimed(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a comparison is more than the limit of a loop or the choice of a way."""
    child, parent = node, parents[node]
    while not isinstance(parent, (ast.stmt, ast.IfExp, ast.comprehension)):
        child, parent = parent, parents[parent]
    if isinstance(parent, ast.comprehension):
        return child not in parent.ifs
    return not (isinstance(parent, (ast.While, ast.If, ast.IfExp)) and parent.test is child)


def _is_sleep(node: ast.Call, sleeps: set[str]) -> bool:
    function = node.func
    if node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0:
        return False
    if isinstance(function, ast.Name):
        return function.id in sleeps
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr == "wait":
        # An event that nobody else knows.
        made = function.value
        return bool(node.args) and isinstance(made, ast.Call) and ast.unparse(made.func).endswith("Event")
    # Of the module, or of C; a clock that a test makes has a `sleep` of its own.
    return function.attr == "sleep" and (
        isinstance(function.value, ast.Call) or ast.unparse(function.value) in ("time", "asyncio")
    )


def _why_wrong(node: ast.Call, comment: str, parents: dict[ast.AST, ast.AST], scope: Scope) -> str:
    if _is_poll(node, parents, scope):
        return ""
    if ANY_MOMENT.search(comment):
        is_fixed = all(isinstance(one, ast.Constant) for one in node.args)
        return "a sleep of always the same time is no moment by chance" if is_fixed else ""
    if not WORK.search(comment):
        return "a sleep that says no reason"
    act = _next_act(node, parents)
    return f"a sleep orders what comes next: {act}" if act else ""


def _is_poll(node: ast.Call, parents: dict[ast.AST, ast.AST], scope: Scope) -> bool:
    """Whether a sleep is the pause of a loop that ends by an event, not by the time alone."""
    seconds = node.args[0] if node.args else None
    if not isinstance(seconds, ast.Constant) or not isinstance(seconds.value, (int, float)):
        return False
    loop: ast.AST | None = node
    while loop is not None and not isinstance(loop, (ast.While, ast.For, ast.FunctionDef, ast.Lambda)):
        loop = parents.get(loop)
    if not isinstance(loop, ast.While) or seconds.value > _LONGEST_PAUSE:
        return False
    if _has_event(loop.test, scope):
        return True
    return any(
        isinstance(one, ast.If) and _has_event(one.test, scope)
        and any(isinstance(way, (ast.Break, ast.Return)) for part in one.body for way in ast.walk(part))
        for one in ast.walk(loop)
    )


def _has_event(test: ast.expr, scope: Scope) -> bool:
    if isinstance(test, ast.BoolOp):
        return any(_has_event(one, scope) for one in test.values)
    if isinstance(test, ast.UnaryOp):
        return _has_event(test.operand, scope)
    return not isinstance(test, ast.Constant) and not scope.has_clock(test)


def _next_act(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    """What the statement behind this one tells another process, or "" ."""
    while not isinstance(node, ast.stmt):
        node = parents[node]
    holder = parents[node]
    for field in ("body", "orelse", "finalbody"):
        block = getattr(holder, field, None)
        if isinstance(block, list) and node in block and node is not block[-1]:
            behind = block[block.index(node) + 1]
            if isinstance(behind, ast.Raise):
                return "raise"
            calls = [one for one in ast.walk(behind) if isinstance(one, ast.Call)]
            return next((name for name in map(_called, calls) if name in _ACTS), "")
    return ""


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _texts(tree: ast.Module) -> Iterator[tuple[int, int, str]]:
    """The strings that may be programs, with their lines: no docstrings, and nothing that a test looks for."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(node.value)
        elif isinstance(node, ast.Compare):
            skipped |= {node.left, *node.comparators}
        elif isinstance(node, ast.JoinedStr):
            skipped |= set(node.values)
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.end_lineno or 0, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (str(one.value) if isinstance(one, ast.Constant) else _PLACE for one in node.values)
            yield node.lineno, node.end_lineno or 0, "".join(parts)


def _parsed(text: str) -> tuple[ast.Module, str] | None:
    if not _WORDS.search(text):
        return None
    # The others are parts of a program that begin within a block.
    for one in (textwrap.dedent(text), text.lstrip(), f"if True:\n    {text.lstrip()}"):
        try:
            return ast.parse(one), one
        except (SyntaxError, ValueError):  # Of null bytes Python 3.10 raises the second one.
            continue
    return None
