"""Sparse values, nests and objects through reduce, gather and the replica context."""

from __future__ import annotations

import pickle
import re
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.comm.arithmetic.combine import named_dtype
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError, is_shared
from mpidist.indexed_slices import IndexedSlices
from tests.helpers.amounts import amount
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import make_strategy

pytestmark = pytest.mark.mpi

Pair = namedtuple("Pair", "x y")


@pytest.fixture(params=["node", "first"])
def strategy(request: pytest.FixtureRequest, communicator: Communicator) -> ArenaStrategy:
    return make_strategy(communicator, request.param)


def here() -> mpidist.ReplicaContext:
    context = mpidist.get_replica_context()
    assert context is not None
    return context


def rows(rank: int, dtype: Any = "float32") -> IndexedSlices:
    """Rank r has r rows, so that the first has none."""
    values = np.arange(2 * rank, dtype=dtype).reshape(rank, 2) + rank
    return IndexedSlices(values, np.arange(rank, dtype="int32") % 2, (4, 2))


@pytest.mark.parametrize("where", ["reduce", "all_reduce", "reduce_to"])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_rows_are_put_one_after_another(strategy: ArenaStrategy, op: str, dtype: str, where: str) -> None:
    n, mine = strategy.num_replicas_in_sync, rows(strategy.communicator.rank, dtype)
    value = {"sparse": mine, "dense": np.ones(3)}
    if where == "reduce":
        result = strategy.reduce(op, value, axis=None)
    elif where == "reduce_to":
        result = strategy.extended.reduce_to(op, value, "cpu:0")
    else:
        result = strategy.run(lambda: here().all_reduce(op, value))
    sparse = result["sparse"]
    every = [rows(r, dtype) for r in range(n)]
    values = np.concatenate([one.values for one in every])
    expected = values if op == "SUM" else values / n
    np.testing.assert_allclose(sparse.values, expected, rtol=1e-3)
    assert sparse.values.dtype == ("float64" if (op, dtype) == ("MEAN", "int32") else dtype)
    assert sparse.indices.tolist() == np.concatenate([one.indices for one in every]).tolist()
    assert sparse.dense_shape == (4, 2)
    dense = strategy.reduce(op, mine.to_dense().astype("float64"), axis=None)
    np.testing.assert_allclose(sparse.to_dense(), dense, rtol=1e-2)
    assert result["dense"].tolist() == [n if op == "SUM" else 1] * 3


def test_what_rows_cannot_do(strategy: ArenaStrategy) -> None:
    for op in ("MIN", "MAX", "PROD"):
        with pytest.raises(ValueError, match="reduced by SUM or MEAN"):
            strategy.reduce(op, rows(1), axis=None)
    with pytest.raises(ValueError, match="axis=None"):
        strategy.reduce("SUM", rows(1), axis=0)
    with pytest.raises(NotImplementedError, match="gather does not support IndexedSlices"):
        strategy.gather([rows(1)], axis=0)
    with pytest.raises(NotImplementedError, match="all_gather does not support IndexedSlices"):
        strategy.run(lambda: here().all_gather(rows(1), axis=0))


@pytest.mark.mpi(min_size=2)
def test_rows_must_fit_those_of_others(strategy: ArenaStrategy) -> None:
    odd = strategy.communicator.rank == 1
    for other in (IndexedSlices(np.ones((1, 3)), np.array([0])), IndexedSlices(np.ones((1, 2)), np.array([0]), (9, 2))):
        with pytest.raises(MismatchError, match="dense shape, row shape and dtype") as caught:
            strategy.reduce("SUM", other if odd else IndexedSlices(np.ones((1, 2)), np.array([0])), axis=None)
        assert is_shared(caught.value)
    with pytest.raises(NotImplementedError, match="gather failed on rank 1"):
        strategy.gather(rows(1) if odd else np.ones((1, 2)), axis=0)


