"""The chosen collective: the one that a strategy's argument `cross_device_ops` or the options of a call select."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mpidist.comm.choice import selection
from mpidist.comm.first_use import at_first_use
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.group.agreement import gather_together, require_same
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import mark_shared
from mpidist.options import CommunicationImplementation, CommunicationOptions

if TYPE_CHECKING:
    from mpidist.comm.cross_device.cross_device_ops import check_chosen, collective_of, with_options
else:
    check_chosen = at_first_use("mpidist.comm.cross_device.cross_device_ops", "check_chosen")
    collective_of = at_first_use("mpidist.comm.cross_device.cross_device_ops", "collective_of")
    with_options = at_first_use("mpidist.comm.cross_device.cross_device_ops", "with_options")

logger = logging.getLogger("mpidist")


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
        TypeError: `chosen` is no such object; on every rank.
        ValueError: `chosen` belongs to other ranks, or cannot keep the options; on every rank.
    """
    names = gather_together(communicator, "taking `cross_device_ops`", lambda: _name_of(chosen, communicator))
    require_same(names, "the type of `cross_device_ops`", "Make the same strategy on all ranks.")
    if chosen is None:
        return None
    if options.implementation is not CommunicationImplementation.AUTO:
        raise mark_shared(ValueError(
            f"`cross_device_ops` and the implementation {options.implementation} are both given: choose one of them"
        ))
    collective = collective_of(chosen, communicator, options, owner)
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
    is_auto = options.implementation is CommunicationImplementation.AUTO
    users = with_options(collective, options) if is_auto else None
    if users is not None:
        return users
    return selection.choose(collective.communicator, options, collective.log.owner)


def _name_of(chosen: object | None, communicator: Communicator) -> str:
    """The name of its type."""
    if chosen is not None:
        check_chosen(chosen, communicator)
    return type(chosen).__name__
