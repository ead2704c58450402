"""Pages: what a rank shows, and what the others conclude from it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpidist.failures.peers import Key, Peer, circle, claim, elsewhere, elsewhere_inside, missing
from mpidist.recorder.calls import CODES, INNER, NEXT, PLACE_WORDS, STATE, Calls
from mpidist.recorder.inner_calls import KEPT
from mpidist.recorder.rank_page import PAGE_BYTES, TEXT_BYTES, Page
from mpidist.recorder.recorder import Recorder

IDENTITY = 77


class Rank:
    """A rank of this process: its calls, and what the others see of them."""

    def __init__(self, number: int) -> None:
        self.page = Page(memoryview(bytearray(PAGE_BYTES)))
        self.page.beat = time.monotonic_ns()
        self.recorder = Recorder()
        self.recorder.show(self.page.places)
        self.key = Key("host", os.getpid() + number, "")
        self.peer = Peer(self.key, f"rank {number}", number, self.page, "")
        self.calls: Calls = self.recorder.open(IDENTITY, [], number)

    def call(self, name: str) -> int:
        self.calls.enter(name)
        return int(self.calls.words[STATE])


def test_who_has_not_come_is_missing() -> None:
    here, late, ahead = (Rank(number) for number in range(3))
    state = here.call("barrier")
    ahead.call("barrier")
    assert missing(state, [late.peer, ahead.peer], IDENTITY) == [late.peer]
    ahead.calls.leave()
    ahead.call("barrier")
    late.call("barrier")
    assert missing(state, [late.peer, ahead.peer], IDENTITY) == []
    # Of another communicator nothing is known.
    assert missing(state, [late.peer], IDENTITY + 1) == []


def test_one_rank_ends_the_job_where_several_come_to_their_turns_at_once() -> None:
    ranks = [Rank(number) for number in range(3)]
    for rank in ranks:
        # The process of a living rank.
        rank.peer.key = Key("host", os.getpid(), "")
    for _ in range(5):
        with ThreadPoolExecutor(3) as pool:
            others = [[other.peer for other in ranks if other is not rank] for rank in ranks]
            assert sum(pool.map(claim, [rank.page for rank in ranks], others)) == 1
        assert sorted(rank.page.claim for rank in ranks) == [0, 0, 1]
        for rank in ranks:
            rank.page.claim = 0


def test_the_claim_of_a_rank_that_is_dead_or_stopped_stands_in_nobodys_way() -> None:
    here, stopped, dead = (Rank(number) for number in range(3))
    stopped.peer.key = Key("host", os.getpid(), "")
    stopped.page.claim = dead.page.claim = 1
    assert not claim(here.page, [stopped.peer])
    stopped.page.beat -= int(4e9)
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead.peer.key = Key("host", ended.pid, "")
    assert claim(here.page, [stopped.peer, dead.peer])


def test_who_is_in_another_call_is_elsewhere() -> None:
    here, same, other = (Rank(number) for number in range(3))
    state = here.call("save")
    same.call("save")
    other.call("barrier")
    assert elsewhere(state, [same.peer, other.peer], IDENTITY) == [other.peer]
    # A rank that has left the call, or is ahead, was in it or not: nobody knows.
    other.calls.leave()
    assert elsewhere(state, [other.peer], IDENTITY) == []


def inside(rank: Rank, *others: Rank) -> tuple[list[Peer], list[Peer]]:
    """Who was in other calls inside the rank's, and who has left it without its last inner one."""
    words = rank.calls.words
    mine = words[INNER:PLACE_WORDS].tolist()
    return elsewhere_inside(int(words[STATE]), mine, [one.peer for one in others], IDENTITY)


def call_inside(rank: Rank, *names: str) -> None:
    for name in names:
        rank.calls.enter(name)
        rank.calls.leave()


def test_other_calls_inside_the_same_one_are_seen() -> None:
    here, late, ahead, other = (Rank(number) for number in range(4))
    for rank in (here, late, ahead, other):
        # Of a call before nothing is left.
        rank.call("restore")
        call_inside(rank, *["broadcast" if rank is late else "agreement"] * 3)
        rank.calls.leave()
        rank.call("assign")
    call_inside(here, "all_reduce")
    here.calls.enter("broadcast")
    assert inside(here, late, ahead, other) == ([], [])
    # A rank that is slower in the same calls may come, and one that is ahead has been here.
    call_inside(late, "all_reduce")
    call_inside(ahead, "all_reduce", *["broadcast"] * KEPT)
    call_inside(other, "broadcast")
    assert inside(here, late, ahead, other) == ([other.peer], [])
    # The names of later ones are the same, and their order is another one.
    call_inside(other, "broadcast")
    assert inside(here, late, ahead, other) == ([other.peer], [])
    other.calls.leave()
    other.call("barrier")
    assert inside(here, other) == ([other.peer], [])


