"""The options with which a collective is opened: the same on every rank, or the same error there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.comm.backends.automatic import AutomaticBackend
from mpidist.comm.backends.mpi import MpiBackend
from mpidist.comm.choice import selection
from mpidist.comm.collective import Collective
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError
from mpidist.experimental import PowerSGD
from mpidist.options import CommunicationOptions
from tests.helpers.strategies import ArenaStrategy

DIFFERENT: list[dict[str, Any]] = [
    {"implementation": "RING"}, {"reproducible": True}, {"wire_dtype": "bfloat16"}, {"bytes_per_pack": 100},
    {"timeout_seconds": 5}, {"compression": PowerSGD(rank=1)},
]


class Uncompressed:
    """A compression that can neither be compared nor pickled."""

    def __init__(self) -> None:
        self.function = lambda: None

    def compresses(self, shape: tuple[int, ...], _dtype: Any) -> bool:
        return len(shape) == 2

    def all_reduce(self, collective: Collective, gradient: AnyArray, _state: dict[str, AnyArray]) -> None:
        collective.all_reduce(gradient, in_place=True)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("options", DIFFERENT, ids=lambda options: next(iter(options)))
def test_options_of_one_rank_are_an_error_on_all(communicator: Communicator, options: dict[str, Any]) -> None:
    mine = CommunicationOptions(**options if communicator.rank == 1 else {})
    with pytest.raises(MismatchError, match=rf"communication options .*got {{}} .*{next(iter(options))}.*on rank 1"):
        ArenaStrategy(communicator, options=mine)


@pytest.mark.mpi(min_size=2)
def test_the_environment_of_one_rank_is_an_error_on_all(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(selection.OVERRIDE, raising=False)
    if communicator.rank == 1:
        monkeypatch.setenv(selection.OVERRIDE, "RING")
    with pytest.raises(MismatchError, match=r"'implementation': 'RING'.*on rank 1.*the same MPIDIST_COLLECTIVE"):
        ArenaStrategy(communicator)


@pytest.mark.mpi
def test_a_check_that_one_rank_asks_for_is_made_by_all(communicator: Communicator) -> None:
    options = CommunicationOptions(check=communicator.rank == communicator.size - 1)
    assert ArenaStrategy(communicator, options=options).arena.options.check


@pytest.mark.mpi
def test_options_of_a_call_beside_a_compression_of_the_users(communicator: Communicator) -> None:
    strategy = ArenaStrategy(communicator, options=CommunicationOptions(compression=Uncompressed()))
    options = CommunicationOptions(implementation="MPI")
    assert strategy.extended.reduce_to("SUM", 1.0, "cpu:0", options=options) == communicator.size


class Noting(MpiBackend):
    """MPI, which both backends here are: ranks that choose differently do not wait for each other for ever."""

    def __init__(self, communicator: Communicator, name: str, chosen: list[str]) -> None:
        super().__init__(communicator, CommunicationOptions())
        self._name, self._chosen = name, chosen

    def all_gather(self, mine: AnyArray, gathered: AnyArray, counts: Sequence[int]) -> None:
        self._chosen.append(self._name)
        super().all_gather(mine, gathered, counts)

    def all_to_all(
        self, sent: AnyArray, sent_counts: Sequence[int], got: AnyArray, got_counts: Sequence[int]
    ) -> None:
        self._chosen.append(self._name)
        super().all_to_all(sent, sent_counts, got, got_counts)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("many", ["first", "last"])
def test_all_ranks_choose_alike_where_their_sizes_differ(communicator: Communicator, many: str) -> None:
    """AUTO chooses by size: here one rank is above the limit, and the others are below."""
    rank, size = communicator.rank, communicator.size
    sizes = [100_000 if other == (0 if many == "first" else size - 1) else 10 for other in range(size)]
    chosen: list[str] = []
    backend = AutomaticBackend(
        communicator, Noting(communicator, "small", chosen), lambda: Noting(communicator, "large", chosen),
        lambda: Noting(communicator, "device", chosen), limit=1 << 12,
    )
    collective = CollectiveFront(backend, CommunicationOptions())
    gathered = collective.all_gather(np.full(sizes[rank], rank))
    np.testing.assert_array_equal(gathered, np.repeat(np.arange(size), sizes))
    received = collective.all_to_all([np.full(sizes[rank], rank)] * size)
    assert [part.size for part in received] == sizes
    assert len(set(communicator.all_gather_object(tuple(chosen)))) == 1
    assert chosen[0] == "large", "the limit lies between the sizes"
    by_choice = selection.choose(communicator, CommunicationOptions())
    np.testing.assert_array_equal(by_choice.all_gather(np.full(sizes[rank], rank)), gathered)
