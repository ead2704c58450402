"""The step that this thread is in: whose model, how many rows of the batch are this rank's, training or not.

In the backend jax a step is traced, and `rows` is a traced number then: it travels with the batch, since steps are
dispatched ahead and a batch's number says nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpidist.keras.binding import ModelBinding

_ROWS, _BATCH = "mpidist rows", "mpidist batch"


class ModelStep:
    """One step of one model.

    Attributes:
        binding: The binding of the model.
        rows: This rank's rows of the batch, a number or a traced one. 0: the batch has one row, which counts nothing.
        is_training: Whether gradients are taken.
        weighed: The identities of the optimizers whose loss has this replica's weight already.
    """

    __slots__ = ("binding", "is_training", "rows", "weighed")

    def __init__(self, binding: ModelBinding, rows: Any, *, is_training: bool) -> None:
        self.binding, self.rows, self.is_training = binding, rows, is_training
        self.weighed: set[int] = set()


class _Steps(threading.local):
    def __init__(self) -> None:
        self.entered: list[ModelStep] = []


_steps = _Steps()


@contextmanager
def enter(step: ModelStep) -> Iterator[ModelStep]:
    """Local. Inside, this thread is in a step."""
    _steps.entered.append(step)
    try:
        yield step
    finally:
        _steps.entered.pop()


def current() -> ModelStep | None:
    """Local. The step that this thread is in."""
    return _steps.entered[-1] if _steps.entered else None


def wrap(rows: Any, batch: Any) -> dict[str, Any]:
    """Local. A batch together with the number of its rows that are this rank's."""
    return {_ROWS: rows, _BATCH: batch}


def unwrap(data: Any) -> tuple[Any, Any]:
    """Local. The number of rows, and the batch; the number is None where the batch comes without."""
    # `train_on_batch` packs what it is given as (x, y, sample_weight), `predict_on_batch` as (x,).
    if isinstance(data, (list, tuple)) and data and isinstance(data[0], dict) and _ROWS in data[0]:
        data = data[0]
    if isinstance(data, dict) and _ROWS in data:
        return data[_ROWS], data[_BATCH]
    return None, data
