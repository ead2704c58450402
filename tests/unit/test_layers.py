"""The shape of the package: imports point down, modules are small, importing it costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mpidist
from tests.launching import launch_environment

PACKAGE = Path(mpidist.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in MODULES]
MAX_LINES = 400


def imported_modules(tree: ast.AST) -> set[str]:
    """Every module that the code may import by statement."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_module_is_small_and_says_its_idea(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring, "the first line of a module says its idea"
    assert docstring.splitlines()[0].endswith(".") or "\n" not in docstring


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_module_imports_at_its_top_only(path: Path) -> None:
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    assert [function.name for function in functions if imported_modules(function)] == []


def test_only_the_mpi_communicator_imports_mpi() -> None:
    homes = [
        name
        for path, name in zip(MODULES, NAMES, strict=True)
        if any(module.split(".")[0] == "mpi4py" for module in imported_modules(ast.parse(path.read_text())))
    ]
    assert homes == ["comm/mpi_communicator.py"]


def test_import_contracts_hold() -> None:
    pytest.importorskip("importlinter", reason="import-linter is in the extra 'dev'")
    # In a process of its own: it puts folders on sys.path, and must see no module of this run.
    result = subprocess.run(
        [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"],
        cwd=PACKAGE.parent, env=launch_environment(), capture_output=True, text=True, check=False, timeout=50,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("module", ["mpidist", "mpidist.testing", "mpidist.cluster_resolver"])
def test_importing_starts_nothing(module: str) -> None:
    """No MPI, and nothing heavy: the plugin is loaded in every pytest run of an environment that has mpidist."""
    code = (
        f"import sys, {module}; "
        "print([name for name in ('mpi4py', 'numpy', 'h5py', 'torch', 'cupy', 'optree') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent, env=launch_environment(), capture_output=True, text=True, check=False, timeout=50,
    )
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
