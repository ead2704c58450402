"""Names of TensorFlow that are not here: the error says what to use instead, and that is here."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest

import mpidist
from mpidist import errors
from mpidist.missing import INSTEAD, Missing, instead_of
from mpidist.strategy.base import Strategy

PACKAGE = Path(mpidist.__file__).parent
MODULES = [mpidist, mpidist.data, mpidist.experimental, mpidist.optimizers, mpidist.metrics, mpidist.cluster_resolver]


def resolve(path: str) -> Any:
    """What a dotted name below `mpidist` or a strategy stands for."""
    first, *rest = path.split(".")
    found: Any = {"mpidist": mpidist, "strategy": mpidist.get_strategy(), "variable": mpidist.Variable(1.0)}[first]
    for name in rest:
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
@pytest.mark.parametrize("name", ["GradientTape", "TFRecordDataset", "experimental_run_v2", "GCEClusterResolver"])
def test_a_name_of_tensorflow_says_what_to_use(module: Any, name: str) -> None:
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute '{name}': use "):
        getattr(module, name)
    assert not hasattr(module, name)


def test_a_name_of_another_module_is_found_there() -> None:
    for module, name, home in (
        (mpidist, "Dataset", "mpidist.data.Dataset"), (mpidist, "SGD", "mpidist.optimizers.SGD"),
        (mpidist, "CommunicationOptions", "mpidist.experimental.CommunicationOptions"),
        (mpidist.experimental, "ReduceOp", "mpidist.ReduceOp"),
    ):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}': use `{home}`"):
            getattr(module, name)
        assert resolve(home).__name__ == name


def test_names_of_submodules_say_what_to_use() -> None:
    module: Any
    for module, name, text in (
        (mpidist.data, "experimental", r"'mpidist\.data' has no attribute 'experimental': use `mpidist\.data`"),
        (mpidist.optimizers, "experimental", r"has no attribute 'experimental': use `mpidist\.optimizers` itself"),
        (errors, "OutOfRangeError", r"'mpidist\.errors' has no attribute 'OutOfRangeError': use `StopIteration`"),
        (mpidist, "AUTOTUNE", r"has no attribute 'AUTOTUNE': use `mpidist\.data\.AUTOTUNE`"),
    ):
        with pytest.raises(AttributeError, match=text):
            getattr(module, name)
    variable: Any = mpidist.Variable([1.0], name="v")
    with pytest.raises(TypeError, match=r"variable 'v' cannot be written by `v\[...\] = value`.* `v\.assign"):
        variable[0] = 5


def test_a_name_of_nobody_is_said_to_be_missing() -> None:
    for module in MODULES:
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'Nonsense'$"):
            getattr(module, "Nonsense")  # noqa: B009  # mypy must not look it up


@pytest.mark.parametrize("name", [name for name, value in vars(Strategy).items() if isinstance(value, Missing)])
def test_a_method_of_tensorflow_says_what_to_use(name: str) -> None:
    for owner in (mpidist.get_strategy(), mpidist.OneDeviceStrategy("cpu:0"), mpidist.MirroredStrategy):
        with pytest.raises(AttributeError, match=f"Strategy' has no attribute '{name}': use `(strategy|mpidist)"):
            getattr(owner, name)
        assert not hasattr(owner, name)


def test_an_optimizer_says_that_gradients_are_the_programs() -> None:
    for optimizer in (mpidist.optimizers.SGD(0.1), mpidist.optimizers.LossScaleOptimizer(mpidist.optimizers.SGD(0.1))):
        with pytest.raises(AttributeError, match="'minimize': use `apply_gradients` with gradients that you compute"):
            optimizer.minimize  # noqa: B018


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_what_is_named_instead_is_here(name: str) -> None:
    text = instead_of(name)
    assert text is not None
    for path in re.findall(r"`((?:mpidist|strategy|variable)[\w.]*)", text):
        assert resolve(path) is not None
    for module in MODULES:
        assert name not in module.__all__, "it is here"


# What a package of an adapter imports.
FRAMEWORKS = {"torch": "torch", "keras": "torch", "jax": "jax", "xla": "jax"}
# Before Keras is imported: its own default is another backend.
os.environ.setdefault("KERAS_BACKEND", "torch")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_texts_name_classes_that_are_here(path: Path) -> None:
    """Texts of errors, warnings and the log; not docstrings, which may speak of other libraries."""
    tree = ast.parse(path.read_text())
    docstrings = {
        node.body[0].value for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
    }
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    texts = [str(node.value) for node in strings if node not in docstrings and " " in str(node.value)]
    for text in texts:
        for dotted in re.findall(r"\bmpidist(?:\.\w+)+", text):
            framework = FRAMEWORKS.get(dotted.split(".")[1])
            if framework is not None and importlib.util.find_spec(framework) is None:
                continue
            if not text.startswith("mpidist.") and "MPIDIST" not in text:
                assert resolve(dotted) is not None, text
        for name in re.findall(r"\b[A-Z][a-z]\w*(?:Strategy|Resolver|Manager|Dataset|Optimizer|Context)\b", text):
            assert any(hasattr(module, name) for module in MODULES), text
