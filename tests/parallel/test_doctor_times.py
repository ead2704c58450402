"""The doctor's table of times on ranks: the same on all of them, in the time that it has, and right sums only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mpidist.cli.doctor import times
from mpidist.cli.doctor.ranks import look_at_ranks
from mpidist.cli.doctor.times import SIZES, look_at_times
from mpidist.comm.choice.selection import choose
from mpidist.comm.collective import Collective
from mpidist.comm.group.communicator import Communicator
from mpidist.options import CommunicationOptions

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def collective(communicator: Communicator) -> Iterator[Collective]:
    with choose(communicator, CommunicationOptions()) as opened:
        yield opened


def test_all_ranks_have_one_table(
    communicator: Communicator, collective: Collective, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "SIZES", SIZES[:4])
    found = look_at_times(communicator, collective, 30.0)
    assert communicator.all_gather_object(found) == [found] * communicator.size
    sizes = [one.data["bytes"] for one in found if one.subject.startswith("sum of")]
    assert sizes[:1] == [8]
    left_out = [size for one in found if one.subject == "sums left out" for size in one.data["bytes"]]  # type: ignore[attr-defined]
    assert [*sizes, *left_out] == list(SIZES[:4])
    assert not [one for one in found if one.state == "wrong"]


def test_ranks_stop_together_when_the_time_is_over(communicator: Communicator, collective: Collective) -> None:
    changed: Any = Changed(collective)
    found = look_at_times(communicator, changed, 0.0)
    # The first ones perhaps; the largest take seconds where ranks share cores.
    assert set(changed.sizes) <= {SIZES[0]}
    (left_out,) = [one for one in found if one.subject == "sums left out"]
    assert left_out.text.endswith("64 MiB: no time was left")
    assert left_out.fix == "mpidist doctor --seconds 60"


class Changed:
    """A collective whose sums are made otherwise, and a clock on which only they take time.

    Attributes:
        sizes: The bytes of each array that was summed.
    """

    def __init__(self, inside: Collective, seconds: float = 0.0, more: float = 0.0) -> None:
        self.inside, self.seconds, self.more = inside, seconds, more
        self.sizes: list[int] = []
        self.now = 0.0

    def all_reduce(self, array: Any, *, in_place: bool) -> Any:
        self.sizes.append(array.nbytes)
        self.inside.all_reduce(array, in_place=in_place)
        array += self.more
        self.now += self.seconds
        return array

    def perf_counter(self) -> float:
        """The time, in place of that of the module `time`: each look at it takes some."""
        self.now += 1e-6
        return self.now

    monotonic = perf_counter


def test_a_wrong_sum_is_found(
    communicator: Communicator, collective: Collective, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank; all ranks say so."""
    monkeypatch.setattr(times, "SIZES", (8, 1 << 10))
    changed: Any = Changed(collective, more=float(communicator.rank == communicator.size - 1))
    found = look_at_times(communicator, changed, 5.0)
    assert [one.state for one in found if one.subject.startswith("sum of")] == ["wrong"] * 2


def test_a_slow_collective_is_looked_at_twice(
    communicator: Communicator, collective: Collective, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "SIZES", (8,))
    monkeypatch.setattr(times, "_MOST_LOOKS", 6)
    monkeypatch.delenv("MPIDIST_COLLECTIVE", raising=False)
    changed: Any = Changed(collective, seconds=0.1)
    monkeypatch.setattr(times, "time", changed)
    found = look_at_times(communicator, changed, 30.0)
    (slow,) = [one for one in found if one.subject == "sum of 8 B"]
    assert (slow.state, slow.data["looks"]) == ("note", 12)
    assert slow.fix == "export MPIDIST_COLLECTIVE=MPI"


@pytest.mark.parametrize("value", ["NOTHING", "NODE"])
def test_a_collective_that_ranks_do_not_agree_on(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """A name that one rank cannot read, or that it has alone: a finding on all of them, and nobody waits."""
    monkeypatch.delenv("MPIDIST_COLLECTIVE", raising=False)
    if communicator.rank == 1:
        monkeypatch.setenv("MPIDIST_COLLECTIVE", value)
    found = {one.subject: one for findings in look_at_ranks(communicator, seconds=None) for one in findings}
    assert found["collective"].state == "wrong"
    assert "MPIDIST_COLLECTIVE" in found["collective"].text
    assert found["collective"].fix == "unset MPIDIST_COLLECTIVE, on all ranks"
