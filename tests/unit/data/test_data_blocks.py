"""Transformations of items that travel in several blocks: the results are those of one block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mpidist.data import Dataset
from mpidist.data.items import batching, stream
from mpidist.data.transformations import random_numbers
from tests.unit.data.test_data_flow import CASES, listed, numbers

COUNT = 50

OTHERS: dict[str, Callable[[Dataset], Dataset]] = {
    "windows that touch": lambda d: d.window(4).flat_map(lambda one: one.batch(4)),
    "windows that overlap": lambda d: d.window(5, 2, 2).flat_map(lambda one: one.batch(5)),
    "windows far apart": lambda d: d.window(2, 7).flat_map(lambda one: one.batch(2)),
    "windows that skip blocks": lambda d: d.window(2, 11, drop_remainder=True).flat_map(lambda one: one.batch(2)),
    "shard": lambda d: d.shard(4, 2),
    "take and skip": lambda d: d.skip(5).take(31),
    "shuffle within a block": lambda d: d.skip(0).shuffle(2, seed=1),
    "shuffle over blocks": lambda d: d.skip(0).shuffle(17, seed=1),
    "shuffle of all": lambda d: d.skip(0).shuffle(COUNT, seed=1),
    "small batches": lambda d: d.batch(2),
    "large batches": lambda d: d.batch(13),
    "batches of sizes in turn": lambda d: d.batch(3).rebatch([1, 7, 4]),
    "batches of a shuffled whole": lambda d: d.shuffle(COUNT, seed=1).batch(3),
    "repeated": lambda d: d.take(7).repeat(3).batch(4),
}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def cut() -> None:
        monkeypatch.setattr(stream, "BLOCK_ROWS", 3)
        monkeypatch.setattr(batching, "_GROUPS_AT_ONCE", 2)

    return cut


@pytest.mark.parametrize("case", CASES)
def test_what_depends_on_other_elements(case: str, small_blocks: Callable[[], None]) -> None:
    build, expected = CASES[case]
    small_blocks()
    assert listed(build(numbers(11))) == expected
    for skipped in range(len(expected) + 1):
        assert listed(build(numbers(11)).skip(skipped)) == expected[skipped:]


@pytest.mark.parametrize("case", OTHERS)
def test_what_moves_items(case: str, small_blocks: Callable[[], None]) -> None:
    def results() -> list[Any]:
        dataset = OTHERS[case](Dataset.range(COUNT))
        return [listed(dataset.skip(skipped)) for skipped in range(12)]

    whole = results()
    small_blocks()
    assert results() == whole == [whole[0][skipped:] for skipped in range(12)]
    assert len(whole[0]) >= 4


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [8.0, 1.0, 0.5]])
def test_samples_are_sought_behind_several_blocks_of_choices(
    monkeypatch: pytest.MonkeyPatch, stops: bool, weights: list[float]
) -> None:
    monkeypatch.setattr(random_numbers, "_BLOCK", 4)
    datasets = [Dataset.range(100 * k, 100 * k + count) for k, count in enumerate((9, 14, 5))]
    sampled = Dataset.sample_from_datasets(datasets, weights, seed=3, stop_on_empty_dataset=stops)
    order = listed(sampled)
    assert len(order) > 2 * 4
    for skipped in range(len(order) + 2):
        assert listed(sampled.skip(skipped)) == order[skipped:]
