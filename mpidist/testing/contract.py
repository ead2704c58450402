"""The contract of a collective as a class of pytest tests, for the library's collectives and for a user's own.

    from mpidist.testing.contract import CollectiveContract

    class TestMine(CollectiveContract):
        @pytest.fixture
        def collective(self, communicator):
            return MyCollective(communicator)

Run it on 1, 2, 3 and 4 ranks: `mpirun -n 3 python -m pytest --with-mpi test_mine.py`. For a backend the fixture returns
`CollectiveFront(MyBackend(communicator), CommunicationOptions())`, and for `CrossDeviceOps` it returns
`MyOps().bind(communicator)`. It must return a new object for each test, since a collective compares only its first
calls between the ranks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.slices import cut_evenly
from mpidist.comm.collective import Collective
from mpidist.errors import MismatchError, is_shared
from mpidist.options import ReduceOp
from mpidist.testing.expected import (
    arrays_of,
    arrays_with_nan,
    combined,
    compare,
    expect,
    expect_equal,
    integers_at_the_limit,
    is_defined,
    known_dtypes,
)

DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16",
    "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble", ">f4", ">i8",
)


class CollectiveContract:
    """Tests that every `Collective` must pass. Subclasses have a fixture `collective` that makes one over all ranks.

    Attributes:
        dtypes: The names of the dtypes to test; bfloat16 is tested if ml_dtypes is installed.
        large: The number of elements of an array that is longer than one message of the collective.
        takes_other_libraries: Whether arrays of PyTorch and JAX are tested, if these are installed.
        wraps_integers: Whether sums and products of integers that do not fit their dtype may wrap. In the library's
            collectives they are an error on every rank.
    """

    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    large: ClassVar[int] = 300_001
    takes_other_libraries: ClassVar[bool] = True
    wraps_integers: ClassVar[bool] = False

    @pytest.fixture
    def collective(self) -> Collective:
        """Make the collective under test."""
        raise NotImplementedError(f"{type(self).__name__} must have a fixture `collective`")

    @pytest.mark.parametrize("op", ReduceOp)
    def test_all_reduce_of_every_dtype(self, collective: Collective, op: ReduceOp) -> None:
        """Values and dtypes of results are right; undefined combinations are refused."""
        for name, dtype in known_dtypes(self.dtypes):
            arrays = arrays_of(collective, dtype)
            mine = arrays[collective.communicator.rank].copy()
            if not is_defined(op, dtype):
                with pytest.raises(TypeError, match=op.name):
                    collective.all_reduce(mine, op)
                continue
            result = collective.all_reduce(mine, op)
            compare(result, arrays, op, name)
            expect_equal(mine, arrays[collective.communicator.rank], f"the input of {op.name} of {name}")
            expect(not np.shares_memory(result, mine), "the result must not be the input, on one rank either")

    def test_all_reduce_of_every_shape(self, collective: Collective) -> None:
        """Scalars, empty arrays and memory that is not contiguous are taken."""
        for shape in ((), (0,), (3, 0), (1,), (2, 3, 5)):
            arrays = arrays_of(collective, np.dtype("float32"), shape)
            compare(collective.all_reduce(arrays[collective.communicator.rank]), arrays, ReduceOp.SUM, f"{shape}")
        wide = arrays_of(collective, np.dtype("float64"), (6, 4))
        for view in (np.transpose, lambda array: array[::-1, ::2], lambda array: array[:, 1]):
            arrays = [view(array) for array in wide]
            for op in (ReduceOp.SUM, ReduceOp.MEAN):
                result = collective.all_reduce(arrays[collective.communicator.rank], op)
                compare(result, arrays, op, "a view that is not contiguous")

    @pytest.mark.parametrize("op", ReduceOp)
    def test_all_reduce_in_place(self, collective: Collective, op: ReduceOp) -> None:
        """The argument takes the result, or stays unchanged if it cannot."""
        for name in ("int32", "float16", "float32", "float64", ">f4"):
            arrays = arrays_of(collective, np.dtype(name))
            mine = arrays[collective.communicator.rank].copy()
            if op is ReduceOp.MEAN and mine.dtype.kind == "i":
                with pytest.raises(TypeError, match="float64"):
                    collective.all_reduce(mine, op, in_place=True)
                expect_equal(mine, arrays[collective.communicator.rank], "an array that cannot take the result")
                continue
            expect(collective.all_reduce(mine, op, in_place=True) is mine, "`in_place` must return its argument")
            compare(mine, arrays, op, f"{name} in place")

    def test_in_place_wants_an_array_that_it_can_write(self, collective: Collective) -> None:
        """Views that are not contiguous and read-only arrays are refused."""
        frozen = np.zeros(3)
        frozen.flags.writeable = False
        for array in (np.zeros((4, 4))[:, ::2], frozen):
            with pytest.raises(ValueError, match="C-contiguous"):
                collective.all_reduce(array, in_place=True)

    def test_results_have_the_same_bits_on_every_rank(self, collective: Collective) -> None:
        """Ranks that add in different orders would get different bits: the sum must be sent."""
        generator = np.random.default_rng(collective.communicator.rank)
        for dtype in ("float32", "float64"):
            array = generator.standard_normal(1001).astype(dtype)
            results = collective.communicator.all_gather_object(collective.all_reduce(array).tobytes())
            expect(len(set(results)) == 1, f"sums of {dtype} differ between ranks")

    @pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
    def test_a_nan_of_any_rank_is_one_on_every_rank(self, collective: Collective, op: ReduceOp) -> None:
        """As in NumPy, whatever the size, the operation, the sign of the NaN and the rank that has it."""
        rank, size = collective.communicator.rank, collective.communicator.size
        for name, dtype in known_dtypes(self.dtypes):
            if dtype.kind != "f" and name != "bfloat16":
                continue
            for count in (size + 1, 1000, self.large):
                if count == self.large and name != "float32":
                    continue
                arrays = arrays_with_nan(size, count, dtype)
                wanted = combined(arrays, op, np.dtype(np.float64))
                text = f"{op.name} of {count} numbers of {name} with NaN"
                result = collective.all_reduce(arrays[rank].copy(), op)
                expect(result.dtype == dtype, f"{text}: the result is of {result.dtype}")
                np.testing.assert_array_equal(result.astype("float64"), wanted, err_msg=f"all_reduce, {text}")
                bits = collective.communicator.all_gather_object(result.astype("float64").tobytes())
                expect(len(set(bits)) == 1, f"{text}: bits differ between ranks")
                reduced = collective.reduce(arrays[rank], op, size - 1)
                if reduced is not None:
                    np.testing.assert_array_equal(reduced.astype("float64"), wanted, err_msg=f"reduce, {text}")
                mine = collective.reduce_scatter(arrays[rank], op).astype("float64")
                np.testing.assert_array_equal(
                    mine, wanted[cut_evenly(count, size)[rank]], err_msg=f"reduce_scatter, {text}"
                )

    def test_small_integers_and_halves_do_not_overflow_on_the_way(self, collective: Collective) -> None:
        """The mean fits the dtype where the sum does not."""
        for array in (np.full(3, 100, np.int8), np.full(3, 40000, np.float16)):
            mean = collective.all_reduce(array, ReduceOp.MEAN)
            expect_equal(mean.astype("float64"), array.astype("float64"), "the mean of equal arrays")

    @pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PROD])
    def test_integers_do_not_wrap(self, collective: Collective, op: ReduceOp) -> None:
        """Results that fit are exact; others are an OverflowError on every rank, in every call."""
        rank, size = collective.communicator.rank, collective.communicator.size
        if self.wraps_integers or size == 1:
            pytest.skip("this collective may let sums of integers wrap, or has one rank")
        for name, dtype in known_dtypes(self.dtypes):
            if dtype.kind not in "iu":
                continue
            for count in (1, 5, self.large) if name in ("int8", "uint32", "int64") else (5,):
                for largest in (False, True):
                    arrays, wanted = integers_at_the_limit(size, count, dtype, op, largest=largest)
                    text = f"{op.name} of {count} numbers of {name}"
                    mine = arrays[rank]
                    expect_equal(collective.all_reduce(mine, op), wanted, f"all_reduce, {text}")
                    reduced = collective.reduce(mine, op, size - 1)
                    if reduced is not None:
                        expect_equal(reduced, wanted, f"reduce, {text}")
                    expect_equal(
                        collective.reduce_scatter(mine, op), wanted[cut_evenly(count, size)[rank]],
                        f"reduce_scatter, {text}",
                    )
                # One number too far, which one rank alone would see, and one rank alone has made.
                mine = mine.copy()
                if rank == size - 1:
                    mine[-1] += 1
                for what, call in _combining(collective, op, mine).items():
                    with pytest.raises(OverflowError, match=f"a {op.name} of .* does not fit") as caught:
                        call()
                    expect(is_shared(caught.value), f"{what} of {name}: the error must be marked as shared")
                    texts = collective.communicator.all_gather_object(str(caught.value))
                    expect(len(set(texts)) == 1, f"{what} of {name}: errors differ between ranks: {texts}")
        expect_equal(collective.all_reduce(np.ones(2, np.int8)), np.full(2, size, np.int8), "a sum after errors")

    def test_what_is_no_number_is_refused(self, collective: Collective) -> None:
        """Text, objects, dates and structures are refused."""
        for array in (np.array(["a"]), np.array([None]), np.zeros(2, "datetime64[s]"), np.zeros(2, "V3")):
            with pytest.raises(TypeError, match="numeric"):
                collective.all_reduce(array)

    def test_large_arrays(self, collective: Collective) -> None:
        """Arrays longer than one message have right results in every operation."""
        communicator = collective.communicator
        size, rank = communicator.size, communicator.rank
        base = np.arange(self.large, dtype=np.float32) % 1000
        total = base * size + size * (size - 1) // 2
        expect_equal(collective.all_reduce(base + rank), total, "all_reduce")
        reduced = collective.reduce(base + rank, ReduceOp.SUM, size - 1)
        if reduced is not None:
            expect_equal(reduced, total, "reduce")
        expect_equal(
            collective.reduce_scatter(base + rank), total[cut_evenly(self.large, size)[rank]], "reduce_scatter"
        )
        expect_equal(collective.broadcast(base + rank, size - 1), base + size - 1, "broadcast")
        gathered = collective.all_gather(base[rank:] + rank)
        expect_equal(gathered, np.concatenate([base[one:] + one for one in range(size)]), "all_gather")
        received = collective.all_to_all([base[to:] + rank for to in range(size)])
        for source, part in enumerate(received):
            expect_equal(part, base[rank:] + source, f"all_to_all from rank {source}")

    def test_reduce_to_each_rank(self, collective: Collective) -> None:
        """The root gets the result, and no other rank does."""
        rank, size = collective.communicator.rank, collective.communicator.size
        cases = [("float64", op, root) for root in range(size) for op in (ReduceOp.SUM, ReduceOp.MEAN)]
        cases += [(name, ReduceOp.MAX, size - 1) for name in ("bool", "float16", "int8")]
        for name, op, root in [*cases, ("int32", ReduceOp.MEAN, 0)]:
            arrays = arrays_of(collective, np.dtype(name))
            result = collective.reduce(arrays[rank], op, root)
            if rank == root:
                compare(np.asarray(result), arrays, op, f"{name} at rank {root}")
            else:
                expect(result is None, f"rank {rank} got a result that belongs to rank {root}")

    def test_reduce_scatter(self, collective: Collective) -> None:
        """Slices are those of `numpy.array_split`, also with fewer rows than ranks and without rows."""
        rank, size = collective.communicator.rank, collective.communicator.size
        cases = [((7,), "float64", ReduceOp.SUM), ((2, 3), "float32", ReduceOp.MEAN), ((0, 3), "int32", ReduceOp.SUM)]
        for shape, name, op in [*cases, ((9, 2), "float16", ReduceOp.MAX), ((5,), "int16", ReduceOp.MEAN)]:
            arrays = arrays_of(collective, np.dtype(name), shape)
            slices = [np.array_split(array, size)[rank] for array in arrays]
            compare(collective.reduce_scatter(arrays[rank], op), slices, op, f"slice of {shape}")
        with pytest.raises(ValueError, match="at least one dimension"):
            collective.reduce_scatter(np.float64(1))

    def test_broadcast(self, collective: Collective) -> None:
        """Arrays of each dtype and shape come from each rank."""
        rank, size = collective.communicator.rank, collective.communicator.size
        cases: list[tuple[tuple[int, ...], np.dtype[Any], int]] = [
            ((7,), dtype, size - 1) for _, dtype in known_dtypes(self.dtypes)
        ]
        cases += [((2, 3), np.dtype("float32"), root) for root in range(size)]
        for shape, dtype, root in [*cases, ((), np.dtype("int32"), 0), ((0,), np.dtype("int32"), 0)]:
            arrays = arrays_of(collective, dtype, shape)
            result = collective.broadcast(arrays[rank], root)
            expect_equal(result, arrays[root], f"{dtype} of shape {shape} from rank {root}")
        wide = np.arange(12.0).reshape(3, 4) + rank
        expect_equal(collective.broadcast(wide[:, ::2]), np.arange(12.0).reshape(3, 4)[:, ::2], "a strided array")
        for root in (-1, size):
            with pytest.raises(ValueError, match="`root` must be a rank"):
                collective.broadcast(np.zeros(2), root)

    def test_all_gather_of_uneven_sizes(self, collective: Collective) -> None:
        """Arrays are concatenated along each axis and of each dtype; some ranks have no elements."""
        rank, size = collective.communicator.rank, collective.communicator.size
        cases = [(np.dtype("float32"), axis) for axis in (1, 2, -1, -3)]
        for dtype, axis in [*cases, *((dtype, 0) for _, dtype in known_dtypes(self.dtypes))]:
            parts = []
            for other in range(size):
                shape = [2, 3, 4]
                shape[axis] = other % 3
                parts.append((np.arange(np.prod(shape)) % 2 + other).reshape(shape).astype(dtype))
            result = collective.all_gather(parts[rank].copy(order="F"), axis)
            expect_equal(result, np.concatenate(parts, axis), f"{dtype} along axis {axis}")
        expect(collective.all_gather(np.zeros((0, 3))).shape == (0, 3), "an array without rows must keep its shape")
        axis = 1 if rank == 0 else -1
        expect(collective.all_gather(np.zeros((2, 1)), axis).shape == (2, size), "axis -1 must be the last one")

    def test_all_gather_refuses_a_bad_axis_on_every_rank(self, collective: Collective) -> None:
        """All ranks raise the same text."""
        for shape, axis in (((), 0), ((3,), 1), ((3,), -2)):
            with pytest.raises(ValueError, match=r"at least one dimension|out of range") as caught:
                collective.all_gather(np.zeros(shape), axis)
            texts = collective.communicator.all_gather_object(str(caught.value))
            expect(len(set(texts)) == 1, f"errors differ between ranks: {texts}")

    def test_all_to_all(self, collective: Collective) -> None:
        """Uneven and empty parts arrive; a wrong number of parts is refused."""
        rank, size = collective.communicator.rank, collective.communicator.size
        for dtype in ("float32", "int8", "complex128"):
            parts = [np.full(((rank + to) % 3, 2), 10 * rank + to, dtype) for to in range(size)]
            received = collective.all_to_all(parts)
            expect(len(received) == size, f"all_to_all must give {size} parts, got {len(received)}")
            for source, part in enumerate(received):
                wanted = np.full(((rank + source) % 3, 2), 10 * source + rank, dtype)
                expect_equal(part, wanted, f"part from rank {source}")
        for part in collective.all_to_all([np.zeros((0, 2))] * size):
            expect_equal(part, np.zeros((0, 2)), "an empty part")
        with pytest.raises(ValueError, match="one part per rank"):
            collective.all_to_all([np.zeros(1)] * (size + 1))

    def test_barrier_returns(self, collective: Collective) -> None:
        """The barrier returns on every rank, also when called again."""
        for _ in range(3):
            collective.barrier()

    @pytest.mark.parametrize("calls", ["reductions", "broadcasts", "gathers", "exchanges"])
    def test_a_difference_is_a_mismatch_on_every_rank(self, collective: Collective, calls: str) -> None:
        """If the last rank makes another call, the error names it on every rank, and the next call works."""
        size = collective.communicator.size
        if size == 1:
            pytest.skip("one rank cannot differ from itself")
        for what, call in _differing(calls, collective, odd=collective.communicator.rank == size - 1).items():
            with pytest.raises(MismatchError, match="must be the same on all ranks") as caught:
                call()
            expect(is_shared(caught.value), f"{what}: the error must be marked as one of every rank")
            expect(f"rank {size - 1}" in str(caught.value), f"{what}: the rank must be named: {caught.value}")
            expect(collective.all_reduce(np.ones(1)).tolist() == [size], f"after another {what} a call must work")

    @pytest.mark.parametrize("library", ["torch", "jax.numpy"])
    def test_arrays_of_other_libraries(self, collective: Collective, library: str) -> None:
        """Arrays of other libraries are taken, and the results are of their kind."""
        if not self.takes_other_libraries:
            pytest.skip("this collective takes NumPy arrays only")
        xp = pytest.importorskip(library, reason=f"{library.partition('.')[0]} is not installed")
        rank, size = collective.communicator.rank, collective.communicator.size
        ones = xp.ones(5, dtype=xp.float32)
        results = {
            "all_reduce": (collective.all_reduce(ones), np.full(5, size)),
            "mean": (collective.all_reduce(ones * rank, ReduceOp.MEAN), np.full(5, (size - 1) / 2)),
            "reduce": (collective.reduce(ones, ReduceOp.SUM, rank if size == 1 else 0), np.full(5, size)),
            "reduce_scatter": (collective.reduce_scatter(xp.ones(size)), np.full(1, size)),
            "broadcast": (collective.broadcast(ones * (rank + 1), size - 1), np.full(5, size)),
            "all_gather": (collective.all_gather(ones), np.ones(5 * size)),
            "all_to_all": (collective.all_to_all([ones] * size)[0], np.ones(5)),
        }
        for what, (result, wanted) in results.items():
            if result is not None:
                expect(isinstance(result, type(ones)), f"{what} of {type(ones)} gave {type(result)}")
                expect_equal(np.asarray(result, "float64"), wanted.astype("float64"), what)
        if library == "torch":
            expect(collective.all_reduce(ones, in_place=True) is ones, "`in_place` must return its argument")
            expect_equal(ones.numpy(), np.full(5, size, "float32"), "a tensor that was reduced in place")
        if importlib.util.find_spec("ml_dtypes") is not None and "bfloat16" in self.dtypes:
            halves = collective.all_reduce(xp.ones(5, dtype=xp.bfloat16))
            expect(halves.dtype == xp.bfloat16, f"a sum of bfloat16 of {library} is of {halves.dtype}")
            expect(halves.tolist() == [float(size)] * 5, f"a sum of bfloat16 of {library} is {halves}")


def _combining(collective: Collective, op: ReduceOp, mine: AnyArray) -> dict[str, Callable[[], object]]:
    """The calls that combine an array."""
    return {
        "all_reduce": lambda: collective.all_reduce(mine, op),
        "in place": lambda: collective.all_reduce(mine.copy(), op, in_place=True),
        "reduce": lambda: collective.reduce(mine, op, collective.communicator.size - 1),
        "reduce_scatter": lambda: collective.reduce_scatter(mine, op),
    }


def _differing(calls: str, collective: Collective, *, odd: bool) -> dict[str, Callable[[], object]]:
    """Calls in which the rank with `odd` differs from the others. They are so few that the collective compares all."""
    x, square, size = np.zeros(4, "float32"), np.zeros((2, 2)), collective.communicator.size
    lists: dict[str, dict[str, Callable[[], object]]] = {
        "reductions": {
            "shape": lambda: collective.all_reduce(x[:3] if odd else x),
            "number of dimensions": lambda: collective.all_reduce(x.reshape(2, 2) if odd else x),
            "dtype": lambda: collective.all_reduce(x.astype("int32") if odd else x),
            "operation": lambda: collective.all_reduce(x, ReduceOp.MAX if odd else ReduceOp.SUM),
            "shape to scatter": lambda: collective.reduce_scatter(x[:3] if odd else x),
            "call": lambda: collective.reduce_scatter(x) if odd else collective.all_reduce(x),
        },
        "broadcasts": {
            "root": lambda: collective.broadcast(x, int(odd)),
            "shape to broadcast": lambda: collective.broadcast(x[:2] if odd else x),
            "root of a reduction": lambda: collective.reduce(x, ReduceOp.SUM, int(odd)),
            "call": lambda: collective.all_gather(x) if odd else collective.all_reduce(x),
            "other call": lambda: collective.all_reduce(x) if odd else collective.all_gather(x),
        },
        "gathers": {
            "dtype": lambda: collective.all_gather(x.astype("float64") if odd else x),
            "number of dimensions": lambda: collective.all_gather(x if odd else square, axis=0),
            "scalar": lambda: collective.all_gather(x[0] if odd else x),
            "axis": lambda: collective.all_gather(square, axis=int(odd)),
            "other size": lambda: collective.all_gather(np.zeros((2, 5 if odd else 4))),
        },
        "exchanges": {
            "dtype": lambda: collective.all_to_all([x.astype("float64") if odd else x] * size),
            "other size": lambda: collective.all_to_all([np.zeros((1, 5 if odd else 4))] * size),
            "number of parts": lambda: collective.all_to_all([x] * (size + odd)),
        },
    }
    return lists[calls]
