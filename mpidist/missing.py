"""Names that a module does not have: not yet, since they are loaded at first use, or not at all, with replacements.

`docs/from-tf-distribute.md` has the whole table of TensorFlow's names.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

_SYNCHRONOUS = "`mpidist.MultiWorkerMirroredStrategy`, which trains on all ranks at the same time"
_LAUNCHED = "nothing: drop the line, the launcher says who takes part and connects the ranks"
_FILES = "`mpidist.data.Dataset.from_files(files, reader)` with your own reader for this kind of file"
_SLICES = "`mpidist.data.Dataset.from_tensor_slices`"
_ARRAY = "`numpy.asarray`: values are plain arrays"

# Not here, in whichever module or object a program looks for it.
INSTEAD = {
    "Adafactor": (
        "`mpidist.optimizers.Adam`, or a `mpidist.optimizers.Kernel` of your own: Adafactor keeps sums of rows and "
        "columns, which the element-wise state of optimizers here cannot hold"
    ),
    "CollectiveAllReduceStrategy": _SYNCHRONOUS,
    "FixedLengthRecordDataset": _FILES,
    "GCEClusterResolver": _LAUNCHED,
    "GradientTape": "gradients that you compute in NumPy, or with PyTorch or JAX on this rank's arrays",
    "KubernetesClusterResolver": _LAUNCHED,
    "OutOfRangeError": "`StopIteration`, which `next(iterator)` raises at the end of the data; a `for` loop ends there",
    "TFRecordDataset": _FILES,
    "Tensor": _ARRAY,
    "TensorSpec": "`mpidist.data.ArraySpec`",
    "TextLineDataset": _FILES,
    "config": "nothing: drop the line, a strategy says where arrays are",
    "constant": _ARRAY,
    "convert_to_tensor": _ARRAY,
    "device": "nothing: drop the line, a strategy says where arrays are",
    "distribute": "`mpidist` itself, which has the names of tf.distribute",
    "errors": "`mpidist.errors`, after `from mpidist import errors`",
    "experimental_connect_to_cluster": _LAUNCHED,
    "experimental_run": "`strategy.run`",
    "experimental_run_v2": "`strategy.run`",
    "function": "nothing: drop the line, nothing is compiled",
    "get_global_step": "`iterations` of an optimizer",
    "keras": "Keras 3, after `import mpidist.keras as keras`",
    "legacy": "`mpidist.optimizers` itself, which has tf.keras's names and arguments",
    "losses": "losses of examples that you compute, and `mpidist.compute_average_loss`",
    "make_dataset_iterator": "`strategy.experimental_distribute_dataset`",
    "make_experimental_numpy_dataset": _SLICES,
    "experimental_make_numpy_dataset": _SLICES,
    "make_input_fn_iterator": "`strategy.distribute_datasets_from_function`",
    "minimize": (
        "`apply_gradients` with gradients that you compute: optimizer.apply_gradients(zip(gradients, variables))"
    ),
    "nn": "`mpidist.embedding_lookup`, `mpidist.compute_average_loss` and `mpidist.scale_regularization_loss`",
    "saved_model": "`mpidist.Checkpoint`",
    "train": "`mpidist.Checkpoint`, `mpidist.CheckpointManager`, `mpidist.load_checkpoint` and `mpidist.ClusterSpec`",
    "unwrap": "`strategy.experimental_local_results`",
}
# Here, in another module than that of TensorFlow or than one may think.
_ELSEWHERE = {
    "mpidist.coordinator": (
        "ClusterCoordinator", "PerWorkerValues", "RemoteValue", "experimental_get_current_worker_index",
    ),
    "mpidist.data": ("AUTOTUNE", "Dataset", "DistributeOptions", "Options"),
    "mpidist.experimental": (
        "CollectiveCommunication", "CollectiveHints", "CommunicationImplementation", "CommunicationOptions",
        "PreemptionCheckpointHandler", "TerminationConfig", "ValueContext", "partitioners",
    ),
    "mpidist.experimental.partitioners": (
        "FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner",
    ),
    "mpidist.cluster_resolver": (
        "ClusterResolver", "MPIClusterResolver", "SimpleClusterResolver", "SlurmClusterResolver",
        "TFConfigClusterResolver", "TPUClusterResolver", "UnionResolver",
    ),
    "mpidist.initializers": ("Constant", "RandomNormal", "RandomUniform"),
    "mpidist.optimizers": ("SGD", "Adam", "AdamW", "Adamax", "LossScaleOptimizer", "Nadam", "Optimizer"),
    "mpidist": (
        "AutoShardPolicy", "ClusterSpec", "DistributedDataset", "DistributedIterator", "DistributedValues",
        "InputContext", "InputOptions", "MirroredStrategy", "OneDeviceStrategy", "ParameterServerStrategy",
        "ReduceOp", "RunOptions", "Strategy", "TPUStrategy",
        "Variable", "embedding_lookup", "embedding_lookup_sparse",
    ),
}
# Not in this module, by its name and that of what a program looks for there.
_INSTEAD_IN = {
    ("mpidist.data", "experimental"): "`mpidist.data` itself, for instance `mpidist.data.AutoShardPolicy`",
    ("mpidist.optimizers", "experimental"): "`mpidist.optimizers` itself, which has tf.keras's names and arguments",
}


def instead_of(name: str) -> str | None:
    """Local. The thing to use instead of a missing name, None where it is no name of TensorFlow."""
    if name in INSTEAD:
        return INSTEAD[name]
    return next((f"`{home}.{name}`" for home, names in _ELSEWHERE.items() if name in names), None)


def no_attribute(module: str, name: str) -> NoReturn:
    """Local. Raise AttributeError for a name that a module lacks, with what to use instead.

    Args:
        module: The name of the module.
        name: The name that a program looked for.
    """
    instead = _INSTEAD_IN.get((module, name)) or instead_of(name)
    way_out = "" if instead is None else f": use {instead}"
    raise AttributeError(f"module {module!r} has no attribute {name!r}{way_out}")


def from_homes(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Local. Make the `__getattr__` of a module whose public names are loaded when they are used first.

    Hide it from type checkers, which would take any name for one of the module's.

    Args:
        module: The name of the module.
        homes: The modules that define its public names, by name.
    """
    def load(name: str) -> Any:
        if name not in homes:
            no_attribute(module, name)
        value = vars(sys.modules[module])[name] = getattr(importlib.import_module(homes[name]), name)
        return value

    load.__name__ = "__getattr__"
    return load


class Missing:
    """A method that a class of TensorFlow has and this one lacks: a descriptor whose error says what to use instead.

    `__getattr__` would do the same, and would make each use of the other attributes slower.
    """

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, _: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__!r} has no attribute {self._name!r}: use {instead_of(self._name)}")
