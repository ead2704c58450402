"""`ClusterCoordinator`: hands functions to workers, and survives the loss of workers."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, cast

from mpidist import tree
from mpidist.attributes import FixedAttributes
from mpidist.coordinator.background import keep_going
from mpidist.coordinator.functions import Naming, SentFunctions, arguments_of
from mpidist.coordinator.late_builds import LateBuilds
from mpidist.coordinator.membership import Membership
from mpidist.coordinator.options import CoordinatorOptions
from mpidist.coordinator.references import Names
from mpidist.coordinator.remote_value import PerWorkerValues, RemoteValue, error_of
from mpidist.coordinator.waits import ChiefWaits
from mpidist.coordinator.worker_datasets import DataSets
from mpidist.data.dataset import Dataset
from mpidist.errors import DeadRankError, EndOfDataError
from mpidist.parameter_server.chief.chief import Chief
from mpidist.parameter_server.chief.decisions import Scheduler
from mpidist.parameter_server.protocol.sent_errors import portable
from mpidist.parameter_server.queue.closures import QUEUE_SIZE
from mpidist.parameter_server.queue.work import MAX_DEATHS, ClosureEnd, End, rules_of
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.variables.variable import BaseVariable

_WAIT_SECONDS = 0.05

_coordinators: weakref.WeakKeyDictionary[ParameterServerStrategy, ClusterCoordinator] = weakref.WeakKeyDictionary()


class ClusterCoordinator(FixedAttributes):
    """Local. Gives functions to workers. There is one for each strategy: another call returns the same object.

    Args:
        strategy: A `ParameterServerStrategy`, on its chief.
        closure_timeout: Seconds after which a function's worker counts as lost; default: never.
        prefetch: Give a worker its next function while it still runs one, if no other worker is free, and let it fetch
            meanwhile the values that this function read when it last ran there. Such values may miss the last step that
            an optimizer has made on this worker. They contain all that earlier functions on this worker have assigned,
            added or scattered, are never of two versions, and never get older.
        queue_size: Number of functions that may wait for a worker or for their arguments; then `schedule` waits.
        max_deaths: A function fails with `FatalFunctionError` when this many workers were lost while they ran it: the
            function itself may be the cause. Other functions continue.

    Raises:
        TypeError: An option has a wrong type.
        ValueError: `strategy` has another type, an option is out of range, or differs from that of the first call.
        RuntimeError: This rank is not the chief.
    """

    _fixed = frozenset({"strategy"})
    _options: CoordinatorOptions

    def __new__(cls, strategy: ParameterServerStrategy, *_: object, **__: object) -> ClusterCoordinator:
        """Local. See the class."""
        if not isinstance(strategy, ParameterServerStrategy):
            raise ValueError(
                "`strategy` must be a ParameterServerStrategy: only this strategy has workers that functions can be "
                f"given to; got {strategy!r}"
            )
        if strategy.chief is None:
            raise RuntimeError(
                f"a ClusterCoordinator belongs to the chief, and this rank is {strategy.roles.task_type}"
            )
        if strategy not in _coordinators:
            _coordinators[strategy] = super().__new__(cls)
        return _coordinators[strategy]

    def __init__(
        self, strategy: ParameterServerStrategy, closure_timeout: float | None = None, *, prefetch: bool = False,
        queue_size: int = QUEUE_SIZE, max_deaths: int = MAX_DEATHS,
    ) -> None:
        options = CoordinatorOptions(closure_timeout, prefetch, queue_size, max_deaths)
        options.checked(is_synchronous=strategy.pace.synchronous)
        if hasattr(self, "strategy"):
            options.require_same(self._options)
            return
        self.strategy = strategy
        self._options = options
        # `__new__` has looked.
        self._chief = cast(Chief, strategy.chief)
        self._station = self._chief.station
        self._queue = self._chief.queue
        self._builds = LateBuilds(strategy, self._chief, self._station, self._find)
        self._names = Names(strategy, self._chief, self._builds)
        self._functions = SentFunctions(Naming(self._names.handle_of, self._names.name_of, self._chief.dropped.note))
        self._value = functools.partial(
            RemoteValue, wait=self._wait_for, find=self._find, look=self._look, note_told=self._note_told
        )
        # An error that the program has got from a value.
        self._told: ClosureEnd | None = None
        self._data_sets = DataSets(
            self._resource, self._make_again, self._wait_for_made, self._queue, self._is_at_end,
            strategy.places.ranks, lambda fn, args: self._functions.work(fn, args, {})[0],
        )
        self._membership = Membership(
            strategy, self._chief, self._data_sets, self._builds, closure_timeout
        )
        self._waits = ChiefWaits(self._queue, self._membership.place_of, strategy.invitation)
        scheduler = Scheduler(self._watch, self.join, self._names.discard, self._functions.forget)
        self._chief.begin(scheduler, strategy.places.ranks, queue_size, closure_timeout, prefetch=prefetch)
        # In a job of one process a background thread would run functions that change the program's variables.
        if not strategy.roles.is_one_process:
            keep_going(self, self._chief.lock)
        self._settle(ClusterCoordinator)

    # ------------------------------------------------------------------ the program

    def schedule(  # noqa: PLR0913  # a function and its rules
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, *,
        worker: int | None = None, priority: float = 0, retries: int = 0,
        on_error: Literal["cancel", "keep"] = "cancel", max_deaths: int | None = None,
    ) -> RemoteValue:
        """Local. Give a function to some worker. It returns at once, unless the queue is full.

        Variables, optimizers, metrics and the strategy that the function uses are those of the servers. All else that
        it captures is sent once, at its first use, and later changes have no effect; so is each `Dataset` that it
        captures or gets as an argument.

        Args:
            fn: The function.
            args: Its arguments; `RemoteValue`s become their values, `PerWorkerValues` those of the worker. The function
                waits for values that do not exist yet, the caller does not; if the function that makes such a value
                fails, this one ends with the same error.
            kwargs: Its keyword arguments, likewise.
            worker: The index of the worker that runs it, while that worker is alive; default: any.
            priority: Higher ones run first, equal ones in the order of `schedule`.
            retries: How often it is run again when it raises.
            on_error: "cancel": its error cancels the functions that wait, and the next `schedule`, `join` or `done`
                raises it. "keep": only its own value raises it.
            max_deaths: The coordinator's option for this function; default: the coordinator's.

        Returns:
            Its result, which may not exist yet.

        Raises:
            Exception: The error of an earlier function; see `on_error`. Not if `RemoteValue.get` has raised it already.
            KeyboardInterrupt: While it waits for space in the queue; the function is then not queued.
            TypeError: `fn` cannot be called, or an object cannot be sent.
            ValueError: An option is out of range.
        """
        arguments = arguments_of(fn, args, kwargs)
        most = self._options.max_deaths if max_deaths is None else max_deaths
        rules = rules_of(self.strategy.places.ranks, worker, priority, retries, on_error, most)
        with self._chief.lock:
            self._raise_error()
            # A worker reads what the program has written before, and no memory of what it has dropped.
            self._chief.settle()
            if self._queue.is_full:
                with self._waits:
                    while self._queue.is_full:
                        self._step()
                        self._raise_error()
            try:
                work, inputs = self._functions.work(fn, *arguments)
            except EndOfDataError as error:
                # The error of an argument: the result has it, as if the argument had not existed yet.
                value = self._value(0)
                value.set(ClosureEnd(0, End.AT_END, portable(error)))
                return value
            return self._chief.schedule(work, rules, inputs, self._value)

    def join(self) -> None:
        """Local. Return when all functions have ended.

        Raises:
            Exception: The error of the first function that has failed; functions that still waited are cancelled.
            DeadRankError: All workers, or a server, are dead.
        """
        with self._chief.lock, self._waits:
            while not self._queue.is_done:
                # At once: functions that wait after an error are cancelled, so there is nothing to wait for.
                self._raise_error()
                self._step()
            self._raise_error()

    def done(self) -> bool:
        """Local. Whether all functions have ended; raises the same errors as `join`."""
        with self._chief.lock:
            # After an error nothing more begins.
            makes_rounds = self.strategy.pace.synchronous
            while self._queue.error is None and (self._act() or (makes_rounds and self._end_round())):
                pass
            self._membership.look()
            self._raise_error()
            return self._queue.is_done

    @property
    def late_updates(self) -> int:
        """Local. Number of updates so far that were dropped since their gradients arrived late (`synchronous=True`).

        The functions that made them still have their results, and their other changes of variables are kept.
        """
        return self._queue.versions.late

    def fetch(self, val: Any) -> Any:
        """Local. Wait for all `RemoteValue`s in a nested structure, and return it with their values.

        Args:
            val: The structure. Other values stay.

        Raises:
            Exception: See `RemoteValue.get`.
        """
        return tree.map_leaves(lambda one: one.fetch() if isinstance(one, RemoteValue) else one, val)

    def create_per_worker_value(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> PerWorkerValues:
        """Local. Let each worker make a value of its own, which stays there.

        Args:
            fn: A function that makes it.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        return self._resource(fn, *arguments_of(fn, args, kwargs))

    def create_per_worker_dataset(self, dataset_fn: Callable[..., Dataset] | Dataset) -> PerWorkerValues:
        """Local. Let each worker make a dataset. `iter` of it gives iterators, one on each worker.

        A function that reads past the end of an iterator has no value and changes nothing, unless it handles
        StopIteration itself. Another worker whose data has not ended runs it again; if there is none, its
        `RemoteValue.is_at_end` is true, and nothing is cancelled. The iterators' `is_at_end` is true when all of them
        have ended.

        Args:
            dataset_fn: A function that makes it; if it has an argument without a default, that is the worker's
                `InputContext`. Or the dataset itself, all of which each worker reads.

        Raises:
            ValueError: `dataset_fn` is neither a function nor a dataset.
        """
        return self._data_sets.create(dataset_fn)

    def _is_at_end(self, data: int) -> bool:
        """See `PerWorkerValues.is_at_end`."""
        with self._chief.lock:
            self._catch_up()
            return self._queue.is_at_end(data)

    def _wait_for_made(self, number: int) -> None:
        """Wait until all workers have made their value of a number."""
        with self._chief.lock, self._waits:
            while self._queue.resources.is_building(number):
                self._step()

    # ------------------------------------------------------------------ inside

    def _resource(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        values: Callable[[int], PerWorkerValues] = PerWorkerValues,
    ) -> PerWorkerValues:
        with self._chief.lock:
            self._chief.settle()
            work, inputs = self._functions.work(fn, args, kwargs)
            while inputs:
                self._wait_for(inputs[0])
                work, inputs = self._functions.work(fn, args, kwargs)
            with self._station.whole:
                number, sends = self._queue.resources.build(work)
                self._chief.do(sends)
                made = values(number)
                self._chief.dropped.note(made, "resource", number)
        return made

    def _make_again(self, number: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Let each worker make its value of a number again."""
        with self._chief.lock:
            work, _ = self._functions.work(fn, args, {})
            with self._station.whole:
                self._chief.do(self._queue.resources.build_again(number, work))

    def _note_told(self, end: ClosureEnd) -> None:
        """The program has got the error of a value: the next call does not raise it again."""
        first = self._queue.error
        # Also as that of a function which takes the value of the failed one.
        if first is not None and first.payload is end.payload:
            self._told = first

    def _find(self, handle: tuple[Any, ...]) -> BaseVariable:
        """A variable that a function has returned."""
        variable = self._chief.variable_of(*handle[:2])
        if variable is None:
            raise RuntimeError("a function has returned a variable that the program has deleted: keep the variable")
        return variable

    def _step(self) -> None:
        """Process one message, or wait a short time for one."""
        if self._membership.failure is not None:
            self._raise_failure(self._membership.failure)
        if self._chief.is_deciding:
            self._chief.require_decided()
        self._waits.show()
        has_read_all = not self._act() and not (self.strategy.pace.synchronous and self._end_round())
        if has_read_all:
            has_read_all = not self._station.step(0.0 if self._chief.is_one_process else _WAIT_SECONDS)
        self._membership.look(has_read_all=has_read_all)

    def _act(self) -> bool:
        """Process a received message, or run a function where this process is the worker; return whether it did."""
        # An interrupt comes between two messages: half of one would leave the queue in no state of its own.
        with self._station.whole:
            return self._station.step() or (self._chief.is_one_process and self.strategy.work_here())

    def _end_round(self) -> bool:
        """Apply waiting updates if no other one comes before the program continues; return whether there were any."""
        with self._station.whole:
            actions = self._queue.end_round()
            self._chief.do(actions)
        return bool(actions)

    def _catch_up(self) -> None:
        """Process the messages that have arrived, without waiting."""
        while self._act():
            pass
        self._membership.look()

    def go_on(self) -> None:
        """Local. Process received messages in a background thread, while the program does something else."""
        try:
            while self._station.step():
                pass
            self._membership.look()
        except BaseException as error:  # the program's own thread raises it
            self._membership.fail(error)

    def _watch(self) -> None:
        # `join` raises it: all workers are dead, and a checkpoint is saved.
        with contextlib.suppress(DeadRankError):
            self._membership.look(has_read_all=False)

    def _look(self) -> None:
        """Process a message in a job of one process, which has no background thread, unless a function is running."""
        if self._chief.is_one_process and self._chief.here() is self._chief and not self.strategy.is_closed:
            self._act()

    def _wait_for(self, number: int) -> None:
        with self._chief.lock, self._waits:
            while number in self._chief.values:
                self._step()

    def _raise_failure(self, failure: BaseException) -> None:
        # The death of a server says more than what came of it.
        self._station.require_needed()
        raise failure

    def _raise_error(self) -> None:
        if self._membership.failure is not None:
            self._raise_failure(self._membership.failure)
        end = self._queue.error
        if end is None:
            return
        # Waiting functions end now; running ones end by themselves, since their updates may be decided already.
        with self._station.whole:
            self._chief.do(self._queue.cancel())
        while self._queue.in_flight:
            self._step()
        with self._station.whole:
            self._queue.take_error()
            told, self._told = self._told, None
            if told is not end:
                raise error_of(end)

    def __reduce__(self) -> NoReturn:
        raise TypeError("it exists in this process only")

    def __repr__(self) -> str:
        return f"<mpidist.coordinator.ClusterCoordinator of {len(self._queue.workers)} workers>"
