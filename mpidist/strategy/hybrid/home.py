"""The home of a hybrid strategy's variables: an arena of the group, whose steps end in outer steps."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from mpidist.strategy.hybrid.outer import Flat, OuterStep, in_messages, write_members
from mpidist.strategy.hybrid.part import OuterMomentum, Part
from mpidist.strategy.hybrid.parts import ExchangedParts
from mpidist.strategy.hybrid.plan import HybridPlan, LocalSteps
from mpidist.variables.arena import Arena, mirrored_only
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.memory.slab import Slab
from mpidist.variables.replicas import Replicas
from mpidist.variables.update.kernel import Kernel, LayerKernel
from mpidist.variables.update.options import OUTER_MOMENTUM, OptimizerOptions
from mpidist.variables.variable import BaseVariable, UpdatePlan

# When the file was written, or the pickled error.
_Saved = tuple[float, bytes | None]


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
    def note_loaded(self) -> None:
        """Local. See `LoadedInBlocks.note_loaded`; all groups begin again at the next step."""
        if isinstance(self.arena, HybridArena):
            self.arena.parts.note_loaded(self)


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
        parts: The parts that the groups exchange.
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
        self.parts = ExchangedParts(leads=self.leads)
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
        # Two optimizers may update one variable, at the same time or one after the other: it is in one part.
        places = self.parts.place(mirrored)
        # An optimizer's step is one of all parts of its variables.
        parts = [*{part.number: part for part, _ in places}.values()]
        step = self._pace.step
        plan = HybridPlan(
            mirrored, kernel, options, LocalSteps(parts, self.before_step, self.after_step, step.is_scheduled)
        )
        if step.has_momentum:
            plan.slots[OUTER_MOMENTUM] = [OuterMomentum(self, part, place) for part, place in places]
        return plan

    def before_step(self, parts: Sequence[Part]) -> None:
        """Collective over the group, and over all groups where they begin. Called before a local step."""
        fresh = [part for part in parts if not part.is_begun]
        if not fresh:
            return
        with self._among_groups("the first step of an optimizer"):
            self._review(_first_step_of(fresh), fresh)

    def after_step(self, parts: Sequence[Part]) -> None:
        """Collective over the group. Called after a local step; waits for no other group, unless synchronous."""
        for part in parts:
            part.count_step()
            if part.steps >= self._pace.every:
                self._close_window(part)
        if self.exchange is not None and not self._pace.synchronous:
            self.exchange.progress()

    def settle(self, subject: str) -> None:
        """Collective over all living groups. Deliver all increments: all groups then hold the same parameters.

        Args:
            subject: The purpose, the same in every group.
        """
        with self._among_groups(subject):
            new = self._review(subject)
            restored = [part for part in self.parts.begun if not part.is_begun]
            fresh = sorted([*new, *restored], key=lambda part: part.number)
            if fresh:
                self._review(_first_step_of(fresh), fresh)
            for part in self.parts.begun:
                if part.steps:
                    self._close_window(part)
            on_first_rank(self.communicator, subject, lambda: self._meet_at_end(subject))
            for part in self.parts.begun:
                self._spread(part)

    def first_value_of_groups(self, subject: str, value: Any) -> Any:
        """Collective over all living groups. The picklable value of the first group."""

        def meet() -> Any:
            return value if self.exchange is None else next(iter(self.exchange.meet(subject, value).values()))

        with self._among_groups(subject):
            return on_first_rank(self.communicator, subject, meet)

    @property
    def share_count(self) -> int:
        """Local. On a leader, the number of groups whose momenta add up to the outer momentum."""
        return 1 if self.exchange is None or self._pace.synchronous else len(self.exchange.groups)

    @override
    def save_once(self, write: Callable[[Mapping[int, Any]], float], told: object) -> float:
        """Collective over all living groups. See `Home.save_once`: all settle, and the first one writes."""
        subject = "saving a checkpoint"
        self.settle(subject)
        with self._among_groups(subject):
            is_first, of_groups = on_first_rank(self.communicator, subject, lambda: self._meet_to_save(told))
        if not is_first:
            saved_at, error = self._tell_of_save(subject, None)
            if error is not None:
                raise mark_shared(pickle.loads(error))
            return saved_at
        try:
            saved_at = write(of_groups)
        except Exception as error:
            self._tell_of_save(subject, (0.0, _pickled(error)))
            raise
        self._tell_of_save(subject, (saved_at, None))
        return saved_at

    @contextmanager
    def _among_groups(self, subject: str) -> Iterator[None]:
        """After an exception inside, all later calls are refused: this group would be a meeting behind the others."""
        with self.communicator.order.during(subject, self.strategy_number) as order:
            order.commit(subject)
            yield

    def _tell_of_save(self, subject: str, told: _Saved | None) -> _Saved:
        with self._among_groups(subject):
            return on_first_rank(self.communicator, subject, lambda: self._hear(subject, told))

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
                part.lead.expect(increments, len(exchange.groups) - 1)
        part.note_window()
        self._spread(part)

    def _review(self, subject: str, fresh: Sequence[Part] = ()) -> list[Part]:
        """Collective over all living groups. Drop the parts that no group uses; return the new ones that all have.

        Args:
            subject: The purpose of the meeting.
            fresh: Parts that begin, with the first group's parameters. They need no meeting of their own, which would
                be another way to all leaders and back for each optimizer that a program makes.
        """
        new, unused = self.parts.look()
        # What is restored begins again, even if its last variable was dropped just now.
        unused = [number for number in unused if number not in {part.number for part in fresh}]
        found = self.communicator.all_gather_object(([part.number for part in new], unused))
        common, dropped, changed = on_first_rank(
            self.communicator, subject, lambda: self._meet_for_parts(subject, fresh, _in_all(found))
        )
        self.parts.drop(dropped)
        for part in fresh:
            self.parts.note_begun(part)
            # Mostly all groups begin with the same values: a program that makes many optimizers need not wait then.
            if part.number in changed:
                self._spread(part)
        return [part for part in new if part.number in common]

    def _meet_for_parts(self, subject: str, fresh: Sequence[Part], mine: list[set[int]]) -> list[set[int]]:
        """Let parts begin; return the numbers of those that are new, unused or changed in all groups."""
        exchange, common = self.exchange, mine
        for part in fresh:
            part.begin_window()
        before = [[one.copy() for one in part.start] for part in fresh]
        if exchange is not None:
            for part in fresh:
                exchange.register(part.number, part)
            first, *others = in_messages((part.pieces, part.start) for part in fresh)
            shapes = [part.shapes for part in fresh]
            heard = exchange.meet(subject, (mine, shapes, first if exchange.is_first else None))
            for number in range(len(fresh)):
                _require_same_shapes({group: theirs[number] for group, (_, theirs, _) in heard.items()})
            common = _in_all([told for told, _, _ in heard.values()])
            exchange.forget(common[1])
            _take_first(first, [values for _, _, values in heard.values()])
            self._align(others, subject)
        for part in fresh:
            # Behind the meeting, in which increments from before a restore still arrive.
            part.take_values()
            for number, velocity in enumerate(part.velocity):
                velocity[...] = 0 if part.restored is None else part.restored[number] / self.share_count
        pairs = zip(fresh, before, strict=True)
        return [*common, {part.number for part, old in pairs if not all(map(np.array_equal, part.start, old))}]

    def _meet_at_end(self, subject: str) -> None:
        exchange = self.exchange
        if exchange is None:
            return
        exchange.deliver()
        exchange.meet(subject, None)
        for part in self.parts.begun:
            part.lead.clear()
        # They are the same up to rounding, which depends on the order of arrival.
        self._align(in_messages((part.pieces, part.outer) for part in self.parts.begun), subject)

    def _meet_to_save(self, told: object) -> tuple[bool, Mapping[int, Any]]:
        """Give every leader the sum of the momenta; return whether this group writes, and what each group has told."""
        exchange = self.exchange
        if exchange is None:
            return True, {0: told}
        for part in self.parts.begun if self._pace.step.has_momentum and not self._pace.synchronous else ():
            for section, start, stop in part.pieces:
                mine = part.velocity[section][start:stop]
                everyone = exchange.meet("the momenta", mine)
                # What all groups make of their differences is the same when each has an equal share of the sum.
                mine[...] = np.sum([*everyone.values()], axis=0) / len(everyone)
        return exchange.is_first, exchange.meet("the positions in the data", told)

    def _hear(self, subject: str, told: _Saved | None) -> _Saved:
        if self.exchange is None:
            return told or (0.0, None)
        words: list[_Saved | None] = [*self.exchange.meet(subject, told).values()]
        said = [word for word in words if word is not None]
        if not said:
            raise mark_shared(CheckpointError(
                f"{subject}: the group that wrote the file has ended in it, and the file is not complete. Save again"
            ))
        return said[0]

    def _align(self, messages: Sequence[Flat], subject: str) -> None:
        """Set arrays of this leader, in messages, to those of the first group."""
        exchange = self.exchange
        if exchange is None:
            return
        for message in messages:
            everyone = exchange.meet(subject, message if exchange.is_first else None)
            _take_first(message, [*everyone.values()])

    def _spread(self, part: Part) -> None:
        """Collective over the group. Set the variables to the values of the leader."""
        flat = part.present()
        by_slab: dict[int, tuple[Slab, list[Any]]] = {}
        for member, place in zip(part.members, part.layout.places, strict=True):
            slab = member.address.slab
            by_slab.setdefault(id(slab), (slab, []))[1].append((member, place))
        is_near = len(self.communicator.node_sizes) == 1
        if self.communicator.size > 1 and not all(slab.is_shared and is_near for slab, _ in by_slab.values()):
            flat = [self.collective.broadcast(one) for one in flat or part.layout.zeros()]
        for number, (slab, members) in enumerate(by_slab.values()):
            self.write(slab, partial(write_members, members, flat), "outer step", (part.number, number))
        if self.leads:
            part.begin_window()

    @override
    def _end(self, *, is_collective: bool) -> None:
        self.parts.clear()
        super()._end(is_collective=is_collective)
        held = [one for one in (self._among_leaders, self.exchange) if one is not None]
        end_all(held, is_collective=is_collective)


def _in_all(several: Sequence[Sequence[Collection[int]]]) -> list[set[int]]:
    """The numbers that are in the first collection of each, in the second one of each, and so on."""
    return [set.intersection(*map(set, collections)) for collections in zip(*several, strict=True)]


def _first_step_of(parts: Sequence[Part]) -> str:
    return f"the first step of optimizer {', '.join(str(part.number) for part in parts)}"


def _take_first(mine: Flat, of_groups: Sequence[Flat | None]) -> None:
    """Set arrays to those of the only group that has sent arrays."""
    sent = next((arrays for arrays in of_groups if arrays is not None), mine)
    for target, values in zip(mine, sent, strict=True):
        target[...] = values


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
                f"HybridStrategy: an optimizer must have the same variables in all groups, got as its variable number "
                f"{place} {told[1]} in group {first} and {told[0]} in group {group}. Build the same model in every "
                "group"
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
