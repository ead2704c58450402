"""Workers' own data and values when something comes again: a restore, a loss, and who joins in a place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpidist.coordinator.remote_value import PerWorkerIterator, PerWorkerValues
from mpidist.coordinator.worker_datasets import DataSets
from mpidist.data.dataset import Dataset
from mpidist.parameter_server.protocol.messages import Applied, Build, Built, Finished, Prepared, Send
from mpidist.parameter_server.queue.work import Work
from mpidist.parameter_server.worker.dataset_iterator import PassPart
from tests.unit.coordinator.test_coordinator_again import making
from tests.unit.coordinator.test_coordinator_closures import FIRST, SECOND, THIRD, at_end, done, lose, make, read, take


def test_after_a_restore_who_was_at_the_end_reads_again() -> None:
    closures = make((FIRST, SECOND))
    number, _ = closures.resources.build(making(1))
    for worker in (FIRST, SECOND):
        take(closures, worker, Built(number))
    read(closures, data=(number,))
    assert done(at_end(closures, FIRST, 1, data=number)) == [(SECOND, 1)]
    assert done(at_end(closures, SECOND, 1, attempt=2, data=number)) == []
    assert closures.is_at_end(number)
    closures.resources.build_again(number, making(1))
    assert not closures.is_at_end(number)
    assert done(read(closures, data=(number,))) == [(FIRST, 2)]
    assert done(read(closures, data=(number,))) == [(SECOND, 3)]


def test_values_that_are_made_again_before_they_were_made_once() -> None:
    closures = make((FIRST,))
    resources = closures.resources
    number, _ = resources.build(making(1))
    resources.positions.begin(number, {FIRST: [PassPart(1, 0)]})
    # A restore, before the worker has begun.
    resources.build_again(number, making(2))
    resources.positions.begin(number, {FIRST: [PassPart(1, 0, 5, 1, {"iteration": 3})]})
    take(closures, FIRST, Built(number, begun={"iteration": 0}))
    assert resources.is_building(number)
    assert resources.positions.left(number) == [PassPart(1, 0, 5, 1, {"iteration": 3})]
    take(closures, FIRST, Built(number, begun={"iteration": 4}))
    assert not resources.is_building(number)
    assert resources.positions.left(number) == [PassPart(1, 0, 5, 1, {"iteration": 4})]


def test_who_joins_after_a_restore_makes_what_the_restore_made() -> None:
    closures = make((FIRST,))
    number, _ = closures.resources.build(making(1))
    closures.resources.build_again(number, making(2))
    closures.resources.build_again(number, making(3))
    builds = [one.message for one in closures.joined(SECOND, 0.0) if isinstance(one, Send)]
    assert [one.function for one in builds if isinstance(one, Build)] == [3]


def test_values_that_are_dropped_while_they_are_made_again_are_nobodys() -> None:
    closures = make((FIRST,))
    number, _ = closures.resources.build(making(1))
    closures.resources.build_again(number, making(1))
    closures.discard("resource", number)
    assert take(closures, FIRST, Built(number, b"error", "text")) == []
    assert take(closures, FIRST, Built(number)) == []
    assert closures.workers[FIRST].building == []


class Saved:
    """A value of a checkpoint."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def numpy(self) -> Any:
        return self.value

    def __str__(self) -> str:
        return str(self.value)


