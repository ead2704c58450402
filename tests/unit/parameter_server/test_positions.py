"""Positions of workers in their data: what is left of a pass, and how it is dealt over other numbers of workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist.coordinator.worker_side import make_dataset, resume
from mpidist.data.dataset import Dataset
from mpidist.data.input_context import InputContext
from mpidist.errors import CheckpointError
from mpidist.parameter_server.queue.data_positions import Positions, deal, from_state, to_state
from mpidist.parameter_server.worker.dataset_iterator import OwnDataEnd, OwnIterator, PassPart

COUNT = 41


class Saved:
    """A value of a checkpoint."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def numpy(self) -> Any:
        return self.value

    def __str__(self) -> str:
        return str(self.value)


def numbers_of(place: InputContext) -> Dataset:
    dataset = Dataset.range(COUNT).shard(place.num_input_pipelines, place.input_pipeline_id)
    return dataset.shuffle(COUNT).prefetch(2)


def iterators(parts: list[PassPart], workers: int) -> tuple[list[OwnIterator], Positions]:
    """The iterators of some workers over what is left."""
    positions = Positions()
    dealt = dict(enumerate(deal(parts, workers)))
    positions.begin(1, dealt)
    made = []
    for worker in range(workers):
        place = InputContext(workers, worker)
        one = resume(make_dataset(numbers_of, place), numbers_of, place, dealt)
        one.number = 1
        positions.built(worker, 1, one.begun)
        made.append(one)
    return made, positions


def read(iterator: OwnIterator, count: int) -> list[int]:
    found = []
    for _ in range(count):
        try:
            found.append(int(next(iterator)))
        except OwnDataEnd:
            break
    return found


@pytest.mark.parametrize("workers", [(1, 2, 3), (3, 2, 5, 1), (2, 5, 3, 4), (4, 4, 4), (5, 1, 4)])
def test_each_element_is_read_once_on_any_numbers_of_workers(workers: tuple[int, ...]) -> None:
    parts = [PassPart(workers[0], worker) for worker in range(workers[0])]
    seen: list[int] = []
    for round_number, count in enumerate(workers):
        its, positions = iterators(parts, count)
        for worker, one in enumerate(its):
            seen += read(one, 3 + worker if round_number + 1 < len(workers) else COUNT)
            if (news := one.news()) is not None:
                positions.note(worker, [news])
            assert one.news() is None
            one.close()
        state = to_state(positions.left(1))
        parts = from_state({name: Saved(value) for name, value in state.items()})
    assert sorted(seen) == list(range(COUNT))


def test_a_pass_keeps_its_number_and_the_next_one_follows() -> None:
    dataset = Dataset.range(COUNT).shuffle(COUNT, seed=4)
    passes = [[int(one) for one in dataset] for _ in range(3)]
    other = Dataset.range(COUNT).shuffle(COUNT, seed=4)
    part = PassPart(1, 0, 7, 1, {"iteration": 1})
    own = resume(other, other, InputContext(1, 0), {0: [part]})
    assert read(own, COUNT) == passes[1][7:]
    assert [int(one) for one in other] == passes[2]


def test_a_batch_size_that_has_changed() -> None:
    def begin(size: int) -> Dataset:
        return Dataset.range(24).batch(size)

    part = PassPart(1, 0, 3, 1, {"iteration": 0, "batch_size": 4})
    own = resume(begin(6), begin(6), InputContext(1, 0), {0: [part]})
    assert next(own).tolist() == [12, 13, 14, 15, 16, 17]
    positions = Positions()
    positions.begin(1, {0: [part]})
    positions.built(0, 1, own.begun)
    own.number = 1
    positions.note(0, [own.news() or ()])
    assert positions.left(1) == [PassPart(1, 0, 3, 1, {"iteration": 0, "batch_size": 6})]
    with pytest.raises(ValueError, match="batches of 4 examples, which 2 workers share, got batches of 6: keep"):
        resume(begin(6), begin(6), InputContext(2, 0), {0: part.dealt(2)[:1]})


def test_a_part_that_cannot_be_opened_is_tried_again() -> None:
    tries = []

    def opens() -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("away for a moment")
        return iter([7])

    own = OwnIterator([], [lambda: iter([1]), opens])
    assert next(own) == 1
    with pytest.raises(OSError, match="away"):
        next(own)
    assert next(own) == 7
    own.fail(LookupError("gone"))
    for _ in range(2):
        with pytest.raises(LookupError, match="gone"):
            next(own)


@pytest.mark.parametrize(("saved", "text"), [
    ({"iterations": 1}, r"are `columns` and `parts`, the checkpoint has \['iterations'\]"),
    ({"columns": Saved("a b"), "parts": Saved(np.zeros((1, 2)))}, r"have the columns \['a', 'b'\]"),
    ({"columns": Saved("pipelines pipeline start stride"), "parts": Saved(np.zeros(4))}, r"the shape \(4,\): expected"),
    ({"columns": Saved("pipelines pipeline start stride"), "parts": Saved(np.zeros((0, 4)))}, r"the shape \(0, 4\)"),
])
def test_what_is_no_position(saved: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        from_state(saved)


def test_who_joins_takes_what_the_one_before_has_left() -> None:
    positions = Positions()
    positions.begin(7, {1: [PassPart(2, 0)], 2: [PassPart(2, 1), PassPart(3, 1)]})
    positions.built(2, 7, {"iteration": 1})
    positions.note(2, [(7, 0, 4)])
    assert positions.take_over(7, 5, [2], PassPart(2, 1)) == [PassPart(2, 1, 4, 1, {"iteration": 1}), PassPart(3, 1)]
    positions.note(5, [(7, 1, 2)])
    assert positions.left(7) == [PassPart(2, 0), PassPart(3, 1, 2)]
    # Nobody has begun in the place of rank 3, and another iterator has no positions.
    assert positions.take_over(7, 6, [3], PassPart(2, 1)) is None
    assert positions.left(7)[-1] == PassPart(2, 1)
    assert positions.take_over(8, 6, [3], PassPart(2, 1)) is None
    # One whose place nobody knows begins anew.
    positions.begin(9, {1: [PassPart(1, 0)]})
    positions.built(1, 9, "a list")
    assert positions.take_over(9, 5, [1], PassPart(1, 0)) is None
    assert positions.left(9) == [PassPart(1, 0)]
