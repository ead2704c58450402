"""`from_ranks`: the samples that other programs of the job send, through MPI."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist import launch
from mpidist.arguments import described, whole
from mpidist.comm.group.mpi_start import start_mpi
from mpidist.data.dataset_base import D
from mpidist.data.items.shuffle import ShuffleSeed
from mpidist.data.items.stream import UNKNOWN, Epoch, Items, Seed
from mpidist.data.options import Options
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.reading.source import ElementSource

# Samples of each rank that are received ahead: enough that a sender need not wait while a step takes some.
_RECEIVES = 4


def from_ranks(
    cls: type[D],
    ranks: Sequence[int],
    communicator: object | None = None,
    *,
    tag: int = 0,
    receives: int = _RECEIVES,
) -> D:
    """Local. A dataset of the samples that other ranks of the job send to this rank, a simulation for instance.

    The senders may be programs in any language. Each sends three kinds of messages, all as MPI_BYTE: a text with the
    dtype and the shape of each array of a sample, "float32 64 64; int64"; the samples, each one message of its arrays
    one after another, without gaps; and an empty message, the end. `MPI_Ssend` lets a sender wait for a reader that is
    slower; small messages of `MPI_Send` pile up in this rank's memory. `examples/coupled` has a sender in C.

    The samples are this rank's own: `distribute_datasets_from_function` makes the dataset under a strategy. They are
    received once, from the ranks in turns, and cannot be read again after a restart. Samples that are not read when the
    program ends are received and dropped, so that senders can end.

    Args:
        cls: The class of the dataset.
        ranks: The senders, at least one. Each sends to no other rank with this tag.
        communicator: The mpi4py intracommunicator that the messages use; default: all ranks of the job, which is
            `MPI_COMM_WORLD` for the other programs.
        tag: The tag of the messages, 0 or more; a tag for each dataset.
        receives: Number of samples of each rank that are received ahead.

    Returns:
        A dataset of arrays, or of tuples of arrays where a sample has several. Its length is unknown.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A rank or the tag is out of range, or used by another dataset. While reading: a message is none of
            the three.
        TimeoutError: While reading: a rank has sent nothing for `MPIDIST_TIMEOUT` seconds.
    """
    if isinstance(ranks, (str, bytes, dict, set)) or not hasattr(ranks, "__iter__"):
        raise TypeError(f"from_ranks: `ranks` must be a list of ranks, got {described(ranks)}")
    senders = [whole("ranks", rank, least=0, owner="from_ranks: ") for rank in ranks]
    number = whole("tag", tag, least=0, owner="from_ranks: ")
    depth = whole("receives", receives, least=1, owner="from_ranks: ")
    if not senders:
        raise ValueError("from_ranks: `ranks` must name at least one rank, got none: this rank would have no samples")
    if communicator is None and "mpi4py.MPI" not in sys.modules and launch.world_size() == 1:
        raise ValueError(
            f"from_ranks: `ranks` must be other ranks of the job, got {senders} in a program of one rank. Start it "
            "with the programs that send: mpirun -n 4 ./simulate : -n 2 python train.py"
        )
    start_mpi()
    # Loaded by name, since it imports `mpi4py.MPI`.
    samples = importlib.import_module("mpidist.data.reading.samples_of_ranks")
    incoming = samples.Incoming(communicator, senders, number, depth)
    source = ElementSource(_element, lambda: tuple(np.zeros(one.shape, one.dtype) for one in incoming.layouts()))
    # A thread that reads ahead would call MPI beside the program.
    return cls(Pipeline(source, _Samples(incoming), prefetch=0), Options())


def _element(sample: tuple[Any, ...]) -> Any:
    return sample[0] if len(sample) == 1 else sample


@dataclass(frozen=True)
class _Samples:
    """The samples of other ranks as items.

    Attributes:
        incoming: The receiver, an `mpidist.data.reading.samples_of_ranks.Incoming`.
    """

    incoming: Any

    def cardinality(self) -> int:
        """Local. UNKNOWN: the other ranks end when they want."""
        return UNKNOWN

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. The samples in the order in which they come."""
        del epoch  # there is one pass
        for sample in self.incoming.samples(start):
            yield [sample]

    def seeds(self) -> list[Seed]:
        """Local. A seed that identifies the senders: ranks that share a dataset compare it."""
        return [ShuffleSeed(0, use=f"samples that ranks {list(self.incoming.ranks)} send")]
