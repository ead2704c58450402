"""The chosen collective: the one that a strategy's argument `cross_device_ops` or the options of a call stand for."""

from __future__ import annotations

import logging
from typing import cast

from mpidist.comm.choice import selection
from mpidist.comm.collective import Collective
from mpidist.comm.cross_device.cross_device_ops import CrossDeviceOps
from mpidist.comm.cross_device.user_backend import CollectiveBackend, HookCollective
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.group.agreement import gather_together, require_same
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import mark_shared
from mpidist.options import CommunicationImplementation, CommunicationOptions

logger = logging.getLogger("mpidist")

_METHODS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier")


def take_collective(
    chosen: object | None, communicator: Communicator, options: CommunicationOptions, owner: int = 0
) -> CollectiveFront | None:
    """Collective. Make the collective for a strategy's argument `cross_device_ops`.

    Args:
        chosen: A `CrossDeviceOps` object, any object with the methods of `Collective`, or None.
        communicator: The strategy's ranks.
        options: The strategy's options.
        owner: The strategy's number; see `CallOrder.deal`.

    Returns:
        The collective, None for the library's choice.

    Raises:
        TypeError: `chosen` is something else; on every rank.
        ValueError: `chosen` belongs to other ranks, or cannot keep the options; on every rank.
    """
    names = gather_together(communicator, "taking `cross_device_ops`", lambda: _check_chosen(chosen, communicator))
    require_same(names, "the type of `cross_device_ops`", "Make the same strategy on all ranks.")
    if chosen is None:
        return None
    if options.implementation is not CommunicationImplementation.AUTO:
        raise mark_shared(ValueError(
            f"`cross_device_ops` and the implementation {options.implementation} are both given: choose one of them"
        ))
    if options.reproducible and not isinstance(chosen, CrossDeviceOps):
        raise mark_shared(ValueError(
            "only the library's own backends keep `reproducible`, and here the object given as `cross_device_ops` "
            "reduces in an order of its own: leave one of them out"
        ))
    if isinstance(chosen, CrossDeviceOps):
        collective = chosen.bind(communicator, options, owner)
    else:
        collective = CollectiveFront(CollectiveBackend(communicator, cast(Collective, chosen)), options, owner)
    if communicator.rank == 0:
        logger.info(
            "collective %s: given as cross_device_ops; %d ranks on %d nodes", type(chosen).__name__, communicator.size,
            len(communicator.node_sizes),
        )
    return collective


def another_collective(collective: CollectiveFront, options: CommunicationOptions) -> CollectiveFront:
    """Collective. Open a collective for calls whose options differ from their strategy's.

    Args:
        collective: The strategy's collective.
        options: The options of the call, merged over the strategy's.

    Raises:
        MismatchError: The options differ between ranks.
        UnavailableError: The options name an implementation that is not available.
        ValueError: The strategy's `cross_device_ops` cannot keep one of the options.
    """
    options = selection.agreed(collective.communicator, options)
    if options.implementation is CommunicationImplementation.AUTO:
        if isinstance(collective, HookCollective):
            return cast(CrossDeviceOps, collective.hooks.ops).bind(
                collective.communicator, options, collective.log.owner
            )
        if isinstance(collective.backend, CollectiveBackend):
            # The user's own object takes no options.
            return collective
    return selection.choose(collective.communicator, options, collective.log.owner)


def _check_chosen(chosen: object | None, communicator: Communicator) -> str:
    """The name of its type."""
    name = type(chosen).__name__
    if chosen is None or isinstance(chosen, CrossDeviceOps):
        return name
    if isinstance(chosen, type):
        raise TypeError(
            f"`cross_device_ops` must be an object, got the class {chosen.__name__}: use {chosen.__name__}()"
        )
    missing = [name for name in _METHODS if not callable(getattr(chosen, name, None))]
    if not hasattr(chosen, "communicator"):
        missing.append("communicator")
    if missing:
        raise TypeError(
            "`cross_device_ops` must be a CrossDeviceOps object (HierarchicalCopyAllReduce(), ...) or have all members "
            f"of a Collective, got {name} without {', '.join(missing)}"
        )
    ranks = cast(Collective, chosen).communicator
    if (ranks.rank, ranks.size) != (communicator.rank, communicator.size):
        raise ValueError(
            f"`cross_device_ops` must communicate over the strategy's ranks, {communicator!r}, got {ranks!r}: make it "
            "for the strategy's ranks"
        )
    return name
