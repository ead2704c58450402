"""The chief's side of all messages: it passes them to the queue of functions, and sends the queue's decisions."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from mpidist.comm.windows.window import require_open
from mpidist.optimizers.optimizer import Optimizer
from mpidist.optimizers.rates import rate_at
from mpidist.parameter_server.chief.dropped_objects import Dropped
from mpidist.parameter_server.chief.making import VariableMaker
from mpidist.parameter_server.chief.plan import ServedPlan
from mpidist.parameter_server.heap.layout import Heaps, Slots
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import (
    OWN_WRITE,
    Applied,
    Began,
    Built,
    Failed,
    Finished,
    Message,
    Pong,
    Prepared,
    Send,
    SnapshotDone,
)
from mpidist.parameter_server.protocol.signal_relay import Others
from mpidist.parameter_server.protocol.thread_guard import OwnersLock
from mpidist.parameter_server.queue.closures import Action, Closures
from mpidist.parameter_server.queue.commits import Commits, RateError, numbered
from mpidist.parameter_server.queue.staleness import Versions
from mpidist.parameter_server.queue.work import ClosureEnd, Rules, Work
from mpidist.variables.update.kernel import require_rate

WAIT_SECONDS = 0.005
# Servers that are waited for are to do this.
WRITE = "apply a write of the program"

V = TypeVar("V", bound="Pending")


class Pending(Protocol):
    """The result of a closure, which is notified of the closure's end."""

    def set(self, end: ClosureEnd) -> None:
        """Local. Note how the closure has ended."""
        ...


class Scheduler(NamedTuple):
    """The object that gives functions to the queue.

    Attributes:
        watch: A function that looks for lost workers, while this process waits for servers.
        join: A function that waits until all functions have ended.
        forget: A function that forgets an object that the program has dropped; its arguments are those of `Discard`.
        forget_unused: A function that releases functions that are kept for their next use.
    """

    watch: Callable[[], None] = lambda: None
    join: Callable[[], None] = lambda: None
    forget: Callable[[str, int], None] = lambda _, __: None
    forget_unused: Callable[[], None] = lambda: None


