"""The arena: the home of mirrored and ON_READ variables, with one copy per node where its ranks share memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy.typing as npt
from typing_extensions import override

from mpidist import context
from mpidist.comm.first_use import at_first_use
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.recorder.calls import noted
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.memory.arena_memory import ArenaMemory
from mpidist.variables.replicas import Replicas
from mpidist.variables.variable import BaseVariable, Home, UpdatePlan

if TYPE_CHECKING:
    from mpidist.variables.drift import DriftCheck
    from mpidist.variables.making.creation import create_variable
    from mpidist.variables.step.arena_plan import ArenaPlan
    from mpidist.variables.update.kernel import Kernel, LayerKernel
    from mpidist.variables.update.options import OptimizerOptions
else:
    create_variable = at_first_use("mpidist.variables.making.creation", "create_variable")
    ArenaPlan = at_first_use("mpidist.variables.step.arena_plan", "ArenaPlan")
    DriftCheck = at_first_use("mpidist.variables.drift", "DriftCheck")


class Arena(ArenaMemory):
    """The home of one strategy's variables: each has one value on all ranks, or a component on each of them.

    Collective. It takes the arguments of `ArenaMemory`.
    """

    _drift: DriftCheck | None = None

    @property
    def mirrored_kind(self) -> Callable[..., MirroredVariable]:
        """Local. Makes an ON_WRITE variable; takes the arguments of `MirroredVariable`."""
        return MirroredVariable

    @override
    def after_run(self) -> None:
        """Collective. See `Home.after_run`; raises MismatchError where variables have drifted apart."""
        if self._drift is None:
            self._drift = DriftCheck(self)
        self._drift.after_step()

    @override
    @noted("creating a variable")
    def create_variable(
        self,
        initial_value: npt.ArrayLike | BaseVariable | Callable[[], npt.ArrayLike],
        *,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        trainable: bool | None = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
        sparse_gradient: bool = False,
    ) -> BaseVariable:
        """Collective. See `Home.create_variable`, and `creation.create_variable` for the errors."""
        return create_variable(
            self, initial_value, name=name, dtype=dtype, trainable=trainable, synchronization=synchronization,
            aggregation=aggregation, sparse_gradient=sparse_gradient, kind=self.mirrored_kind,
        )

    @override
    @noted("building an optimizer")
    def plan(
        self, variables: Sequence[BaseVariable], kernel: Kernel | LayerKernel, options: OptimizerOptions
    ) -> UpdatePlan:
        """Collective. See `Home.plan`.

        Raises:
            MismatchError: The lists of variables differ between ranks.
            TypeError: A variable is not mirrored.
            OSError: Sharing is demanded (shared=True), and node memory has run out; on every rank.
        """
        return ArenaPlan(mirrored_only(variables), kernel, options)


def mirrored_only(variables: Sequence[BaseVariable]) -> list[MirroredVariable]:
    """Local. The variables, if each of them is mirrored; else a TypeError."""
    mirrored = [variable for variable in variables if isinstance(variable, MirroredVariable)]
    if len(mirrored) < len(variables):
        raise TypeError(f"an arena plans updates of ON_WRITE variables, got {list(variables)!r}")
    return mirrored


class _SoloArena(Arena):
    """The arena of variables without a strategy: the default strategy's, which is not theirs."""

    is_default = True

    @override
    def set_strategy(self, strategy: object) -> None:
        """Local. Do nothing: these variables have no strategy."""


@functools.cache
def solo_arena() -> Arena:
    """Local. The arena of variables that no strategy of several ranks owns."""
    return _SoloArena(Replicas(SoloCommunicator()))


def current_home() -> Home:
    """Local. The home of new variables: the current strategy's, or outside any scope that of this process alone."""
    entry = context.innermost()
    # The stack knows no types; whatever it holds has been put there as a home.
    return solo_arena() if entry is None else cast(Home, entry.home)