def test_nests_everywhere(strategy: ArenaStrategy) -> None:
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    nest = {"b": Pair([np.full((2, rank), 1.0)], ()), "a": (np.full((1, rank), 2), [])}
    reduced = strategy.reduce("SUM", nest, axis=(0, 1))
    assert reduced == {"a": (n * (n - 1), []), "b": Pair([n * (n - 1.0)], ())}
    gathered = strategy.gather(nest, axis=-1)
    assert isinstance(gathered["b"], Pair)
    assert gathered["b"].x[0].shape == (2, n * (n - 1) // 2)
    assert gathered["a"][0].shape == (1, n * (n - 1) // 2)
    meant = strategy.reduce("MEAN", nest, axis=[-1, 0])
    np.testing.assert_equal(meant["a"][0], 2.0 if n > 1 else np.nan)
    assert strategy.run(lambda: here().all_reduce("SUM", [])) == []
    with pytest.raises(TypeError, match="expected arrays or numbers"):
        strategy.gather([np.array(["text"])], axis=0)


OBJECTS = {
    "object": np.array([1, None], object),
    "texts of any length": np.array(["a", "b"], np.dtypes.StringDType()),
    "structure": np.zeros(2, [("a", "O")]),
    "large int": 10**30,
    "huge int": 10**5000,
}
METHODS: dict[str, Callable[[ArenaStrategy, Any], Any]] = {
    "reduce": lambda strategy, value: strategy.reduce("SUM", value, axis=None),
    "reduce along an axis": lambda strategy, value: strategy.reduce("SUM", value, axis=0),
    "reduce a nest": lambda strategy, value: strategy.reduce("MAX", {"a": value, "b": 1.0}, axis=None),
    "reduce many along an axis": lambda strategy, value: strategy.reduce(
        "SUM", {"a": np.ones(2), "b": np.atleast_1d(value)}, axis=0
    ),
    "reduce rows": lambda strategy, value: strategy.reduce(
        "SUM", [np.ones(1), IndexedSlices(np.atleast_1d(value), np.arange(np.size(value)), (3,))], axis=None
    ),
    "reduce_to": lambda strategy, value: strategy.extended.reduce_to("SUM", value, "cpu:0"),
    "all_reduce": lambda strategy, value: strategy.run(lambda: here().all_reduce("SUM", [value])),
    "gather": lambda strategy, value: strategy.gather(value, axis=0),
    "all_gather": lambda strategy, value: strategy.run(lambda: here().all_gather([value], 0)),
    "broadcast_to": lambda strategy, value: strategy.extended.broadcast_to(value),
    "collective.broadcast": lambda strategy, value: strategy.arena.collective.broadcast(np.asarray(value)),
    "collective.all_gather": lambda strategy, value: strategy.arena.collective.all_gather(np.atleast_1d(value)),
    "collective.all_to_all": lambda strategy, value: strategy.arena.collective.all_to_all(
        [np.atleast_1d(value)] * strategy.num_replicas_in_sync
    ),
    "collective.reduce_scatter": lambda strategy, value: strategy.arena.collective.reduce_scatter(np.atleast_1d(value)),
}


@pytest.mark.parametrize("odd", ["every rank", "the last rank"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", OBJECTS)
def test_what_cannot_be_sent_is_refused_alike_and_harms_nothing(
    strategy: ArenaStrategy, kind: str, method: str, odd: str
) -> None:
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    value = OBJECTS[kind]
    if odd == "the last rank" and rank < n - 1:
        value = 1 if isinstance(value, int) and "axis" not in method else np.zeros(2)
    for _ in range(3):
        with pytest.raises((TypeError, ValueError, MismatchError)) as caught:
            METHODS[method](strategy, value)
        texts = strategy.communicator.all_gather_object(f"{caught.type.__name__}: {caught.value}")
        assert texts == texts[:1] * n, "\n".join(texts)
        assert strategy.reduce("SUM", 1.0, axis=None) == n


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("value", "axis", "text"),
    [
        ("a", None, "expected arrays or numbers, got 'a' of type str"),
        (True, None, "SUM of booleans is not defined"),
        (np.zeros(2), 1, "`axis` is out of range: expected -1 to 0"),
        (np.zeros(2), "0", "`axis` must be None, an int or a sequence of ints, got '0'"),
    ],
)
def test_what_one_rank_refuses_is_told_on_all(strategy: ArenaStrategy, value: Any, axis: Any, text: str) -> None:
    last = strategy.num_replicas_in_sync - 1
    mine = (value, axis) if strategy.communicator.rank == last else (np.zeros(2), None if axis is None else 0)
    with pytest.raises(MismatchError, match=rf"refused: {re.escape(text)}.* on rank {last}"):
        strategy.reduce("SUM", mine[0], axis=mine[1])
    # Refused on all ranks it is no mismatch, be the texts different.
    with pytest.raises((TypeError, ValueError)) as caught:
        strategy.reduce("SUM", [object()], axis=None)
    assert not isinstance(caught.value, MismatchError)


def test_python_ints_are_never_cut_off(strategy: ArenaStrategy) -> None:
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    largest = 2**31 - 1
    assert strategy.reduce("SUM", largest, axis=None) == n * largest
    # Whether an int is small must not decide about its dtype.
    assert strategy.reduce("SUM", [2**31 + rank, rank], axis=None) == [n * 2**31 + n * (n - 1) // 2, n * (n - 1) // 2]
    assert strategy.reduce("MAX", 2**40 if rank == n - 1 else 5, axis=None) == 2**40
    assert strategy.run(lambda: here().all_reduce("PROD", 2**12)) == 2 ** (12 * n)
    assert strategy.reduce("SUM", -(2**63) if rank == 0 else 0, axis=None) == -(2**63)
    with pytest.raises(ValueError, match=r"Python int of -2\*\*63 to 2\*\*63 - 1, got one of 64 bits\. Pass"):
        strategy.reduce("SUM", 2**63, axis=None)
    sent = strategy.extended.broadcast_to([2**64 - 1 if rank == 0 else 7, 3 if rank == 0 else 2**63, True])
    assert sent == [2**64 - 1, 3, True]
    assert [type(one) for one in sent] == [int, int, bool]
    with pytest.raises(ValueError, match="a Python int of at most 64 bits, got one of 65 bits"):
        strategy.extended.broadcast_to(2**64)


class Scores(dict[str, Any]):
    pass


@pytest.mark.parametrize("axis", [None, 0])
def test_a_subclass_of_dict_survives(strategy: ArenaStrategy, axis: int | None) -> None:
    n = strategy.num_replicas_in_sync
    scores = Scores(loss=np.ones(3), other=Scores(count=np.arange(2)))
    reduced = strategy.reduce("SUM", scores, axis=axis)
    assert (type(reduced), type(reduced["other"])) == (Scores, Scores)
    np.testing.assert_array_equal(reduced["loss"], n * scores["loss"].sum(axis) if axis == 0 else n * scores["loss"])
    np.testing.assert_array_equal(reduced["other"]["count"], [0, n] if axis is None else n)
    gathered = strategy.gather(scores, axis=0)
    assert type(gathered) is Scores
    assert gathered["loss"].shape == (3 * n,)
    assert type(strategy.run(lambda: here().all_reduce("SUM", scores))) is Scores


@pytest.mark.parametrize("axis", [None, 1.0, True, "0"])
def test_an_axis_is_an_int(strategy: ArenaStrategy, axis: Any) -> None:
    last = strategy.communicator.rank == strategy.communicator.size - 1
    with pytest.raises(TypeError, match=f"`axis` must be an int.* got {type(axis).__name__}: "):
        strategy.gather(np.ones((2, 2)), axis=axis if last else 0)
    with pytest.raises(TypeError, match="`axis` must be an int"):
        strategy.run(lambda: here().all_gather(np.ones((2, 2)), axis=axis))


def test_objects(strategy: ArenaStrategy) -> None:
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    value = {"rank": rank, "text": "x" * rank, "nothing": None}
    expected = [{"rank": r, "text": "x" * r, "nothing": None} for r in range(n)]
    assert strategy.run(lambda: here().all_gather_object(value)) == expected
    assert strategy.gather_object(value) == expected
    with pytest.raises(RuntimeError, match="cross-replica"):
        strategy.run(lambda: strategy.gather_object(1))
    last = n - 1
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="pickl") as caught:
        strategy.gather_object((lambda: 1) if rank == last else 1)
    assert n == 1 or is_shared(caught.value)


def test_the_mean_of_halves_does_not_overflow(strategy: ArenaStrategy) -> None:
    mean = strategy.reduce("MEAN", np.full(1000, 100, "float16"), axis=0)
    assert (mean, mean.dtype) == (100, np.float16)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_halves_along_an_axis_are_rounded_once(strategy: ArenaStrategy, dtype: str) -> None:
    half = named_dtype(dtype)
    n = strategy.num_replicas_in_sync
    # 2048 + 1 is 2048 in float16, and 256 + 1 is 256 in bfloat16.
    for shape in [(4000,), (4000, 1), (2, 2000)]:
        total = strategy.reduce("SUM", np.ones(shape, half), axis=range(len(shape)))
        assert (total, total.dtype) == (np.float32(4000 * n).astype(half), half)


@pytest.mark.keeps_memory
@settings(max_examples=amount(25, 2000), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_axes_and_sizes(communicator: Communicator, data: st.DataObject) -> None:
    strategy = _shared_strategy(communicator)
    n, rank = strategy.num_replicas_in_sync, strategy.communicator.rank
    ndim = data.draw(st.integers(1, 3))
    shape = data.draw(st.lists(st.integers(1, 3), min_size=ndim, max_size=ndim))
    axes = data.draw(st.lists(st.integers(0, ndim - 1), min_size=1, max_size=ndim, unique=True))
    lengths = data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    every = []
    for r in range(n):
        shape[axes[0]] = lengths[r]
        every.append(np.random.default_rng(r).integers(-5, 5, shape).astype("float64"))
    whole = np.concatenate(every, axes[0])
    written = [axis - ndim if data.draw(st.booleans()) else axis for axis in axes]
    given_axis: Any = written[0] if len(written) == 1 else data.draw(st.sampled_from([tuple(written), written]))
    np.testing.assert_allclose(strategy.reduce("SUM", every[rank], axis=given_axis), whole.sum(tuple(axes)))
    if whole.size:
        np.testing.assert_allclose(strategy.reduce("MEAN", every[rank], axis=given_axis), whole.mean(tuple(axes)))
        np.testing.assert_allclose(strategy.reduce("MAX", every[rank], axis=given_axis), whole.max(tuple(axes)))
    np.testing.assert_array_equal(strategy.gather(every[rank], axis=written[0]), whole)


_made: dict[int, ArenaStrategy] = {}


def _shared_strategy(communicator: Communicator) -> ArenaStrategy:
    if id(communicator) not in _made:
        _made[id(communicator)] = make_strategy(communicator, "node")
    return _made[id(communicator)]


@pytest.mark.parametrize("op", ["SUM", "MEAN", "PROD"])
@pytest.mark.parametrize("axis", [None, 0])
def test_booleans_have_no_sum(strategy: ArenaStrategy, op: str, axis: int | None) -> None:
    with pytest.raises(TypeError, match=f"{op} of booleans is not defined"):
        strategy.reduce(op, np.array([True, False]), axis=axis)


@pytest.mark.parametrize(("op", "identity"), [("MIN", True), ("MAX", False)])
def test_a_replica_without_booleans_does_not_decide(strategy: ArenaStrategy, op: str, identity: bool) -> None:
    rank, n = strategy.communicator.rank, strategy.num_replicas_in_sync
    for value in (True, False):
        # Only the last replica has rows.
        mine = np.full((3 if rank == n - 1 else 0, 2), value)
        result = strategy.reduce(op, mine, axis=0)
        assert result.dtype == bool
        assert result.tolist() == [value, value]
    nobody = strategy.reduce(op, np.zeros((0, 2), bool), axis=0)
    assert nobody.dtype == bool
    assert nobody.tolist() == [identity, identity]
    assert strategy.reduce(op, np.zeros((0, 2), bool), axis=None).shape == (0, 2)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_kinds_of_arrays_with_sums_of_their_own(communicator: Communicator) -> None:
    strategy = ArenaStrategy(communicator)
    n = communicator.size
    matrix = np.matrix([[1.0, 2.0], [3.0, 4.0]])
    assert strategy.reduce("SUM", matrix, axis=0).tolist() == [4 * n, 6 * n]
    unmasked = np.ma.array(np.ones((4, 2)))
    assert strategy.reduce("MEAN", unmasked, axis=0).tolist() == [1, 1]
    masked = np.ma.array(np.ones((4, 2)), mask=[[False, True]] * 4)
    for axis in (0, None):
        # Its own sum leaves out what a mean would count.
        with pytest.raises(TypeError, match="4 numbers are masked"):
            strategy.reduce("MEAN", masked, axis=axis)
    with pytest.raises(TypeError, match="4 numbers are masked"):
        strategy.gather(masked, axis=0)
    assert strategy.reduce("SUM", 1, axis=None) == n
