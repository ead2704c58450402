"""Arguments of a wrong type or size: no public function or constructor answers with a bare text of Python's.

Names are found by looking, so a new one is tested as soon as it is public.
"""

from __future__ import annotations

import enum
import functools
import inspect
import io
import re
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.cluster.resolvers.simple import SimpleClusterResolver
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import UnavailableError
from mpidist.metrics.mean import MeanMeasure
from mpidist.optimizers.families.sgd import SGDKernel
from mpidist.variables.arena import solo_arena
from tests.helpers.amounts import amount

MODULES = (
    mpidist, mpidist.data, mpidist.experimental, mpidist.optimizers, mpidist.metrics, mpidist.cluster_resolver,
    mpidist.summary, mpidist.observe, mpidist.coordinator, mpidist.experimental.partitioners,
    mpidist.initializers,
)
# Only the library makes them, from what it has checked.
MADE_BY_THE_LIBRARY = {
    "Dataset", "DatasetSpec", "DistributedDataset", "DistributedIterator", "PerWorkerValues", "RemoteValue",
    "StrategyExtended", "SummaryWriter",
}
# Texts of the interpreter and of NumPy, which name neither the argument nor what is expected.
BARE = re.compile(
    r"not supported between|object is not (iterable|callable|subscriptable)|not subscriptable|unsupported operand|"
    r"object has no attribute|has no len\(\)|cannot be interpreted as an integer|could not convert string|"
    r"float\(\) argument|int\(\) argument|cannot unpack|not enough values|"
    r"too many values|bad operand|division by zero|can only concatenate|object is not a mapping|unhashable type|"
    r"must be real number, not|invalid literal for"
)
WRONG: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1.5, float("nan"), float("inf"), "a", "", b"a", [], [1], ["a"], (1, 2), {}, {"a": 1},
    {1: "a"}, {1}, object(), print, np.ones(2), np.array(None),
)


@functools.cache
def fitting() -> dict[str, Any]:
    """Values that fit the parameters without a default of this name, wherever it stands."""
    return {
        "after": 0.1, "boundaries": (1,), "cluster": {"worker": ["a:1"]},
        "cluster_spec": mpidist.ClusterSpec({"worker": ["a:1"]}), "communicator": SoloCommunicator(),
        "condition": True, "data": np.ones((1, 2, 2, 1)), "groups": 1,
        "decay_rate": 0.5, "decay_steps": 3, "device": "cpu:0",
        "gradient": np.ones((1, 1)), "ids": [0], "params": mpidist.Variable([[1.0], [2.0]]), "sp_ids": [[0], [1, 0]],
        "directory": "folder", "dtype": np.dtype("float32"), "first_decay_steps": 3, "indices": [0],
        "checkpoint_dir": "folder", "checkpoint_or_checkpoint_manager": mpidist.Checkpoint(v=mpidist.Variable(1.0)),
        "cluster_resolver": None, "checkpoint": mpidist.Checkpoint(v=mpidist.Variable(1.0)), "max_to_keep": 3,
        "max_shard_bytes": 1024, "num_shards": 2,
        "initial_learning_rate": 0.1, "initial_value": 1.0, "inner_optimizer": mpidist.optimizers.SGD(),
        "kernel": SGDKernel(), "learning_rate": 0.1, "logdir": "folder", "measure": MeanMeasure(), "name": "a",
        "names": "a", "num_classes": 2, "path": "none.npy", "per_example_loss": [1.0], "ratio": 0.5,
        "regularization_loss": 1.0, "replica_id_in_sync_group": 0, "resolvers": SimpleClusterResolver(
            mpidist.ClusterSpec({"worker": ["a:1"]})
        ), "sample_rate": 8000, "server_or_cluster_def": {"worker": ["a:1"]}, "shape": (1,),
        "home": solo_arena(), "replicas": solo_arena().replicas, "strategy": mpidist.get_strategy(),
        "step": lambda *_: {}, "values": [1.0, 2.0], "warmup_steps": 3,
    }


