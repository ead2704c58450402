"""Enums and option classes: the vocabulary of arguments, with the names and values of tf.distribute."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from mpidist.arguments import flag, number, python_numbers, whole

E = TypeVar("E", bound=enum.Enum)


class ReduceOp(enum.Enum):
    """An operation that combines the components of several replicas."""

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"
    PROD = "PROD"

    # Enum's own hash is a Python function, and takes a measurable part of the time of a small all-reduce. The hash of
    # the object does as well, since each member exists only once.
    __hash__ = object.__hash__

    @staticmethod
    def from_variable_aggregation(aggregation: VariableAggregation) -> ReduceOp:
        """Local. The operation that corresponds to an aggregation.

        Raises:
            ValueError: `aggregation` is neither SUM nor MEAN.
        """
        if aggregation is VariableAggregation.SUM:
            return ReduceOp.SUM
        if aggregation is VariableAggregation.MEAN:
            return ReduceOp.MEAN
        raise ValueError(f"expected VariableAggregation.SUM or MEAN, which have a ReduceOp, got {aggregation!r}")


class VariableSynchronization(enum.Enum):
    """The moment when the components of a variable are combined: at a write or at a read."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """The way to combine the values that replicas write to one variable, or keep in it."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3


class CommunicationImplementation(enum.Enum):
    """The collective to use. `AUTO` chooses one, and logs the reason."""

    AUTO = "AUTO"
    MPI = "MPI"
    RING = "RING"
    NCCL = "NCCL"
    NODE = "NODE"
    STAGED = "STAGED"


class WindowWay(enum.Enum):
    """The transport to other ranks' memory. `AUTO` chooses one, and logs the reason."""

    AUTO = "AUTO"
    RMA = "RMA"
    SOCKETS = "SOCKETS"


class InputReplicationMode(enum.Enum):
    """The number of input pipelines. One rank is one worker and one replica, so both members mean the same."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(enum.IntEnum):
    """The policy by which ranks share a dataset; the docstring of `mpidist.data` has the table."""

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


def parse_enum(kind: type[E], value: object, argument: str, owner: str = "") -> E:
    """Local. A member of an enum, given as such or by its name in upper or lower case.

    Args:
        kind: The enum.
        value: A member, or the name of one.
        argument: The name of the caller's argument, for the error.
        owner: The beginning of the error, where it is one of several things of the kind: "variable 'w': ".

    Returns:
        The member.

    Raises:
        ValueError: `value` is a string that names no member.
        TypeError: `value` is neither a string nor a member.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    names = ", ".join(kind.__members__)
    home = "mpidist.experimental" if kind.__name__ == "CommunicationImplementation" else "mpidist"
    if isinstance(value, str):
        raise ValueError(
            f"{owner}`{argument}`: {value!r} is not a valid {kind.__name__}; expected one of {names}"
        )
    raise TypeError(
        f"{owner}Expected `{argument}` to be a `{home}.{kind.__name__}` or its name ({names}), "
        f"got {value!r} of type {type(value).__name__}"
    )


