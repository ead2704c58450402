"""What docstrings and comments refer to is there: "see `module.name`", `Class.member` and `module.py`."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import mpidist

PACKAGE = Path(mpidist.__file__).parent
FILES = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def names_in(node: ast.AST) -> Iterator[str]:
    """What a module or class defines, takes, binds or imports."""
    for one in ast.walk(node):
        if isinstance(one, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield one.name
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            yield one.id
        elif isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
            yield one.attr
        elif isinstance(one, ast.arg):
            yield one.arg
        elif isinstance(one, ast.alias):
            yield (one.asname or one.name).split(".")[0]


@cache
def definitions() -> tuple[dict[str, set[str]], dict[str, set[str]], dict[str, set[str]]]:
    """The names in modules and packages of one name, the members of classes, and the bases of classes."""
    modules: dict[str, set[str]] = defaultdict(set)
    members: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for path, text in FILES.items():
        tree = ast.parse(text)
        modules[path.parent.name if path.stem == "__init__" else path.stem].update(names_in(tree))
        modules[path.parent.name].add(path.stem)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                members[node.name].update(names_in(node))
                bases[node.name].update(re.findall(r"\w+", " ".join(map(ast.unparse, node.bases))))
    return modules, members, bases


def members_of(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
    _, members, bases = definitions()
    above = [members_of(base, seen | {name}) for base in bases[name] & members.keys() - seen - {name}]
    return members[name].union(*above)


def test_what_is_referred_to_is_there() -> None:
    modules, members, _ = definitions()
    checked, missing = 0, []
    for path, text in FILES.items():
        place = path.relative_to(PACKAGE).as_posix()
        for name in re.findall(r"`(\w+)\.py`", text):
            checked += 1
            if not any(one.stem == name for one in FILES):
                missing.append(f"{place}: {name}.py")
        for owner, name in re.findall(r"`(?:\w+\.)*([A-Z]\w+)\.(\w+)`", text):
            if owner in members:
                checked += 1
                if name not in members_of(owner):
                    missing.append(f"{place}: {owner}.{name}")
        for owner, name in re.findall(r"[Ss]ee `(?:\w+\.)*([a-z]\w*)\.(\w+)`", text):
            checked += 1
            if owner in modules and name not in {"py", *modules[owner]}:
                missing.append(f"{place}: {owner}.{name}")
        for name in re.findall(r"[Ss]ee `(\w+)`", text):
            checked += 1
            if name not in members and not any(name in names for names in modules.values()):
                missing.append(f"{place}: {name}")
    assert checked > 500
    assert missing == []
