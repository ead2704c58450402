"""`reproducible=True`: reductions and steps have the bits of one tree over the ranks, wherever they stand."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpidist import optimizers
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic.tree_order import leaves, pairing
from mpidist.comm.backends.tree import GATHERED_BYTES, TreeBackend
from mpidist.comm.choice import selection
from mpidist.comm.choice.table import BACKENDS
from mpidist.comm.collective import Collective
from mpidist.comm.group.communicator import Communicator
from mpidist.indexed_slices import IndexedSlices
from mpidist.optimizers.optimizer import Optimizer
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.strategy.default import Variable
from mpidist.testing.contract import CollectiveContract
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import LAYOUTS, lay_out, refuse_shared

pytestmark = pytest.mark.mpi

NAMES = ["AUTO", *(one.name for one, row in BACKENDS.items() if row.takes_host_arrays)]


class TestContract(CollectiveContract):
    """What every collective keeps."""

    # More than a block of integers, and no more: messages are small here, and ranks share cores.
    large = 140_001

    @pytest.fixture(params=NAMES)
    def collective(self, request: pytest.FixtureRequest, communicator: Communicator) -> Collective:
        options = CommunicationOptions(implementation=request.param, bytes_per_pack=1 << 14, reproducible=True)
        return selection.choose(communicator, options)


@functools.lru_cache(128)
def random_array(rank: int, dtype: np.dtype[Any], size: int) -> AnyArray:
    """Numbers of different sizes, so that another order gives other bits. Drawn once for all tests."""
    random = np.random.default_rng(rank)
    array: AnyArray = random.normal(size=size) * 10.0 ** random.integers(-2, 2, size)
    if dtype.kind == "c":
        array = array + 1j * random.normal(size=size)
    array = array.astype(dtype)
    array.flags.writeable = False
    return array


def tree_of(arrays: list[AnyArray], function: Any) -> AnyArray:
    """By NumPy on one rank: halves in float32, rounded once."""
    dtype = arrays[0].dtype
    wide = [array.astype(np.float32) if dtype.itemsize == 2 else array.copy() for array in arrays]
    for left, right in pairing(leaves(len(wide))):
        wide[left] = function(wide[left], wide[right])
    return wide[0].astype(dtype)


@pytest.mark.parametrize("dtype_name", ["float16", "bfloat16", "float32", "float64", "complex64"])
@pytest.mark.parametrize("layout", ["node", "each", "first", "last", "pairs"])
def test_the_bits_are_those_of_the_tree_on_any_backend_and_nodes(
    communicator: Communicator, layout: str, dtype_name: str
) -> None:
    if dtype_name == "bfloat16" and importlib.util.find_spec("ml_dtypes") is None:
        pytest.skip("bfloat16 comes from ml_dtypes")
    dtype: np.dtype[Any] = (
        np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if dtype_name == "bfloat16" else np.dtype(dtype_name)
    )
    ranks = lay_out(communicator, layout)
    for backend in ("AUTO", "MPI", "RING"):
        for pack in (0, 4096):
            options = CommunicationOptions(implementation=backend, bytes_per_pack=pack, reproducible=True)
            collective = selection.choose(ranks, options)
            for size in (3, GATHERED_BYTES // dtype.itemsize + 7):
                arrays = [random_array(rank, dtype, size) for rank in range(ranks.size)]
                mine = arrays[ranks.rank]
                expected = tree_of(arrays, np.add)
                assert collective.all_reduce(mine).tobytes() == expected.tobytes()
                assert collective.all_reduce(mine.copy(), in_place=True).tobytes() == expected.tobytes()
                part = np.array_split(expected, ranks.size)[ranks.rank]
                assert collective.reduce_scatter(mine).tobytes() == part.tobytes()
                root = ranks.size - 1
                reduced = collective.reduce(mine, root=root)
                assert reduced is None if ranks.rank != root else reduced.tobytes() == expected.tobytes()  # type: ignore[union-attr]
                if dtype.kind == "f" and dtype.itemsize > 2:
                    product = collective.all_reduce(mine, ReduceOp.PROD)
                    assert product.tobytes() == tree_of(arrays, np.multiply).tobytes()
                    mean = collective.all_reduce(mine, ReduceOp.MEAN)
                    assert mean.tobytes() == (expected / dtype.type(ranks.size)).tobytes()


@pytest.mark.mpi(min_size=4)
def test_the_order_of_the_ranks_alone_gives_other_bits(communicator: Communicator) -> None:
    """The test above can fail: what it tells apart is there in these numbers."""
    arrays = [random_array(rank, np.dtype(np.float32), 1000) for rank in range(communicator.size)]
    in_order = arrays[0].copy()
    for array in arrays[1:]:
        in_order += array
    assert in_order.tobytes() != tree_of(arrays, np.add).tobytes()


def test_it_is_there_only_when_asked_for(communicator: Communicator) -> None:
    plain = selection.choose(communicator, CommunicationOptions())
    asked = selection.choose(communicator, CommunicationOptions(reproducible=True))
    assert not isinstance(plain.backend, TreeBackend)
    assert isinstance(asked.backend, TreeBackend) == (communicator.size > 1)


def make_strategy(communicator: Communicator, layout: str, *, reproducible: bool = True) -> ArenaStrategy:
    """As `layouts.make_strategy`, with reproducible sums."""
    options = CommunicationOptions(reproducible=reproducible, bytes_per_pack=1 << 14 if layout == "chunks" else 0)
    shared = False if layout == "private" else None
    strategy = ArenaStrategy(lay_out(communicator, layout), options=options, shared=shared)
    if layout == "full":
        strategy.arena.reserve = refuse_shared(strategy.arena)  # type: ignore[method-assign]
    return strategy


OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "SGD": lambda: optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: optimizers.Adam(0.01),
    "Adam clipnorm": lambda: optimizers.Adam(0.01, clipnorm=0.5),
    "SGD global_clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.5),
    "LAMB": lambda: optimizers.LAMB(0.01),
    "LARS": lambda: optimizers.LARS(0.1),
}
SHAPES = [(3,), (70, 50), (70_000,), (17,)]


def train(strategy: ArenaStrategy, make: Callable[[], Optimizer], *, is_summed: bool) -> bytes:
    """The parameters and state after some steps."""
    initial = [np.linspace(-1, 1, int(np.prod(shape)), dtype="float32").reshape(shape) for shape in SHAPES]
    with strategy.scope():
        variables = [Variable(array) for array in initial]
    optimizer = make()
    ranks = strategy.communicator
    for step in range(3):
        gradients = []
        for number, shape in enumerate(SHAPES):
            size = int(np.prod(shape))
            arrays = [random_array(100 * step + 10 * number + r, np.dtype("f"), size) for r in range(ranks.size)]
            one = tree_of(arrays, np.add) if is_summed else arrays[ranks.rank]
            gradients.append(one.reshape(shape))
        optimizer.apply_gradients(zip(gradients, variables, strict=True), skip_gradients_aggregation=is_summed)
    return b"".join(v.numpy().tobytes() for v in [*variables, *optimizer.variables])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_has_the_same_bits_in_every_layout(communicator: Communicator, name: str) -> None:
    expected = train(make_strategy(communicator, "private"), OPTIMIZERS[name], is_summed=False)
    for layout in LAYOUTS:
        # Nothing is summed where layouts differ: two of them do.
        for is_summed in (False, True) if layout in ("node", "full") else (False,):
            result = train(make_strategy(communicator, layout), OPTIMIZERS[name], is_summed=is_summed)
            assert result == expected, (layout, is_summed)


def test_half_precision_gradients_are_rounded_once(communicator: Communicator) -> None:
    arrays = [random_array(rank, np.dtype(np.float16), 999) for rank in range(communicator.size)]
    expected = (np.zeros(999, np.float16) - tree_of(arrays, np.add)).tobytes()
    for layout in LAYOUTS:
        strategy = make_strategy(communicator, layout)
        with strategy.scope():
            variable = Variable(np.zeros(999, np.float16))
        optimizers.SGD(1.0).apply_gradients([(arrays[communicator.rank], variable)])
        assert variable.numpy().tobytes() == expected, layout


@pytest.mark.parametrize("is_summed", [False, True])
def test_rows_with_norms_have_the_same_bits_in_every_layout(communicator: Communicator, is_summed: bool) -> None:
    results = []
    for layout in LAYOUTS:
        strategy = make_strategy(communicator, layout)
        with strategy.scope():
            table = Variable(np.ones((5000, 20), np.float32), sparse_gradient=True)
        optimizer = optimizers.SGD(0.1, global_clipnorm=0.5)
        for step in range(2):
            seed = step if is_summed else 10 * step + strategy.communicator.rank
            rows = np.random.default_rng(seed).integers(0, 5000, 4000)
            values = random_array(seed, np.dtype("f"), 4000 * 20).reshape(4000, 20)
            pairs = [(IndexedSlices(values, rows, (5000, 20)), table)]
            optimizer.apply_gradients(pairs, skip_gradients_aggregation=is_summed)
        results.append(table.numpy().tobytes())
    assert len(set(results)) == 1
