"""The way in which a strategy makes the steps of a training: what the loop asks of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from mpidist.arrays import AnyArray
from mpidist.training.position import Totals
from mpidist.training.results import StepOutcome

T = TypeVar("T")


class StepTask(NamedTuple):
    """The work of a run of steps.

    Attributes:
        fn: The program's function, which gets a batch.
        function: The name of the argument that gave it, for errors.
        totals: The sums of the run's steps.
        add: Counts a step, with its sums.
        left: The number of steps that may still be made.
        wish: This rank's wish to leave the loop; see `StepOutcome.wish`.
        before: A function that is called before a step.
        updates: A value that differs once the step has updated variables.
        around: Calls a function that makes a step; for a handler of preemption.
    """

    fn: Callable[..., Any]
    function: str
    totals: Totals
    add: Callable[[Mapping[str, AnyArray]], None]
    left: Callable[[], float]
    wish: Callable[[], int]
    before: Callable[[], None]
    updates: Callable[[], object]
    around: Callable[[Callable[[], Any]], Any]


class StepSource(Protocol):
    """A dataset as a strategy distributes it, and one pass over it."""

    @property
    def batches(self) -> Any:
        """Local. The iterator of the pass, which a checkpoint holds."""
        ...

    @property
    def pass_steps(self) -> float:
        """Local. The largest number of steps that a pass may have."""
        ...

    def begin_pass(self) -> None:
        """Local, on every rank. Begin the next pass."""
        ...


class Steps(Protocol):
    """A run of steps over a source."""

    def advance(self) -> StepOutcome | None:
        """Collective. Make a step; None at the end of the pass."""
        ...

    def settle(self) -> None:
        """Collective. Wait for steps that are under way, and count them."""
        ...

    def catch_up(self) -> None:
        """Local. Count the steps under way that have ended."""
        ...


class Way(Protocol):
    """The way in which steps run under a kind of strategy."""

    def source(self, dataset: Any, argument: str, *, is_validation: bool) -> StepSource:
        """Collective. Distribute a dataset, and begin the first pass.

        Args:
            dataset: The argument of the program.
            argument: The name of the argument, for errors.
            is_validation: Whether every group of ranks gets all of it.
        """
        ...

    def steps(self, source: StepSource, task: StepTask) -> Steps:
        """Local. Steps over the pass of a source."""
        ...

    @property
    def leaves_epochs(self) -> bool:
        """Local. Whether a wish has effect in the middle of an epoch."""
        ...

    def agree(self, wish: int) -> int:
        """Collective. The largest wish of all ranks; see `StepOutcome.wish`."""
        ...

    def begin_run(self, function: str) -> None:
        """Collective. Begin an epoch, or an evaluation, whose steps the argument of this name makes."""
        ...

    def end_run(self, function: str, totals: Totals) -> dict[str, float]:
        """Collective. End it; returns the values of its steps' sums."""
        ...

    def finish(self) -> None:
        """Collective. End the training: all ranks hold the same parameters."""
        ...
