"""The options with which a collective is opened: the same on every rank, or the same error there."""

from __future__ import annotations

from typing import Any

import pytest

from mpidist.arrays import AnyArray
from mpidist.comm.choice import selection
from mpidist.comm.collective import Collective
from mpidist.comm.communicator import Communicator
from mpidist.errors import MismatchError
from mpidist.experimental import PowerSGD
from mpidist.options import CommunicationOptions
from mpidist.strategy.base import Strategy

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
        Strategy(communicator, options=mine)


@pytest.mark.mpi(min_size=2)
def test_the_environment_of_one_rank_is_an_error_on_all(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(selection.OVERRIDE, raising=False)
    if communicator.rank == 1:
        monkeypatch.setenv(selection.OVERRIDE, "RING")
    with pytest.raises(MismatchError, match=r"'implementation': 'RING'.*on rank 1.*the same MPIDIST_COLLECTIVE"):
        Strategy(communicator)


@pytest.mark.mpi
def test_a_check_that_one_rank_asks_for_is_made_by_all(communicator: Communicator) -> None:
    options = CommunicationOptions(check=communicator.rank == communicator.size - 1)
    assert Strategy(communicator, options=options).arena.options.check


@pytest.mark.mpi
def test_options_of_a_call_beside_a_compression_of_the_users(communicator: Communicator) -> None:
    strategy = Strategy(communicator, options=CommunicationOptions(compression=Uncompressed()))
    options = CommunicationOptions(implementation="MPI")
    assert strategy.extended.reduce_to("SUM", 1.0, "cpu:0", options=options) == communicator.size
