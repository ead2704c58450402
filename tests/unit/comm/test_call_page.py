"""The page of a node's calls, by the memory of two ranks."""

from __future__ import annotations

from mpidist.comm.calls.signature_page import PAGE_BYTES, CallPage


def pages() -> list[CallPage]:
    memory = memoryview(bytearray(2 * PAGE_BYTES))
    return [CallPage(memory, (0, 1), place) for place in range(2)]


def test_ranks_that_raise_the_same_error_are_in_step() -> None:
    first, second = pages()
    first.write(7, 7, "one call")
    second.write(7, 7, "another call")
    assert first.texts(7, 7) == ({0: "one call", 1: "another call"}, True)


def test_what_is_written_for_a_waiting_rank_does_not_count_as_its_own() -> None:
    """It has not seen the difference: the others must not go on as if it had."""
    first, second = pages()
    first.write(7, 7, "one call")
    second.write_for_others(7, "another call")
    assert second.has_written(7)
    assert first.texts(7, 7) == ({0: "one call", 1: "another call"}, False)
