"""Whether ranks have the same bits, without sending them."""

from __future__ import annotations

import hashlib

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.comm.group.communicator import Communicator


def require_same_bits(communicator: Communicator, *arrays: AnyArray) -> None:
    """Collective. Every rank has the same arrays."""
    digests = [hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).data).hexdigest() for array in arrays]
    everyones = communicator.all_gather_object(digests)
    differing = [(rank, i) for rank, others in enumerate(everyones) for i, other in enumerate(others)
                 if other != everyones[0][i]]
    assert not differing, f"(rank, array) with other bits than rank 0's: {differing}"
