"""Objects of foreign types in checkpoints: adapters of frameworks register what is saved of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from mpidist import arrays, context
from mpidist.arguments import described
from mpidist.arrays import AnyArray
from mpidist.attributes import is_array
from mpidist.checkpoint.file.saved import Saved, SavedArray
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.variables.update.options import PartialState
from mpidist.variables.variable import BaseVariable, Read

T = TypeVar("T")


class PerReplica:
    """Local. A value that differs between replicas, as a leaf of a registered object's state: each one's is saved.

    Args:
        value: A number, or an array of any library, of the same shape and dtype on all replicas. In `load_state` it is
            this replica's own. If n replicas saved and another number restores, replica r gets that of replica r % n,
            and `values` all n.

    Attributes:
        value: The constructor's argument.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def values(self) -> list[Any]:
        """Local. In `load_state`: the values of all replicas that were saved, in their order."""
        return [self.value]


class _SavedPerReplica(PerReplica):
    """The saved values of all replicas, for `load_state`."""

    def __init__(self, saved: SavedArray, rank: int) -> None:
        self._saved = saved
        super().__init__(self._read(rank % saved.replicas))

    def _read(self, replica: int) -> Any:
        saved = self._saved
        count = saved.size // saved.replicas
        return saved.read(replica * count, (replica + 1) * count).reshape(saved.shape[1:])[()]

    @property
    def values(self) -> list[Any]:
        """Local. See `PerReplica.values`."""
        return [self._read(replica) for replica in range(self._saved.replicas)]


