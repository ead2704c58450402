"""Objects that decide themselves what a checkpoint saves of them; random generators are among them."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, cast

import numpy as np

from mpidist.checkpoint.file.saved import Saved
from mpidist.checkpoint.walk.registered import KINDS, registered_state
from mpidist.errors import CheckpointError

# A text: NumPy loads its generators when they are first named, which takes ten milliseconds of a core.
RandomGenerator: TypeAlias = "np.random.Generator | np.random.RandomState | random.Random"


class Stateful(Protocol):
    """An object that decides itself what a checkpoint saves of it: an optimizer, a metric, an iterator.

    An object that spans several ranks without having a variable has them as its attribute `group`, a `Communicator`.

    An object whose state has an entry for each of some variables, as an optimizer's, has these variables as its
    property `built_on`. Lists, and dictionaries with integer keys, in its state are by the numbers of these variables.
    In the file the path of the variable takes the place of the number, where the checkpoint holds the variable: a
    program that makes its variables in another order gives each its own state back.

    An object that takes back a state without some of its entries, such as those of later versions, has their names as
    its attribute `may_lack`; of an object inside, as "inner/name".

    An object of which each of several groups has one, as an iterator over a group's batches, has its own place as its
    property `place_in_group`, picklable, and is told those of all groups by `note_places` before one group saves it.
    """

    def state(self) -> Any:
        """Local. Give what is to be saved.

        Returns:
            Dictionaries, lists and tuples, nested at will, of variables, NumPy arrays, Python numbers and strings, and
            `SavedArray`s that `load_state` was given. Everything but variables must be the same on every rank.
        """

    def load_state(self, saved: Saved) -> None:
        """Collective. Take back what `state` once gave.

        Args:
            saved: Nested dictionaries of `SavedArray`, which may be kept for later. The keys are the same, as strings;
                a list's indices, too, are keys. `variable.load` takes `SavedArray.read_for(variable)`. Where `built_on`
                gave a variable, the key is its `saved_as`.
        """


def state_of(value: object) -> Stateful | None:
    """Local. Find what gives the state of `value`: itself, or what wraps a generator; None where nothing does.

    The generator of the operating system has no state.
    """
    # Looked up on the class: an instance may answer to any name, as proxies and data frames do.
    registered = registered_state(value) if KINDS else None
    if registered is not None:
        return registered
    kind: Any = type(value)
    if callable(getattr(kind, "state", None)) and callable(getattr(kind, "load_state", None)):
        return cast(Stateful, value)
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else GeneratorState(value)
    if "numpy.random" in sys.modules and isinstance(value, (np.random.Generator, np.random.RandomState)):
        return GeneratorState(value)
    return None


class GeneratorState:
    """A random generator as an object with `state` and `load_state`; it must be the same on every rank.

    Args:
        generator: The generator.
    """

    def __init__(self, generator: RandomGenerator) -> None:
        self._generator = generator

    def state(self) -> dict[str, str]:
        """Local. The kind of the generator, and its state as JSON: its integers may have more than 64 bits."""
        kind, content = self._read()
        return {"generator": kind, "content": json.dumps(content, default=_as_list)}

    def raw(self) -> Any:
        """Local. The state as the generator has it, for `put_back`; in a tenth of the time of `state`."""
        return self._read()[1]

    def put_back(self, content: Any) -> None:
        """Local. Bring the generator to a state that `raw` gave."""
        if isinstance(self._generator, random.Random):
            self._generator.setstate(content)
        elif isinstance(self._generator, np.random.RandomState):
            self._generator.set_state(content)
        else:
            self._generator.bit_generator.state = content

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Local. Bring the generator to the saved state.

        Raises:
            CheckpointError: The saved state is that of a generator of another kind.
        """
        kind, text = str(saved["generator"]), str(saved["content"])
        expected, _ = self._read()
        if kind != expected:
            raise CheckpointError(
                f"expected the state of a random generator {expected}, the checkpoint has that of {kind}; create the "
                "generator as it was when the checkpoint was saved"
            )
        content = json.loads(text)
        if isinstance(self._generator, random.Random):
            version, words, gauss = content
            content = version, tuple(words), gauss
        self.put_back(content)

    def _read(self) -> tuple[str, Any]:
        if isinstance(self._generator, random.Random):
            return "random.Random", self._generator.getstate()
        if isinstance(self._generator, np.random.RandomState):
            content: Any = self._generator.get_state(legacy=False)
        else:
            content = self._generator.bit_generator.state
        return f"numpy {content['bit_generator']}", content


def _as_list(value: Any) -> Any:
    return value.tolist()
