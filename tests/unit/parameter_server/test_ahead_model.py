"""Pulling ahead, explored: it keeps its rules in all orders of events, and faulty ones are found."""

from __future__ import annotations

import pytest

from tests.model.ahead import AHEAD_MUTANTS, MIXED, AheadJob, explore_ahead

JOBS = {
    "steps": AheadJob(),
    "assigns": AheadJob(assigns=True),
    "shards": AheadJob(is_sharded=True),
    "another-worker": AheadJob(others=1),
    "two-functions": MIXED,
    "a-loss": AheadJob(losses=1),
}


@pytest.mark.parametrize("name", JOBS)
def test_rules_hold_in_all_orders(name: str) -> None:
    broken, ways = explore_ahead(JOBS[name])
    assert not broken
    assert ways > 20


@pytest.mark.long
@pytest.mark.parametrize("name", JOBS)
def test_rules_hold_in_all_orders_of_more_functions(name: str) -> None:
    broken, _ = explore_ahead(JOBS[name]._replace(closures=4, first=2, pulls=1))
    assert not broken


@pytest.mark.parametrize("name", AHEAD_MUTANTS)
def test_faulty_one_is_found(name: str) -> None:
    rule, job = AHEAD_MUTANTS[name]
    broken, _ = explore_ahead(job)
    assert broken.startswith(f"{rule}:"), broken
