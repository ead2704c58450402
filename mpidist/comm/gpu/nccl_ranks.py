"""NCCL's communicators: one for each communicator of MPI and GPU, which all backends over it share."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from mpidist.comm.group.agreement import together
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.resource import Claim, Identity, new_identity
from mpidist.failures.farewell import LAST
from mpidist.observe.output import say

# A rank on which NCCL fails does not reach its start, and the others would wait there without end.
START_SECONDS = 120.0
# At the end of the program all ranks have made their calls. What is not done after this time has no partner.
END_SECONDS = 30.0
_STEP = "starting NCCL"

# The objects of this process that were not destroyed, and the module that made each. Their ranks add and remove them
# together.
_open: dict[Identity, tuple[Any, Any]] = {}


class NcclRanks:
    """Collective. A communicator of NCCL: destroyed when all its users have closed it, at the latest with its owner.

    Args:
        owner: The communicator of MPI.
        cuda: The module `mpidist.comm.gpu.cuda`, which needs CuPy.
        identity: The identity, the same on every rank.
        ranks: The communicator as CuPy's object.

    Attributes:
        ranks: The constructor's argument.
        cuda: The constructor's argument.
        device: The number of the GPU that was current at the start. No other one may be current in a call.
        identity: The constructor's argument.
        user_count: The number of users that have not closed it, with those that were dropped; the same on every rank.
    """

    def __init__(self, owner: Communicator, cuda: Any, identity: Identity, ranks: Any) -> None:
        self.ranks, self.cuda, self.identity = ranks, cuda, identity
        self.device = int(cuda.current_device())
        self.user_count = 0
        _open[identity] = ranks, cuda
        if end_all not in LAST:
            LAST.append(end_all)
        # Destroying it is a collective call, which the garbage collector must not make.
        self._claim = Claim(self, identity, owner.size, functools.partial(_destroy, identity))

    def can_serve(self, cuda: Any) -> bool:
        """Local. Whether this rank may make further calls on it, on the GPU that is current now."""
        if self.identity not in _open or self.cuda is not cuda or self.device != cuda.current_device():
            return False
        try:
            self.ranks.check_async_error()
        except Exception:
            return False
        return True

    def close(self) -> None:
        """Collective. End the use by one user; the last one destroys it."""
        self.user_count -= 1
        if self.user_count == 0:
            self._claim.give_back()


class _Owned:
    """The communicators of NCCL over one communicator of MPI, which frees this.

    Attributes:
        living: The objects that are in use on this rank; ranks drop them at different times.
        identities: The identities of all; the same on every rank.
    """

    def __init__(self) -> None:
        self.living: weakref.WeakValueDictionary[Identity, NcclRanks] = weakref.WeakValueDictionary()
        self.identities: set[Identity] = set()

    def Free(self) -> None:
        """Collective. Destroy those that are left."""
        for identity in sorted(self.identities & _open.keys()):
            _destroy(identity)

    def add(self, ranks: NcclRanks) -> None:
        """Collective. Add one more communicator."""
        self.identities &= _open.keys()
        self.identities.add(ranks.identity)
        self.living[ranks.identity] = ranks


_owned: weakref.WeakKeyDictionary[Communicator, _Owned] = weakref.WeakKeyDictionary()


def open_ranks(communicator: Communicator, cuda: Any) -> NcclRanks:
    """Collective. The communicator of NCCL over these ranks and their current GPUs, for a user that closes it.

    Args:
        communicator: The ranks, which own it: it is destroyed when they close their communicator, if not before.
        cuda: The module `mpidist.comm.gpu.cuda`, which needs CuPy.

    Returns:
        The communicator that all ranks have and can use, otherwise a new one.

    Raises:
        RuntimeError: NCCL cannot start on some rank, or has not started after 120 s; on every rank.
    """
    owned = _owned.get(communicator)
    if owned is None:
        _owned[communicator] = owned = _Owned()
        communicator.own(owned)
    # Kept until one is chosen, since the garbage collector may take them at any time.
    living = dict(owned.living)
    usable = together(
        communicator, _STEP, lambda: {identity for identity, one in living.items() if one.can_serve(cuda)}
    )
    # A rank may have dropped one that others have, have another GPU current, or know of an error.
    common = set.intersection(*communicator.all_gather_object(usable))
    if common:
        ranks = living[min(common)]
    else:
        ranks = _open_new(communicator, cuda)
        owned.add(ranks)
    ranks.user_count += 1
    return ranks


def _open_new(communicator: Communicator, cuda: Any) -> NcclRanks:
    rank, size = communicator.rank, communicator.size
    unique = together(communicator, _STEP, lambda: cuda.load_nccl().get_unique_id() if rank == 0 else None)
    unique, identity = communicator.broadcast_object((unique, new_identity()))
    start = _Start(functools.partial(_make, cuda, size, unique, rank))
    try:
        ranks: Any = together(communicator, _STEP, lambda: _begin(cuda, communicator, start))
    except Exception:
        # Where it has started it is of no use, without the others.
        start.give_up()
        raise
    return NcclRanks(communicator, cuda, identity, ranks)


def _make(cuda: Any, size: int, unique: Any, rank: int) -> Any:
    return cuda.load_nccl().NcclCommunicator(size, unique, rank)


class _Start:
    """NCCL's start on this rank. Its communicator is aborted once the ranks have given it up, however late it comes.

    Args:
        make: A function that returns a communicator of NCCL.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._ranks: Any = None
        self._is_given_up = False

    def __call__(self) -> Any:
        """Local. Make the communicator. On a thread of its own, since it may never return."""
        ranks = self._make()
        with self._lock:
            self._ranks, is_late = ranks, self._is_given_up
        if is_late:
            _abort(ranks)
        return ranks

    def give_up(self) -> None:
        """Local. Abort the communicator that was made, or will be."""
        with self._lock:
            self._is_given_up, ranks = True, self._ranks
        if ranks is not None:
            _abort(ranks)


