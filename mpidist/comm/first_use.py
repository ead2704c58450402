"""First use: functions whose module is loaded when they are called, so that a program loads only what it uses."""

from __future__ import annotations

import functools
import importlib
from typing import Any


def at_first_use(module: str, name: str) -> Any:
    """Local. A function that calls `name` of `module`; its first call loads the module.

    Use it in the `else:` of an `if TYPE_CHECKING:` that imports the same name for type checkers and for the import
    contracts. It is not for what runs in a signal handler, at exit, or after a death: nothing can be loaded where the
    file system is unmounted, or the interpreter has partly ended.

    Args:
        module: The full name of the module.
        name: The name of a function in it, or of a class that is only called.
    """
    @functools.cache
    def find() -> Any:
        return getattr(importlib.import_module(module), name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return find()(*args, **kwargs)

    return call
