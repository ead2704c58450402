"""Resources and claims, without MPI: what is given back, when, and in which order."""

from __future__ import annotations

import gc

import pytest

from mpidist.comm.group import resource
from mpidist.comm.group.resource import Claim, Identity, Resource, end_all, give_back_offered, new_identity, offered


class Thing(Resource):
    def __init__(self, *, is_whole: bool = True) -> None:
        self.ends: list[bool] = []
        self.is_intact = is_whole

    def _is_whole(self) -> bool:
        return self.is_intact

    def _end(self, *, is_collective: bool) -> None:
        self.ends.append(is_collective)


def test_a_resource_ends_once() -> None:
    thing = Thing()
    thing.close()
    thing.close()
    thing.drop()
    assert thing.is_closed
    assert thing.ends == [True]


def test_closing_in_a_group_that_is_not_whole_is_local() -> None:
    thing = Thing(is_whole=False)
    thing.close()
    assert thing.ends == [False]


def test_leaving_a_block_closes_and_an_exception_drops() -> None:
    with Thing() as closed:
        pass
    dropped = Thing()
    with pytest.raises(KeyError, match="here"):
        leave(dropped)
    assert (closed.ends, dropped.ends) == ([True], [False])


def leave(thing: Thing) -> None:
    with thing:
        raise KeyError("here")


def test_several_end_in_their_order() -> None:
    things = [Thing(), Thing()]
    end_all(things, is_collective=True)
    end_all([Thing(), *things], is_collective=False)
    assert [thing.ends for thing in things] == [[True], [True]]


class Owner:
    """Something that has a claim."""


def claimed(given_back: list[Identity], ranks: int = 2) -> tuple[Owner, Claim, Identity]:
    owner, identity = Owner(), new_identity()
    return owner, Claim(owner, identity, ranks, lambda: given_back.append(identity)), identity


def test_a_claim_is_given_back_once() -> None:
    given_back: list[Identity] = []
    owner, claim, identity = claimed(given_back)
    assert identity in resource.held()
    claim.give_back()
    claim.give_back()
    claim.drop()
    del owner
    assert given_back == [identity]
    assert identity not in resource.held()
    assert identity not in offered()


def test_what_all_ranks_have_dropped_is_given_back_in_the_order_of_creation() -> None:
    given_back: list[Identity] = []
    first, second, third, fourth = (claimed(given_back) for _ in range(4))
    identities = [one[2] for one in (first, second, third, fourth)]
    del third, first
    gc.collect()
    second[1].drop()
    mine = {identity: count for identity, count in offered().items() if identity in identities}
    assert mine == dict.fromkeys(identities[:3], 2)
    # The other rank still uses the second, and has dropped the fourth.
    others = {identities[2]: 2, identities[0]: 2, identities[3]: 2}
    give_back_offered([others, mine])
    assert given_back == [identities[0], identities[2]]
    assert identities[1] in offered()
    give_back_offered([{identities[1]: 2}, {identities[1]: 2}])
    assert given_back[2:] == [identities[1]]
    fourth[1].give_back()
