"""The programming model of tf.distribute on MPI.

    import mpidist

    strategy = mpidist.MultiWorkerMirroredStrategy()     # every rank of `mpirun -n 8` is one replica
    with strategy.scope():
        weights = mpidist.Variable(np.zeros(10, "float32"))
        optimizer = mpidist.optimizers.SGD(0.1)

Importing this package starts no MPI. Without a launcher a program has one replica, and MPI never starts.

- Strategies: `MultiWorkerMirroredStrategy` (all ranks), `MirroredStrategy` (one node), `OneDeviceStrategy`,
  `CentralStorageStrategy`, `TPUStrategy` (replicas of several ranks), `HybridStrategy` (groups in sync within),
  `ParameterServerStrategy`; `get_strategy()` is the current one.
- In a strategy: `scope()`, `run()`, `reduce()`, `gather()`, `experimental_distribute_dataset()`.
- Objects that span ranks: `Variable`, `Module`, `optimizers`, `metrics`, `data.Dataset`.
- Objects that survive a job: `Checkpoint`, `CheckpointManager`, `experimental.PreemptionCheckpointHandler`.
- The ranks that take part: `cluster_resolver`; `mpidist doctor` on the command line says what is missing.

The first line of a docstring says which ranks must call: *Collective* (all ranks, in the same order), *Local* (any
rank; the call does not communicate) or *Root only* (rank 0).

The guides are in `docs/`; `docs/architecture.md` says how the package is built.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from mpidist.missing import from_homes
from mpidist.version import __version__ as __version__

if TYPE_CHECKING:
    from mpidist import (
        checkpoint,
        cluster_resolver,
        coordinator,
        data,
        experimental,
        initializers,
        metrics,
        observe,
        optimizers,
        parallel,
        summary,
        testing,
        tpu,
        training,
    )
    from mpidist import jax as jax
    from mpidist import keras as keras
    from mpidist import torch as torch
    from mpidist.checkpoint.checkpoint import Checkpoint
    from mpidist.checkpoint.following import checkpoints_iterator
    from mpidist.checkpoint.manager import CheckpointManager, latest_checkpoint
    from mpidist.checkpoint.options import CheckpointOptions
    from mpidist.checkpoint.reader import list_variables, load_checkpoint, load_variable
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
    from mpidist.parameter_server.options import ServerOptions
    from mpidist.strategy.base import Strategy
    from mpidist.strategy.central_storage import CentralStorageStrategy
    from mpidist.strategy.default import (
        Variable,
        experimental_set_strategy,
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
    )
    from mpidist.strategy.extended import StrategyExtended
    from mpidist.strategy.hybrid.strategy import HybridStrategy
    from mpidist.strategy.losses import compute_average_loss, scale_regularization_loss
    from mpidist.strategy.mirrored import MirroredStrategy
    from mpidist.strategy.multi_worker import MultiWorkerMirroredStrategy
    from mpidist.strategy.one_device import OneDeviceStrategy
    from mpidist.strategy.parameter_server.server import Server
    from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
    from mpidist.strategy.replica import ReplicaContext
    from mpidist.strategy.tpu.strategy import TPUStrategy
    from mpidist.strategy.values import DistributedValues
    from mpidist.training.trainer import Trainer
    from mpidist.variables.kinds.sharded import ShardedVariable
    from mpidist.variables.lookup import embedding_gradient, embedding_lookup, embedding_lookup_sparse
    from mpidist.variables.module import Module

# Public name -> the module that has it. Loaded at first use: a program that only reads a checkpoint loads no strategy.
_HOMES = {
    "AutoShardPolicy": "mpidist.options",
    "CentralStorageStrategy": "mpidist.strategy.central_storage",
    "Checkpoint": "mpidist.checkpoint.checkpoint",
    "CheckpointManager": "mpidist.checkpoint.manager",
    "CheckpointOptions": "mpidist.checkpoint.options",
    "ClusterSpec": "mpidist.cluster.spec",
    "CrossDeviceOps": "mpidist.comm.cross_device.cross_device_ops",
    "DistributedDataset": "mpidist.data.distribution.distributed_dataset",
    "DistributedIterator": "mpidist.data.distribution.distributed_iterator",
    "DistributedValues": "mpidist.strategy.values",
    "HierarchicalCopyAllReduce": "mpidist.comm.cross_device.reductions",
    "HybridStrategy": "mpidist.strategy.hybrid.strategy",
    "IndexedSlices": "mpidist.indexed_slices",
    "InputContext": "mpidist.data.input_context",
    "InputOptions": "mpidist.options",
    "InputReplicationMode": "mpidist.options",
    "MirroredStrategy": "mpidist.strategy.mirrored",
    "Module": "mpidist.variables.module",
    "MultiWorkerMirroredStrategy": "mpidist.strategy.multi_worker",
    "NcclAllReduce": "mpidist.comm.cross_device.reductions",
    "OneDeviceStrategy": "mpidist.strategy.one_device",
    "ParameterServerStrategy": "mpidist.strategy.parameter_server.strategy",
    "ReduceOp": "mpidist.options",
    "ReductionToOneDevice": "mpidist.comm.cross_device.reductions",
    "ReplicaContext": "mpidist.strategy.replica",
    "RunOptions": "mpidist.options",
    "Server": "mpidist.strategy.parameter_server.server",
    "ServerOptions": "mpidist.parameter_server.options",
    "ShardedVariable": "mpidist.variables.kinds.sharded",
    "Strategy": "mpidist.strategy.base",
    "StrategyExtended": "mpidist.strategy.extended",
    "TPUStrategy": "mpidist.strategy.tpu.strategy",
    "Trainer": "mpidist.training.trainer",
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
    "list_variables": "mpidist.checkpoint.reader",
    "load_checkpoint": "mpidist.checkpoint.reader",
    "load_variable": "mpidist.checkpoint.reader",
    "scale_regularization_loss": "mpidist.strategy.losses",
}
_MODULES = (
    "checkpoint", "cluster_resolver", "coordinator", "data", "experimental", "initializers", "metrics", "observe",
    "optimizers", "parallel", "summary", "testing", "tpu", "training",
    # Of extras: not in `__all__`, so that `from mpidist import *` needs none of them.
    "jax", "keras", "torch",
)

__all__ = [
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointManager",
    "CheckpointOptions",
    "ClusterSpec",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "HybridStrategy",
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
    "TPUStrategy",
    "Trainer",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "WindowOptions",
    "checkpoint",
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
    "list_variables",
    "load_checkpoint",
    "load_variable",
    "metrics",
    "observe",
    "optimizers",
    "parallel",
    "scale_regularization_loss",
    "summary",
    "testing",
    "tpu",
    "training",
]

if not TYPE_CHECKING:
    _load = from_homes("mpidist", _HOMES)

    def __getattr__(name: str) -> Any:
        return importlib.import_module(f"mpidist.{name}") if name in _MODULES else _load(name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _leave() -> None:
    # Nothing to leave where no communicator of several ranks was ever opened.
    ending = sys.modules.get("mpidist.failures.ending")
    if ending is not None:
        ending.leave()


# A job that `mpidist run` has started leaves a word when it ends: below, after the ranks have ended together.
_restarted = importlib.import_module("mpidist.failures.restart.rank") if "MPIDIST_RUN" in os.environ else None
if _restarted is not None:
    _restarted.begin()

# Exit functions run in reverse order. Those that the program registers after its imports run before this one, while the
# ranks can still communicate. After a death of a rank this one ends the process, and functions after it would not run.
atexit.register(_leave)
if _restarted is not None:
    _restarted.watch_end()

# A job that gets a signal while it starts is requeued. Elsewhere no handler is set, and nothing is loaded.
if {"SLURM_JOB_ID", "MPIDIST_SIGNALS"} & set(os.environ):
    importlib.import_module("mpidist.cluster.early_signals").begin()
