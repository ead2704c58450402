"""Initial values that do not depend on the shards of a variable: `mpidist.Variable(initializer, shape=...)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from mpidist.missing import no_attribute
from mpidist.variables.making.initializers import Constant, RandomNormal, RandomUniform

__all__ = ["Constant", "RandomNormal", "RandomUniform"]


# Hidden from type checkers, which would take any name for one of the module's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        no_attribute(__name__, name)
