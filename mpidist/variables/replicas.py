"""The replicas: the ranks of one strategy, in groups by what they do together, and their collectives."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from mpidist.comm.arithmetic.combine import named_dtype
from mpidist.comm.choice import selection
from mpidist.comm.cross_device.chosen_collective import another_collective, take_collective
from mpidist.comm.first_use import at_first_use
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.group.communicator import Communicator, require_communicator
from mpidist.comm.group.resource import Resource, end_all
from mpidist.options import CommunicationOptions
from mpidist.recorder.calls import Calls

if TYPE_CHECKING:
    from mpidist.comm.front.arrival import Arrival
else:
    Arrival = at_first_use("mpidist.comm.front.arrival", "Arrival")


class Replicas(Resource):
    """The ranks of one strategy. Where each rank is a replica with an input pipeline, its three groups are the same.

    A fourth group, the ranks that have a variable and save it together, is the `communicator` of the variable's home.

    Collective over `everyone`. Args:
        communicator: The replicas.
        options: The options of the strategy's communication.
        everyone: All ranks of the strategy, of which this rank's replicas are some. Default: the replicas.
        pipelines: The ranks that have an input pipeline each. Default: the replicas.
        cross_device_ops: The user's reduction of arrays, see `chosen_collective.take_collective`; None lets the
            options choose.

    Raises:
        TypeError: `cross_device_ops` is neither `CrossDeviceOps` nor a `Collective`.
        ValueError: `cross_device_ops` and the options contradict each other.
        MismatchError: The options differ between ranks.

    Attributes:
        communicator: The replicas: values are reduced, gathered and sent over them, and gradients summed.
        everyone: All ranks of the strategy: they make variables and steps together, measure norms, look for gradients
            that are not finite, and agree on seeds.
        pipelines: Datasets are distributed over these ranks.
        options: The options on which all ranks have agreed.
        number: The number of the strategy among those on `everyone`, which its calls carry; see `CallOrder.deal`.
        calls: The record of the calls that the replicas make together, with the time limit of the options.
        collective: The collective of the replicas; exact, whatever `wire_dtype` says.
        has_user_collective: Whether the collective is the user's.
        wire_dtype: The dtype in which gradients are sent; None for their own.
        arrival: The meeting of all ranks before a step under `timeout_seconds`, else None.
    """

    def __init__(
        self,
        communicator: Communicator,
        options: CommunicationOptions | None = None,
        *,
        everyone: Communicator | None = None,
        pipelines: Communicator | None = None,
        cross_device_ops: object | None = None,
    ) -> None:
        require_communicator(communicator)
        self.communicator = communicator
        self.everyone = communicator if everyone is None else everyone
        self.pipelines = communicator if pipelines is None else pipelines
        options = CommunicationOptions().merge(options)
        checks = options.check or os.environ.get("MPIDIST_CHECK", "") not in ("", "0")
        self.options = selection.agreed(self.everyone, replace(options, check=checks))
        self.number = owner = self.everyone.order.deal("strategy")
        if self.everyone is not communicator:
            owner = communicator.order.deal("strategy")
        self.calls: Calls = communicator.calls.limited(options.timeout_seconds, owner)
        given = take_collective(cross_device_ops, communicator, self.options, owner)
        self.has_user_collective = given is not None
        self.wire_dtype = None if self.options.wire_dtype is None else named_dtype(self.options.wire_dtype)
        # Norms, metrics and what users reduce are not rounded.
        exact = replace(self.options, wire_dtype=None)
        self.collective: CollectiveFront = given or selection.choose(communicator, exact, owner)
        self._others: dict[CommunicationOptions, CollectiveFront] = {}
        # A step is timed here, where every rank of the job can be named, and not on each lane.
        self.arrival = Arrival(self.everyone, options.timeout_seconds) if options.timeout_seconds else None

    def collective_for(self, options: CommunicationOptions | None) -> CollectiveFront:
        """Collective at the first call with equal options, then Local. The collective for calls with these options.

        Args:
            options: The options of the call, the same on every rank: fields that differ from the defaults replace the
                strategy's. The strategy's `wire_dtype` is for gradients, and not for calls that do not ask for it.
        """
        if options is None:
            return self.collective
        exact = replace(self.options, wire_dtype=None)
        merged = exact.merge(options)
        if merged == exact:
            return self.collective
        if merged not in self._others:
            self.require_open()
            self.communicator.require_whole("opening a collective for these options")
            self._others[merged] = another_collective(self.collective, merged)
        return self._others[merged]

    def require_open(self) -> None:
        """Local. Raise RuntimeError if the strategy is closed."""
        if self.is_closed:
            raise RuntimeError(
                "this strategy is closed: it can no longer create or combine variables. Its variables on servers are "
                "gone, others can be read. Make a new strategy"
            )

    def is_whole(self) -> bool:
        """Local. Whether all ranks can take part in a collective call; the same on every rank."""
        is_late = self.arrival is not None and self.arrival.is_broken
        return self.everyone.is_whole() and self.communicator.is_whole() and not is_late

    def _is_whole(self) -> bool:
        return self.is_whole()

    def _end(self, *, is_collective: bool) -> None:
        end_all([*self._others.values(), self.collective], is_collective=is_collective)

    def __repr__(self) -> str:
        return f"Replicas({self.communicator!r})"
