"""The home of variables where a replica is a group of ranks, its logical devices.

A replicated variable is one variable over all ranks, and only the gradient of logical device 0 counts: if each device
had a variable of its own, over the same device of all replicas, these variables would diverge after a difference of
one bit in a gradient. A split variable has a tile on each device, in an arena over the same device of all replicas. One
plan updates both: barriers, norms and the search for gradients that are not finite include all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
from typing_extensions import override

from mpidist.arrays import AnyArray
from mpidist.comm.choice import selection
from mpidist.comm.first_use import at_first_use
from mpidist.comm.front.sparse import reduce_slices
from mpidist.comm.group.resource import end_all
from mpidist.indexed_slices import IndexedSlices
from mpidist.options import ReduceOp
from mpidist.recorder.calls import noted
from mpidist.variables.arena import Arena, mirrored_only
from mpidist.variables.kinds.split import SplitVariable
from mpidist.variables.logical_devices import LogicalDevices
from mpidist.variables.making.splitting import create_split
from mpidist.variables.replicas import Replicas
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.update.options import OptimizerOptions
from mpidist.variables.variable import BaseVariable, UpdatePlan

if TYPE_CHECKING:
    from mpidist.variables.step.arena_plan import ArenaPlan
    from mpidist.variables.step.logical_plan import LogicalPlan, SplitPlan
else:
    ArenaPlan = at_first_use("mpidist.variables.step.arena_plan", "ArenaPlan")
    LogicalPlan = at_first_use("mpidist.variables.step.logical_plan", "LogicalPlan")
    SplitPlan = at_first_use("mpidist.variables.step.logical_plan", "SplitPlan")


class LogicalArena(Arena):
    """Collective over all ranks. The home of `TPUStrategy`'s variables.

    Args:
        replicas: The same logical device of all replicas, and all ranks; see `Replicas`.
        devices: The logical devices of this rank's replica.
        shared: See `Arena`.
        on_gpu: See `Arena`; only for replicas of one rank.
    """

    takes_partition_dimensions = True

    def __init__(
        self, replicas: Replicas, devices: LogicalDevices, *, shared: bool | None = None, on_gpu: bool = False
    ) -> None:
        own = None
        if devices.count > 1:
            exact = replace(replicas.options, wire_dtype=None)
            own = selection.choose(replicas.everyone, exact, replicas.number)
        self._own_collective = own
        super().__init__(replicas, shared=shared, on_gpu=on_gpu, collective=own)
        self.devices = devices
        self._tiles: Arena | None = self if devices.count == 1 else None
        self._tile_replicas: Replicas | None = None
        self._shared = shared if self.shares_memory else False
        self.gives_gradients = devices.device == 0
        if devices.count > 1:
            node = self.communicator.node
            giving = node.all_gather_object(self.gives_gradients)
            # A node without a logical device 0 adds zeros from its first rank to the sums of other nodes.
            self.givers = [rank for rank, gives in enumerate(giving) if gives] or [0]

    def _end(self, *, is_collective: bool) -> None:
        tiles = [] if self._tile_replicas is None or self._tiles is None else [self._tiles, self._tile_replicas]
        own = [] if self._own_collective is None else [self._own_collective]
        end_all([*tiles, *own], is_collective=is_collective)
        super()._end(is_collective=is_collective)

    @override
    def combine(self, array: AnyArray, op: ReduceOp) -> AnyArray:
        """Collective. See `ArenaMemory.combine`; the array of logical device 0 is the array of its replica."""
        return self.devices.first(self.replicas.collective.all_reduce(array, op))

    @override
    def combine_rows(self, rows: IndexedSlices, op: ReduceOp) -> IndexedSlices:
        """Collective. See `ArenaMemory.combine_rows`; the rows of logical device 0 are the rows of its replica."""
        return self.devices.lead("reducing rows", lambda: reduce_slices(self.replicas.collective, op, rows))

    @override
    def after_run(self) -> None:
        """Collective. See `Home.after_run`; tiles are compared over the replicas."""
        super().after_run()
        if self._tile_replicas is not None and self._tiles is not None:
            self._tiles.after_run()

    @override
    def create_variable(
        self, initial_value: npt.ArrayLike | BaseVariable | Callable[[], npt.ArrayLike], *,
        partition_dimensions: Any = None, **arguments: Any,
    ) -> BaseVariable:
        """Collective. See `Home.create_variable`, and `splitting.create_split` with `partition_dimensions`."""
        if partition_dimensions is None:
            return super().create_variable(initial_value, **arguments)
        self.require_open()
        with self.calls.during("creating a variable"):
            return create_split(
                self, self._open_tiles(), self.devices, initial_value, partition_dimensions, **arguments
            )

    @override
    @noted("building an optimizer")
    def plan(
        self, variables: Sequence[BaseVariable], kernel: Kernel | LayerKernel, options: OptimizerOptions
    ) -> UpdatePlan:
        """Collective. See `Arena.plan`."""
        held = mirrored_only([one.tile if isinstance(one, SplitVariable) else one for one in variables])
        plan = ArenaPlan(held, kernel, options) if self.gives_everywhere else LogicalPlan(held, kernel, options, self)
        if not any(isinstance(one, SplitVariable) for one in variables):
            return plan
        return SplitPlan(variables, plan, self, self.devices)

    def _open_tiles(self) -> Arena:
        if self._tiles is None:
            column = self.replicas.communicator
            self._tile_replicas = Replicas(column, self.options)
            self._tiles = Arena(self._tile_replicas, shared=self._shared)
            self._tiles.set_strategy(self.strategy)
            # Other threads that copy tiles must wait for a step over all variables.
            self._tiles.guard = self.guard
        return self._tiles
