"""Messages whose sizes all ranks know, so that no rank asks for them before."""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.arrays import AnyArray, as_bytes
from mpidist.comm.backends.messages import Messages
from mpidist.comm.front.front import CollectiveFront


class CountedMessages:
    """Collective. Exchanges of host arrays between the ranks of a collective, as calls of it.

    Args:
        front: The collective. Its other calls and these come in one order on all ranks.

    Attributes:
        traffic: The bytes moved so far.
    """

    def __init__(self, front: CollectiveFront) -> None:
        self._front = front
        self._messages = Messages(front.communicator)
        self.traffic = self._messages.traffic

    def exchange(self, name: str, sent: Sequence[AnyArray], got: Sequence[AnyArray]) -> None:
        """Collective. Send array r to rank r, and get one from every other rank; what is this rank's own stays.

        Args:
            name: The name of the call, the same on every rank.
            sent: One contiguous array for each rank, of as many bytes as rank r expects. All may be the same one.
            got: One contiguous array for each rank; the own one is not written.
        """
        rank, messages = self._front.communicator.rank, self._messages
        with self._front.log.begin(name, None, None):
            self._front.begin_moving()
            requests = []
            for source, array in enumerate(got):
                if source != rank:
                    # As bytes, since MPI has no type for bfloat16.
                    requests += [
                        messages.start_receive(as_bytes(array)[piece], source)
                        for piece in messages.pieces(array.nbytes, 1)
                    ]
            for dest, array in enumerate(sent):
                if dest != rank:
                    requests += [
                        messages.start_send(as_bytes(array)[piece], dest) for piece in messages.pieces(array.nbytes, 1)
                    ]
            for request in requests:
                request.Wait()
