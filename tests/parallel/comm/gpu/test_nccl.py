"""What the NCCL collective asks of NCCL, in every operation and dtype, with NCCL's interface over host memory."""

from __future__ import annotations

import gc
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.cluster.devices.names import visible_gpus
from mpidist.comm.choice import capabilities, device_selection
from mpidist.comm.choice.selection import choose
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.gpu import nccl_ranks
from mpidist.comm.gpu.nccl import NcclBackend
from mpidist.comm.gpu.nccl_ranks import end_all
from mpidist.comm.gpu.staged import StagedBackend
from mpidist.comm.gpu.transport import TRANSPORT
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import UnavailableError, is_shared
from mpidist.failures.farewell import LAST
from mpidist.options import CommunicationOptions, ReduceOp
from tests.parallel.comm.gpu.simulated_nccl import SimulatedCuda

pytestmark = pytest.mark.mpi(min_size=2)

DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "complex128",
]
FUNCTIONS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.sum, ReduceOp.MEAN: np.mean, ReduceOp.MIN: np.min, ReduceOp.MAX: np.max, ReduceOp.PROD: np.prod,
}


@pytest.fixture
def collective(communicator: Communicator) -> CollectiveFront:
    return CollectiveFront(NcclBackend(communicator, SimulatedCuda(communicator)), CommunicationOptions())


def make(dtype_name: str, rank: int, shape: tuple[int, ...] = (7, 3)) -> AnyArray:
    if dtype_name == "bfloat16":
        dtype = np.dtype(pytest.importorskip("ml_dtypes", reason="bfloat16 comes from ml_dtypes").bfloat16)
    else:
        dtype = np.dtype(dtype_name)
    values: AnyArray = (np.arange(int(np.prod(shape))).reshape(shape) + rank) % 3 + 1
    if dtype.kind == "c":
        values = values + 1j * rank
    return (values % 2 if dtype.kind == "b" else values).astype(dtype)


def is_refused(op: ReduceOp, dtype: np.dtype[Any]) -> bool:
    is_order = op in (ReduceOp.MIN, ReduceOp.MAX)
    return (dtype.kind == "c" and is_order) or (dtype.kind == "b" and not is_order)


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_reductions(collective: CollectiveFront, dtype_name: str, op: ReduceOp) -> None:
    rank, size = collective.communicator.rank, collective.communicator.size
    arrays = [make(dtype_name, other) for other in range(size)]
    mine, dtype = arrays[rank], arrays[rank].dtype
    before = mine.copy()
    if is_refused(op, dtype):
        with pytest.raises(TypeError, match=op.name):
            collective.all_reduce(mine, op)
        return
    wide = np.complex128 if dtype.kind == "c" else np.float64
    expected = FUNCTIONS[op](np.stack(arrays).astype(wide), axis=0)
    tolerance = {"bfloat16": 1e-2, "float16": 1e-3}.get(dtype_name, 1e-6)
    result = collective.all_reduce(mine, op)
    assert result.dtype == (np.float64 if op is ReduceOp.MEAN and dtype.kind in "iu" else dtype)
    np.testing.assert_allclose(result.astype(wide), expected, rtol=tolerance)
    reduced = collective.reduce(mine, op, size - 1)
    assert (reduced is None) is (rank != size - 1)
    if reduced is not None:
        np.testing.assert_allclose(reduced.astype(wide), expected, rtol=tolerance)
    # Seven rows are cut unevenly by most numbers of ranks, `size` rows evenly.
    scattered = collective.reduce_scatter(mine, op)
    np.testing.assert_allclose(scattered.astype(wide), np.array_split(expected, size)[rank], rtol=tolerance)
    even = collective.reduce_scatter(np.ascontiguousarray(mine[:size]), op)
    np.testing.assert_allclose(even.astype(wide), expected[:size][rank : rank + 1], rtol=tolerance)
    np.testing.assert_array_equal(mine, before)
    if not (op is ReduceOp.MEAN and dtype.kind in "iu"):
        collective.all_reduce(mine, op, in_place=True)
        np.testing.assert_array_equal(mine, result)


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_what_only_moves(collective: CollectiveFront, dtype_name: str) -> None:
    rank, size = collective.communicator.rank, collective.communicator.size
    for root in range(size):
        np.testing.assert_array_equal(collective.broadcast(make(dtype_name, rank), root), make(dtype_name, root))
    for lengths in ([2] * size, [other % 3 for other in range(size)]):
        parts = [make(dtype_name, other, (length, 2)) for other, length in enumerate(lengths)]
        np.testing.assert_array_equal(collective.all_gather(parts[rank]), np.concatenate(parts))
    for first in (0, 1):
        sent = [make(dtype_name, to, (first * to + rank, 2)) for to in range(size)]
        for source, part in enumerate(collective.all_to_all(sent)):
            np.testing.assert_array_equal(part, make(dtype_name, rank, (first * rank + source, 2)))


