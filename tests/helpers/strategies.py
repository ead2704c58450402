"""A strategy over any ranks and any nodes, as tests want them; the public ones open ranks of their own."""

from __future__ import annotations

from mpidist.comm.group.communicator import Communicator
from mpidist.options import CommunicationOptions
from mpidist.strategy.base import Strategy
from mpidist.variables.arena import Arena
from mpidist.variables.replicas import Replicas


def make_arena(
    communicator: Communicator, options: CommunicationOptions | None = None, *, shared: bool | None = None,
    on_gpu: bool = False, cross_device_ops: object | None = None, shard_optimizer: bool = False,
) -> Arena:
    """Collective. An arena over some ranks, each a replica."""
    return Arena(
        Replicas(communicator, options, cross_device_ops=cross_device_ops), shared=shared, on_gpu=on_gpu,
        shard_optimizer=shard_optimizer,
    )


def arena_of(strategy: Strategy) -> Arena:
    """Local. The arena of a strategy's variables."""
    assert isinstance(strategy.home, Arena)
    return strategy.home


class ArenaStrategy(Strategy):
    """A strategy whose ranks are given.

    Collective. Args:
        communicator: The replicas.
        options: How they communicate.
        shared: As for `Arena`.
        cross_device_ops: As for `Replicas`.
        shard_optimizer: As for `Arena`.
    """

    def __init__(
        self, communicator: Communicator, *, options: CommunicationOptions | None = None, shared: bool | None = None,
        cross_device_ops: object | None = None, shard_optimizer: bool = False,
    ) -> None:
        arena = make_arena(
            communicator, options, shared=shared, cross_device_ops=cross_device_ops, shard_optimizer=shard_optimizer
        )
        super().__init__(arena.replicas, arena)

    @property
    def arena(self) -> Arena:
        """The home."""
        return arena_of(self)