@dataclass(frozen=True)
class CommunicationOptions:
    """Options of a strategy's communication.

    Attributes:
        bytes_per_pack: Size in bytes of the chunks of a large reduction; 0 lets the library choose.
        timeout_seconds: The time that a rank waits for the others at the beginning of a collective call or of a step.
            After it, an error names the missing ranks; where a strategy waits elsewhere, a report names them and the
            job ends. None and 0 set no limit, and cost nothing.
        implementation: The collective, or its name; `AUTO` lets the library choose.
        check: Compare every call between the ranks, not only the first ones, and compare the variables' values.
        wire_dtype: "float16" or "bfloat16": the dtype in which float32 gradients are sent to be summed; they are added
            up in float32. It halves the bytes sent, and rounds the gradients and the sum. All dense float32 gradients
            of a step together must have 64 KB or more. Given for a call, it holds for each array of 64 KB or more.
        reproducible: Sums have the same bits on any number of nodes; with `Strategy.gradients` on any number of ranks.
        compression: An approximate way for optimizers to sum gradients, for example `PowerSGD(rank=4)`; see
            `mpidist.comm.compression.compression.Compression`. Variables are then private to each rank, as with an
            `implementation`. A checkpoint of an optimizer holds the errors that compression has left on each rank, of
            the size of a gradient per rank. So a program continues bit for bit on the same number of ranks; on another
            number of ranks only the sum of these errors is kept.

    Raises:
        ValueError: An option is out of range, or options contradict each other.
        TypeError: An option has a wrong type.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    check: bool = False
    wire_dtype: str | None = None
    reproducible: bool = False
    compression: object | None = None

    def __post_init__(self) -> None:
        whole("bytes_per_pack", self.bytes_per_pack)
        if self.bytes_per_pack < 0:
            raise ValueError(f"`bytes_per_pack` must be 0 (automatic) or positive, got {self.bytes_per_pack}")
        if self.timeout_seconds is not None and self.timeout_seconds != math.inf:
            number("timeout_seconds", self.timeout_seconds, least=0)
        flag("check", self.check)
        flag("reproducible", self.reproducible)
        python_numbers(self)
        member = parse_enum(CommunicationImplementation, self.implementation, "implementation")
        object.__setattr__(self, "implementation", member)
        if self.wire_dtype not in (None, "float16", "bfloat16"):
            raise ValueError(f'`wire_dtype` must be None, "float16" or "bfloat16", got {self.wire_dtype!r}')
        if self.wire_dtype is not None and self.reproducible:
            raise ValueError("`wire_dtype` rounds sums, and `reproducible` must not: give only one of them")
        if self.compression is not None:
            # A class that was given instead of an object has the methods, too.
            methods = [getattr(self.compression, name, None) for name in ("compresses", "all_reduce")]
            if isinstance(self.compression, type) or not all(map(callable, methods)):
                raise TypeError(
                    f"`compression` must be a Compression, for instance PowerSGD(rank=4), got {self.compression!r}"
                )
            if self.reproducible:
                raise ValueError("`compression` rounds sums, and `reproducible` must not: give only one of them")

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """Local. These options, with those fields of `other` that differ from the defaults.

        Raises:
            ValueError: The merged options contradict each other.
            TypeError: `other` is neither `CommunicationOptions` nor None.
        """
        if other is None:
            return self
        if not isinstance(other, CommunicationOptions):
            raise TypeError(
                "options of communication must be mpidist.experimental.CommunicationOptions(...) or None, got "
                f"{other!r} of type {type(other).__name__}"
            )
        said = {
            field.name: getattr(other, field.name) for field in fields(other)
            if getattr(other, field.name) != field.default
        }
        return replace(self, **said)

    def __str__(self) -> str:
        # The text of tf.distribute; then the fields that only this package has, if they are set.
        tail = "".join(
            f", {field.name}={getattr(self, field.name)}" for field in fields(self)[3:]
            if getattr(self, field.name) != field.default
        )
        return (
            f"Options(bytes_per_pack={self.bytes_per_pack},timeout_seconds={self.timeout_seconds}, "
            f"implementation={self.implementation}{tail})"
        )


@dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`, kept for code written for tf.distribute; they change nothing here."""

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: object = None


@dataclass(frozen=True)
class InputOptions:
    """Options of `experimental_distribute_dataset`.

    Attributes:
        experimental_fetch_to_device: Under a strategy on GPUs, None and True give batches as CuPy arrays that were
            copied ahead; False leaves batches in host memory.
        experimental_replication_mode: Both modes mean the same here: one rank is one pipeline and one replica.
        experimental_place_dataset_on_device: Kept for code written for tf.distribute; it changes nothing.
        experimental_per_replica_buffer_size: Number of batches that a thread prepares ahead; 0 turns prefetching off.
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode | str = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1

    def __post_init__(self) -> None:
        if self.experimental_fetch_to_device is not None:
            flag("experimental_fetch_to_device", self.experimental_fetch_to_device)
        mode = parse_enum(InputReplicationMode, self.experimental_replication_mode, "experimental_replication_mode")
        object.__setattr__(self, "experimental_replication_mode", mode)
        flag("experimental_place_dataset_on_device", self.experimental_place_dataset_on_device)
        whole("experimental_per_replica_buffer_size", self.experimental_per_replica_buffer_size, least=0)
        python_numbers(self)


@dataclass(frozen=True)
class WindowOptions:
    """Options of the communication between servers, workers and the coordinator.

    Attributes:
        way: The transport, or its name: one-sided calls of MPI, or sockets; `AUTO` lets the library choose.
        ports: The first and the last port on which a rank may listen for other hosts; default: any free one.
        silence_seconds: A rank on another host counts as lost after this many seconds without a message from its host;
            at least 1.

    Raises:
        ValueError: An option is out of range.
        TypeError: An option has a wrong type.
    """

    way: WindowWay | str = WindowWay.AUTO
    ports: tuple[int, int] | None = None
    silence_seconds: float = 30.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "way", parse_enum(WindowWay, self.way, "way"))
        number("silence_seconds", self.silence_seconds, least=1)
        if self.ports is not None:
            try:
                first, last = (whole("ports", port, least=1) for port in self.ports)
            except (TypeError, ValueError):
                first, last = 1, 0
            if not first <= last < 1 << 16:
                raise ValueError(
                    "`ports` must be None or the first and the last of some ports, from 1 to 65535, such as "
                    f"(50000, 50100), got {self.ports!r}"
                )
            object.__setattr__(self, "ports", (first, last))
        python_numbers(self)