def test_sums_on_the_wire_in_half_precision(communicator: Communicator) -> None:
    options = CommunicationOptions(wire_dtype="float16")
    collective = CollectiveFront(NcclBackend(communicator, SimulatedCuda(communicator)), options)
    values = np.linspace(1, 2, 20_001, dtype=np.float32)
    result = collective.all_reduce(values * (communicator.rank + 1))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, values * sum(range(1, communicator.size + 1)), rtol=2e-3)


@pytest.mark.parametrize("count", [3, 5000])
def test_integers_beyond_nccls_types_do_not_wrap(collective: CollectiveFront, count: int) -> None:
    size = collective.communicator.size
    total = collective.all_reduce(np.full(count, 32767 // size, np.int16))
    np.testing.assert_array_equal(total, np.full(count, 32767 // size * size, np.int16))
    for call in (collective.all_reduce, collective.reduce_scatter):
        with pytest.raises(OverflowError, match="a SUM of int16 does not fit its dtype") as caught:
            call(np.full(count, 30000, np.int16))
        assert is_shared(caught.value)


def test_at_the_end_it_is_destroyed_by_all_ranks_that_have_come(communicator: Communicator) -> None:
    backend = NcclBackend(communicator, SimulatedCuda(communicator))
    assert end_all in LAST
    end_all()
    assert backend._ranks.is_destroyed
    assert not backend._ranks.is_aborted


@pytest.mark.parametrize("is_broken", [False, True])
def test_at_the_end_a_call_without_a_partner_is_given_up(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], is_broken: bool
) -> None:
    monkeypatch.setattr(nccl_ranks, "END_SECONDS", 60.0 if is_broken else 0.1)
    cuda = SimulatedCuda(communicator)
    backend = NcclBackend(communicator, cuda)
    cuda.nccl.finished.clear()
    cuda.nccl.is_broken = is_broken
    end_all()
    cuda.nccl.finished.set()
    assert backend._ranks.is_aborted
    assert not backend._ranks.is_destroyed
    assert ("NCCL_ERROR_SYSTEM" if is_broken else "has found no partner in 0.1 s") in capfd.readouterr().err


def test_a_rank_that_fails_at_the_start_does_not_keep_the_others(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_ranks, "START_SECONDS", 0.2)
    cuda = SimulatedCuda(communicator)
    cuda.nccl.fails_at_start = communicator.rank == 0
    never = threading.Event()
    cuda.nccl.waits_at_start = None if communicator.rank == 0 else never
    with pytest.raises(OSError, match="has found no network") as caught:
        NcclBackend(communicator, cuda)
    assert is_shared(caught.value)
    # A start that ends after the ranks have given it up leaves nothing behind.
    never.set()
    for thread in threading.enumerate():
        if thread.name == "mpidist-nccl-start":
            thread.join(60)
    assert [one.is_aborted for one in cuda.nccl.made] == [True] * (communicator.rank != 0)


def test_where_one_rank_fails_the_others_abort_what_has_started(communicator: Communicator) -> None:
    before = set(nccl_ranks._open)
    cuda = SimulatedCuda(communicator)
    for failing in range(communicator.size):
        cuda.nccl.fails_at_start = communicator.rank == failing
        with pytest.raises(OSError, match="has found no network") as caught:
            NcclBackend(communicator, cuda)
        assert is_shared(caught.value)
    assert set(nccl_ranks._open) == before
    assert len(cuda.nccl.made) == communicator.size - 1
    assert all(one.is_aborted and not one.is_destroyed for one in cuda.nccl.made)
    # The next one, with all ranks, lives and is destroyed as any other.
    cuda.nccl.fails_at_start = False
    CollectiveFront(NcclBackend(communicator, cuda), CommunicationOptions()).close()
    assert cuda.nccl.made[-1].is_destroyed
    assert not cuda.nccl.made[-1].is_aborted


def test_where_nccl_does_not_start_the_next_way_is_taken(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = SimulatedCuda(communicator)
    cuda.nccl.fails_at_start = communicator.rank == communicator.size - 1
    monkeypatch.setattr(device_selection, "_cuda", lambda: cuda)
    monkeypatch.setattr(capabilities, "why_no_nccl", lambda *_: None)
    monkeypatch.setattr(nccl_ranks, "START_SECONDS", 1.0)
    monkeypatch.delenv(TRANSPORT, raising=False)
    host = choose(communicator, CommunicationOptions()).backend
    with device_selection.open_device(communicator, CommunicationOptions(), host) as opened:
        assert isinstance(opened, StagedBackend)
    monkeypatch.setenv(TRANSPORT, "nccl")
    with pytest.raises(OSError, match="has found no network"):
        device_selection.open_device(communicator, CommunicationOptions(), host)
    assert [one.is_aborted for one in cuda.nccl.made] == [True, True] * (not cuda.nccl.fails_at_start)


@pytest.mark.parametrize("uuid", ["the same", "another"])
def test_slices_of_one_gpu_are_one_gpu_to_nccl(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, uuid: str
) -> None:
    """Of a GPU in slices (MIG) each has a UUID, and all have the same place on the bus."""
    cuda = SimpleNamespace(
        device_count=lambda: 1, current_device=lambda: 0, device_bus=lambda _: "0000:01:00.0",
        device_uuid=lambda _: uuid if uuid == "the same" else str(communicator.rank),
        load_nccl=lambda: SimpleNamespace(available=True),
    )
    monkeypatch.setitem(sys.modules, "mpidist.comm.gpu.cuda", cuda)
    reason = capabilities.why_no_nccl(communicator)
    assert reason is not None
    assert "share one GPU" in reason
    # As NCCL sees it, too.
    monkeypatch.setenv(capabilities.NCCL_HOST, f"host{communicator.rank}")
    assert capabilities.why_no_nccl(communicator) is None


def test_closing_destroys_it_on_all_ranks(communicator: Communicator) -> None:
    with NcclBackend(communicator, SimulatedCuda(communicator)) as backend:
        ranks = backend._ranks
        assert not ranks.is_destroyed
    assert ranks.is_destroyed
    assert not ranks.is_aborted


@pytest.mark.mpi(min_size=2)
def test_one_that_was_dropped_is_destroyed_with_a_later_communicator(communicator: Communicator) -> None:
    backend = NcclBackend(communicator, SimulatedCuda(communicator))
    ranks = backend._ranks
    del backend
    gc.collect()
    assert not ranks.is_destroyed
    communicator.split(0).close()
    assert ranks.is_destroyed


def total(backend: NcclBackend) -> float:
    """The sum of all ranks' numbers, the first of which is 1."""
    out = np.zeros(1)
    backend.all_reduce(np.array([backend.communicator.rank + 1.0]), out, ReduceOp.SUM)
    return float(out[0])


def test_backends_over_one_communicator_share_one(communicator: Communicator) -> None:
    cuda = SimulatedCuda(communicator)
    backends = [NcclBackend(communicator, cuda) for _ in range(3)]
    (ranks,) = cuda.nccl.made
    for backend in backends:
        assert not ranks.is_destroyed
        assert total(backend) == sum(range(1, communicator.size + 1))
        backend.close()
    assert ranks.is_destroyed
    with NcclBackend(communicator, cuda):
        assert len(cuda.nccl.made) == 2
    assert all(one.is_destroyed for one in cuda.nccl.made)


def test_every_communicator_has_its_own(communicator: Communicator) -> None:
    with communicator.split(0) as other:
        cuda = SimulatedCuda(communicator)
        with NcclBackend(communicator, cuda), NcclBackend(other, cuda):
            assert len(cuda.nccl.made) == 2


def test_it_ends_with_its_communicator(communicator: Communicator) -> None:
    other = communicator.split(0)
    cuda = SimulatedCuda(other)
    backends = [NcclBackend(other, cuda) for _ in range(2)]
    other.close()
    assert [one.is_destroyed for one in cuda.nccl.made] == [True]
    for backend in backends:
        backend.close()


@pytest.mark.parametrize("first", ["communicator", "backend"])
def test_it_ends_with_its_communicator_when_both_were_dropped(communicator: Communicator, first: str) -> None:
    other = communicator.split(0)
    cuda = SimulatedCuda(other)
    backend = NcclBackend(other, cuda)
    for one in (other, backend) if first == "communicator" else (backend, other):
        one.drop()
    del one, other, backend, cuda.nccl.communicator
    gc.collect()
    assert not cuda.nccl.made[0].is_destroyed
    communicator.split(0).close()
    assert cuda.nccl.made[0].is_destroyed


def test_one_that_a_rank_has_dropped_is_not_shared(communicator: Communicator) -> None:
    cuda = SimulatedCuda(communicator)
    first = NcclBackend(communicator, cuda)
    if communicator.rank == 0:
        first.drop()
    with NcclBackend(communicator, cuda) as second:
        assert len(cuda.nccl.made) == 2
        assert total(second) == sum(range(1, communicator.size + 1))
    assert [one.is_destroyed for one in cuda.nccl.made] == [False, True]
    first.drop()
    communicator.split(0).close()
    assert cuda.nccl.made[0].is_destroyed


def test_each_gpu_has_one_and_another_gpu_is_refused(communicator: Communicator) -> None:
    cuda = SimulatedCuda(communicator)
    with NcclBackend(communicator, cuda) as first:
        # One rank has changed its GPU: the others must not stay with the one that it cannot use.
        cuda.device = int(communicator.rank == 0)
        with NcclBackend(communicator, cuda) as second:
            assert len(cuda.nccl.made) == 2
            assert total(second) == sum(range(1, communicator.size + 1))
            cuda.device = 1 - cuda.device
            with pytest.raises(ValueError, match=r"was started on GPU \d and GPU \d is current"):
                total(second)
        cuda.device = 0
        with NcclBackend(communicator, cuda) as third:
            assert len(cuda.nccl.made) == 2
            assert total(third) == total(first)


def test_one_that_has_failed_on_a_rank_is_not_shared(communicator: Communicator) -> None:
    cuda = SimulatedCuda(communicator)
    with NcclBackend(communicator, cuda):
        cuda.nccl.is_broken = communicator.rank == communicator.size - 1
        with NcclBackend(communicator, cuda):
            cuda.nccl.is_broken = False
            assert len(cuda.nccl.made) == 2


def test_nccl_without_a_gpu_says_why_on_every_rank(communicator: Communicator) -> None:
    if all(communicator.all_gather_object(bool(visible_gpus()))):
        pytest.skip("the ranks have GPUs")
    with pytest.raises(UnavailableError, match=r"NCCL.*(CuPy cannot be imported|no GPU is visible)") as caught:
        choose(communicator, CommunicationOptions(implementation="NCCL"))
    assert len(set(communicator.all_gather_object(str(caught.value)))) == 1
    assert "STAGED" in str(caught.value)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("dtype_name", ["float16", "bfloat16", "float32", "float64"])
def test_a_nan_of_any_rank_is_one_on_every_rank(collective: CollectiveFront, dtype_name: str, op: ReduceOp) -> None:
    """NCCL itself drops it, as its simulation does."""
    rank, size = collective.communicator.rank, collective.communicator.size
    arrays = [make(dtype_name, other, (3 * size, 2)) - 2 for other in range(size)]
    for other, array in enumerate(arrays):
        array[other] = np.nan if other % 2 else -np.nan
        array[size + 1] = (-1) ** other * np.inf
    expected = FUNCTIONS[op](np.stack(arrays).astype("float64"), axis=0)
    assert np.isnan(expected[:size]).all()
    result = collective.all_reduce(arrays[rank], op)
    assert result.dtype == arrays[rank].dtype
    np.testing.assert_array_equal(result.astype("float64"), expected)
    reduced = collective.reduce(arrays[rank], op, 0)
    if reduced is not None:
        np.testing.assert_array_equal(reduced.astype("float64"), expected)
    for rows in (3 * size, 3 * size - 1):
        mine = collective.reduce_scatter(np.ascontiguousarray(arrays[rank][:rows]), op)
        np.testing.assert_array_equal(mine.astype("float64"), np.array_split(expected[:rows], size)[rank])
