"""The reductions with tf.distribute's names: three algorithms, which differ in the bytes that each rank moves.

Let n ranks have B bytes each. In a reduction to one device, that rank moves 2(n - 1)B bytes and every other rank 2B. In
the hierarchical one the same holds within each node, and one stage crosses nodes. In a ring each rank sends
2(n - 1)/n B.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from mpidist import arrays
from mpidist.arguments import whole
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.slices import cut_evenly, slices_of
from mpidist.comm.backends.gather_to_one import GatherToOne
from mpidist.comm.backends.messages import Messages, Traffic
from mpidist.comm.backends.ring import RingBackend
from mpidist.comm.cross_device.cross_device_ops import CrossDeviceOps
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.group.agreement import together
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import mark_shared
from mpidist.options import CommunicationOptions, ReduceOp

_DEVICE = re.compile(r"(?:.*[/:])?(?:CPU|GPU)(?::(\d+))?", re.IGNORECASE)


class ReductionToOneDevice(CrossDeviceOps):
    """Local. Reduces on one rank: it receives all arrays, combines them in the order of the ranks, sends the result.

    Args:
        reduce_to_device: The rank that combines: its number, or the name of a device with that number ("/gpu:1",
            "CPU:0"). Default: the first rank.
        accumulation_fn: A function that combines, whatever the operation. It is called on that rank with the list of
            the ranks' arrays and returns one array of their shape, which under MEAN is divided by the number of ranks.
            Default: the operation itself, piece by piece.

    Raises:
        ValueError: `reduce_to_device` is neither a rank nor the name of a device. In `bind`: there is no such rank.
    """

    def __init__(
        self,
        reduce_to_device: str | int | None = None,
        accumulation_fn: Callable[[list[AnyArray]], AnyArray] | None = None,
    ) -> None:
        self._center = _number_of(reduce_to_device)
        self._accumulate = accumulation_fn
        self._messages: Messages | None = None
        self._to_one: GatherToOne | None = None

    def bind(
        self, communicator: Communicator, options: CommunicationOptions | None = None, owner: int = 0
    ) -> CollectiveFront:
        """Collective. See `CrossDeviceOps.bind`."""
        if self._center >= communicator.size:
            raise mark_shared(ValueError(
                f"`reduce_to_device` must name one of the strategy's ranks, 0 to {communicator.size - 1}, got rank "
                f"{self._center}"
            ))
        collective = super().bind(communicator, options, owner)
        if self._to_one is None:
            self._messages = Messages(communicator, options.bytes_per_pack if options else 0)
            self._to_one = GatherToOne(self._messages, range(communicator.size), self._center, communicator.rank)
        return collective

    @property
    @override
    def is_of_library(self) -> bool:
        """Local. See `CrossDeviceOps.is_of_library`; False with an `accumulation_fn`, which is the user's."""
        return type(self) is ReductionToOneDevice and self._accumulate is None

    @property
    def traffic(self) -> Traffic:
        """Local. The bytes that this rank has moved so far."""
        return Traffic() if self._messages is None else self._messages.traffic

    @override
    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: AnyArray, destinations: Any, options: CommunicationOptions
    ) -> AnyArray:
        """Collective. Reduce to one rank, and send the result back."""
        to_one, source = _opened(self._to_one), per_replica_value.reshape(-1)
        total = np.empty_like(source)
        if self._accumulate is None:
            to_one.combine(source, total, reduce_op)
        else:
            collected = to_one.collect(source)
            made = together(
                self.communicator, "accumulation_fn",
                lambda: None if collected is None else self._accumulated(
                    [one.reshape(per_replica_value.shape) for one in collected]
                ),
            )
            if made is not None:
                total[...] = made.reshape(-1)
        to_one.spread(total)
        return _mean_of(total, reduce_op, self.communicator.size).reshape(per_replica_value.shape)

    def _accumulated(self, sources: list[AnyArray]) -> AnyArray:
        made: AnyArray = np.asarray(self._accumulate(sources)) if self._accumulate else sources[0]
        if made.shape != sources[0].shape:
            raise ValueError(
                f"`accumulation_fn` must return an array of the shape of its arguments, {sources[0].shape}, got shape "
                f"{made.shape}"
            )
        return made


class PackedReduction(CrossDeviceOps):
    """Local. Base class of reductions that pack several values: arrays of one dtype are concatenated in packs.

    Args:
        num_packs: Number of packs for the values of one dtype in a `batch_reduce`; 0 reduces one value after another.

    Raises:
        ValueError: `num_packs` is negative.
        TypeError: `num_packs` is no integer.
    """

    def __init__(self, num_packs: int = 1) -> None:
        self._num_packs = whole("num_packs", num_packs, least=0)

    @property
    @override
    def is_of_library(self) -> bool:
        """Local. See `CrossDeviceOps.is_of_library`; False for a subclass, which may compute something else."""
        return type(self) in (HierarchicalCopyAllReduce, NcclAllReduce)

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[AnyArray, Any]],
        options: CommunicationOptions,
    ) -> list[AnyArray]:
        """Collective. Make one reduction for each pack."""
        if self._num_packs == 0:
            return super().batch_reduce_implementation(reduce_op, value_destination_pairs, options)
        kinds: dict[tuple[np.dtype[Any], bool], list[int]] = {}
        for number, (value, _) in enumerate(value_destination_pairs):
            kinds.setdefault((value.dtype, arrays.is_cupy(value)), []).append(number)
        results: dict[int, AnyArray] = {}
        for numbers in kinds.values():
            for cut in cut_evenly(len(numbers), min(self._num_packs, len(numbers))):
                pack = numbers[cut]
                values = [value_destination_pairs[number][0] for number in pack]
                flat = arrays.namespace(values[0]).concatenate([value.reshape(-1) for value in values])
                reduced = self.reduce_implementation(reduce_op, flat, value_destination_pairs[pack[0]][1], options)
                slices = slices_of([value.size for value in values])
                for number, value, one in zip(pack, values, slices, strict=True):
                    results[number] = reduced[one].reshape(value.shape)
        return [results[number] for number in range(len(results))]


