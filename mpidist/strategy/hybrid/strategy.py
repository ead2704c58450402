"""`HybridStrategy`: groups of ranks in sync within, asynchronous between."""

from __future__ import annotations

import atexit
import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from types import NoneType
from typing import TYPE_CHECKING, cast

from mpidist.arguments import described, flag, whole
from mpidist.cluster.devices.gpu_binding import agree, bind
from mpidist.cluster.devices.names import warn_about_idle_gpus
from mpidist.cluster.resolvers.mpi import MPIClusterResolver
from mpidist.cluster.slurm.idle_tasks import warn_about_idle_tasks
from mpidist.comm.group.agreement import together
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.opening import open_communicator
from mpidist.comm.group.resource import end_all
from mpidist.data.input_context import InputContext
from mpidist.data.items.groups import GroupPlace
from mpidist.failures import ending
from mpidist.failures.deaths import Process
from mpidist.optimizers.families.sgd import SGD
from mpidist.optimizers.optimizer import Optimizer
from mpidist.options import CommunicationOptions, InputOptions
from mpidist.strategy import datasets
from mpidist.strategy.base import Strategy
from mpidist.strategy.extended import StrategyExtended
from mpidist.strategy.hybrid.groups import HybridGroups, open_groups
from mpidist.strategy.hybrid.home import HybridArena, OuterPace
from mpidist.strategy.hybrid.input import share_among_groups
from mpidist.strategy.hybrid.outer import OuterStep
from mpidist.variables.replicas import Replicas

if TYPE_CHECKING:
    from mpidist.data.dataset import Dataset
    from mpidist.data.distribution.distributed_dataset import DistributedDataset


# By the communicator of its group, for each open strategy whose ranks survive deaths of others: the ranks of the group.
_MATES: weakref.WeakKeyDictionary[Communicator, list[Process]] = weakref.WeakKeyDictionary()


def default_outer(group_count: int) -> Optimizer:
    """Local. The outer optimizer of a strategy for which the program names none; see `benchmarks/hybrid.py`.

    The mean divides a group's way by the number of groups, which is too much where groups go different ways: rows of a
    table that only one of them has met, or the noise of batches that are smaller than one of all ranks. The momentum
    makes up for it: after many windows a difference has counted 0.7 / (1 - momentum) times, 0.875 for each group. So
    two and four groups lost least of what was compared, whether they wait for each other or not. One group trains as
    if there were no outer step.
    """
    if group_count == 1:
        return SGD(1.0)
    return SGD(0.7, round(min(0.9, 1 - 0.8 / group_count), 3), nesterov=True)


class HybridExtended(StrategyExtended):
    """The methods for library code under a `HybridStrategy`: replicas are those of the own group."""

    @property
    def cores_per_replica(self) -> int:
        """Local. See `StrategyExtended.cores_per_replica`; the ranks of all groups share the node."""
        return self._cores_of(cast(HybridStrategy, self._owner).all_ranks)


