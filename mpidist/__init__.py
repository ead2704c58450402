"""The programming model of tf.distribute on MPI.

    import mpidist

    strategy = mpidist.MultiWorkerMirroredStrategy()     # every rank of `mpirun -n 8` is one replica
    with strategy.scope():
        weights = mpidist.Variable(np.zeros(10, "float32"))
        optimizer = mpidist.optimizers.SGD(0.1)

Importing this package starts no MPI. Without a launcher a program has one replica, and MPI never starts.

Layers, from top to bottom. A module imports from lower rows, or from lower modules of its own folder; the import
contracts in `setup.cfg` check it:

    cli                          the command line
    testing                      the pytest plugin, the contract of a collective
    cluster_resolver experimental    thin modules with tf.distribute's names
    strategy | checkpoint        what a user calls: scope, run, reduce, gather, data | save and restore
    optimizers metrics | data    state with arithmetic | input
    variables                    arrays that span ranks, and their home: the arena, and the step
    cluster                      who takes part
    comm                         communicators, collectives, node memory
    observe summary              progress, who waits for whom; event files
    indexed_slices chief         rows of an array; who writes for a group
    errors options tree arrays attributes launch context    vocabulary; no MPI
    arguments missing            checks of arguments | names of TensorFlow that are not here

Rooms of `comm`, likewise:

    asynchronous                 reductions in the background
    cross_device/                tf.distribute's `CrossDeviceOps`, and collectives of the user's own
    choice/                      which backend, from which size on
    backends/ gpu/ compression/  one way to move arrays a module; CUDA, NCCL, staging; compressed gradients
    front/                       the front of every collective: checks, conversions, the call log, packing, sparse sums
    backend collective memory/ arrival    the two interfaces; memory that ranks share; who is late
    agreement duplicates         one error on all ranks; our duplicates of the user's communicator
    mpi_communicator             the only home of `mpi4py.MPI`
    arithmetic/ communicator ending    arithmetic without communication; a group of ranks; how a job ends

Five minutes through the code: `strategy/mirrored.py` (a strategy), `comm/collective.py` (what a collective promises),
`comm/front/front.py` (what all of them share), `comm/backend.py` and `comm/backends/ring.py` (one of them),
`testing/contract.py` (its tests), `variables/variable.py` (a variable and its home), `variables/arena.py` and
`variables/step/` (a synchronous step), `variables/update/` (its arithmetic).

Where a new thing goes: a backend is one module in `comm/backends/` and a line in `comm/choice/selection.py`; a resolver
one module in `cluster/` and a line in `cluster/detect.py`; an optimizer or a metric one module and a line in the
package's `__init__`.

Glossary; each word has one meaning:

    rank            MPI's. One rank is one replica.
    node            the ranks that share memory
    chief           rank 0 of a strategy; it prints and writes for all
    local           communicates with nobody
    host, device    CPU memory, GPU memory
    communicator    a group of ranks that the library owns
    resource        what is closed by its owner: a communicator, a collective, an arena, a strategy
    claim           the right to something that all ranks of a group must give back together
    channel         messages between two ranks, apart from all others
    death           the end of a rank's process while other ranks still need it
    calls           the communicating calls of this rank on one communicator, which the recorder notes
    page            memory in which a rank shows its calls to the ranks of its node
    peer            another rank, as the watchdog sees it by its page, or by its file in the job directory
    collective      an object that combines arrays of all ranks; as a word before a call: every rank makes the call
    front           the checks and conversions around a backend
    backend         one way to move and combine flat arrays
    messages        point-to-point transport of our own algorithms
    wire dtype      the dtype in which arrays are sent
    lane            the communicator of the ranks with the same number on all nodes
    staging copier  copies between arrays and the room in which another backend combines them
    node memory     memory that the ranks of a node share; our own file
    home            where variables live: it makes them and plans their updates
    arena           the home of mirrored variables: the slabs in which they live, once per node
    slab            a piece of node memory of one dtype
    slice           a rank's share of a slab, or of an array
    block           as many elements as fit a cache
    bucket          private memory for a packed message
    chunk           a piece of an array on its way between ranks
    shard           a part of a partitioned variable, or of a dataset
    plan            where gradients and state of some variables lie, and which slice each rank updates
    update plan     what a home keeps for one optimizer: gradients, state, and the way of its updates
    kernel          the arithmetic of one family of optimizers, on one block
    bundle          variables of a plan that have one dtype, laid end to end
    table           a variable of a plan whose gradients are rows
    variable pass   one look at every variable of a plan, for norms
    compression errors    what compressed gradients left out, to be sent later
    machine profile the facts on which measured sizes depend
    strategy        the user's one entry: scope, run, reduce, gather, data
    checkpoint      a tree of arrays, agreed on by a group of ranks, in one HDF5 file
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from mpidist.missing import no_attribute
from mpidist.version import __version__ as __version__

if TYPE_CHECKING:
    from mpidist import (
        cluster_resolver,
        coordinator,
        data,
        experimental,
        initializers,
        metrics,
        observe,
        optimizers,
        summary,
        testing,
    )
    from mpidist.checkpoint.checkpoint import Checkpoint
    from mpidist.checkpoint.following import checkpoints_iterator
    from mpidist.checkpoint.manager import CheckpointManager, latest_checkpoint
    from mpidist.cluster.spec import ClusterSpec
    from mpidist.cluster.torch_env import export_torch_env
    from mpidist.comm.cross_device.cross_device_ops import CrossDeviceOps
    from mpidist.comm.cross_device.reductions import HierarchicalCopyAllReduce, NcclAllReduce, ReductionToOneDevice
    from mpidist.data.distribution.distributed_dataset import DistributedDataset
    from mpidist.data.distribution.distributed_iterator import DistributedIterator
    from mpidist.data.input_context import InputContext
    from mpidist.indexed_slices import IndexedSlices
    from mpidist.launch import is_first_rank
    from mpidist.options import (
        AutoShardPolicy,
        InputOptions,
        InputReplicationMode,
        ReduceOp,
        RunOptions,
        VariableAggregation,
        VariableSynchronization,
        WindowOptions,
    )
    from mpidist.strategy.base import Strategy
    from mpidist.strategy.default import (
        Variable,
        experimental_set_strategy,
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
    )
    from mpidist.strategy.extended import StrategyExtended
    from mpidist.strategy.losses import compute_average_loss, scale_regularization_loss
    from mpidist.strategy.mirrored import MirroredStrategy
    from mpidist.strategy.multi_worker import MultiWorkerMirroredStrategy
    from mpidist.strategy.one_device import OneDeviceStrategy
    from mpidist.strategy.parameter_server import ParameterServerStrategy
    from mpidist.strategy.replica import ReplicaContext
    from mpidist.strategy.server import Server
    from mpidist.strategy.server_options import ServerOptions
    from mpidist.strategy.values import DistributedValues
    from mpidist.variables.lookup import embedding_gradient, embedding_lookup, embedding_lookup_sparse
    from mpidist.variables.module import Module
    from mpidist.variables.sharded import ShardedVariable

# Public name -> the module that has it. Loaded at first use: a program that only reads a checkpoint loads no strategy.
_HOMES = {
    "AutoShardPolicy": "mpidist.options",
    "Checkpoint": "mpidist.checkpoint.checkpoint",
    "CheckpointManager": "mpidist.checkpoint.manager",
    "ClusterSpec": "mpidist.cluster.spec",
    "CrossDeviceOps": "mpidist.comm.cross_device.cross_device_ops",
    "DistributedDataset": "mpidist.data.distribution.distributed_dataset",
    "DistributedIterator": "mpidist.data.distribution.distributed_iterator",
    "DistributedValues": "mpidist.strategy.values",
    "HierarchicalCopyAllReduce": "mpidist.comm.cross_device.reductions",
    "IndexedSlices": "mpidist.indexed_slices",
    "InputContext": "mpidist.data.input_context",
    "InputOptions": "mpidist.options",
    "InputReplicationMode": "mpidist.options",
    "MirroredStrategy": "mpidist.strategy.mirrored",
    "Module": "mpidist.variables.module",
    "MultiWorkerMirroredStrategy": "mpidist.strategy.multi_worker",
    "NcclAllReduce": "mpidist.comm.cross_device.reductions",
    "OneDeviceStrategy": "mpidist.strategy.one_device",
    "ParameterServerStrategy": "mpidist.strategy.parameter_server",
    "ReduceOp": "mpidist.options",
    "ReductionToOneDevice": "mpidist.comm.cross_device.reductions",
    "ReplicaContext": "mpidist.strategy.replica",
    "RunOptions": "mpidist.options",
    "Server": "mpidist.strategy.server",
    "ServerOptions": "mpidist.strategy.server_options",
    "ShardedVariable": "mpidist.variables.sharded",
    "Strategy": "mpidist.strategy.base",
    "StrategyExtended": "mpidist.strategy.extended",
    "Variable": "mpidist.strategy.default",
    "VariableAggregation": "mpidist.options",
    "VariableSynchronization": "mpidist.options",
    "WindowOptions": "mpidist.options",
    "checkpoints_iterator": "mpidist.checkpoint.following",
    "compute_average_loss": "mpidist.strategy.losses",
    "embedding_gradient": "mpidist.variables.lookup",
    "embedding_lookup": "mpidist.variables.lookup",
    "embedding_lookup_sparse": "mpidist.variables.lookup",
    "experimental_set_strategy": "mpidist.strategy.default",
    "export_torch_env": "mpidist.cluster.torch_env",
    "get_replica_context": "mpidist.strategy.default",
    "get_strategy": "mpidist.strategy.default",
    "has_strategy": "mpidist.strategy.default",
    "in_cross_replica_context": "mpidist.strategy.default",
    "is_first_rank": "mpidist.launch",
    "latest_checkpoint": "mpidist.checkpoint.manager",
    "scale_regularization_loss": "mpidist.strategy.losses",
}
_MODULES = (
    "cluster_resolver", "coordinator", "data", "experimental", "initializers", "metrics", "observe", "optimizers",
    "summary", "testing",
)

__all__ = [
    "AutoShardPolicy",
    "Checkpoint",
    "CheckpointManager",
    "ClusterSpec",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirroredStrategy",
    "Module",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "ServerOptions",
    "ShardedVariable",
    "Strategy",
    "StrategyExtended",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "WindowOptions",
    "checkpoints_iterator",
    "cluster_resolver",
    "compute_average_loss",
    "coordinator",
    "data",
    "embedding_gradient",
    "embedding_lookup",
    "embedding_lookup_sparse",
    "experimental",
    "experimental_set_strategy",
    "export_torch_env",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "initializers",
    "is_first_rank",
    "latest_checkpoint",
    "metrics",
    "observe",
    "optimizers",
    "scale_regularization_loss",
    "summary",
    "testing",
]


# Hidden from type checkers, which would take any name for one of the module's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"mpidist.{name}")
        if name not in _HOMES:
            no_attribute("mpidist", name)
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _leave() -> None:
    # Nothing to leave where no communicator of several ranks was ever opened.
    ending = sys.modules.get("mpidist.comm.ending")
    if ending is not None:
        ending.leave()


# Exit functions run in reverse order. Those that the program registers after its imports run before its ranks leave
# each other: they may communicate, and after a death they run at all.
atexit.register(_leave)

# A job that is signalled while it starts shall be queued again. Elsewhere no handler is set, and nothing loaded.
if {"SLURM_JOB_ID", "MPIDIST_SIGNALS"} & set(os.environ):
    importlib.import_module("mpidist.cluster.early_signals").begin()
