"""The protocol of parameter servers, explored: the product's machines keep the rules, and faulty ones are found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpidist.parameter_server.queue.work import Rules
from tests.helpers.amounts import amount
from tests.model.explorer import explore, wander
from tests.model.mutants import MUTANTS
from tests.model.parties import Schedule, Write, rate_of_first, rate_of_none
from tests.model.world import Job, World

BOTH, FIRST, SECOND, NONE = Schedule((1, 2)), Schedule((1,)), Schedule((2,)), Schedule(())
BOUND = Schedule((1, 2), Rules(worker=3))
AGAIN, KEPT = Schedule((1, 2), Rules(retries=1)), Schedule((1, 2), Rules(on_error="keep"))
PARTS = Schedule((1, 2), parts=2)
POISON = Schedule((1,), Rules(max_deaths=1, on_error="keep"))
POISON_THAT_CANCELS = Schedule((1,), Rules(max_deaths=2))

JOBS = {
    "two-closures": Job((BOTH, BOTH, "join"), upfront=2),
    "the-next-before-the-last-is-applied": Job((BOTH, BOTH, "join"), upfront=2, workers=1, pulls=True),
    "prefetch": Job((BOTH, BOTH, BOTH, "join"), upfront=3, workers=1, pulls=True, prefetch=True),
    "a-worker-dies": Job((BOTH, "join"), upfront=1, kills=1),
    "a-worker-is-suspected": Job((BOTH, "join"), upfront=1, suspicions=1),
    "a-worker-leaves": Job((BOTH, "join"), upfront=1, leaves=1),
    "the-only-worker-leaves": Job((BOTH, "cut"), upfront=1, workers=1, leaves=1),
    "the-only-worker-dies": Job((BOTH, FIRST, "cut"), upfront=2, workers=1, kills=1),
    "a-worker-joins": Job((BOTH, "join"), upfront=1, workers=1, kills=1, joins=1, splits=True),
    "who-joins-gets-the-slots-of-the-lost": Job(
        (BOTH, "join"), upfront=1, workers=1, suspicions=1, joins=1, splits=True, inherits=True
    ),
    "a-function-that-kills": Job((POISON, FIRST, "join"), upfront=2, kills=1, prefetch=True),
    "a-function-that-kills-and-others": Job(
        (POISON_THAT_CANCELS, NONE, "join", NONE, "join"), upfront=2, workers=3, kills=2
    ),
    "servers-for-some": Job((FIRST, SECOND, NONE, "join"), upfront=3, kills=1),
    "functions-fail": Job((BOTH, BOTH, "join", BOTH, "join"), upfront=2, fails=1),
    "functions-fail-and-are-tried-again": Job((AGAIN, FIRST, "join"), upfront=2, fails=2, workers=1),
    "only-the-value-fails": Job((KEPT, FIRST, "join"), upfront=2, fails=2),
    "no-learning-rate": Job((BOTH, BOTH, "join", BOTH, "join"), upfront=2, pulls=True, rate=rate_of_first),
    "commits-around-a-cut": Job((BOTH, "cut", BOTH, "join"), workers=1),
    "commits-wait-for-a-cut": Job((BOTH, "cut", FIRST, FIRST, "join"), workers=1, copies=0),
    "a-round": Job((BOTH, BOTH, "join"), upfront=2, pulls=True, wanted=2),
    "a-backup": Job((BOTH, BOTH, "join"), upfront=2, pulls=True, wanted=1),
    "a-round-and-what-is-no-step": Job((BOTH, NONE, "join"), upfront=2, pulls=True, wanted=2),
    "a-death-in-a-round": Job((BOTH, "join"), upfront=1, pulls=True, wanted=2, kills=1),
    "rounds-of-one-worker": Job((BOUND, BOUND, "join"), upfront=2, pulls=True, wanted=2),
    "a-round-around-a-cut": Job((FIRST, FIRST, "cut", "join"), servers=1, upfront=2, pulls=True, wanted=2),
    "a-round-without-a-learning-rate": Job(
        (BOTH, BOTH, "join", BOTH, "join"), upfront=2, pulls=True, wanted=2, rate=rate_of_none
    ),
    "own-writes": Job((Write((1, 2)), Write((1,)), Write((1, 2)), "read", BOTH, "cut", "join", "cut"), workers=1),
}

LONG_JOBS = {
    "no-learning-rate-and-a-suspicion": Job(
        (BOTH, FIRST, "join"), upfront=2, suspicions=1, pulls=True, rate=rate_of_first
    ),
    "two-that-join-one-after-another": Job(
        (BOTH, "join"), upfront=1, workers=1, suspicions=2, joins=2, splits=True, inherits=True
    ),
    "slots-of-the-lost-among-two-closures": Job(
        (BOTH, BOTH, "join"), upfront=2, workers=1, suspicions=1, joins=1, pulls=True, splits=True, inherits=True
    ),
    "slots-of-the-lost-without-a-learning-rate": Job(
        (BOTH, FIRST, "join"), upfront=2, workers=1, suspicions=1, joins=1, inherits=True, rate=rate_of_first
    ),
    "slots-of-the-lost-in-rounds": Job(
        (BOTH, BOTH, "join"), upfront=2, workers=2, suspicions=1, joins=1, pulls=True, wanted=2, inherits=True
    ),
    "death-and-suspicion": Job((BOTH, "join"), upfront=1, kills=1, suspicions=1),
    "a-death-among-two": Job((BOTH, BOTH, "join"), upfront=2, kills=1),
    "a-suspicion-among-two": Job((BOTH, BOTH, "join"), upfront=2, suspicions=1),
    "prefetch-and-a-suspicion": Job(
        (BOTH, BOTH, BOTH, "join"), upfront=3, workers=1, pulls=True, prefetch=True, suspicions=1, joins=1
    ),
    "failure-and-death": Job((BOTH, FIRST, "join", FIRST, "join"), upfront=2, fails=1, kills=1),
    "updates-in-parts": Job((PARTS, "join"), upfront=1, kills=1, fails=1),
    "own-writes-a-cut-and-a-death": Job((BOTH, Write((1, 2)), "read", "cut", "join"), kills=1),
    "cuts-and-a-death": Job((BOTH, "cut", BOTH, "cut", "join"), kills=1),
    "a-cut-and-a-suspicion": Job((BOTH, BOTH, "cut", "join"), upfront=2, suspicions=1, copies=0),
    "a-departure-and-a-suspicion": Job((BOTH, "join"), upfront=1, leaves=1, suspicions=1, joins=1),
    "two-deaths": Job((BOTH, BOTH, "join"), upfront=2, kills=2),
    "two-suspicions": Job((BOTH, "join"), upfront=1, workers=2, suspicions=2, joins=1),
    "all-of-it": Job((BOTH, BOTH, "join"), upfront=2, kills=1, suspicions=1),
    "a-round-of-two-servers-around-a-cut": Job((BOTH, BOTH, "cut", "join"), upfront=2, pulls=True, wanted=2),
    "rounds": Job((BOTH, BOTH, BOTH, "join"), upfront=3, pulls=True, wanted=2),
    "rounds-and-a-backup": Job((BOTH, BOTH, BOTH, "join"), upfront=3, pulls=True, wanted=1),
    "a-death-in-a-round-of-two": Job((BOTH, BOTH, "join"), upfront=2, pulls=True, wanted=2, kills=1),
    "a-suspicion-in-a-round-of-two": Job((BOTH, BOTH, "join"), upfront=2, pulls=True, wanted=2, suspicions=1),
    "a-failure-in-a-round": Job((BOTH, BOTH, "join", BOTH, "join"), upfront=2, pulls=True, wanted=2, fails=1),
    "a-round-a-cut-and-a-death": Job((BOTH, BOTH, "cut", "join"), upfront=2, pulls=True, wanted=2, kills=1),
}


@pytest.mark.parametrize("name", JOBS)
def test_rules_hold_in_every_state(name: str) -> None:
    explored = explore(JOBS[name])
    assert not explored.broken, "\n".join(explored.way)
    assert explored.outcomes


@pytest.mark.long
@pytest.mark.parametrize("name", LONG_JOBS)
def test_rules_hold_in_every_state_of_larger_jobs(name: str) -> None:
    explored = explore(LONG_JOBS[name])
    assert not explored.broken, "\n".join(explored.way)
    assert explored.outcomes


@pytest.mark.parametrize("job", [
    Job((BOTH, "join"), upfront=1, suspicions=1),
    Job((BOTH, "join"), upfront=1, kills=1),
    Job((BOTH, "join"), upfront=1, leaves=1),
    Job((FIRST, SECOND, "join"), upfront=2, workers=1, kills=1, joins=1),
    Job((BOTH, FIRST, "join"), upfront=2, workers=1, fails=1),
    Job((FIRST, "join"), upfront=1, workers=1, suspicions=1, joins=1, splits=True, inherits=True),
    Job((POISON, FIRST, "join"), upfront=2, kills=1),
], ids=["suspicion", "death", "departure", "join", "failure", "slots", "guilt"])
def test_nothing_is_missed_by_not_trying_what_commutes(job: Job) -> None:
    all_orders = explore(replace(job, reduces=False))
    assert not all_orders.broken
    few_orders = explore(job)
    assert few_orders.states < all_orders.states
    assert few_orders.outcomes == all_orders.outcomes


@pytest.mark.parametrize("name", MUTANTS)
def test_faulty_machine_is_found(name: str) -> None:
    rule, job = MUTANTS[name]
    explored = explore(job)
    assert explored.broken.startswith(f"{rule}:"), explored.broken


def test_rules_hold_on_random_ways_of_a_large_job() -> None:
    """Three servers and workers, and everything that can happen to them."""
    all_three, near, far = Schedule((1, 2, 3)), Schedule((1,), parts=2), Schedule((2, 3), Rules(retries=1))
    urgent, bound = Schedule((), Rules(priority=1)), Schedule((3,), Rules(worker=4, on_error="keep"))
    program = (
        all_three, near, Write((1, 2)), "read", far, urgent, bound, "cut", all_three, Write((3,)), "join", all_three,
        "cut", near, "join", "cut",
    )
    world = World(Job(
        program, servers=3, workers=3, kills=1, suspicions=1, fails=2, joins=2, leaves=1, prefetch=True, pulls=True
    ))
    for seed in range(amount(8, 1000)):
        walked = wander(world, seed)
        assert not walked.broken, f"{seed}: {walked.broken}\n" + "\n".join(walked.way)
