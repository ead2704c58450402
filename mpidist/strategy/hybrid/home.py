"""The home of a hybrid strategy's variables: an arena of the group, whose steps end in outer steps."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from mpidist.comm.choice import selection
from mpidist.comm.group.agreement import on_first_rank
from mpidist.comm.group.resource import end_all
from mpidist.errors import CheckpointError, MismatchError, RankError, mark_shared
from mpidist.options import ReduceOp
from mpidist.recorder.calls import noted
from mpidist.strategy.hybrid.exchange import GroupExchange
from mpidist.strategy.hybrid.groups import HybridGroups
from mpidist.strategy.hybrid.outer import Flat, OuterStep, write_variables
from mpidist.strategy.hybrid.part import OuterMomentum, Part
from mpidist.variables.arena import Arena, mirrored_only
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.memory.slab import Slab
from mpidist.variables.replicas import Replicas
from mpidist.variables.step.arena_plan import ArenaPlan
from mpidist.variables.update.arithmetic import UpdateSettings
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.update.options import OUTER_MOMENTUM, OptimizerOptions
from mpidist.variables.variable import BaseVariable, Gradient, Read, UpdatePlan


class OuterPace(NamedTuple):
    """The way in which groups exchange their increments.

    Attributes:
        step: The outer optimizer.
        every: The number of local steps in a window.
        synchronous: Whether all groups make their outer steps together.
    """

    step: OuterStep
    every: int
    synchronous: bool


class HybridVariable(MirroredVariable):
    """A mirrored variable of a group."""

    @override
    def load(self, read: Read) -> None:
        """Collective over the group. See `MirroredVariable.load`; all groups begin again at the next step."""
        super().load(read)
        if isinstance(self.arena, HybridArena):
            self.arena.note_loaded(self)


class HybridArena(Arena):
    """The home of `HybridStrategy`'s variables.

    Collective over all ranks. Args:
        replicas: The ranks of this group.
        groups: All groups.
        pace: See `OuterPace`.
        shared: See `Arena`.
        on_gpu: See `Arena`.

    Attributes:
        leads: Whether this rank leads its group.
        exchange: On a leader, the messages to and from other groups; None on other ranks, and with one group.
    """

    saves_once = True

    def __init__(
        self, replicas: Replicas, groups: HybridGroups, pace: OuterPace, *, shared: bool | None = None,
        on_gpu: bool = False,
    ) -> None:
        super().__init__(replicas, shared=shared, on_gpu=on_gpu)
        self._pace, self._count = pace, groups.count
        self.leads = groups.leaders is not None
        self.exchange: GroupExchange | None = None
        self._parts: list[Part] = []
        self._among_leaders = None
        if groups.leaders is not None and groups.count > 1:
            self.exchange = GroupExchange(groups.leaders)
            if pace.synchronous:
                owner = groups.leaders.order.deal("strategy")
                exact = replace(replicas.options, wire_dtype=None, compression=None)
                self._among_leaders = selection.choose(groups.leaders, exact, owner)

    @property
    @override
    def mirrored_kind(self) -> Callable[..., MirroredVariable]:
        """Local. Makes a `HybridVariable`."""
        return HybridVariable

    @override
    @noted("building an optimizer")
    def plan(
        self, variables: Sequence[BaseVariable], kernel: Kernel | LayerKernel, options: OptimizerOptions
    ) -> UpdatePlan:
        """Collective over the group. See `Arena.plan`; the groups agree on the variables at the first step."""
        mirrored = mirrored_only(variables)
        # Two optimizers may update one variable: the first one's steps count.
        known = {id(variable) for part in self._parts for variable in part.variables}
        numbers = [number for number, variable in enumerate(mirrored) if id(variable) not in known]
        part = Part(len(self._parts), [mirrored[number] for number in numbers], leads=self.leads)
        plan = HybridPlan(mirrored, kernel, options, self, part)
        if self._pace.step.has_momentum:
            plan.slots[OUTER_MOMENTUM] = {
                number: OuterMomentum(self, part, place) for place, number in enumerate(numbers)
            }
        self._parts.append(part)
        if self.exchange is not None:
            self.exchange.register(part.number, part)
        return plan

    def note_loaded(self, variable: MirroredVariable) -> None:
        """Local. Note that a variable was restored: what groups have exchanged before does not count any more."""
        for part in self._parts:
            if any(one is variable for one in part.variables):
                part.note_restored()

    def before_step(self, part: Part) -> None:
        """Collective over the group, and over all groups where they begin. Called before a local step."""
        if not part.is_begun:
            self._begin(part)

    def after_step(self, part: Part) -> None:
        """Collective over the group. Called after a local step; waits for no other group, unless synchronous."""
        part.count_step()
        if part.steps >= self._pace.every:
            self._close_window(part)
        elif self.exchange is not None and not self._pace.synchronous:
            self.exchange.progress()

    def settle(self, subject: str) -> None:
        """Collective over all living groups. Deliver all increments: all groups then hold the same parameters.

        Args:
            subject: What it is for, the same in every group.
        """
        for part in self._parts:
            if not part.is_begun:
                self._begin(part)
            if part.steps:
                self._close_window(part)
        on_first_rank(self.communicator, subject, lambda: self._meet_at_end(subject))
        for part in self._parts:
            self._spread(part)

    def first_value_of_groups(self, subject: str, value: Any) -> Any:
        """Collective over all living groups. The picklable value of the first group."""

        def meet() -> Any:
            return value if self.exchange is None else next(iter(self.exchange.meet(subject, value).values()))

        return on_first_rank(self.communicator, subject, meet)

    @property
    def share_count(self) -> int:
        """Local. On a leader, the number of groups whose momenta add up to the outer momentum."""
        return 1 if self.exchange is None or self._pace.synchronous else len(self.exchange.groups)

    @override
    def save_once(self, write: Callable[[], float]) -> float:
        """Collective over all living groups. See `Home.save_once`: all settle, and the first one writes."""
        subject = "saving a checkpoint"
        self.settle(subject)
        is_first = on_first_rank(self.communicator, subject, self._meet_to_save)
        if not is_first:
            saved_at, error = on_first_rank(self.communicator, subject, partial(self._hear, subject))
            if error is not None:
                raise mark_shared(pickle.loads(error))
            return float(saved_at)
        try:
            saved_at = write()
        except Exception as error:
            on_first_rank(self.communicator, subject, partial(self._hear, subject, (0.0, _pickled(error))))
            raise
        on_first_rank(self.communicator, subject, partial(self._hear, subject, (saved_at, None)))
        return saved_at

    def _close_window(self, part: Part) -> None:
        """Collective over the group: an outer step of this group."""
        if self.leads:
            exchange = self.exchange
            differences = part.differences(self._count if self._pace.synchronous else self.share_count)
            if self._among_leaders is not None:
                differences = [self._among_leaders.all_reduce(one, ReduceOp.SUM) for one in differences]
            increments = self._pace.step.apply(differences, part.velocity, part.windows)
            for outer, increment in zip(part.outer, increments, strict=True):
                np.add(outer, increment, out=outer)
            if exchange is not None and not self._pace.synchronous:
                exchange.add(part.number, increments)
                exchange.progress()
        part.note_window()
        self._spread(part)

    def _begin(self, part: Part) -> None:
        """Collective over all living groups: all begin with the first one's parameters."""
        on_first_rank(self.communicator, "the groups' first step", lambda: self._meet_at_begin(part))
        part.note_begun()
        self._spread(part)

    def _meet_at_begin(self, part: Part) -> None:
        subject = f"the first step of optimizer {part.number}"
        part.begin_window()
        if self.exchange is not None:
            self.exchange.discard(part.number)
            _require_same_shapes(self.exchange.meet(subject, part.shapes))
        # Behind the meeting, in which increments from before a restore still arrive.
        part.take_values()
        if self.exchange is not None:
            self._align(part.outer, part, subject)
        for number, velocity in enumerate(part.velocity):
            velocity[...] = 0 if part.restored is None else part.restored[number] / self.share_count

    def _meet_at_end(self, subject: str) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        exchange.deliver()
        exchange.meet(subject, None)
        for part in self._parts:
            # They are the same up to rounding, which depends on the order of arrival.
            self._align(part.outer, part, subject)

    def _meet_to_save(self) -> bool:
        """Give every leader the sum of the momenta; returns whether this group writes."""
        exchange = self.exchange
        if exchange is None:
            return True
        for part in self._parts if self._pace.step.has_momentum and not self._pace.synchronous else ():
            for section, start, stop in part.pieces:
                mine = part.velocity[section][start:stop]
                everyone = exchange.meet("the momenta", mine)
                # What all groups make of their differences is the same when each has an equal share of the sum.
                mine[...] = np.sum([*everyone.values()], axis=0) / len(everyone)
        return exchange.is_first

    def _hear(self, subject: str, told: tuple[float, bytes | None] | None = None) -> tuple[float, bytes | None]:
        if self.exchange is None:
            return told or (0.0, None)
        words: list[tuple[float, bytes | None] | None] = [*self.exchange.meet(subject, told).values()]
        said = [word for word in words if word is not None]
        if not said:
            raise CheckpointError(
                f"{subject}: the group that wrote the file has ended in it, and the file is not complete. Save again"
            )
        return said[0]

    def _align(self, flat: Flat, part: Part, subject: str) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        for section, start, stop in part.pieces:
            mine = flat[section][start:stop]
            everyone = exchange.meet(subject, mine if exchange.is_first else None)
            mine[...] = next((one for one in everyone.values() if one is not None), mine)

    def _spread(self, part: Part) -> None:
        """Collective over the group. Set the variables to the leader's outer parameters."""
        flat = part.outer
        by_slab: dict[int, tuple[Slab, list[Any]]] = {}
        for variable, place in zip(part.variables, part.layout.places, strict=True):
            slab = variable.address.slab
            by_slab.setdefault(id(slab), (slab, []))[1].append((variable, place))
        is_near = len(self.communicator.node_sizes) == 1
        if self.communicator.size > 1 and not all(slab.is_shared and is_near for slab, _ in by_slab.values()):
            flat = [self.collective.broadcast(one) for one in flat or part.layout.zeros()]
        for number, (slab, members) in enumerate(by_slab.values()):
            self.write(slab, partial(write_variables, members, flat), "outer step", (part.number, number))
        if self.leads:
            part.begin_window()

    @override
    def _end(self, *, is_collective: bool) -> None:
        self._parts.clear()
        super()._end(is_collective=is_collective)
        held = [one for one in (self._among_leaders, self.exchange) if one is not None]
        end_all(held, is_collective=is_collective)


