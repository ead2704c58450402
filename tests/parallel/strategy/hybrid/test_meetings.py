"""Meetings of groups: when a leader may leave one, and the errors that it finds there, which all its ranks raise."""

from __future__ import annotations

import pytest

from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CollectiveTimeoutError, is_shared
from mpidist.strategy.hybrid import exchange as module
from tests.parallel.strategy.hybrid.making import home_of, make_hybrid

pytestmark = pytest.mark.mpi(min_size=2)


def test_a_leader_stays_until_all_have_its_word(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_hybrid(communicator) as strategy:
        exchange = home_of(strategy).exchange
        heard: set[int] = set()
        heard_at_end: list[set[int]] = []
        if exchange is not None:
            poll = exchange._window.poll

            def look(seconds: float = 0.0) -> tuple[int, bytes] | None:
                # A leader that has all words, and that all have heard, looks once more, without waiting.
                if not seconds:
                    heard_at_end.append(set(heard))
                got = poll(seconds)
                if got is not None and got[1][0] == module._HEARD:
                    heard.add(got[0])
                return got

            monkeypatch.setattr(exchange._window, "poll", look)
        found = home_of(strategy).first_value_of_groups("a meeting", f"group {strategy.group_index}")
        assert found == "group 0"
        # Of a word larger than a message of MPI, whoever has left before would keep the rest.
        assert heard_at_end == ([] if exchange is None else [{1 - strategy.group_index}])


def test_a_group_that_does_not_come_is_named_and_none_meets_it_later(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_hybrid(communicator, groups=[[rank] for rank in range(communicator.size)]) as strategy:
        exchange = home_of(strategy).exchange
        assert exchange is not None
        if communicator.rank == 0:
            monkeypatch.setenv("MPIDIST_TIMEOUT", "0.1")
            late = ", ".join(map(exchange.name_of, range(1, communicator.size)))
            with pytest.raises(CollectiveTimeoutError) as caught:
                exchange.meet("finish", None)
            has = "has" if communicator.size == 2 else "have"
            assert str(caught.value) == (
                f"HybridStrategy: finish: {late} {has} not answered for 0 s. Such a group is stopped, still computes, "
                "or makes other calls: build the same optimizers, and call `finish` and `save` equally often, in every "
                "group; or set a larger MPIDIST_TIMEOUT than 0.1"
            )
            assert is_shared(caught.value)
            for call in (lambda: exchange.meet("finish", None), exchange.deliver):
                with pytest.raises(CollectiveTimeoutError, match=r"this group has left finish without group 1 \("):
                    call()
            monkeypatch.delenv("MPIDIST_TIMEOUT")
        communicator.barrier()
