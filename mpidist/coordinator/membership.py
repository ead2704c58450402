"""Membership: the coordinator gives the work of lost workers to others, and work to those that have joined."""

from __future__ import annotations

import logging
import time

from mpidist.coordinator.late_builds import LateBuilds
from mpidist.coordinator.worker_datasets import DataSets
from mpidist.errors import DeadRankError
from mpidist.failures.deaths import WATCH, Process
from mpidist.failures.peers import Key
from mpidist.parameter_server.chief.chief import Chief
from mpidist.strategy.parameter_server.invitation import Invitation
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy

logger = logging.getLogger("mpidist")


class Membership:
    """The workers that are lost, and those that join.

    Args:
        strategy: The strategy of the chief.
        chief: The chief of the strategy: its queue has the workers.
        data_sets: The datasets of workers.
        builds: Answers what workers ask.
        closure_timeout: The coordinator's option, for the texts of errors.

    Attributes:
        failure: The error because of which the coordinator cannot continue: all workers are lost, for instance. Every
            later call raises it.
    """

    def __init__(
        self, strategy: ParameterServerStrategy, chief: Chief, data_sets: DataSets, builds: LateBuilds,
        closure_timeout: float | None,
    ) -> None:
        self._strategy = strategy
        self._closures = chief.queue
        self._data_sets = data_sets
        self._station = chief.station
        self._do = chief.do
        self._builds = builds
        self._timeout = closure_timeout or 0.0
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Local. Note why the coordinator cannot continue: the program's own thread raises it."""
        self.failure = error

    def place_of(self, rank: int) -> tuple[str, Key]:
        """Local. The name of a rank, and its process."""
        return self._station.name_of(rank), Key(*self._strategy.places.process_of(rank))

    def look(self, *, has_read_all: bool = True) -> None:
        """Local. Answer workers that ask, and note workers that are lost, and workers that join.

        Args:
            has_read_all: Whether all messages were read by which a worker may have reported the end of a function.

        Raises:
            DeadRankError: There is no worker any more, and none can join.
        """
        # Building asks servers, and takes messages meanwhile: never inside the taking of one.
        if has_read_all:
            self._builds.look()
        now, workers = time.monotonic(), self._closures.workers
        if actions := self._closures.look(now):
            with self._station.whole:
                self._do(actions)
        # The window reports deaths, and a worker itself that it leaves: the worker's reason is the better one.
        lost = {rank: "" for rank in self._station.window.lost() if rank in workers}
        lost |= {rank: reason for rank, reason in self._station.left.items() if rank in workers}
        # Not before all messages are read: the one that ends a function may be there already.
        if has_read_all:
            late = f"timed out: its function ran for longer than `closure_timeout`, {self._timeout:g} s"
            lost |= {rank: late for rank in self._closures.overdue() if rank not in lost}
        for rank in sorted(lost):
            self._lose(rank, now, lost[rank])
        if not workers:
            self._require_more(is_new=bool(lost))
        if self._strategy.invitation is not None:
            self._let_join(self._strategy.invitation, now)

    def _lose(self, rank: int, now: float, why: str) -> None:
        (name, key), left = self.place_of(rank), len(self._closures.workers) - 1
        place = f"{name} (rank {rank}, process {key.number} on {key.host})"
        logger.warning("%s is lost; its work goes to the other %d worker%s", place, left, "s" * (left != 1))
        how = why or WATCH.how_ended(Process(*key))
        with self._station.whole:
            # The fences are sent first: a rank that is treated as lost gets no message any more.
            self._do(self._closures.lost(rank, now, f"{place}{': ' * bool(how)}{how}"))
            self._strategy.give_up(rank)

    def _require_more(self, *, is_new: bool) -> None:
        """All workers are lost: raise DeadRankError unless others may join."""
        invitation = self._strategy.invitation
        if invitation is None:
            suspects = "".join(f". Workers were lost while they ran {one}" for one in self._closures.suspects())
            self.failure = DeadRankError(
                "all workers are lost: restart the job, and let it restore the last checkpoint" + suspects
            )
            raise self.failure
        if is_new:
            logger.warning(
                "all workers are lost: the job waits until others join, by `%s`", invitation.command
            )

    def _let_join(self, invitation: Invitation, now: float) -> None:
        """Give work to workers that have joined, and answer those that ask for a place."""
        with self._station.whole:
            # A worker that has arrived gets its work before another one can get its place.
            for rank in invitation.arrived():
                own = self._data_sets.joined(rank, invitation.before(rank))
                self._do(self._closures.joined(rank, now, own))
            invitation.look(self._closures.workers.keys(), self._closures.has_work_of)
