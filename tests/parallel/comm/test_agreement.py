"""Agreement: the same error, of the same type and with the same text, on every rank."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from mpidist.comm.group.agreement import exchange, on_first_rank, same_on_all, together
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import CheckpointError, MismatchError, RankError, is_shared, mark_shared

pytestmark = pytest.mark.mpi


class UserError(Exception):
    """What another rank cannot rebuild."""


def fail(error: Exception) -> None:
    raise error


ERRORS: dict[str, tuple[Callable[[], Exception], type[Exception]]] = {
    "built-in": (lambda: ValueError("the cause"), ValueError),
    "key": (lambda: KeyError("the cause"), KeyError),
    "ours": (lambda: CheckpointError("the cause"), CheckpointError),
    "file": (lambda: FileNotFoundError(errno.ENOENT, "the cause", "/nowhere"), FileNotFoundError),
    "full": (lambda: OSError(errno.ENOSPC, "the cause"), OSError),
    "import": (lambda: ModuleNotFoundError("the cause"), ModuleNotFoundError),
    "user's": (lambda: UserError("the cause"), RankError),
    "unicode": (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "the cause"), RankError),
}


def test_results_are_each_ranks_own(communicator: Communicator) -> None:
    assert together(communicator, "counting", lambda: communicator.rank + 1) == communicator.rank + 1
    assert together(communicator, "nothing", lambda: None) is None


@pytest.mark.parametrize("who", ["first", "last", "odd", "all"])
@pytest.mark.parametrize("case", list(ERRORS))
@pytest.mark.mpi(min_size=2)
def test_a_failure_is_everybodys(communicator: Communicator, case: str, who: str) -> None:
    ranks = {
        "first": [0], "last": [communicator.size - 1], "odd": list(range(1, communicator.size, 2)),
        "all": list(range(communicator.size)),
    }[who]
    make, kind = ERRORS[case]
    with pytest.raises(kind, match="the cause") as caught:
        together(communicator, "doing it", lambda: fail(make()) if communicator.rank in ranks else None)
    assert type(caught.value) is kind
    text = str(caught.value)
    told = communicator.all_gather_object((type(caught.value).__name__, text, communicator.host))
    assert len({(name, other) for name, other, _ in told}) == 1
    assert "doing it" in text
    assert is_shared(caught.value)
    if who != "all":
        assert f"failed on rank{'s' if len(ranks) > 1 else ''} {ranks[0]}" in text
        assert told[ranks[0]][2] in text, "the host is named"
        assert type(make()).__name__ in text
    if case in ("file", "full"):
        assert isinstance(caught.value, OSError)
        assert caught.value.errno == make().errno  # type: ignore[attr-defined]  # both are OSErrors


@pytest.mark.mpi(min_size=2)
def test_different_failures_are_all_told(communicator: Communicator) -> None:
    error = ValueError("first cause") if communicator.rank == 0 else TypeError("second cause")
    with pytest.raises(ValueError, match=r"failed on rank 0 .*ValueError: first cause.*TypeError: second cause"):
        together(communicator, "doing it", lambda: fail(error))


@pytest.mark.mpi(min_size=2)
def test_ones_own_failure_is_the_cause(communicator: Communicator) -> None:
    mine = RuntimeError(f"on rank {communicator.rank}")
    with pytest.raises(RuntimeError, match=r"doing it failed on rank 1 .*on rank 1") as caught:
        together(communicator, "doing it", lambda: fail(mine) if communicator.rank == 1 else None)
    assert caught.value.__cause__ is (mine if communicator.rank == 1 else None)


def test_the_same_value_passes(communicator: Communicator) -> None:
    same_on_all(communicator, "the value", {"a": (1, 2)}, "No hint.")


@pytest.mark.mpi(min_size=2)
def test_a_different_value_is_named_with_its_ranks(communicator: Communicator) -> None:
    value = "other" if communicator.rank == communicator.size - 1 else "usual"
    with pytest.raises(MismatchError, match="the value must be the same on all ranks") as caught:
        same_on_all(communicator, "the value", value, "Do this.")
    text = str(caught.value)
    assert f"'other' on rank {communicator.size - 1}" in text
    assert text.endswith("Do this.")
    assert is_shared(caught.value)
    assert len(set(communicator.all_gather_object(text))) == 1


def test_flags_and_objects_travel(communicator: Communicator) -> None:
    size = communicator.size
    assert communicator.all_reduce_max(communicator.rank - 5) == size - 6
    assert communicator.all_reduce_max(-(2**62)) == -(2**62)
    for root in range(size):
        assert communicator.broadcast_object(("from", communicator.rank), root) == ("from", root)


def test_split_orders_by_key(communicator: Communicator) -> None:
    reverse = communicator.split(0, -communicator.rank)
    assert reverse.rank == communicator.size - 1 - communicator.rank
    alone = communicator.split(communicator.rank)
    assert (alone.rank, alone.size) == (0, 1)
    assert sum(alone.node_sizes) == 1


def test_exchange_gives_all_values_or_one_error(communicator: Communicator) -> None:
    everyone = list(range(communicator.size))
    assert exchange(communicator, "counting", communicator.rank) == everyone
    last = communicator.size - 1
    mine = ValueError("the cause") if communicator.rank == last else None
    with pytest.raises(ValueError, match="the cause") as caught:
        exchange(communicator, "counting", communicator.rank, mine)
    if communicator.size > 1:
        assert f"counting failed on rank {last} " in str(caught.value)
        assert is_shared(caught.value)
        assert caught.value.__cause__ is mine


@pytest.mark.mpi(min_size=2)
def test_different_steps_are_an_error_of_all_ranks(communicator: Communicator) -> None:
    """As where one rank makes another strategy than the others."""
    step = "assigning the roles" if communicator.rank == 0 else "reading the cluster"
    with pytest.raises(MismatchError, match="'assigning the roles' on rank 0; 'reading the cluster' on rank") as caught:
        exchange(communicator, step, communicator.rank if communicator.rank else (1, 2))
    assert is_shared(caught.value)
    # A name in it may differ.
    assert exchange(communicator, f"making variable 'v{communicator.rank}'", 1) == [1] * communicator.size


def test_the_first_rank_acts_for_all(communicator: Communicator) -> None:
    calls: list[int] = []

    def act() -> int:
        calls.append(communicator.rank)
        return 7

    assert on_first_rank(communicator, "acting", act) == 7
    assert calls == [0] * (communicator.rank == 0)
    with pytest.raises(OSError, match="the cause") as caught:
        on_first_rank(communicator, "acting", lambda: fail(OSError(errno.ENOSPC, "the cause")))
    assert caught.value.errno == errno.ENOSPC
    if communicator.size > 1:
        assert "acting failed on rank 0 " in str(caught.value)
        assert is_shared(caught.value)
    # What it has found together with others has a text that is whole, and is told as it is.
    with pytest.raises(MismatchError) as told:
        on_first_rank(communicator, "acting", lambda: fail(mark_shared(MismatchError("groups differ"))))
    assert str(told.value) == "groups differ"
    assert is_shared(told.value)
