"""The hooks of all callbacks of a `fit`, called in their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from mpidist.arguments import described
from mpidist.training.callbacks.callback import Callback, Trained
from mpidist.training.callbacks.model_checkpoint import ModelCheckpoint

# What a callback must have that is none of ours, as Keras's have.
_HOOKS = (
    "set_model", "set_params", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end",
    "on_train_batch_begin", "on_train_batch_end", "on_test_begin", "on_test_end", "on_test_batch_begin",
    "on_test_batch_end",
)


class CallbackHooks:
    """Local. The callbacks of a `fit` or an evaluation.

    Args:
        callbacks: Callbacks, or other objects with all of Keras's hooks.
        trainer: The trainer.
        params: See `Callback.params`.

    Raises:
        TypeError: One of them lacks hooks.
    """

    def __init__(self, callbacks: Any, trainer: Trained, params: Mapping[str, Any]) -> None:
        given = [callbacks] if isinstance(callbacks, Callback) else callbacks
        if not isinstance(given, Iterable) or isinstance(given, (str, bytes)):
            raise TypeError(f"`callbacks` must be a list of callbacks, got {described(callbacks)}")
        self._callbacks: Sequence[Any] = [require_callback(one) for one in given]
        if len({id(one) for one in self._callbacks}) < len(self._callbacks):
            raise ValueError("`callbacks` has one callback twice: its hooks would be called twice. Make another object")
        # A checkpoint holds the states of other callbacks as they are after the same moment.
        self._callbacks = sorted(self._callbacks, key=lambda one: isinstance(one, ModelCheckpoint))
        for one in self._callbacks:
            one.set_model(trainer)
        self.set_params(params)

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Local. Set the parameters of `fit`; see `Callback.params`."""
        for one in self._callbacks:
            one.set_params(params)

    @property
    def own(self) -> list[Callback]:
        """Local. The callbacks that extend `Callback`."""
        return [one for one in self._callbacks if isinstance(one, Callback)]

    def named(self) -> dict[str, Callback]:
        """Local. The callbacks that extend `Callback`, by names that are the same in each run of a program."""
        counts: dict[str, int] = {}
        found: dict[str, Callback] = {}
        for one in self.own:
            kind = type(one).__name__
            counts[kind] = number = counts.get(kind, 0) + 1
            found[f"{kind}_{number}"] = one
        return found

    def enter(self, stack: ExitStack) -> None:
        """Local. Enter the callbacks, which `stack` leaves in the reverse order."""
        for one in self.own:
            stack.enter_context(one)

    def call(self, hook: str, *args: Any) -> None:
        """Local. Call a hook of all callbacks.

        Args:
            hook: The name of the hook.
            *args: Its arguments; the last one, the values, is copied for each callback.
        """
        *first, logs = args
        for one in self._callbacks:
            getattr(one, hook)(*first, dict(logs))


def require_callback(value: Any) -> Any:
    """Local. The value, if it is a callback.

    Raises:
        TypeError: It lacks hooks.
    """
    missing = [hook for hook in _HOOKS if not callable(getattr(value, hook, None))]
    if missing or isinstance(value, type):
        instead = f"the class {value.__name__}: make an object of it" if isinstance(value, type) else described(value)
        raise TypeError(
            f"`callbacks` must be mpidist.training.Callback objects, or others with Keras's hooks, got {instead}"
            + ("" if isinstance(value, type) else f", which lacks {', '.join(missing[:3])}")
        )
    return value
