"""Logical devices: the ranks of one replica, numbered from 0, and their collective calls."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

from mpidist.arrays import AnyArray
from mpidist.comm.choice import selection
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import Resource, end_all
from mpidist.errors import RankError
from mpidist.options import CommunicationOptions

T = TypeVar("T")


class LogicalDevices(Resource):
    """Collective over the replica. The ranks of this rank's replica: each is a logical device.

    Args:
        communicator: The ranks, in the order of the logical devices. It is closed with this object.
        options: The options of the strategy, the same on all ranks.

    Attributes:
        communicator: The constructor's argument.
        collective: The reductions and broadcasts over these ranks.
        device: The number of this rank's logical device.
        count: Number of logical devices.
    """

    def __init__(self, communicator: Communicator, options: CommunicationOptions) -> None:
        self.communicator = communicator
        self.device, self.count = communicator.rank, communicator.size
        owner = communicator.order.deal("strategy")
        self.collective = selection.choose(communicator, replace(options, wire_dtype=None), owner)

    def first(self, array: AnyArray) -> AnyArray:
        """Collective. The array of logical device 0; shape and dtype must be the same on all ranks of the replica."""
        return array if self.count == 1 else self.collective.broadcast(array)

    def lead(self, name: str, function: Callable[[], T]) -> T:
        """Collective. Call `function` on logical device 0; all ranks of the replica get its value, or its error.

        Outside `run` the value of logical device 0 is the value of its replica: the values of the other devices may
        differ in the last bit, but the results must be the same on all.

        Args:
            name: The name of the call, for the record.
            function: A function that is Collective over the logical devices 0 of all replicas. Its value must be
                picklable.
        """
        if self.count == 1:
            return function()
        with self.communicator.calls.during(name):
            result: T | None = None
            error: Exception | None = None
            if self.device == 0:
                try:
                    result = function()
                except Exception as caught:
                    error = caught
            told, value = self.communicator.broadcast_object((_told(error), result))
        if told is None:
            return cast(T, value)
        try:
            raise told if error is None else error
        finally:
            # A frame that refers to its error forms a cycle with the traceback, which garbage collection must free.
            del error, told

    def _is_whole(self) -> bool:
        return self.communicator.is_whole()

    def _end(self, *, is_collective: bool) -> None:
        end_all([self.collective, self.communicator], is_collective=is_collective)

    def __repr__(self) -> str:
        return f"LogicalDevices({self.device} of {self.count})"


def _told(error: Exception | None) -> Exception | None:
    """A copy of an error for the other ranks of the replica: of its type if it can be pickled, else a RankError."""
    if error is None:
        return None
    copy: Exception | None = None
    with contextlib.suppress(Exception):
        copy = pickle.loads(pickle.dumps(error))
    if type(copy) is type(error):
        return copy
    told = RankError(f"{type(error).__name__}: {error}")
    told.__dict__.update({name: value for name, value in error.__dict__.items() if name == "raised_on_all_ranks"})
    return told