class HierarchicalCopyAllReduce(PackedReduction):
    """Local. Reduces to the first rank of each node, all-reduces over these ranks in a ring, and sends the result back.

    Args:
        num_packs: See `PackedReduction`.

    Raises:
        ValueError: `num_packs` is negative.
        TypeError: `num_packs` is no integer.
    """

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)
        self._messages: Messages | None = None
        self._to_one: GatherToOne | None = None
        self._between: RingBackend | None = None

    def bind(
        self, communicator: Communicator, options: CommunicationOptions | None = None, owner: int = 0
    ) -> CollectiveFront:
        """Collective. See `CrossDeviceOps.bind`."""
        options = options or CommunicationOptions()
        collective = super().bind(communicator, options, owner)
        if self._to_one is None:
            self._messages = Messages(communicator, options.bytes_per_pack)
            ranks = [rank for rank, node in enumerate(communicator.nodes) if node == communicator.node_index]
            self._to_one = GatherToOne(self._messages, ranks, ranks[0], communicator.rank)
            lane = communicator.open_lane()
            if lane is not None and self._to_one.is_center:
                self._between = RingBackend(lane, CommunicationOptions(bytes_per_pack=options.bytes_per_pack))
        return collective

    @property
    def traffic(self) -> Traffic:
        """Local. The bytes that this rank has moved so far."""
        inside = Traffic() if self._messages is None else self._messages.traffic
        between = Traffic() if self._between is None else self._between.traffic
        return Traffic(
            inside.sent + between.sent, inside.received + between.received,
            inside.sent_between_nodes + between.sent_between_nodes,
        )

    @override
    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: AnyArray, destinations: Any, options: CommunicationOptions
    ) -> AnyArray:
        """Collective. Reduce inside the nodes and then between them, and send the result inside the nodes."""
        to_one, source = _opened(self._to_one), per_replica_value.reshape(-1)
        total = np.empty_like(source)
        to_one.combine(source, total, reduce_op)
        if self._between is not None:
            self._between.all_reduce(total, total, reduce_op)
        to_one.spread(total)
        return _mean_of(total, reduce_op, self.communicator.size).reshape(per_replica_value.shape)


class NcclAllReduce(PackedReduction):
    """Local. Reduces CuPy arrays by NCCL, or by the library's choice without it, and host memory in a ring over MPI.

    Args:
        num_packs: See `PackedReduction`.

    Raises:
        ValueError: `num_packs` is negative.
        TypeError: `num_packs` is no integer.
    """

    takes_device_arrays = True

    def __init__(self, num_packs: int = 1) -> None:
        super().__init__(num_packs)
        self._ring: RingBackend | None = None

    def bind(
        self, communicator: Communicator, options: CommunicationOptions | None = None, owner: int = 0
    ) -> CollectiveFront:
        """Collective. See `CrossDeviceOps.bind`."""
        options = options or CommunicationOptions()
        collective = super().bind(communicator, options, owner)
        if self._ring is None:
            self._ring = RingBackend(communicator, CommunicationOptions(bytes_per_pack=options.bytes_per_pack))
        return collective

    @property
    def traffic(self) -> Traffic:
        """Local. The bytes that this rank has moved so far from host memory."""
        return Traffic() if self._ring is None else self._ring.traffic

    @override
    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: AnyArray, destinations: Any, options: CommunicationOptions
    ) -> AnyArray:
        """Collective. Reduce in a ring, CuPy arrays by the library's choice."""
        source = per_replica_value.reshape(-1)
        if arrays.is_cupy(source):
            # The library's choice is NCCL if every rank has a GPU of its own. Its front divides means.
            return self.collective.all_reduce(per_replica_value, reduce_op)
        total = np.empty_like(source)
        _opened(self._ring).all_reduce(source, total, reduce_op)
        return _mean_of(total, reduce_op, self.communicator.size).reshape(per_replica_value.shape)


def _opened(opened: Any) -> Any:
    if opened is None:
        raise RuntimeError(
            "this object is not bound to ranks: give it to a strategy as `cross_device_ops`, or call its "
            "`bind(communicator)`"
        )
    return opened


def _mean_of(total: AnyArray, op: ReduceOp, size: int) -> AnyArray:
    return np.divide(total, size, out=total) if op is ReduceOp.MEAN else total


def _number_of(device: str | int | None) -> int:
    if device is None:
        return 0
    if isinstance(device, int) and not isinstance(device, bool) and device >= 0:
        return device
    found = _DEVICE.fullmatch(device) if isinstance(device, str) else None
    if found is None:
        raise ValueError(
            f'`reduce_to_device` must be a rank or the name of a device, for instance "/gpu:1", got {device!r}'
        )
    return int(found.group(1) or 0)