def _abort(ranks: Any) -> None:
    # The error that all ranks raise says why; whatever NCCL adds must not take its place.
    with contextlib.suppress(Exception):
        ranks.abort()


def _in_background(name: str, cuda: Any, work: Callable[[], Any], turn: Callable[[], bool]) -> tuple[bool, Any]:
    """Do work in a thread of its own, on this thread's GPU, for as long as `turn`, called again and again, allows.

    Returns:
        Whether it is done, and its result.
    """
    done, results, errors = threading.Event(), [], []
    device = cuda.current_device()

    def run() -> None:
        try:
            cuda.use_device(device)
            results.append(work())
        except BaseException as error:
            errors.append(error)
        done.set()

    # A daemon, since it may never end; named so that the end of the program does not wait for it.
    threading.Thread(target=run, name=name, daemon=True).start()
    pause = 0.001
    while not done.wait(pause):
        if not turn():
            return False, None
        pause = min(pause * 2, 0.1)
    if errors:
        raise errors[0]
    return True, results[0]


def _begin(cuda: Any, communicator: Communicator, start: _Start) -> Any:
    end = time.monotonic() + START_SECONDS

    def turn() -> bool:
        communicator.require_whole("the start of NCCL")
        return time.monotonic() < end

    is_done, ranks = _in_background("mpidist-nccl-start", cuda, start, turn)
    if not is_done:
        raise RuntimeError(
            f"NCCL has not started after {START_SECONDS:g} s: it may have failed on another rank, or its network may "
            "be blocked. Set NCCL_DEBUG=INFO to see why, or MPIDIST_GPU_TRANSPORT=staged to do without"
        )
    return ranks


def _is_done(ranks: Any, cuda: Any, seconds: float = math.inf) -> bool:
    """Wait until a GPU has done its work, at most for a time.

    Raises:
        Exception: NCCL reports an error, for example of the network.
    """
    end = time.monotonic() + seconds
    index = ranks.device_id()

    def turn() -> bool:
        ranks.check_async_error()
        return time.monotonic() < end

    return _in_background("mpidist-nccl-end", cuda, functools.partial(cuda.synchronize, index), turn)[0]


def _destroy(identity: Identity) -> None:
    """Collective. Destroy a communicator after the last results have been sent."""
    ranks, cuda = _open.pop(identity, (None, None))
    if ranks is not None and _is_done(ranks, cuda):
        ranks.destroy()


def end_all() -> None:
    """Collective. Destroy all communicators at the end of the program, which all ranks have reached."""
    for identity in sorted(_open):
        ranks, cuda = _open.pop(identity)
        try:
            is_done = _is_done(ranks, cuda, END_SECONDS)
        except Exception as error:
            say(f"NCCL has failed, and results are lost: {error}")
            is_done = False
        else:
            if not is_done:
                say(f"a call of NCCL has found no partner in {END_SECONDS:g} s: other ranks have made fewer calls")
        if is_done:
            ranks.destroy()
        else:
            # The other ranks need not take part.
            ranks.abort()
