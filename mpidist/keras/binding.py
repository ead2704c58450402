"""The binding: what the objects of one distributed model share."""

from __future__ import annotations

import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpidist.keras.step import ModelStep, current
from mpidist.options import ReduceOp
from mpidist.strategy.default import get_replica_context

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy

T = TypeVar("T")

_numbers = itertools.count(1)
_bindings: weakref.WeakValueDictionary[int, ModelBinding] = weakref.WeakValueDictionary()


def find(number: int) -> ModelBinding:
    """Local. The binding of a number that a compiled step carries.

    Raises:
        RuntimeError: The model is gone, and its compiled step still runs.
    """
    binding = _bindings.get(number)
    if binding is None:
        raise RuntimeError("a compiled step runs whose model no longer exists. Keep the model while its steps run")
    return binding


class ModelBinding:
    """The strategy of a model, its optimizers, losses and seeds, and what they tell each other during a step.

    A copy of one of these objects is on its own: a copied or unpickled binding is None.

    Attributes:
        strategy: The strategy.
        number: The number by which compiled steps find the binding.
        wants_stop: Whether a callback of this rank has asked to stop; the next reduction sends it to all ranks.
        stops: Whether a callback of any rank has asked to stop.
        reductions: The number of reductions so far.
        members: The objects that were taken, for saving them as plain Keras objects.
        is_merged: Whether the statistics of batch normalization have had no step since they were averaged.
        memory: The memory in which the backend reduces gradients, by their dtype and shapes.
        hooks: The hooks of the backend during `fit`.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.number = next(_numbers)
        self.wants_stop = self.stops = False
        self.reductions = 0
        self.members: list[weakref.ref[Any]] = []
        self.is_merged = True
        self.memory: dict[Any, Any] = {}
        self.hooks: list[Any] = []
        _bindings[self.number] = self

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __copy__(self) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @property
    def size(self) -> int:
        """Local. The number of replicas."""
        return self.strategy.num_replicas_in_sync

    @property
    def rank(self) -> int:
        """Local. This rank's replica."""
        return self.strategy.communicator.rank

    @property
    def extended(self) -> Any:
        """Local. The strategy's `extended`.

        Raises:
            RuntimeError: The strategy was closed.
        """
        if self.strategy.is_closed:
            raise RuntimeError(
                f"the model is distributed over a {type(self.strategy).__name__} that was closed. Make a new strategy, "
                "build the model again and call mpidist.keras.distribute(model)"
            )
        return self.strategy.extended

    def sum(self, value: Any, name: str) -> np.ndarray[Any, Any]:
        """Collective. Sum a small array over the replicas."""
        own: np.ndarray[Any, Any] = np.asarray(value)
        if self.size > 1:
            own = np.asarray(self.extended.all_reduce(ReduceOp.SUM, own, name=name))
        return own

    def gather(self, value: Any) -> list[Any]:
        """Collective. Gather an object of every rank."""
        if self.size == 1:
            return [value]
        return list(self.extended.all_gather_object(value))

    def together(self, what: str, function: Callable[[], T], signature: Callable[[T], Any] | None = None) -> T:
        """Collective. Call a function that may fail on some rank, and whose outcome must be the same on all.

        Args:
            what: What the ranks do, for the error.
            function: A function that does not communicate.
            signature: A function of its result; its value must be the same on all ranks, and can be compared and
                pickled.

        Raises:
            Exception: What the function raised on the first rank where it failed, on every rank.
            ValueError: The signatures differ.
        """
        result, mine, failed = None, None, None
        try:
            result = function()
            mine = signature(result) if signature is not None else None
        except Exception as error:
            failed = error
        answers = self.gather((mine, _portable(failed)))
        for rank, (_, other) in enumerate(answers):
            if other is not None:
                if failed is not None and rank == self.rank:
                    raise failed
                raise other
        differing = [rank for rank, (signed, _) in enumerate(answers) if signed != answers[0][0]]
        if differing:
            raise ValueError(
                f"{what}: all ranks must give the same. Expected {answers[0][0]!r} as on rank 0, got "
                f"{answers[differing[0]][0]!r} on rank {differing[0]}. Every rank runs the same program over the same "
                "global data; the strategy takes each rank's rows"
            )
        return result  # type: ignore[return-value]

    def weigh(self, rows: float) -> float:
        """Collective. Begin a reduction of gradients; return the factor of this rank's gradients in the mean.

        Args:
            rows: The rows that this rank's gradients are the mean over.
        """
        head = self.sum(np.array([rows, self.wants_stop], np.float64), "rows of a step")
        self.stops = self.stops or bool(head[1])
        self.reductions += 1
        self.is_merged = False
        return float(self.size * rows / head[0]) if head[0] else 0.0

    def step(self) -> ModelStep | None:
        """Local. The step that this thread is in, if it is one of this binding."""
        step = current()
        return step if step is not None and step.binding is self else None

    def is_running(self) -> bool:
        """Local. Whether this thread is inside `run` of the strategy."""
        replica = get_replica_context()
        return replica is not None and replica.strategy is self.strategy

    def require_run(self, what: str) -> None:
        """Local. Raise RuntimeError outside of `strategy.run`: there nothing says how to combine the replicas."""
        if not self.is_running():
            raise RuntimeError(
                f"{what} of a distributed optimizer was called outside `fit` and outside `strategy.run`, where nothing "
                "says how to combine the gradients of the replicas. Call it in a function that `strategy.run` calls: "
                "gradients are then summed over the replicas, as by TensorFlow's `apply_gradients`"
            )


def _portable(error: Exception | None) -> Exception | None:
    if error is None:
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
