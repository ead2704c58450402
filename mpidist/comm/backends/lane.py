"""The lane: each rank of a node combines its slice with the same slice of the other nodes, at the same time."""

from __future__ import annotations

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.combine import combined_dtype
from mpidist.comm.backends.circulant import CirculantBackend
from mpidist.comm.backends.mpi import MpiBackend
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import Resource, end_all
from mpidist.options import CommunicationOptions, ReduceOp


class Lane(Resource):
    """Collective. Combines arrays of one rank of each node. Of larger nodes some ranks are on no lane.

    Args:
        communicator: All ranks, on several nodes.
        circulant_from: Arrays of this size in bytes and above go over a circulant graph of the nodes; None: none do.
            The same on every rank.
    """

    def __init__(self, communicator: Communicator, circulant_from: int | None) -> None:
        lane = communicator.open_lane()
        self._mpi = None if lane is None else MpiBackend(lane, CommunicationOptions())
        self._circulant_from = circulant_from or 0
        self._circulant = (
            None if self._mpi is None or lane is None or circulant_from is None
            else CirculantBackend(lane, CommunicationOptions(), self._mpi)
        )

    def all_reduce(self, array: AnyArray, op: ReduceOp) -> None:
        """Collective over the lane. Combine an array with that of the other nodes, in place."""
        if self._mpi is None or not array.size:
            return
        # MEAN is a sum here: the front divides once, by the number of all ranks.
        op = ReduceOp.SUM if op is ReduceOp.MEAN else op
        # MPI has no type for bfloat16, and adds float16 in float16.
        wide = array.astype(combined_dtype(array.dtype, op, combines_halves=False), copy=False)
        if self._circulant is not None and wide.nbytes >= self._circulant_from:
            self._circulant.all_reduce(wide, wide, op)
        else:
            self._mpi.all_reduce(wide, wide, op)
        if wide is not array:
            array[...] = wide

    def _end(self, *, is_collective: bool) -> None:
        end_all([one for one in (self._circulant, self._mpi) if one is not None], is_collective=is_collective)