@functools.cache
def coordinator() -> mpidist.coordinator.ClusterCoordinator:
    """That of a process which is worker and server, too."""
    options = mpidist.ServerOptions(heap_bytes=1 << 20)
    return mpidist.coordinator.ClusterCoordinator(mpidist.ParameterServerStrategy(options=options))


@functools.cache
def shards() -> list[Any]:
    """Variables of a server, which may be shards of one."""
    with coordinator().strategy.scope():
        return [mpidist.Variable([[1.0]]), mpidist.Variable([[2.0]])]


def fitting_for(name: str) -> dict[str, Any]:
    """As `fitting`; who coordinates needs a strategy with workers, and a sharded variable shards."""
    if name.endswith("ShardedVariable"):
        return {**fitting(), "variables": shards()}
    return {**fitting(), "strategy": coordinator().strategy} if "Coordinator" in name else fitting()


@functools.cache
def public() -> dict[str, Callable[..., Any]]:
    """All public functions and classes that take arguments, by their full names."""
    found = {}
    for module in MODULES:
        for name in module.__all__:
            made = getattr(module, name)
            is_plain = isinstance(made, types.ModuleType) or not callable(made)
            if is_plain or name in MADE_BY_THE_LIBRARY or (inspect.isclass(made) and issubclass(made, enum.Enum)):
                continue
            if not inspect.isabstract(made) and not getattr(made, "_is_protocol", False) and parameters(made):
                found[f"{module.__name__}.{name}"] = made
    return found


def parameters(made: Callable[..., Any]) -> list[inspect.Parameter]:
    signature = inspect.signature(made.__new__ if made is mpidist.Variable else made)
    return [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD and one.name != "cls"]


def call(made: Callable[..., Any], given_values: dict[str, Any], others: dict[str, Any] | None = None) -> None:
    """Call with some values, and with fitting ones, which `others` may have, for what else is required."""
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for one in parameters(made):
        is_needed = one.default is one.empty and (one.kind is not one.VAR_POSITIONAL or one.name in fitting())
        if one.name in given_values or is_needed:
            value = given_values[one.name] if one.name in given_values else (others or fitting())[one.name]
            if one.kind is one.VAR_POSITIONAL:
                positional.append(value)
            else:
                named[one.name] = value
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made(*positional, **named)
    except Exception as error:
        # Of other types are mistakes in the library itself.
        is_meant = isinstance(error, (TypeError, ValueError, OSError, RuntimeError, UnavailableError))
        if not is_meant or len(str(error)) < 20 or BARE.search(str(error)):
            pytest.fail(f"{given_values!r}: {type(error).__name__}: {error}")


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files go into a folder of the test's own, and no strategy stays current."""
    monkeypatch.chdir(tmp_path)
    with mpidist.summary.create_file_writer("events").as_default(step=1):
        yield
    mpidist.experimental_set_strategy(None)


@pytest.mark.parametrize("name", sorted(public()))
def test_a_wrong_argument_is_named(name: str) -> None:
    made, failures = public()[name], []
    for one in parameters(made):
        for value in WRONG:
            try:
                call(made, {one.name: value}, fitting_for(name))
            except pytest.fail.Exception as error:
                failures.append(str(error).splitlines()[0])
    assert not failures, "\n".join(failures)


# What a program gets from the library and calls: methods by name, without those that serve other parts of it.
SERVING = {
    "batch_scatter_update", "close", "coerce", "collective_for", "drop", "fail", "load", "load_state", "put",
    "read_rows", "reader", "scatter", "state", "when_unused",
}


