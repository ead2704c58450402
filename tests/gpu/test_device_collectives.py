"""Every transport on CuPy arrays against NumPy: results, the order of streams, and memory that is used again."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpidist.comm.backends.automatic import AutomaticBackend
from mpidist.comm.choice import capabilities
from mpidist.comm.cross_device.asynchronous import open_asynchronous
from mpidist.comm.front.front import CollectiveFront
from mpidist.comm.gpu import nccl_ranks
from mpidist.comm.gpu.nccl_ranks import open_ranks
from mpidist.comm.group.communicator import Communicator
from mpidist.options import CommunicationOptions, ReduceOp

pytestmark = [pytest.mark.gpu, pytest.mark.mpi]

Opener = Callable[..., CollectiveFront]
TRANSPORTS = ["auto", "staged", "cuda-aware", "nccl"]
DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64", "complex64"]
# Several pieces of 4 MiB in the largest case.
COUNTS = [0, 1, 1001, 3_000_001]
# On simulated GPUs: several pieces of 4 KiB.
SMALL_COUNTS = [0, 1, 5001]
PIECE_BYTES = 1 << 12

# Keeps the stream busy for a while, then writes: whoever does not wait for it sees what was there before.
SLOW = r"""
extern "C" __global__ void slow(float* values, long long count, float value, long long cycles) {
    const long long begin = clock64();
    while (clock64() - begin < cycles) {}
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        values[i] = value;
}
"""
CYCLES = 200_000_000


@pytest.fixture(params=TRANSPORTS)
def collective(request: pytest.FixtureRequest, open_collective: Opener, is_simulated: bool) -> CollectiveFront:
    if is_simulated and request.param == "auto" and "dtype" in request.node.callspec.params:
        pytest.skip("on simulated GPUs it is NCCL")
    options = CommunicationOptions(bytes_per_pack=PIECE_BYTES if is_simulated else 0)
    return open_collective(request.param, options)


@pytest.fixture
def counts(is_simulated: bool) -> list[int]:
    return SMALL_COUNTS if is_simulated else COUNTS


def host_values(dtype: str, rank: int, count: int) -> Any:
    values = (np.arange(count) + rank) % 3 + 1
    return (values % 2 if dtype == "bool" else values).astype(dtype)


@pytest.fixture
def large(is_simulated: bool) -> int:
    """Elements of float32 that pass through rooms in many pieces."""
    return 20_001 if is_simulated else 2_000_000


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(
    cupy: Any, collective: CollectiveFront, counts: list[int], dtype: str, op: ReduceOp
) -> None:
    is_order = op in (ReduceOp.MIN, ReduceOp.MAX)
    if (dtype == "bool" and not is_order) or (dtype == "complex64" and is_order):
        pytest.skip(f"{op.name} of {dtype} is refused")
    functions: dict[ReduceOp, Any] = {
        ReduceOp.SUM: np.sum, ReduceOp.MEAN: np.mean, ReduceOp.MIN: np.min, ReduceOp.MAX: np.max,
        ReduceOp.PROD: np.prod,
    }
    rank, size = collective.communicator.rank, collective.communicator.size
    for count in counts:
        parts = [host_values(dtype, other, count) for other in range(size)]
        wide = np.complex128 if dtype == "complex64" else np.float64
        expected = functions[op](np.stack(parts).astype(wide), axis=0)
        mine = cupy.asarray(parts[rank])
        result = collective.all_reduce(mine, op)
        assert isinstance(result, cupy.ndarray)
        np.testing.assert_allclose(cupy.asnumpy(result).astype(wide), expected, rtol=1e-3)
        np.testing.assert_array_equal(cupy.asnumpy(mine), parts[rank])
        scattered = collective.reduce_scatter(mine, op)
        np.testing.assert_allclose(
            cupy.asnumpy(scattered).astype(wide), np.array_split(expected, size)[rank], rtol=1e-3
        )
        reduced = collective.reduce(mine, op, size - 1)
        assert (reduced is None) is (rank != size - 1)
        if reduced is not None:
            np.testing.assert_allclose(cupy.asnumpy(reduced).astype(wide), expected, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_only_moves(cupy: Any, collective: CollectiveFront, counts: list[int], dtype: str) -> None:
    rank, size = collective.communicator.rank, collective.communicator.size
    for count in counts:
        root = size - 1
        got = collective.broadcast(cupy.asarray(host_values(dtype, rank, count)), root)
        np.testing.assert_array_equal(cupy.asnumpy(got), host_values(dtype, root, count))
        parts = [host_values(dtype, other, count * (other % 3)) for other in range(size)]
        gathered = collective.all_gather(cupy.asarray(parts[rank]))
        np.testing.assert_array_equal(cupy.asnumpy(gathered), np.concatenate(parts))
    sent = [cupy.asarray(host_values(dtype, to, 1000 * to + rank)) for to in range(size)]
    for source, part in enumerate(collective.all_to_all(sent)):
        np.testing.assert_array_equal(cupy.asnumpy(part), host_values(dtype, rank, 1000 * rank + source))


@pytest.mark.parametrize("own_stream", [False, True])
def test_a_kernel_that_is_still_running_is_not_overtaken(
    cupy: Any, collective: CollectiveFront, own_stream: bool, large: int
) -> None:
    rank, size = collective.communicator.rank, collective.communicator.size
    slow = cupy.RawKernel(SLOW, "slow")
    stream = cupy.cuda.Stream(non_blocking=True) if own_stream else cupy.cuda.Stream.null
    for in_place in (False, True):
        with stream:
            values = cupy.zeros(large, np.float32)
            slow((1,), (256,), (values, np.int64(values.size), np.float32(rank + 1), np.int64(CYCLES)))
            result = collective.all_reduce(values, in_place=in_place)
            # Started on the same stream, without waiting: what comes after sees the result.
            after = result * 2
            np.testing.assert_array_equal(cupy.asnumpy(after), 2 * sum(range(1, size + 1)))


def test_memory_that_is_given_up_at_once_is_not_overwritten_too_early(
    cupy: Any, collective: CollectiveFront, large: int
) -> None:
    size = collective.communicator.size
    results = []
    for number in range(8):
        values = cupy.full(large, number + 1, np.float32)
        results.append(collective.all_reduce(values))
        # The pool hands the same memory out again.
        del values
        cupy.full(large, -1, np.float32)
    for number, result in enumerate(results):
        np.testing.assert_array_equal(cupy.asnumpy(result), size * (number + 1))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_reduction_in_the_background(
    cupy: Any, communicator: Communicator, open_collective: Opener, large: int, transport: str
) -> None:
    with open_asynchronous(open_collective(transport)) as asynchronous:
        arrays = [cupy.full(large, communicator.rank + number, np.float32) for number in range(3)]
        handles = [asynchronous.all_reduce_async(array) for array in arrays]
        ranks = cupy.full(large, communicator.rank, np.float64)
        mean = asynchronous.all_reduce_async(ranks, ReduceOp.MEAN, in_place=False)
        # Work of the program's own, beside it.
        product = cupy.arange(large, dtype=np.int64) * 3
        for number, (handle, array) in enumerate(zip(handles, arrays, strict=True)):
            assert handle.wait() is array
            total = sum(rank + number for rank in range(communicator.size))
            np.testing.assert_array_equal(cupy.asnumpy(array), np.full(large, total, np.float32))
        np.testing.assert_array_equal(cupy.asnumpy(mean.wait()), np.full(large, (communicator.size - 1) / 2))
        assert cupy.asnumpy(product)[-1] == 3 * (large - 1)


def test_halves_on_the_wire(cupy: Any, communicator: Communicator, open_collective: Opener) -> None:
    collective = open_collective("auto", CommunicationOptions(wire_dtype="float16"))
    values = cupy.linspace(1, 2, 100_001, dtype=np.float32)
    result = collective.all_reduce(values * (communicator.rank + 1))
    expected = cupy.asnumpy(values) * sum(range(1, communicator.size + 1))
    np.testing.assert_allclose(cupy.asnumpy(result), expected, rtol=2e-3)


@pytest.mark.mpi(min_size=2)
def test_collectives_over_the_same_ranks_share_one_communicator_of_nccl(
    cupy: Any, communicator: Communicator, open_collective: Opener
) -> None:
    collectives = [
        open_collective("nccl"), open_collective("auto"),
        open_collective("auto", CommunicationOptions(implementation="NCCL")),
    ]
    backends: list[Any] = [
        one.backend.backend(cupy.zeros(1), 8) if isinstance(one.backend, AutomaticBackend) else one.backend
        for one in collectives
    ]
    (shared,) = {backend._shared for backend in backends}
    with communicator.split(0) as other:
        assert open_ranks(other, backends[0]._cuda) is not shared
    for collective in collectives:
        assert shared.identity in nccl_ranks._open
        result: Any = collective.all_reduce(cupy.ones(9))
        np.testing.assert_array_equal(result.get(), np.full(9, communicator.size))
        collective.close()
    assert shared.identity not in nccl_ranks._open


@pytest.mark.mpi(min_size=2)
def test_an_array_on_another_gpu_is_refused(cupy: Any, open_collective: Opener) -> None:
    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip("needs two GPUs that this rank can see")
    collective = open_collective("staged")
    with cupy.cuda.Device((cupy.cuda.Device().id + 1) % count):
        elsewhere = cupy.zeros(10, np.float32)
    with pytest.raises(ValueError, match=r"is on GPU \d+ and GPU \d+ is current"):
        collective.all_reduce(elsewhere)
    # No rank has begun the call.
    total = collective.all_reduce(cupy.ones(3, np.float32))
    assert cupy.asnumpy(total).tolist() == [collective.communicator.size] * 3


@pytest.mark.mpi(min_size=2)
def test_nccl_is_refused_where_ranks_share_a_gpu(cupy: Any, communicator: Communicator) -> None:
    if cupy.cuda.runtime.getDeviceCount() >= communicator.node.size or capabilities.NCCL_HOST in os.environ:
        pytest.skip("each rank has a GPU of its own, or a host of its own to NCCL")
    reasons = communicator.all_gather_object(capabilities.why_no_nccl(communicator))
    assert any(reason is not None and "share one GPU" in reason for reason in reasons)
