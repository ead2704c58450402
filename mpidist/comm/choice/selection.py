"""The choice of a collective's backend: one function over the table, and a line in the log with the reason."""

from __future__ import annotations

import errno
import importlib
import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from mpidist.comm.backend import Backend
from mpidist.comm.backends.solo import SoloBackend
from mpidist.comm.calls.text import OWNERS_HINT
from mpidist.comm.choice.sizes import NEVER, Sizes, find_sizes
from mpidist.comm.choice.table import BACKENDS, Opening, open_row, why_not
from mpidist.comm.first_use import at_first_use
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.group.agreement import exchange, name_ranks, require_same, same_on_all
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import UnavailableError, mark_shared
from mpidist.options import CommunicationImplementation, CommunicationOptions, parse_enum

if TYPE_CHECKING:
    from mpidist.comm.backends.automatic import AutomaticBackend
    from mpidist.comm.backends.circulant import CirculantBackend
    from mpidist.comm.backends.tree import TreeBackend
    from mpidist.comm.group.shared_file import descriptors_missing
else:
    AutomaticBackend = at_first_use("mpidist.comm.backends.automatic", "AutomaticBackend")
    CirculantBackend = at_first_use("mpidist.comm.backends.circulant", "CirculantBackend")
    TreeBackend = at_first_use("mpidist.comm.backends.tree", "TreeBackend")
    descriptors_missing = at_first_use("mpidist.comm.group.shared_file", "descriptors_missing")

logger = logging.getLogger("mpidist")

OVERRIDE = "MPIDIST_COLLECTIVE"


def asked_for(options: CommunicationOptions) -> CommunicationImplementation:
    """Local. The implementation that the environment asks for, or otherwise the options; AUTO if neither does.

    Raises:
        ValueError: The environment names no implementation.
    """
    override = os.environ.get(OVERRIDE)
    if override:
        return parse_enum(CommunicationImplementation, override, OVERRIDE)
    return parse_enum(CommunicationImplementation, options.implementation, "implementation")


def agreed(communicator: Communicator, options: CommunicationOptions) -> CommunicationOptions:
    """Collective. The options with which all ranks open a collective; a check that one rank asks for, all make.

    Raises:
        OSError: A rank has no descriptors left; on every rank.
        MismatchError: The options differ between ranks. Without this error the ranks would wait for each other forever:
            they would open different backends, or make different messages.
    """
    # By its type: a user's own object need be neither comparable nor picklable.
    compression = None if options.compression is None else type(options.compression).__name__
    described = {**vars(options), "implementation": asked_for(options).name, "compression": compression, "check": None}
    said = {name: value for name, value in described.items() if value and value != "AUTO"}
    why = descriptors_missing() if communicator.size > 1 else ""
    error = OSError(errno.EMFILE, why) if why else None
    everyones = exchange(communicator, "making a strategy", (said, options.check), error)
    require_same(
        [one for one, _ in everyones], "communication options",
        f"Give the same options, and the same {OVERRIDE} in the environment, on all ranks.",
    )
    return replace(options, check=any(check for _, check in everyones))


def choose(communicator: Communicator, options: CommunicationOptions, owner: int = 0) -> CollectiveFront:
    """Collective. Open a collective for these ranks: the front over the chosen backend.

    Args:
        communicator: The ranks.
        options: The options: `implementation` names a backend or is AUTO; `MPIDIST_COLLECTIVE` in the environment
            overrides it. Under `reproducible` that backend moves the bytes, and `TreeBackend` combines.
        owner: The number of the strategy whose collective it is; see `CallOrder.deal`.

    Returns:
        The collective.

    Raises:
        UnavailableError: The backend that was asked for is not available; on every rank. The text lists the available
            backends, and the reasons why the others are not.
        MismatchError: Ranks open the collective of another strategy; on every rank.
    """
    if owner:
        # Else ranks would share the memory of two strategies crosswise.
        same_on_all(
            communicator, "the strategy whose collective is opened", f"strategy number {owner}", OWNERS_HINT
        )
    return CollectiveFront(_choose(asked_for(options), communicator, options), options, owner)


def _choose(
    wanted: CommunicationImplementation, communicator: Communicator, options: CommunicationOptions
) -> Backend:
    if communicator.size == 1:
        # A program that asks for shared memory or a ring may also run on one rank. It still needs a GPU if it asks for
        # one.
        if wanted in BACKENDS and not BACKENDS[wanted].takes_host_arrays:
            _require_available(wanted, communicator)
        return SoloBackend(communicator)
    if not options.reproducible:
        return _choose_backend(wanted, communicator, options)
    inside = _choose_backend(wanted, communicator, options)
    # Over several nodes the node backend does not keep the tree order, since it sums in lanes.
    keeps_order = len(communicator.node_sizes) == 1 and wanted in (
        CommunicationImplementation.AUTO, CommunicationImplementation.NODE
    )
    return TreeBackend(
        communicator, options, inside, (lambda: _open_node(communicator, options)) if keeps_order else None
    )


