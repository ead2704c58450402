"""The shape of the package: imports point down, modules are small, importing it costs nothing."""

from __future__ import annotations

import ast
import collections
import configparser
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import mpidist
from tests.helpers.launching import launch_environment

PACKAGE = Path(mpidist.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(PACKAGE)) for path in MODULES]
MAX_LINES = 400
MAX_MODULES = 15
# Of the package, by a program of one rank: 177 and 201 when nothing waited for its first use.
MAX_LOADED = 110
MAX_LOADED_BY_A_STEP = 165
# TensorFlow has one name for two classes each, in two of its namespaces.
OF_ONE_NAME = {
    "MultiWorkerMirroredStrategy": {"experimental.py", "strategy/multi_worker.py"},
    "TPUStrategy": {"experimental.py", "strategy/tpu/strategy.py"},
}


def imported_modules(tree: ast.AST) -> set[str]:
    """Every module that the code may import by statement."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def depends_on(tree: ast.AST) -> set[str]:
    """Every module that the code imports when it runs, by statement or by name."""
    only_types = {
        id(node)
        for test in ast.walk(tree)
        if isinstance(test, ast.If) and ast.unparse(test.test) == "TYPE_CHECKING"
        for one in test.body
        for node in ast.walk(one)
    }
    nodes = [node for node in ast.walk(tree) if id(node) not in only_types]
    names = {
        f"{node.module}.{alias.name}" for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "at_first_use")):
            names |= {one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return names


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def test_no_circle_of_imports() -> None:
    """Also none that an import by name hides from the import contracts."""
    trees = {module_name(path): ast.parse(path.read_text()) for path in MODULES}

    def known(name: str) -> str:
        return name if name in trees or "." not in name else known(name.rpartition(".")[0])

    graph = {
        name: {known(one) for one in depends_on(tree)} & {*trees} - {name, "mpidist"} for name, tree in trees.items()
    }
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_no_folder_is_crowded() -> None:
    sizes = collections.Counter(path.parent for path in MODULES if path.name != "__init__.py")
    crowded = {str(folder.relative_to(PACKAGE)): size for folder, size in sizes.items() if size > MAX_MODULES}
    assert crowded == {}


def test_no_two_public_classes_have_one_name() -> None:
    homes: dict[str, set[str]] = {}
    for path, name in zip(MODULES, NAMES, strict=True):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, set()).add(name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == OF_ONE_NAME


def test_the_architecture_page_names_every_package() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    packages = [path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    assert [name for name in packages if f"`{name}/`" not in page] == []


# Rooms whose objects have all their parts when they are made.
WIRED = ("strategy", "coordinator", "parameter_server")
# Assignments to an attribute of another object: by module, the object and its class. Records of plain fields are
# changed by the state machine that owns them; of the others the reason is beside them.
RECORDS = {
    "parameter_server/queue/closures.py": {
        "closure": "Closure", "begun": "Closure", "self._closures[number]": "Closure",
        "self._closures[one.closure]": "Closure",
    },
    "parameter_server/queue/data_positions.py": {"place": "_Place"},
    "parameter_server/queue/resources.py": {"worker": "WorkerRecord"},
    "parameter_server/queue/worker_table.py": {"worker": "WorkerRecord"},
    "parameter_server/server/staging.py": {"staged": "_Staged"},
}
NO_PARTS = {
    "parameter_server/chief/decisions.py": {
        # A public attribute that a program sets, too.
        "self._optimizers[number]": "Optimizer",
    },
    "parameter_server/chief/dropped_objects.py": {
        # Of the standard library, which has no argument for it.
        "weakref.finalize(given, self.noted.append, (kind, number, place))": "weakref.finalize",
    },
    # Of the standard library: this is how a hook is set.
    "strategy/adapters/ending.py": {"threading": "threading"},
    # An exception of the program, whose constructor must not be called.
    "parameter_server/protocol/sent_errors.py": {"error": "BaseException"},
    # The user's own, whose attributes a program sets, as in tf.distribute.
    "strategy/multi_worker.py": {"resolver": "ClusterResolver"},
}


def assigned_to_others(tree: ast.AST) -> set[str]:
    """Objects but `self` and the class to whose attributes the code assigns."""
    targets: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
            targets.append(node.target)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            targets.append(node.optional_vars)
    found: set[str] = set()
    while targets:
        target = targets.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            targets += target.elts
        elif isinstance(target, ast.Starred):
            targets.append(target.value)
        elif isinstance(target, ast.Attribute) and ast.unparse(target.value) not in ("self", "cls"):
            found.add(ast.unparse(target.value))
    return found


def test_objects_are_wired_by_their_constructors() -> None:
    """Nobody sets an attribute of another object, or of its own parts: constructors and methods say what may change."""
    found = {
        name: others for path, name in zip(MODULES, NAMES, strict=True)
        if name.split("/")[0] in WIRED and (others := assigned_to_others(ast.parse(path.read_text())))
    }
    assert found == {name: set(known) for name, known in {**RECORDS, **NO_PARTS}.items()}


def test_records_have_plain_fields() -> None:
    classes = {
        node.name: node for path, name in zip(MODULES, NAMES, strict=True) if name in RECORDS or "/queue/" in name
        for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)
    }
    for record in {name for known in RECORDS.values() for name in known.values()}:
        assert any("dataclass" in ast.unparse(one) for one in classes[record].decorator_list), record


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
    assert homes == ["comm/group/mpi_communicator.py"]


def test_import_contracts_hold() -> None:
    pytest.importorskip("importlinter", reason="import-linter is in the extra 'dev'")
    # In a process of its own: it puts folders on sys.path, and must see no module of this run.
    result = subprocess.run(
        [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"],
        cwd=PACKAGE.parent, env=launch_environment(), capture_output=True, text=True, check=False, timeout=50,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_adapters_import_homes_of_public_names_only() -> None:
    contracts = configparser.ConfigParser(allow_no_value=True)
    contracts.read(PACKAGE.parent / "setup.cfg")
    lines = contracts["importlinter:contract:adapters"]["ignore_imports"].split("\n")
    homes = {line.partition(" -> ")[2] for line in lines if line}
    public = {*mpidist._HOMES.values(), mpidist.data.Dataset.__module__, mpidist.optimizers.__name__}
    assert homes
    assert homes <= public


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


def test_a_strategy_loads_what_it_uses() -> None:
    """Each module takes a third of a millisecond of every rank's core, and is a file that all ranks read at once."""
    code = """
import sys
import numpy as np
import mpidist

def loaded():
    return sum(name.partition(".")[0] == "mpidist" for name in sys.modules)

strategy = mpidist.MirroredStrategy()
print(loaded())
with strategy.scope():
    variable = mpidist.Variable(np.zeros(3, "float32"))
    mpidist.optimizers.SGD(0.1).apply_gradients([(np.ones(3, "float32"), variable)])
print(loaded())
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent, env=launch_environment(), capture_output=True, text=True, check=False, timeout=50,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    after_strategy, after_step = map(int, result.stdout.split())
    assert after_strategy <= MAX_LOADED
    assert after_step <= MAX_LOADED_BY_A_STEP
