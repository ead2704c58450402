"""Every public name of Keras: its classes of models, optimizers and metrics distribute what they make in a scope."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import keras

from mpidist.keras.distribute import distribute, serve
from mpidist.keras.input.creator import DatasetCreator
from mpidist.strategy.default import get_strategy, has_strategy, in_cross_replica_context
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy

# Layers of this one class have their tables on parameter servers; other strategies leave them as they are.
_KINDS = (keras.Model, keras.optimizers.Optimizer, keras.metrics.Metric, keras.layers.Embedding)


def _made(thing: Any) -> Any:
    """Collective where a strategy is current. Distribute an object that was made in its scope."""
    if has_strategy() and in_cross_replica_context():
        strategy = get_strategy()
        if isinstance(strategy, ParameterServerStrategy):
            serve(thing, strategy)
        elif not isinstance(thing, keras.layers.Embedding):
            distribute(thing, strategy)
    return thing


class MadeInScope(type):
    """The metaclass of classes that a user derives from this package's: their instances are distributed in a scope."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Collective where a strategy is current. Make an instance."""
        return _made(super().__call__(*args, **kwargs))


class Marked(metaclass=MadeInScope):
    """The base of such classes beside Keras's own."""


class Maker:
    """A class of Keras whose instances are distributed over the strategy of the scope.

    It is called, asked by `isinstance` and `issubclass`, and derived from like the class.

    Args:
        kind: Keras's class.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self.__doc__, self.__name__ = kind.__doc__, kind.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Collective where a strategy is current. Make an instance."""
        return _made(self._kind(*args, **kwargs))

    def __or__(self, other: Any) -> Any:
        return self._kind | other

    __ror__ = __or__

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._kind)

    def __subclasscheck__(self, kind: type) -> bool:
        return issubclass(kind, self._kind)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (self._kind,) if Marked in bases else (Marked, self._kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kind, name)

    def __repr__(self) -> str:
        return f"<{self._kind.__module__}.{self._kind.__name__}, distributed in a strategy's scope>"


class NamesOfKeras(types.ModuleType):
    """A public module of Keras, with makers in place of some classes.

    Args:
        module: Keras's module.
        added: Names that Keras does not have.
    """

    def __init__(self, module: types.ModuleType, added: dict[str, Any]) -> None:
        super().__init__(f"mpidist.{module.__name__}", module.__doc__)
        self._module, self._added = module, added

    def __getattr__(self, name: str) -> Any:
        if name in self._added:
            return self._added[name]
        return _wrapped(getattr(self._module, name))

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._module), *self._added})


@functools.cache
def _maker(kind: Any) -> Maker:
    return Maker(kind)


@functools.cache
def _names(module: types.ModuleType) -> NamesOfKeras:
    added: dict[str, Any] = {}
    if module.__name__ == "keras.utils":
        experimental = types.ModuleType("mpidist.keras.utils.experimental")
        experimental.DatasetCreator = DatasetCreator  # type: ignore[attr-defined]
        added["experimental"] = sys.modules[experimental.__name__] = experimental
    return NamesOfKeras(module, added)


def _wrapped(value: Any) -> Any:
    if isinstance(value, types.ModuleType) and value.__name__.startswith("keras."):
        return _names(value)
    return _maker(value) if isinstance(value, type) and issubclass(value, _KINDS) else value


def lookup(name: str) -> Any:
    """Local. A public name of Keras.

    Raises:
        AttributeError: Keras has no such name.
    """
    if name.startswith("_") or name not in public_names():
        raise AttributeError(
            f"module 'mpidist.keras' has no attribute {name!r}, and neither has keras {keras.__version__}"
        )
    return _wrapped(getattr(keras, name))


def register_modules() -> None:
    """Local. Let `from mpidist.keras.layers import Dense` find Keras's public modules."""
    for name in public_names():
        value = getattr(keras, name)
        if isinstance(value, types.ModuleType) and value.__name__ == f"keras.{name}":
            names = _names(value)
            names.__path__ = []
            sys.modules[f"mpidist.keras.{name}"] = names


@functools.cache
def public_names() -> frozenset[str]:
    """Local. The names of Keras."""
    return frozenset(name for name in dir(keras) if not name.startswith("_"))
