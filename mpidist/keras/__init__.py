"""Keras 3 over a strategy: `distribute(model)`, and every public name of Keras.

Two lines in a script that trains on one process:

```python
strategy = mpidist.MultiWorkerMirroredStrategy()
mpidist.keras.distribute(model)
```

or `import mpidist.keras as keras`, and what is built under `strategy.scope()` is distributed. Backends: torch and jax.
"""

from __future__ import annotations

from typing import Any

# First: it says which backend is missing.
from mpidist.keras.backends.choice import is_jax as _is_jax  # noqa: F401 - for its error
from mpidist.keras.checkpoints import register_kinds as _register_kinds
from mpidist.keras.distribute import distribute as distribute
from mpidist.keras.input.creator import DatasetCreator as DatasetCreator
from mpidist.keras.names import lookup as _lookup
from mpidist.keras.names import public_names as _public_names
from mpidist.keras.names import register_modules as _register_modules

_register_modules()
_register_kinds()


def __getattr__(name: str) -> Any:
    return _lookup(name)


def __dir__() -> list[str]:
    return sorted({"distribute", "DatasetCreator", *_public_names()})
