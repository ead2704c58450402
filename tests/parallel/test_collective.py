"""The contract of a collective, over every backend, dtype, shape and operation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist.comm import selection
from mpidist.comm.collective import AnyArray, Collective
from mpidist.comm.communicator import Communicator
from mpidist.errors import MismatchError, UnavailableError, is_collective
from mpidist.options import CommunicationImplementation, CommunicationOptions, ReduceOp

pytestmark = pytest.mark.mpi

BACKENDS = ["AUTO", *(backend.name for backend in selection.BACKENDS)]
DTYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16",
    "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble", ">f4", ">i8",
]
SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (), "empty": (0,), "empty rows": (3, 0), "vector": (7,), "3-D": (2, 3, 5), "strided": (6, 4),
    "several chunks": (70,),
}


def as_dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        name = pytest.importorskip("ml_dtypes", reason="bfloat16 comes from ml_dtypes").bfloat16
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def make(shape: str, dtype: np.dtype[Any], rank: int) -> AnyArray:
    """Small numbers, so that every dtype can hold sum and product over four ranks."""
    size = int(np.prod(SHAPES[shape]))
    values: AnyArray = (np.arange(size) + rank) % 3 + 1
    if dtype.kind == "c":
        values = values + 1j * rank
    elif dtype.kind == "b":
        values = values % 2
    array = values.reshape(SHAPES[shape]).astype(dtype)
    # Each second column of a transposed array twice as wide: neither C- nor F-contiguous.
    return np.repeat(array.T, 2, axis=1)[:, ::2].T if shape == "strided" else array


def expected_of(arrays: list[AnyArray], op: ReduceOp) -> AnyArray:
    """By NumPy, in the widest type, in which these small numbers are exact."""
    wide = np.clongdouble if arrays[0].dtype.kind == "c" else np.longdouble
    stacked = np.stack([array.astype(wide) for array in arrays])
    functions: dict[ReduceOp, Any] = {
        ReduceOp.SUM: np.sum, ReduceOp.MEAN: np.mean, ReduceOp.MIN: np.min, ReduceOp.MAX: np.max,
        ReduceOp.PROD: np.prod,
    }
    result: AnyArray = np.asarray(functions[op](stacked, axis=0))
    return result


def is_defined(op: ReduceOp, dtype: np.dtype[Any]) -> bool:
    if dtype.kind == "b":
        return op in (ReduceOp.MIN, ReduceOp.MAX)
    return dtype.kind != "c" or op not in (ReduceOp.MIN, ReduceOp.MAX)


@pytest.fixture(params=BACKENDS)
def collective(request: pytest.FixtureRequest, communicator: Communicator) -> Collective:
    """Chunks of 64 bytes, so that small arrays are several."""
    options = CommunicationOptions(implementation=request.param, bytes_per_pack=64)
    return selection.choose(communicator, options)


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_all_reduce(collective: Collective, dtype_name: str, op: ReduceOp) -> None:
    dtype = as_dtype(dtype_name)
    communicator = collective.communicator
    for shape in SHAPES:
        arrays = [make(shape, dtype, rank) for rank in range(communicator.size)]
        mine = arrays[communicator.rank]
        before = mine.copy()
        if not is_defined(op, dtype):
            with pytest.raises(TypeError, match=op.name):
                collective.all_reduce(mine, op)
            continue
        result = collective.all_reduce(mine, op)
        assert result.shape == mine.shape
        assert result.dtype == (np.float64 if op is ReduceOp.MEAN and dtype.kind in "iu" else dtype)
        expected = expected_of(arrays, op)
        # A mean has to be rounded to the dtype.
        tolerance = {"bfloat16": 1e-2, "float16": 1e-3}.get(dtype_name, 1e-6)
        np.testing.assert_allclose(result.astype(expected.dtype), expected, rtol=tolerance, err_msg=shape)
        np.testing.assert_array_equal(mine, before)
        assert not np.shares_memory(result, mine), "a result must not be the input, on one rank either"


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_all_reduce_in_place(collective: Collective, dtype_name: str, op: ReduceOp) -> None:
    dtype = as_dtype(dtype_name)
    if not is_defined(op, dtype):
        pytest.skip(f"{op.name} of {dtype} is refused in place as elsewhere")
    rank, size = collective.communicator.rank, collective.communicator.size
    for shape in ("scalar", "empty", "vector", "several chunks"):
        arrays = [make(shape, dtype, other) for other in range(size)]
        mine = arrays[rank].copy()
        if op is ReduceOp.MEAN and dtype.kind in "iu":
            with pytest.raises(TypeError, match="float64"):
                collective.all_reduce(mine, op, in_place=True)
            np.testing.assert_array_equal(mine, arrays[rank])
            continue
        assert collective.all_reduce(mine, op, in_place=True) is mine
        np.testing.assert_array_equal(mine, collective.all_reduce(arrays[rank], op))


def test_in_place_wants_an_array_it_can_write(collective: Collective) -> None:
    strided = np.zeros((4, 4))[:, ::2]
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    for array in (strided, frozen):
        with pytest.raises(ValueError, match="C-contiguous"):
            collective.all_reduce(array, in_place=True)


def test_small_integers_and_halves_do_not_overflow_on_the_way(collective: Collective) -> None:
    assert collective.all_reduce(np.full(3, 100, np.int8), ReduceOp.MEAN).tolist() == [100.0] * 3
    assert collective.all_reduce(np.full(3, 40000, np.float16), ReduceOp.MEAN).tolist() == [40000.0] * 3


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None]), np.zeros(2, "datetime64[s]"), np.zeros(2, "V3")])
def test_what_is_no_number_is_refused(collective: Collective, array: AnyArray) -> None:
    with pytest.raises(TypeError, match="numeric"):
        collective.all_reduce(array)


@pytest.mark.parametrize("dtype_name", DTYPES)
def test_broadcast_from_each_root(collective: Collective, dtype_name: str) -> None:
    dtype = as_dtype(dtype_name)
    rank = collective.communicator.rank
    for root in range(collective.communicator.size):
        for shape in SHAPES:
            mine = make(shape, dtype, rank)
            before = mine.copy()
            result = collective.broadcast(mine, root)
            np.testing.assert_array_equal(result, make(shape, dtype, root), strict=dtype.isnative)
            np.testing.assert_array_equal(mine, before)
    for root in (-1, collective.communicator.size):
        with pytest.raises(ValueError, match="`root` must be a rank"):
            collective.broadcast(np.zeros(2), root)


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_all_gather_of_uneven_sizes(collective: Collective, axis: int, dtype_name: str) -> None:
    dtype = as_dtype(dtype_name)
    rank, size = collective.communicator.rank, collective.communicator.size
    parts = []
    for other in range(size):
        shape = [2, 3, 4]
        shape[axis] = other % 3  # 0 on the first rank
        parts.append((np.arange(np.prod(shape)) % 2 + other).reshape(shape).astype(dtype))
    result = collective.all_gather(parts[rank], axis)
    np.testing.assert_array_equal(result, np.concatenate(parts, axis), strict=dtype.isnative)
    assert not np.shares_memory(result, parts[rank])
    strided = parts[rank].copy(order="F")[:, ::-1]
    expected = np.concatenate([part[:, ::-1] for part in parts], axis)
    np.testing.assert_array_equal(collective.all_gather(strided, axis), expected)


def test_all_gather_where_nobody_has_anything(collective: Collective) -> None:
    assert collective.all_gather(np.zeros((0, 3), "float32")).shape == (0, 3)


@pytest.mark.parametrize(("shape", "axis"), [((), 0), ((3,), 1), ((3,), -2), ((2, 3), 2)])
def test_a_bad_axis_is_the_same_error_on_every_rank(
    collective: Collective, shape: tuple[int, ...], axis: int
) -> None:
    with pytest.raises(ValueError, match=r"at least one dimension|out of range") as caught:
        collective.all_gather(np.zeros(shape), axis)
    assert len(set(collective.communicator.all_gather_object(str(caught.value)))) == 1
    assert collective.communicator.size == 1 or is_collective(caught.value)


def different(case: str, collective: Collective) -> object:
    """A call in which the last rank does something else."""
    odd = collective.communicator.rank == collective.communicator.size - 1
    x = np.zeros(4, "float32")
    calls = {
        "shape": lambda: collective.all_reduce(x[:3] if odd else x),
        "dimensions": lambda: collective.all_reduce(x.reshape(2, 2) if odd else x),
        "dtype": lambda: collective.all_reduce(x.astype("int32") if odd else x),
        "operation": lambda: collective.all_reduce(x, ReduceOp.MAX if odd else ReduceOp.SUM),
        "call": lambda: collective.all_gather(x) if odd else collective.all_reduce(x),
        "other call": lambda: collective.all_reduce(x) if odd else collective.all_gather(x),
        "root": lambda: collective.broadcast(x, int(odd)),
        "broadcast shape": lambda: collective.broadcast(x[:2] if odd else x),
        "gather dtype": lambda: collective.all_gather(x.astype("float64") if odd else x),
        "gather dimensions": lambda: collective.all_gather(x if odd else np.zeros((4, 3)), axis=1),
        "gather scalar": lambda: collective.all_gather(x[0] if odd else x),
        "gather axis": lambda: collective.all_gather(np.zeros((2, 2)), axis=int(odd)),
        "gather other sizes": lambda: collective.all_gather(np.zeros((2, 5 if odd else 4))),
    }
    return calls[case]()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "case",
    ["shape", "dimensions", "dtype", "operation", "call", "other call", "root", "broadcast shape", "gather dtype",
     "gather dimensions", "gather scalar", "gather axis", "gather other sizes"],
)
def test_a_difference_is_a_mismatch_on_every_rank(collective: Collective, case: str) -> None:
    with pytest.raises(MismatchError, match="must be the same on all ranks") as caught:
        different(case, collective)
    assert is_collective(caught.value)
    last = collective.communicator.size - 1
    assert f"rank {last}" in str(caught.value)
    # Nothing is left on the way: the next call works.
    assert collective.all_reduce(np.ones(1)).tolist() == [collective.communicator.size]


@pytest.mark.mpi(min_size=2)
def test_check_looks_at_every_call(communicator: Communicator) -> None:
    collective = selection.choose(communicator, CommunicationOptions(check=True))
    for _ in range(40):
        collective.all_reduce(np.ones(2))
    with pytest.raises(MismatchError):
        collective.all_reduce(np.ones(2 + communicator.rank))


def test_gather_with_negative_and_positive_axis_agree(collective: Collective) -> None:
    axis = 1 if collective.communicator.rank == 0 else -1
    assert collective.all_gather(np.zeros((2, 1)), axis).shape == (2, collective.communicator.size)


def test_barrier_returns(collective: Collective) -> None:
    collective.barrier()


def test_an_unknown_backend_is_refused_by_name(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = next(kind for kind in reversed(CommunicationImplementation) if kind not in selection.BACKENDS)
    with pytest.raises(UnavailableError, match=f"{missing.name} was asked for by `implementation`.*AUTO, MPI"):
        selection.choose(communicator, CommunicationOptions(implementation=missing))
    monkeypatch.setenv("MPIDIST_COLLECTIVE", "nonsense")
    with pytest.raises(ValueError, match="nonsense"):
        selection.choose(communicator, CommunicationOptions())
