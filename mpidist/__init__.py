"""The programming model of tf.distribute on MPI.

    import mpidist

    strategy = mpidist.MultiWorkerMirroredStrategy()     # every rank of `mpirun -n 8` is one replica
    with strategy.scope():
        weights = mpidist.Variable(np.zeros(10, "float32"))
        optimizer = mpidist.optimizers.SGD(0.1)

Layers, from top to bottom; a module imports from lower rows only:

    strategy | checkpoint       what a user calls: scope, run, reduce, gather, data | save and restore
    optimizers metrics data     state with arithmetic | input
    variables                   arrays that span ranks, and where they live (the arena)
    cluster                     who takes part
    comm                        communicators, collectives, node memory
    observe                     progress, summaries
    errors options tree arrays launch context      vocabulary; no MPI

Words: a *communicator* is a group of ranks that we own; a *collective* combines arrays of all ranks; the *arena* holds
a node's variables once, in *slabs*; a *plan* says where gradients and state of some variables lie and which *slice*
each rank updates; a *strategy* is the user's entry. One MPI rank is one replica. Importing this package starts no MPI.

Where a new thing goes: a collective is one module in `comm/backends/` and a line in `comm/choice/selection.py`; a
resolver one module in `cluster/` and a line in `cluster/detect.py`; an optimizer or a metric one module and a line in
the package's `__init__`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpidist import cluster_resolver, data, experimental, metrics, observe, optimizers, summary, testing
    from mpidist.checkpoint.checkpoint import Checkpoint
    from mpidist.checkpoint.manager import CheckpointManager, latest_checkpoint
    from mpidist.cluster.spec import ClusterSpec
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
    from mpidist.strategy.mirrored import MirroredStrategy
    from mpidist.strategy.multi_worker import MultiWorkerMirroredStrategy
    from mpidist.strategy.one_device import OneDeviceStrategy
    from mpidist.strategy.replica import ReplicaContext
    from mpidist.strategy.values import DistributedValues, compute_average_loss, scale_regularization_loss
    from mpidist.variables.module import Module

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
    "ReduceOp": "mpidist.options",
    "ReductionToOneDevice": "mpidist.comm.cross_device.reductions",
    "ReplicaContext": "mpidist.strategy.replica",
    "RunOptions": "mpidist.options",
    "Strategy": "mpidist.strategy.base",
    "StrategyExtended": "mpidist.strategy.extended",
    "Variable": "mpidist.strategy.default",
    "VariableAggregation": "mpidist.options",
    "VariableSynchronization": "mpidist.options",
    "compute_average_loss": "mpidist.strategy.values",
    "experimental_set_strategy": "mpidist.strategy.default",
    "get_replica_context": "mpidist.strategy.default",
    "get_strategy": "mpidist.strategy.default",
    "has_strategy": "mpidist.strategy.default",
    "in_cross_replica_context": "mpidist.strategy.default",
    "is_first_rank": "mpidist.launch",
    "latest_checkpoint": "mpidist.checkpoint.manager",
    "scale_regularization_loss": "mpidist.strategy.values",
}
_MODULES = ("cluster_resolver", "data", "experimental", "metrics", "observe", "optimizers", "summary", "testing")

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
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "cluster_resolver",
    "compute_average_loss",
    "data",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "is_first_rank",
    "latest_checkpoint",
    "metrics",
    "observe",
    "optimizers",
    "scale_regularization_loss",
    "summary",
    "testing",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"mpidist.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'mpidist' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
