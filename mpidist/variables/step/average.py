"""The exponential moving average of the weights, a slot after those of the kernel."""

from __future__ import annotations

from mpidist.variables.step.plan import Plan
from mpidist.variables.update.arithmetic import UpdateArithmetic
from mpidist.variables.update.options import OptimizerOptions


class MovingAverage:
    """The moving average of all variables of a plan.

    Args:
        plan: The plan of the variables, whose last slot is the average.
        arithmetic: The arithmetic of the optimizer.
        options: The options of the optimizer.
    """

    def __init__(self, plan: Plan, arithmetic: UpdateArithmetic, options: OptimizerOptions) -> None:
        self._plan = plan
        self._arithmetic = arithmetic
        self._frequency = options.ema_overwrite_frequency
        self._all = tuple(range(len(plan.variables)))

    def follow(self, step: int, numbers: tuple[int, ...], moves: int) -> None:
        """Collective. Move the average towards the variables; at the given interval, set the variables to it.

        Args:
            step: The step of the update that has just changed the variables. In step 1 the average becomes their value.
            numbers: The numbers of these variables.
            moves: Number of moves that were made before it changed them. Others are due as many more.
        """
        move = self._arithmetic.follow(step)
        late = self._arithmetic.follow(step, 1 + moves) if moves and len(numbers) < len(self._all) else move
        changed = set(numbers)
        self._plan.variable_pass(self._all).change(lambda number: move if number in changed else late)
        if self._frequency is not None and step % self._frequency == 0:
            self.overwrite(self._all)

    def overwrite(self, numbers: tuple[int, ...], moves: int = 0) -> None:
        """Collective. Set variables to their average, after the given number of further moves of the average."""
        variable_pass = self._plan.variable_pass(numbers)
        # Other ranks may still be reading the variables.
        variable_pass.barrier()
        take = self._arithmetic.take(moves)
        variable_pass.apply(lambda _: take)