def _choose_backend(
    wanted: CommunicationImplementation, communicator: Communicator, options: CommunicationOptions
) -> Backend:
    if wanted is CommunicationImplementation.AUTO:
        return _open_by_size(communicator, options, logs=True)
    _require_available(wanted, communicator)
    _log(communicator, wanted.name, "asked for")
    sizes = find_sizes(communicator) if wanted is CommunicationImplementation.NODE else None
    return open_backend(wanted, communicator, options, sizes)


def _open_node(communicator: Communicator, options: CommunicationOptions) -> Backend | None:
    """Collective. The node backend, or None on every rank if there is no room for it."""
    try:
        return open_backend(CommunicationImplementation.NODE, communicator, options, find_sizes(communicator))
    except UnavailableError as error:
        _log(communicator, "MPI for sums in the tree order", str(error), level=logging.WARNING)
        return None


def open_backend(
    implementation: CommunicationImplementation,
    communicator: Communicator,
    options: CommunicationOptions,
    sizes: Sizes | None = None,
) -> Backend:
    """Collective. Open a backend of the table without checking whether it is available.

    Args:
        implementation: The name of the backend.
        communicator: The ranks.
        options: The options of the communication.
        sizes: The result of `find_sizes`, the same on every rank; default: sizes for any machine.
    """
    def open_host() -> Backend:
        return _open_by_size(communicator, CommunicationOptions(bytes_per_pack=options.bytes_per_pack))

    return open_row(implementation, Opening(communicator, options, sizes or Sizes(), open_host))


def _on_devices() -> Any:
    # By name: a program without GPUs loads nothing of them.
    return importlib.import_module("mpidist.comm.choice.device_selection")


def _sizes_described(sizes: Sizes, *, shares: bool) -> str:
    begins, large = (sizes.node_from, "NODE") if shares else (sizes.circulant_from, "a circulant graph")
    why = sizes.reason + ("" if shares else "; no two ranks share memory")
    # Where another backend takes all arrays larger than a chunk, there are none.
    mpi = "MPI" if begins <= sizes.chunk_bytes else f"MPI in chunks of {sizes.chunk_bytes} bytes"
    if begins >= NEVER:
        return f"{mpi}, {why}"
    if begins == 0:
        return f"{large}, {why}"
    return f"{mpi} below {begins} bytes, {large} from there on, {why}"


def _open_by_size(
    communicator: Communicator, options: CommunicationOptions, *, logs: bool = False
) -> Backend:
    shares = why_not(CommunicationImplementation.NODE, communicator) is None
    sizes = find_sizes(communicator)
    if logs:
        _log(communicator, "AUTO", _sizes_described(sizes, shares=shares))
    in_chunks = replace(options, bytes_per_pack=options.bytes_per_pack or sizes.chunk_bytes)
    mpi = open_backend(CommunicationImplementation.MPI, communicator, in_chunks)
    begins = sizes.node_from if shares else sizes.circulant_from
    if shares:
        # Not in the middle of the first large call, where nothing else may begin.
        communicator.open_lane()

    def open_large() -> Backend:
        if not shares and begins >= NEVER:
            return mpi
        try:
            if not shares:
                return CirculantBackend(communicator, options, mpi)
            return open_backend(CommunicationImplementation.NODE, communicator, options, sizes)
        except UnavailableError as error:
            _log(communicator, "MPI for all sizes", str(error), level=logging.WARNING)
            return mpi

    def open_device() -> Backend:
        return cast(Backend, _on_devices().open_device(communicator, options, automatic))

    automatic = AutomaticBackend(communicator, mpi, open_large, open_device, begins)
    return automatic


def _require_available(wanted: CommunicationImplementation, communicator: Communicator) -> None:
    """Collective. Raise UnavailableError on every rank if the backend is not available on one of them."""
    reasons = communicator.all_gather_object(why_not(wanted, communicator))
    failed = [rank for rank, reason in enumerate(reasons) if reason is not None]
    if not failed:
        return
    by = OVERRIDE if os.environ.get(OVERRIDE) else "`implementation`"
    can = [one.name for one in BACKENDS if why_not(one, communicator) is None]
    cannot = [
        f"{one.name} ({why})" for one in CommunicationImplementation
        if one is not wanted and (why := why_not(one, communicator)) is not None
    ]
    # The lists may differ from rank to rank. All ranks must raise the same text: rank 0's.
    text = communicator.broadcast_object(
        f"the backend {wanted.name}, asked for by {by}, is not available on {name_ranks(failed)}: "
        f"{reasons[failed[0]]}. Choose one of: {', '.join(['AUTO', *can])}"
        + (f". Not available: {'; '.join(cannot)}" if cannot else "")
    )
    raise mark_shared(UnavailableError(text))


def _log(communicator: Communicator, name: str, why: str, *, level: int = logging.INFO) -> None:
    # One line per job, not one per rank.
    if communicator.rank == 0:
        nodes = len(communicator.node_sizes)
        logger.log(level, "backend %s: %s; %d rank(s) on %d node(s)", name, why, communicator.size, nodes)