class HybridStrategy(Strategy):
    """Collective. Groups of ranks, in sync within and asynchronous between.

    In a group gradients are summed in each step, as under `MultiWorkerMirroredStrategy`. Groups make steps by
    themselves. After `every` local steps a group takes the difference from where it began, passes it through an outer
    momentum of its own, adds the result, an increment, to the parameters, and sends it to all others, which add it when
    it comes. No group waits for another one: what a slow or stopped group has not taken yet is added up for it.
    All groups reach the same parameters in any order of arrival, up to rounding. Until the others' increments come,
    a group trains as if they had made its own: between two calls of `finish` its variables are ahead of what all have.

        strategy = mpidist.HybridStrategy(2)                   # mpirun -n 8: two groups of four ranks
        with strategy.scope():
            ...                                                # as under any strategy
        for batch in batches:
            strategy.run(step, args=(batch,))
        strategy.finish()                                      # all groups hold the same parameters

    `num_replicas_in_sync`, `reduce`, `gather`, metrics and a global batch are those of the own group. A dataset is
    divided among the groups, so that they see different data.

    Making the strategy, the first step of an optimizer, `finish`, saving and restoring, and `close` are Collective over
    all ranks: a group waits there for the others. A group that ends its program without `finish` misses increments that
    come later, and the others continue. If a rank of a group dies, its group ends, with a report; others continue where
    the launcher lets them (see the guide about failures), and `finish` and saving then include the groups that live.

    Args:
        groups: The number of groups (of equal size, whole nodes first), or a list of lists of ranks. A program without
            a launcher is one group.
        every: The number of local steps between two increments; a local step is a call of `apply_gradients` that
            updates variables.
        outer: The optimizer of the groups' differences, with linear momentum: an `SGD` of `mpidist.optimizers` that
            nothing else uses. A schedule of its learning rate gets the number of the group's outer steps. SGD(1.0) adds
            the mean of the differences. Default: SGD(0.7, momentum, nesterov=True) with a momentum of 1 - 0.8 / n with
            n groups, 0.9 at most; with one group SGD(1.0).
        synchronous: Whether all groups wait for each other after `every` local steps, and make the outer step with the
            mean of their differences: the same bits in each run. All groups must then make the same number of steps,
            and the death of a rank ends the job.
        communicator: An mpi4py communicator of the ranks that take part; default: all ranks of the job.
        communication_options: Options of the communication within a group.
        shared: See `MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: The groups do not fit the ranks, `every` is less than 1, or `outer` has no linear momentum; on every
            rank.
        TypeError: An argument has another type; on every rank.
        MismatchError: Ranks pass different arguments.

    Attributes:
        groups: The ranks of each group.
        group_index: The number of this rank's group.
        every: The constructor's argument.
    """

    _extended_class = HybridExtended

    def __init__(
        self,
        groups: int | Sequence[Sequence[int]],
        every: int = 16,
        outer: Optimizer | None = None,
        *,
        synchronous: bool = False,
        communicator: object | None = None,
        communication_options: CommunicationOptions | None = None,
        shared: bool | None = None,
    ) -> None:
        # Before the first communicator starts MPI: an MPI library that knows GPUs uses the one that is current then.
        binding = bind()
        ranks = open_communicator(communicator)
        on_gpu = agree(binding, ranks) is not None
        pace = together(ranks, "HybridStrategy", lambda: _pace(every, outer, synchronous, communication_options))
        self._division = division = open_groups(
            ranks, groups,
            {"every": pace.every, "outer": outer is not None and repr(pace.step), "synchronous": pace.synchronous},
        )
        if outer is None:
            pace = pace._replace(step=OuterStep(default_outer(division.count)))
        self.groups, self.group_index, self.every = division.ranks, division.index, pace.every
        warn_about_idle_gpus(ranks.node.size)
        warn_about_idle_tasks()
        replicas = Replicas(division.own, communication_options)
        self._arena = arena = HybridArena(replicas, division, pace, shared=shared, on_gpu=on_gpu)
        super().__init__(replicas, arena, cluster_resolver=MPIClusterResolver(ranks), namespace=arena.namespace)
        if arena.exchange is not None:
            atexit.register(_leave, weakref.ref(arena), os.getpid())
        self._survives = division.count > 1 and not pace.synchronous
        if self._survives:
            _survive(division)
        self._settle(HybridStrategy)

    @property
    def all_ranks(self) -> Communicator:
        """Local. The ranks of all groups."""
        return self._division.everyone

    def finish(self) -> None:
        """Collective over all living groups. Deliver all increments: all groups then hold the same parameters.

        A window that is not full counts. Call it after the last step, before the parameters are evaluated. Training may
        continue after it.

        Raises:
            RuntimeError: The call is inside `run`.
            CollectiveTimeoutError: A group has not come within `MPIDIST_TIMEOUT` seconds, where that is set.
        """
        self._require_cross_replica()
        self._arena.settle("finish")

    def experimental_distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Collective over the group. See `Strategy.experimental_distribute_dataset`; groups get different batches.

        Group g of n gets the batches g, g + n, g + 2 n, and so on, and its ranks share them. Under the policy OFF all
        groups read all data. If a shuffle has no seed, the call is Collective over all groups, which take one seed.

        A checkpoint holds how far each group is. Another number of groups continues behind as many batches as all
        groups had taken (see the guide about training).
        """
        mine, place = share_among_groups(dataset, self._division, self._arena.first_value_of_groups)
        return datasets.distribute(mine, self.replicas, options, self.namespace, group=place)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Collective over the group. See `Strategy.distribute_datasets_from_function`.

        Args:
            dataset_fn: A function that is called once with `InputContext(all ranks, rank, ranks of the group)`.
            options: The options of the input.
        """
        ranks = self._division.everyone
        mine = InputContext(ranks.size, ranks.rank, self.num_replicas_in_sync)
        given = (lambda _: dataset_fn(mine)) if callable(dataset_fn) else dataset_fn
        place = GroupPlace(self._division.count, self.group_index, in_turn=False)
        return datasets.distribute_from_function(given, self.replicas, options, self.namespace, group=place)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def _end(self, *, is_collective: bool) -> None:
        super()._end(is_collective=is_collective)
        whole_job = is_collective and self._division.everyone.is_whole()
        end_all(self._division.opened, is_collective=whole_job)
        if self._survives:
            _survive_no_more(self._division, is_whole=whole_job)


def _pace(every: object, outer: Optimizer | None, synchronous: object, options: object) -> OuterPace:
    if not isinstance(options, (CommunicationOptions, NoneType)):
        raise TypeError(f"`communication_options` must be CommunicationOptions or None, got {described(options)}")
    waits = flag("synchronous", synchronous, owner="HybridStrategy: ")
    # The default depends on the number of groups, which are not there yet.
    optimizer = default_outer(1) if outer is None else outer
    return OuterPace(OuterStep(optimizer), whole("every", every, least=1), waits)


def _survive(groups: HybridGroups) -> None:
    """Let this rank survive the deaths of other groups, but not those of its own."""
    own = groups.own
    _MATES[own] = [process for rank, process in enumerate(own.processes) if rank != own.rank]
    ending.tolerate_deaths(itertools.chain.from_iterable(_MATES.values()))


def _survive_no_more(groups: HybridGroups, *, is_whole: bool) -> None:
    """Let a death end this rank again, if no other strategy lets it survive."""
    _MATES.pop(groups.own, None)
    if _MATES:
        ending.tolerate_deaths(itertools.chain.from_iterable(_MATES.values()))
    elif is_whole:
        ending.tolerate_deaths(None)


def _leave(arena: weakref.ref[HybridArena], process: int) -> None:
    """At the end of the program: the other groups do not wait for this one."""
    held = arena()
    if os.getpid() != process:
        # A child that was forked: its rank continues.
        return
    # After a death in this group another thread may be here, while this one is in a call; the kernel tells the others.
    if held is not None and held.exchange is not None and held.communicator.is_whole():
        held.exchange.leave()