class Party:
    """The data sets of a coordinator, whose workers have begun to read.

    Attributes:
        ranks: Of the workers, in the order of their places.
        works: What works call that were asked for.
    """

    def __init__(self) -> None:
        self.ranks = [FIRST, SECOND, THIRD]
        self.closures = make((FIRST, SECOND, THIRD))
        self.works: list[tuple[Any, ...]] = []
        self.data_sets = DataSets(
            self.make, self.make_again, lambda _: None, self.closures, self.closures.is_at_end, self.ranks, self.work_of
        )
        iterator = iter(self.data_sets.create(Dataset.range(30)))
        assert isinstance(iterator, PerWorkerIterator)
        self.iterator, self.positions = iterator, self.closures.resources.positions

    def make(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        values: Callable[[int], PerWorkerValues],
    ) -> PerWorkerValues:
        number, _ = self.closures.resources.build(making(1))
        made = values(number)
        for worker in self.closures.workers:
            take(self.closures, worker, Built(number, begun={"iteration": 0}))
        return made

    def make_again(self, number: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.closures.resources.build_again(number, self.work_of(fn, args))

    def work_of(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Work:
        self.works.append(args)
        return making(2)

    def note(self, rank: int, place: int, part: int = 0) -> None:
        self.positions.note(rank, [(self.iterator.number, part, place)])

    def join(self, rank: int, place: int, before: list[int]) -> None:
        self.ranks[place] = rank
        self.closures.joined(rank, 0.0, self.data_sets.joined(rank, before))

    def state(self) -> dict[str, Saved]:
        return {name: Saved(value) for name, value in self.iterator.state().items()}


def part(pipeline: int, start: int) -> PassPart:
    return PassPart(3, pipeline, start, 1, {"iteration": 0})


def test_a_restore_after_a_loss_deals_all_that_is_left_over_those_that_live() -> None:
    party = Party()
    saved = party.state()
    for rank, place in ((FIRST, 4), (SECOND, 5), (THIRD, 6)):
        party.note(rank, place)
    later = party.state()
    lose(party.closures, SECOND)
    for state, starts in ((saved, (0, 0, 0)), (later, (4, 5, 6))):
        party.iterator.load_state(state)
        parts = [part(pipeline, start) for pipeline, start in enumerate(starts)]
        assert party.works[-1][-1] == {0: [parts[0], parts[2]], 2: [parts[1]]}
        assert party.positions.left(party.iterator.number) == [parts[0], parts[2], parts[1]]
    # A checkpoint that is saved now has all of it, too.
    assert sorted(np.asarray(party.state()["parts"].numpy())[:, 2]) == [4, 5, 6]


def test_data_is_not_set_back_under_functions_that_read_it() -> None:
    party = Party()
    saved, number = party.state(), party.iterator.number
    read(party.closures, data=(number,))
    take(party.closures, FIRST, Finished(1, 1, (1,), (), b"", ((number, 0, 4),)))
    # It was finished, and may still count.
    with pytest.raises(RuntimeError, match="while functions that read these datasets are running"):
        party.iterator.load_state(saved)
    assert party.works == []
    take(party.closures, 1, Prepared(1, 1))
    take(party.closures, 1, Applied(1, 1))
    party.iterator.load_state(saved)
    assert party.positions.left(number)[0] == part(0, 0)


def test_the_second_one_that_joins_in_a_place_goes_on_behind_the_first_one() -> None:
    party = Party()
    number = party.iterator.number
    party.note(SECOND, 5)
    lose(party.closures, SECOND)
    party.join(7, 1, [SECOND])
    assert party.works[-1][-1] == {1: [part(1, 5)]}
    party.note(7, 8)
    lose(party.closures, 7)
    party.join(8, 1, [SECOND, 7])
    assert party.works[-1][-1] == {1: [part(1, 8)]}
    assert party.positions.left(number) == [part(0, 0), part(2, 0), part(1, 8)]
    # One that was lost before it had read anything leaves what the one before it has left.
    lose(party.closures, 8)
    party.join(9, 1, [SECOND, 7, 8])
    assert party.works[-1][-1] == {1: [part(1, 8)]}


def test_each_part_has_the_pass_to_which_it_belongs() -> None:
    party = Party()
    lose(party.closures, SECOND)
    party.iterator.load_state(party.state())
    # The first worker has come to its second part, which begins a pass of its own.
    party.positions.note(FIRST, [(party.iterator.number, 1, 2, {"iteration": 6})])
    assert party.positions.left(party.iterator.number) == [PassPart(3, 2, 2, 1, {"iteration": 6}), part(1, 0)]
