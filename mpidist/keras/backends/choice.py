"""Keras's backend, and the module of this package for it."""

from __future__ import annotations

import importlib
from typing import Any

try:
    import keras
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("keras"):
        raise
    raise ImportError(
        f"mpidist.keras: Keras is set to a backend that is not installed: there is no module {error.name!r}. Without "
        "the environment variable KERAS_BACKEND, and without \"backend\" in ~/.keras/keras.json, Keras takes "
        "tensorflow. Set KERAS_BACKEND=torch (or jax) before Keras is imported, and install that package"
    ) from error

_MODULES = {"torch": "mpidist.keras.backends.torch_backend", "jax": "mpidist.keras.backends.jax_backend"}

name: str = keras.backend.backend()

if name not in _MODULES:
    raise ImportError(
        f"mpidist.keras: expected the Keras backend torch or jax, got {name!r}. Set the environment variable "
        "KERAS_BACKEND=torch (or jax) before Keras is imported, or \"backend\" in ~/.keras/keras.json"
    )
serving: Any = importlib.import_module(_MODULES[name])


def is_jax() -> bool:
    """Local. Whether steps are traced."""
    return name == "jax"