def methods() -> dict[str, Callable[..., Any]]:
    strategy, variable = mpidist.OneDeviceStrategy("cpu:0"), mpidist.Variable([1.0, 2.0])
    objects = (
        mpidist.get_strategy(), strategy, strategy.extended, mpidist.get_replica_context(), variable,
        mpidist.optimizers.SGD(0.1), mpidist.metrics.Mean(), coordinator(),
    )
    found = {}
    for one in objects:
        for name in dir(type(one)):
            plain = inspect.getattr_static(type(one), name)
            is_public = not name.startswith("_") and name not in SERVING
            if is_public and inspect.isfunction(plain) and parameters(getattr(one, name)):
                found[f"{type(one).__name__}.{name}"] = getattr(one, name)
    return found


def arguments_of_methods() -> dict[str, Any]:
    variable = mpidist.Variable([1.0, 2.0])
    dataset = mpidist.data.Dataset.range(4).batch(2)
    return {
        "axis": 0, "batch": np.ones((2, 2)), "colocate_with_variable": variable, "dataset": dataset,
        "dataset_fn": lambda _: dataset, "delta": [1.0, 1.0], "destinations": "cpu:0", "fn": lambda *_: None,
        "function": lambda: None, "iteration": 0, "n": 3, "nest": np.ones(2), "number": 0, "position": 1,
        "grads_and_vars": [(np.ones(2), variable)], "merge_fn": lambda *_: None, "metrics": [mpidist.metrics.Mean()],
        "reduce_op": "SUM", "scale": 1.0, "sparse_delta": mpidist.IndexedSlices(np.ones(1), np.array([0])),
        "val": [1], "array": np.ones(2), "tensor": np.ones(2), "v": variable, "value": np.ones(2),
        "value_destination_pairs": [(1.0, "cpu:0")], "value_fn": lambda _: 1, "var": variable, "variables": [variable],
    }


def test_a_wrong_argument_of_a_method_is_named() -> None:
    others, failures = {**fitting(), **arguments_of_methods()}, []
    for name, method in methods().items():
        for one in parameters(method):
            for value in WRONG:
                try:
                    call(method, {one.name: value}, others)
                except pytest.fail.Exception as error:
                    failures.append(f"{name}: {str(error).splitlines()[0]}")
    assert not failures, "\n".join(failures)


# Arguments of tf.distribute that are taken, and have no effect; and one that only the library gives.
FREE_FLAGS = {
    "auto_set_gpu", "experimental_bucketizing_dynamic_shape", "experimental_enable_dynamic_batch_size", "on_gpu",
    "read_value", "start", "use_locking",
}


def test_what_is_true_or_false_is_nothing_else() -> None:
    """A text is true, also that of "False": an option that is not asked for would be on without a word."""
    taken, count = [], 0
    for name, made in {**public(), **methods()}.items():
        for one in parameters(made):
            if one.annotation not in ("bool", "bool | None") or one.name in FREE_FLAGS:
                continue
            others = {**fitting_for(name), **arguments_of_methods()}
            values = {it.name: others[it.name] for it in parameters(made) if it.default is it.empty}
            count += 1
            try:
                made(**{**values, one.name: "False"})
            except Exception as error:
                if type(error) is TypeError and f"`{one.name}` must be True or False" in str(error):
                    continue
            taken.append(f"{name}({one.name})")
    assert not taken
    assert count > 20


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), st.binary(max_size=3),
    st.lists(st.integers() | st.text(max_size=2), max_size=3), st.dictionaries(st.text(max_size=2), st.integers()),
    st.sampled_from([object(), io.StringIO(), np.zeros(0), np.ones((2, 2)), np.float32(-1), type, len]),
)


@pytest.mark.parametrize("name", sorted(public()))
@settings(
    max_examples=amount(25, 1000), deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_wrong_arguments_together_are_named(name: str, data: st.DataObject) -> None:
    made = public()[name]
    names = st.sampled_from([one.name for one in parameters(made)])
    chosen = data.draw(st.lists(names, min_size=1, max_size=3, unique=True))
    call(made, {one: data.draw(VALUES) for one in chosen}, fitting_for(name))
