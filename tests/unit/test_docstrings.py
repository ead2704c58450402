"""Examples in docstrings run and give what they say."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import pkgutil
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mpidist

# These import MPI, which would start it here.
NEEDS_MPI = {
    "mpidist.comm.group.mpi_communicator", "mpidist.comm.group.duplicates", "mpidist.comm.backends.mpi",
    "mpidist.comm.windows.rma.window",
}
# And this one imports CuPy, which is there only where a GPU is.
NEEDS_CUPY = {"mpidist.comm.gpu.cuda"}
# These, and what is in them, import what an extra brings.
OF_EXTRAS = {
    "mpidist.comm.arithmetic.machine_code": "llvmlite", "mpidist.torch": "torch", "mpidist.keras": "torch",
    "mpidist.jax": "optax", "mpidist.xla": "jax",
}
# Before Keras is imported: its own default is another backend.
os.environ.setdefault("KERAS_BACKEND", "torch")
MODULES = sorted({m.name for m in pkgutil.walk_packages(mpidist.__path__, "mpidist.")} - NEEDS_MPI - NEEDS_CUPY)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    for module, extra in OF_EXTRAS.items():
        if f"{name}.".startswith(f"{module}."):
            pytest.importorskip(extra, reason=f"{extra} is not installed")
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0


# The methods that a constructor's errors come from.
FOLDER = str(Path(mpidist.__file__).parent)
CONSTRUCTORS = ("__init__", "__new__", "__post_init__")


def public(module: ModuleType = mpidist) -> Iterator[tuple[str, Any]]:
    """The functions and classes that `module` and the modules in it list in `__all__`, by name."""
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value):
            # `mpidist.summary.experimental` is a module of two functions, without a list.
            yield from public(value) if hasattr(value, "__all__") else ()
        elif inspect.isclass(value) or inspect.isfunction(value):
            yield f"{module.__name__}.{name}", value


def functions() -> dict[str, Callable[..., Any]]:
    """The public functions, and the public methods and properties of public classes, with those that they inherit."""
    found: dict[str, Callable[..., Any]] = {}
    for name, value in public():
        if inspect.isfunction(value):
            found[name] = value
            continue
        for kind in value.__mro__:
            for method, member in vars(kind).items() if kind.__module__.startswith("mpidist") else ():
                function = getattr(member, "fget", None) or getattr(member, "__func__", member)
                if inspect.isfunction(function) and not method.startswith("_"):
                    found[f"{kind.__module__}.{kind.__qualname__}.{method}"] = function
    return found


def classes() -> dict[str, type]:
    """The public classes."""
    return {name: value for name, value in public() if inspect.isclass(value)}


def raised(function: Callable[..., Any]) -> set[str]:
    """The names of the errors that a function raises itself; not of abstract methods."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    made = [node.exc.func for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    names = {node.id for node in made if isinstance(node, ast.Name)}
    return {name for name in names if name.endswith("Error") and name != "NotImplementedError"}


def test_public_docstrings_begin_with_who_must_call() -> None:
    first = re.compile(r"(Local|Collective|Root only)\b")
    functions_ = {name: value.__doc__ for name, value in functions().items()}
    assert len(functions_) > 350
    # Values that a program only reads need no word.
    constructed = {name: value.__doc__ for name, value in classes().items() if "Args:" in (value.__doc__ or "")}
    found = [name for name, text in (functions_ | constructed).items() if not first.match(text or "")]
    assert not found, "\n".join(sorted(found))


def test_public_docstrings_name_the_errors() -> None:
    found = [
        f"{name}: {error}" for name, value in functions().items() for error in raised(value)
        if error not in (value.__doc__ or "")
    ]
    for name, kind in classes().items():
        for maker in CONSTRUCTORS:
            function = getattr(vars(kind).get(maker), "__func__", vars(kind).get(maker))
            # Not those of enumerations and data classes, which Python has made.
            if inspect.isfunction(function) and function.__code__.co_filename.startswith(FOLDER):
                found += [f"{name}: {error}" for error in raised(function) if error not in (kind.__doc__ or "")]
    assert not found, "\n".join(sorted(found))