class HybridPlan(ArenaPlan):
    """Collective over the group. An optimizer's plan whose updates are local steps of the group.

    Args:
        variables: The variables of the optimizer, the same list on every rank.
        kernel: The arithmetic.
        options: For the work around the kernel.
        home: The home of the variables.
        part: What the groups exchange of them.
    """

    def __init__(
        self, variables: Sequence[MirroredVariable], kernel: Kernel | LayerKernel, options: OptimizerOptions,
        home: HybridArena, part: Part,
    ) -> None:
        super().__init__(variables, kernel, options)
        self._home, self._part = home, part

    @override
    def apply(
        self, gradients: Mapping[int, Gradient], settings: UpdateSettings, *, numbers: tuple[int, ...] | None = None
    ) -> bool:
        """Collective. See `ArenaPlan.apply`; then, if the window is full, the outer step."""
        if numbers is None:
            self._home.before_step(self._part)
        was_applied = super().apply(gradients, settings, numbers=numbers)
        # With accumulation the base class calls this method again, with the numbers; a step that is skipped counts,
        # too, so that all groups count alike.
        if numbers is None:
            self._home.after_step(self._part)
        return was_applied

    @override
    def flush(self, count: int, settings: UpdateSettings) -> bool:
        """Collective. See `ArenaPlan.flush`."""
        self._home.before_step(self._part)
        was_applied = super().flush(count, settings)
        if count:
            self._home.after_step(self._part)
        return was_applied


def _require_same_shapes(by_group: Mapping[int, Any]) -> None:
    first, expected = next(iter(by_group.items()))
    for group, shapes in by_group.items():
        if shapes != expected:
            place = next(
                number for number in range(max(len(shapes), len(expected)) + 1)
                if shapes[number : number + 1] != expected[number : number + 1]
            )
            told = [_at(shapes, place), _at(expected, place)]
            raise mark_shared(MismatchError(
                f"HybridStrategy: all groups must have the same variables, got as number {place} of an optimizer's "
                f"{told[1]} in group {first} and {told[0]} in group {group}. Build the same model in every group"
            ))


def _at(shapes: Sequence[tuple[tuple[int, ...], str]], place: int) -> str:
    return f"shape {shapes[place][0]} and dtype {shapes[place][1]}" if place < len(shapes) else "nothing"


def _pickled(error: Exception) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        # Some exceptions need more arguments than their text.
        return pickle.dumps(RankError(f"{type(error).__name__}: {error}"))
    return data
