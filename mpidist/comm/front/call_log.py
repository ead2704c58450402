"""The call log: the calls of a collective, the first of which are compared before they begin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, Protocol

from mpidist.arrays import AnyArray
from mpidist.comm.calls.order import CallOrder
from mpidist.comm.calls.schedule import schedule_of
from mpidist.comm.calls.text import HINT
from mpidist.comm.first_use import at_first_use
from mpidist.comm.group.agreement import same_on_all
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError
from mpidist.options import CommunicationOptions, ReduceOp

if TYPE_CHECKING:
    from mpidist.comm.front.arrival import Arrival
else:
    Arrival = at_first_use("mpidist.comm.front.arrival", "Arrival")

_REFUSED = "refused"


@dataclass(frozen=True, repr=False)
class _Refusal:
    """The detail of a call that this rank refuses: one call on all ranks that do, whatever their reasons."""

    reason: str = field(compare=False)

    def __str__(self) -> str:
        return _REFUSED

    def __repr__(self) -> str:
        return f"{_REFUSED}: {self.reason}"


def is_refusal(error: BaseException) -> bool:
    """Local. Whether an error says that ranks have refused a call; see `CallLog.refuse`."""
    return isinstance(error, MismatchError) and f" {_REFUSED}: " in str(error)


class Begin(Protocol):
    """The beginning of a call, whose end is `leave` or `fail` of the result, or that of a `with` block over it."""

    def __call__(
        self, name: str, detail: object, array: AnyArray | None, owner: int, *, meets: bool = True,
        only_dtype: bool = False,
    ) -> CallOrder:
        """Collective. Begin a call; see `CallOrder.enter`."""
        ...


class CallLog:
    """The calls of a collective.

    Args:
        communicator: The ranks.
        options: The options: `check` compares at every call, `timeout_seconds` limits the wait for late ranks.
        owner: The number of the strategy whose calls they are; see `CallOrder.deal`.

    Attributes:
        owner: The constructor's argument.
        begin_owned: A function that begins a call of this owner, see `Begin`. At first, and always under these options,
            it raises `MismatchError` before anything is moved, on every rank; later it is `CallOrder.enter`.
    """

    def __init__(self, communicator: Communicator, options: CommunicationOptions, owner: int = 0) -> None:
        self.owner = owner
        self._communicator = communicator
        self._order = communicator.order
        self._first = schedule_of(check=options.check).first
        self._arrival = Arrival(communicator, options.timeout_seconds) if options.timeout_seconds else None
        self._count = 0
        self.begin_owned: Begin = self._begin_checked if communicator.size > 1 else self._order.enter

    def begin(
        self, name: str, detail: object, array: AnyArray | None, *, meets: bool = True, only_dtype: bool = False
    ) -> CallOrder:
        """Collective. Begin a call; see `CallOrder.enter`. Where 0.1 us matter, call `begin_owned`."""
        return self.begin_owned(name, detail, array, self.owner, meets=meets, only_dtype=only_dtype)

    def _begin_checked(
        self, name: str, detail: object, array: AnyArray | None, owner: int, *, meets: bool = True,
        only_dtype: bool = False,
    ) -> CallOrder:
        if self._arrival is not None:
            # A rank that waits here has not entered the call.
            self._arrival.wait(name)
        with self._order.compared():
            order = self._order.enter(name, detail, array, owner, meets=meets, only_dtype=only_dtype)
        try:
            self._check(name, detail, array, compares_itself=only_dtype)
        except BaseException as error:
            order.fail(error)
            raise
        return order

    def _check(self, name: str, detail: object, array: AnyArray | None, *, compares_itself: bool) -> None:
        self._count += 1
        if compares_itself:
            return
        if self._count <= self._first:
            call = f"{name} {detail.name if isinstance(detail, ReduceOp) else detail}"
            described: tuple[object, ...] = (call,) if array is None else (call, array.shape, array.dtype.name)
            if isinstance(detail, _Refusal):
                described = name, detail
            same_on_all(self._communicator, "the collective call, its shape and dtype", described, HINT)
        elif self._arrival is None:
            self.begin_owned = self._order.enter

    def refuse(self, name: str, error: Exception) -> NoReturn:
        """Collective. Raise an error in this rank's arguments; ranks with valid ones get it in their call `name`.

        Raises:
            MismatchError: In its place, where other ranks' arguments are right; between nodes only where calls are
                compared before they begin.
        """
        # Others may be in a call that is not new to them. They get this one's error, if not that of the comparison.
        with self._order.compared():
            order = self.begin(name, _Refusal(str(error)), None)
        order.show_refusal()
        try:
            # Others reach it in their call. A rank that continued would be one barrier behind them.
            self._meet()
        except BaseException as caught:
            order.fail(caught)
            raise caught from error
        order.fail(error)
        raise error

    def meet(self, name: str, op: ReduceOp, array: AnyArray) -> None:
        """Collective. Meet the ranks of the node before a call, where that takes no message: one of them may refuse it.

        In a call of MPI a rank would not be notified.

        Args:
            name: The name of the call; `refuse` has the same.
            op: The operation of the call.
            array: The array of the call.

        Raises:
            MismatchError: Ranks are about to make other calls, or refuse this one; on every rank.
        """
        if self._communicator.size > 1:
            with self.begin(name, op, array):
                self._meet()

    def _meet(self) -> None:
        order = self._order
        if order.barrier is not None and not order.is_across:
            order.barrier()

    def refuse_calls(self) -> None:
        """Local. From now on every call raises RuntimeError: the collective is closed."""
        self.begin_owned = _refuse

    def is_broken(self) -> bool:
        """Local. Whether ranks no longer meet, since one of them came too late."""
        return self._arrival is not None and self._arrival.is_broken


def _refuse(
    name: str, detail: object, array: AnyArray | None, owner: int, *, meets: bool = True, only_dtype: bool = False
) -> NoReturn:
    del detail, array, owner, meets, only_dtype  # any call is refused
    raise RuntimeError(
        f"{name}: this collective is closed, or its strategy is. Call it before `close()`, or make a new strategy"
    )