class Component:
    """This rank's component of an array that a checkpoint holds for each rank of a group.

    Args:
        array: The component.
        group: The ranks.

    Attributes:
        array: The constructor's argument.
        group: The constructor's argument.
    """

    def __init__(self, array: AnyArray, group: Communicator) -> None:
        self.array = array
        self.group = group

    @property
    def shape(self) -> tuple[int, ...]:
        """Local. The shape of all components together, with the ranks as its first dimension."""
        return (self.group.size, *self.array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Local. The dtype."""
        return self.array.dtype

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> AnyArray:
        return np.asarray(self.array, dtype)

    def reader(self) -> Read:
        """Local. Open this rank's component for reading, as `BaseVariable.reader`."""
        flat = np.ascontiguousarray(self.array).reshape(-1)
        return lambda start, stop: flat[start:stop]


class _Kind(NamedTuple):
    """The functions that were registered for a class; see `register`."""

    state: Callable[[Any], Any]
    load_state: Callable[[Any, Any], object]
    group: Callable[[Any], Any] | None


# What was registered, by class.
KINDS: dict[type, _Kind] = {}


def register(
    kind: type[T], state: Callable[[T], Any], load_state: Callable[[T, Any], object], *,
    group: Callable[[T], Any] | None = None,
) -> None:
    """Local. Let checkpoints save and restore objects of a class that has no `state` and `load_state` of its own.

        mpidist.checkpoint.register(torch.nn.Module, lambda model: model.state_dict(), load)
        mpidist.Checkpoint(model=model)              # saves model/0.weight, and so on

    Registering a class again replaces what was registered.

    Args:
        kind: The class; objects of its subclasses count as well.
        state: A function of an object that returns what is saved of it: a dictionary of arrays of any library, numbers,
            strings, bytes, None and further dictionaries, by name. It must be the same on every rank, except for leaves
            that are `PerReplica`.
        load_state: A function of an object and of the saved state, with NumPy arrays and numbers. Lists come back as
            dictionaries by index, empty dictionaries not at all. Where a part is restored, it gets a whole state:
            values that do not fit, or were not saved, are those that `state` returns now.
        group: A function of an object that returns its strategy. Default: the strategy of the scope, or else the only
            one that is open.

    Raises:
        TypeError: `kind` is no class, or an argument is no function.
    """
    if not isinstance(kind, type):
        raise TypeError(f"register: `kind` must be a class, got {described(kind)}")
    for name, function in (("state", state), ("load_state", load_state), ("group", group)):
        if not callable(function) and not (name == "group" and function is None):
            raise TypeError(f"register: `{name}` must be a function, got {described(function)}")
    KINDS[kind] = _Kind(state, load_state, group)


class RegisteredState:
    """An object of a registered class, as an object with `state` and `load_state`; see `states.Stateful`.

    Args:
        value: The object.
        kind: The functions that were registered for its class.
    """

    def __init__(self, value: object, kind: _Kind) -> None:
        self._value = value
        self._kind = kind

    @property
    def group(self) -> Communicator | None:
        """Local. The ranks that save the object together; None where there is no strategy.

        Raises:
            ValueError: Several strategies are open, and it is unknown which one is the object's.
        """
        strategy = None if self._kind.group is None else self._kind.group(self._value)
        if strategy is None:
            strategy = _current_strategy(type(self._value).__name__)
        if strategy is not None and strategy.home.saves_once:
            raise NotImplementedError(
                f"a checkpoint cannot hold a {type(self._value).__name__} under {strategy!r}, whose groups have "
                "different ones. Save it under mpidist.MultiWorkerMirroredStrategy()"
            )
        return None if strategy is None else cast(Communicator, strategy.home.communicator)

    def state(self) -> Any:
        """Local. Give what is to be saved."""
        return _to_save(self._kind.state(self._value), self)

    def load_state(self, saved: Saved) -> None:
        """Local. Give the object what was saved; of a `PartialState` what fits, with its present state for the rest."""
        group = self.group
        if isinstance(saved, PartialState):
            saved = _merged(self.state(), saved)
        self._kind.load_state(self._value, _restored(saved, 0 if group is None else group.rank))


def registered_state(value: object) -> RegisteredState | None:
    """Local. The state of an object of a registered class, None of any other."""
    kind = next((KINDS[one] for one in type(value).__mro__ if one in KINDS), None)
    return None if kind is None else RegisteredState(value, kind)


def _current_strategy(name: str) -> Any:
    entry = context.innermost()
    if entry is not None and getattr(entry.home, "strategy", None) is entry.strategy:
        return entry.strategy
    found: list[Any] = [one for one in context.open_strategies() if one.num_replicas_in_sync > 1]
    if len(found) > 1:
        raise ValueError(
            f"a checkpoint holds a {name}, and {len(found)} strategies are open: it is unknown whose ranks save it "
            "together. Save and restore inside `with strategy.scope():`"
        )
    return found[0] if found else None


def _to_save(value: Any, owner: RegisteredState) -> Any:
    """A state with NumPy arrays for those of other libraries."""
    if isinstance(value, Mapping):
        return {name: _to_save(child, owner) for name, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_save(child, owner) for child in value]
    if isinstance(value, PerReplica):
        array = np.asarray(_to_save(value.value, owner))
        if array.dtype.kind not in "biufcV" or array.dtype.hasobject:
            raise ValueError(f"PerReplica: expected a number or an array of numbers, got {described(value.value)}")
        return Component(array, owner.group or SoloCommunicator())
    if isinstance(value, (np.ndarray, BaseVariable, SavedArray)) or not is_array(value):
        return value
    if getattr(value, "requires_grad", False):
        value = value.detach()
    return arrays.to_host(arrays.lend(value))


def _restored(saved: Saved, rank: int) -> Any:
    if isinstance(saved, dict):
        return {name: _restored(child, rank) for name, child in saved.items()}
    if isinstance(saved, SavedArray):
        return _SavedPerReplica(saved, rank) if saved.replicas else saved.value()
    # What a restore in part has left as it is.
    return PerReplica(saved.array) if isinstance(saved, Component) else saved


def _merged(present: Any, saved: Saved) -> Any:
    """The saved values where they fit, else the present ones; what a dictionary has besides is left out."""
    if isinstance(present, (list, tuple)):
        present = {str(number): child for number, child in enumerate(present)}
    if isinstance(present, dict) and isinstance(saved, dict):
        # One that is empty until the first step, as of optimizers, takes everything.
        if not present:
            return dict(saved)
        names = {str(name): child for name, child in present.items()}
        return {name: _merged(child, saved[name]) if name in saved else child for name, child in names.items()}
    return present if why_not(present, saved) is not None else saved


def why_not(present: Any, saved: Saved) -> str | None:
    """Local. Why a value of a present state cannot be replaced by what was saved; None where it can."""
    if isinstance(present, dict) or not isinstance(saved, SavedArray):
        return "one value was saved" if isinstance(present, dict) else "several arrays were saved below that path"
    is_each = isinstance(present, Component)
    if is_each is not bool(saved.replicas):
        return "one value was saved for all replicas" if is_each else "a value of each replica was saved"
    shape = tuple(getattr(present, "shape", ()))
    own, its = (shape[1:], saved.shape[1:]) if is_each else (shape, saved.shape)
    is_number = not isinstance(present, (str, bytes, bytearray, type(None)))
    if is_number and not saved.kind and own != its:
        return f"it has shape {own}, but {its} was saved (saved {saved.type_name})"
    return None