class Iterations(MutableMapping[int, int]):
    """`Optimizer.iterations`, by the number of the optimizer: commits count from the value that the program sets.

    Args:
        optimizers: The optimizers that the program has not dropped.
    """

    def __init__(self, optimizers: Mapping[int, Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, number: int) -> int:
        """Local. The steps so far."""
        return self._optimizers[number].iterations

    def __setitem__(self, number: int, iterations: int) -> None:
        """Local. Set the steps so far."""
        self._optimizers[number].iterations = iterations

    def __delitem__(self, number: int) -> None:
        """Local. Refuse: optimizers go with the program's last reference."""
        raise TypeError(f"the steps of optimizer {number} cannot be deleted")

    def __iter__(self) -> Iterator[int]:
        """Local. The numbers."""
        return iter(list(self._optimizers))

    def __len__(self) -> int:
        """Local. The number of optimizers."""
        return len(self._optimizers)


class Decisions:
    """The queue of functions, and the chief's messages to workers and servers.

    Args:
        station: The station of this process.
        servers: The ranks of the servers.
        slots: The slots of each heap.
        versions: The rules by which functions may begin, and updates may count.

    Attributes:
        station: The constructor's argument.
        queue: The functions that have not ended, and the workers.
        commits: The order of all changes, which the program's own writes share.
        lock: The lock of the thread that uses the station.
        values: The values of functions that have not ended, by their numbers.
        optimizers: The optimizers by their numbers, as far as functions use them.
        dropped: The objects that the program has dropped.
        others: The receiver of signals of the other processes.
        is_deciding: Whether a decision waits for a learning rate schedule of the program, which is running.
        is_one_process: Whether this process is worker and server, too.
    """

    def __init__(self, station: Station, servers: Sequence[int], slots: Slots, versions: Versions) -> None:
        self.station = station
        self.is_one_process = station.window.size == 1
        # The program's thread uses the station, or a background thread while the program does something else: a message
        # between two messages of the other thread would break their order.
        self.lock = OwnersLock(is_alone=self.is_one_process)
        self.values: dict[int, Pending] = {}
        self.optimizers: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self.commits = Commits(
            station.window.rank, servers, self._rate, self._name_of_optimizer, iterations=Iterations(self.optimizers)
        )
        self.queue = Closures(self.commits, versions=versions)
        self._scheduler = Scheduler()
        # Messages about closures that arrived in a pause.
        self._held: list[tuple[int, Message]] | None = None
        self.is_deciding = False
        self._heaps = Heaps({server: station.window.heap_sizes[server] for server in servers}, slots, station.name_of)
        self._maker = VariableMaker(station, slots.end, self._heaps.give)
        self.dropped = Dropped(station, self.commits, self._heaps.give, self._maker.finish, self._discard)
        self.others = Others(station, self.lock, self._wait_for_all, self.queue.counts)
        station.route((Finished, Failed, Prepared, Applied, Built, Began, Pong, SnapshotDone), self.take)

    def begin(
        self, scheduler: Scheduler, workers: Sequence[int], limit: int, timeout: float | None, *, prefetch: bool
    ) -> None:
        """Local. Begin to take functions.

        Args:
            scheduler: The scheduler that gives them.
            workers: The ranks of the workers.
            limit: See `Closures`.
            timeout: See `Closures`.
            prefetch: See `Closures`.
        """
        self._scheduler = scheduler
        self.queue.take_options(limit, timeout, prefetch=prefetch)
        now = time.monotonic()
        for worker in workers:
            self.do(self.queue.joined(worker, now))

    def schedule(self, work: Work, rules: Rules, inputs: Sequence[int], value_of: Callable[[int], V]) -> V:
        """Local. Add a function to the queue; see `Closures.schedule`.

        Args:
            work: See `Closures.schedule`.
            rules: See `Closures.schedule`.
            inputs: See `Closures.schedule`.
            value_of: A function that makes the value for the number of the closure.
        """
        # An interrupt between the two would leave a function in the queue whose end no object gets.
        with self.station.whole:
            number, actions = self.queue.schedule(work, rules, time.monotonic(), inputs)
            value = self.values[number] = value_of(number)
            self.do(actions)
        return value

    def take(self, sender: int, message: Message) -> None:
        """Local. Process a message of a worker or a server about functions."""
        if self._held is None:
            self.do(self.queue.take(sender, message, time.monotonic()) or ())
        elif isinstance(message, Applied) and message.attempt == OWN_WRITE:
            # The caller that has begun the pause may wait for this, and it decides nothing.
            self.commits.written(sender, message.closure, message.error)
        elif isinstance(message, SnapshotDone):
            self.commits.snapshot_done(sender, message)
        else:
            self._held.append((sender, message))

    def do(self, actions: Iterable[Action]) -> None:
        """Local. Do the queue's actions, in their order: messages to one rank must not overtake each other."""
        for action in actions:
            if isinstance(action, Send):
                # The worker itself gets no notice: its connection may be cut.
                if action.rank not in self.station.lost:
                    self.station.send(action)
            elif isinstance(action, ClosureEnd):
                self.values.pop(action.closure).set(action)

    def _wait_for_all(self) -> None:
        """Wait until all functions have ended, if there is a coordinator."""
        self._scheduler.join()

    def _discard(self, kind: str, number: int) -> Sequence[Send]:
        """Forget an object that the program has dropped; return the messages to workers."""
        self._scheduler.forget(kind, number)
        return self.queue.discard(kind, number)

    def settle(self) -> None:
        """Local. Before workers get more work, forget dropped objects, and wait until all own writes can be read."""
        if self.is_deciding:
            self.require_decided()
        require_open(self.station.window)
        # Asked here: at most functions there is nothing to do.
        if self.dropped.noted:
            self.dropped.let_go()
        self._wait_for_writes(self.commits.servers)

    def _wait_for_writes(self, servers: Iterable[int]) -> None:
        # A write names variables: servers must have created them.
        if self._maker.unfinished:
            self._maker.finish()
        if not self.commits.unapplied:
            return
        for server in filter(self.commits.unwritten, servers):
            with self.station.awaited((server,), WRITE):
                while self.commits.unwritten(server):
                    self.station.step(WAIT_SECONDS)
                    if not self.is_deciding:
                        self._scheduler.watch()

    def wait_for_snapshot(self) -> None:
        """Local. Wait until all servers have saved the last snapshot. Functions continue meanwhile."""
        if not self.commits.saving:
            return
        with self.station.awaited(self.commits.saving, "save a checkpoint"):
            while self.commits.saving:
                require_open(self.station.window)
                with self.lock:
                    self.station.step(WAIT_SECONDS)
                    self._scheduler.watch()
                if self.is_one_process:
                    # Its window does not wait.
                    time.sleep(WAIT_SECONDS)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Local. See `ServedHome.pause`. Messages about closures are kept until its end."""
        with self.lock:
            if self._held is not None:
                yield
                return
            self._held = []
            try:
                yield
            finally:
                held, self._held = self._held, None
                for sender, message in held:
                    self.take(sender, message)

    def _rate(self, optimizer: int, iteration: int) -> float:
        """The learning rate of a step that is about to be committed.

        Raises:
            RateError: The optimizer refuses the rate, which the servers could not do any more; or it is no number, and
                comes from no schedule.
            Exception: The error that the schedule raises.
        """
        stepping = self.optimizers[optimizer]
        is_schedule = callable(stepping.learning_rate)
        # A number runs no code of the program.
        with contextlib.nullcontext() if isinstance(stepping.learning_rate, float) else self._deciding():
            try:
                rate = rate_at(stepping.learning_rate, iteration, stepping.name)
            except TypeError as error:
                if is_schedule:
                    raise
                raise RateError(str(error)) from error
            plan = stepping.plan
            if isinstance(plan, ServedPlan) and not math.isnan(rate):
                try:
                    require_rate(plan.kernel, iteration + 1, rate)
                except ValueError as error:
                    raise RateError(str(error)) from error
            return rate

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[None]:
        """Inside, a schedule runs. It may read variables, and wait: messages that come then are handled after it."""
        held, self._held, self.is_deciding = self._held, [], True
        try:
            yield
        finally:
            came, self._held, self.is_deciding = self._held, held, False
            # Not taken here: the decision that waits for this rate is not sent yet, and must not be overtaken.
            self.station.put_back(came)

    def require_decided(self) -> None:
        """Local. Raise RuntimeError inside a schedule: the call would wait for a decision that waits for it."""
        if self.is_deciding:
            raise RuntimeError(
                "a learning rate schedule uses the ClusterCoordinator, or writes a variable, while an update waits for "
                "the rate: let it compute the rate from its step, and from variables that it reads"
            )

    def _name_of_optimizer(self, optimizer: int) -> str:
        known = self.optimizers.get(optimizer)
        return numbered(optimizer) if known is None else known.name