def test_who_has_left_a_call_without_an_inner_one_never_comes_to_it() -> None:
    here, left, without, later = (Rank(number) for number in range(4))
    for rank in (here, left, without, later):
        rank.call("assign")
    here.calls.enter("all_reduce")
    call_inside(left, "all_reduce")
    for rank in (left, without, later):
        assert inside(here, rank) == ([], [])
        rank.calls.leave()
    assert inside(here, left, without) == ([], [without.peer])
    # A rank that has made inner calls in a later one: what it did before is not known.
    later.call("assign")
    assert inside(here, later) == ([], [later.peer])
    call_inside(later, "all_reduce")
    assert inside(here, later) == ([], [])


def test_who_has_left_another_call_by_an_exception_never_comes() -> None:
    here, same, other = (Rank(number) for number in range(3))
    here.call("save")
    same.call("save")
    other.call("barrier")
    for rank in (same, other):
        rank.calls.fail()
    assert inside(here, same, other) == ([other.peer], [])


def test_ranks_that_wait_for_one_another_are_a_circle() -> None:
    first, second, third = (Rank(number) for number in range(3))
    peers = {one.key: one.peer for one in (second, third)}
    second.page.write({"missing": [third.key]})
    third.page.write({"missing": [second.key]})
    assert circle(first.key, [second.peer], peers) == []
    third.page.write({"missing": [second.key, first.key]})
    assert circle(first.key, [second.peer], peers) == [second.peer, third.peer]
    # What a rank wrote long ago does not count.
    third.page.beat = 1
    assert circle(first.key, [second.peer], peers) == []


def test_an_old_text_counts_only_as_far_as_it_is_true() -> None:
    """A rank that is led writes seldom for whom it waits: one of them may have come, and this rank, too."""
    first, second, third = (Rank(number) for number in range(3))
    peers = {one.key: one.peer for one in (second, third)}
    for rank in (second, third):
        rank.call("barrier")
    second.page.write({"missing": [third.key], "on": [IDENTITY]})
    third.page.write({"missing": [first.key], "on": [IDENTITY]})

    def found() -> list[Peer]:
        return circle(first.key, [second.peer], peers, first.page.state)

    assert found() == []
    second.calls.leave()
    second.call("barrier")
    # The second one waits for the third one again, and that one for the first one.
    assert found() == [second.peer, third.peer]
    first.call("barrier")
    assert found() == []


def test_a_text_is_whole_or_empty() -> None:
    page = Page(memoryview(bytearray(PAGE_BYTES)))
    assert page.read() == {}
    page.write({"line": "a.py:1"})
    assert page.read() == {"line": "a.py:1"}
    page.write({"line": "a.py:2", "stack": "x" * PAGE_BYTES})
    assert page.read()["line"] == "a.py:2"
    page.write({})
    assert page.read() == {}


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_text_has_room_up_to_the_last_byte(more: int) -> None:
    page = Page(memoryview(bytearray(PAGE_BYTES)))
    details = {"line": "a.py:1", "stack": ""}
    details["stack"] = "x" * (TEXT_BYTES + more - len(json.dumps(details)))
    page.write(details)
    assert (page.read()["line"], page.read() == details) == ("a.py:1", more <= 0)
    # The last of the calls is what counts.
    assert page.read()["stack"].endswith("x")


@pytest.mark.parametrize("count", [10, 1500, 4000])
def test_a_rank_that_waits_for_many_still_says_in_which_call(count: int) -> None:
    page = Page(memoryview(bytearray(PAGE_BYTES)))
    host = "ip-10-0-0-1.eu-central-1.compute.internal"
    keys = [Key(host, 4_000_000 + one, "pid:[4026531836]") for one in range(count)]
    page.write({"calls": [{"name": "save"}], "missing": keys})
    details = page.read()
    assert details["calls"] == [{"name": "save"}]
    assert len(details["missing"]) == count if count <= 1500 else 0 < len(details["missing"]) < count


def test_letters_that_take_six_bytes_are_cut_to_what_fits() -> None:
    page = Page(memoryview(bytearray(PAGE_BYTES)))
    page.write({"line": "a.py:1", "stack": "\u00e9" * TEXT_BYTES})
    assert page.read()["line"] == "a.py:1"
    # What cannot be cut is none.
    page.write({"line": "x" * TEXT_BYTES})
    assert page.read() == {}


def test_as_many_communicators_are_seen_as_have_a_place() -> None:
    page, recorder = Page(memoryview(bytearray(PAGE_BYTES))), Recorder()
    recorder.show(page.places)
    room = len(page.places) // PLACE_WORDS
    opened = [recorder.open(identity, [], 0) for identity in range(5, 5 + room + 1)]
    for one in opened:
        one.enter("barrier")
    assert [page.state(one.identity) for one in opened[-3:]] == [NEXT + CODES["barrier"]] * 2 + [None]
    assert page.inner(opened[-1].identity) == []
    assert recorder.opened() == opened[:-1]


def test_a_communicator_keeps_its_state_where_its_place_has_moved() -> None:
    rank = Rank(0)
    state = rank.call("barrier")
    assert rank.page.state(IDENTITY) == state == NEXT + CODES["barrier"]
    del rank.calls
    other = rank.recorder.open(5, [], 0)
    assert rank.page.state(IDENTITY) is None
    again = rank.recorder.open(IDENTITY, [], 0)
    assert (rank.page.state(5), rank.page.state(IDENTITY)) == (0, 0)
    assert other.identity, again.identity
