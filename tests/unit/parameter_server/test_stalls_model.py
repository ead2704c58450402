"""Time limits of functions, explored: whoever is stopped at whatever moment, only who runs for too long is given up."""

from __future__ import annotations

import pytest

from tests.model.stalls import STALL_JOBS, STALL_MUTANTS, explore_stalls


@pytest.mark.parametrize("name", STALL_JOBS)
def test_rules_hold_at_all_moments(name: str) -> None:
    broken, ways = explore_stalls(STALL_JOBS[name])
    assert not broken
    assert ways > 50


@pytest.mark.long
@pytest.mark.parametrize("name", STALL_JOBS)
def test_rules_hold_at_all_moments_of_two_stops(name: str) -> None:
    broken, _ = explore_stalls(STALL_JOBS[name]._replace(stops=2, every=1))
    assert not broken


@pytest.mark.parametrize("name", STALL_MUTANTS)
def test_faulty_one_is_found(name: str) -> None:
    rule, job = STALL_MUTANTS[name]
    broken, _ = explore_stalls(job)
    assert broken.startswith(f"{rule}:"), broken
