"""Sharded variables and tables in one process that is chief, worker and server, against NumPy on one array."""

from __future__ import annotations

import functools
import math
import operator
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.checkpoint.file.layout import PAGE_BYTES
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.experimental import partitioners
from mpidist.parameter_server.options import ServerOptions
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.variables.kinds.sharded import ShardedVariable
from mpidist.variables.making.initial import ShardedInitial, ShardInfo
from tests.helpers.amounts import amount
from tests.optimizers import WITH_ROWS
from tests.parallel.serving.test_parameter_server import CLIPPED_BY_NORM, MAKERS, WITH_OPTIONS

KINDS = {
    "add": np.add.at, "sub": np.subtract.at, "mul": np.multiply.at, "div": np.true_divide.at, "min": np.minimum.at,
    "max": np.maximum.at,
}


class Partitioned:
    """A strategy whose partitioner is chosen variable by variable."""

    def __init__(self) -> None:
        self.shards = 1
        self.strategy = ParameterServerStrategy(
            variable_partitioner=lambda shape, _: [self.shards, *(1 for _ in shape[1:])],  # type: ignore[arg-type]
            options=ServerOptions(heap_bytes=1 << 28),
        )
        self.coordinator = ClusterCoordinator(self.strategy)

    def make(self, value: Any, shards: int, **options: Any) -> Any:
        self.shards = shards
        with self.strategy.scope():
            return mpidist.Variable(value, **options)

    def run(self, function: Any, *args: Any) -> Any:
        return self.coordinator.schedule(function, args).fetch()


@pytest.fixture(scope="module")
def servers() -> Iterator[Partitioned]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TF_CONFIG", raising=False)
        made = Partitioned()
        with made.strategy:
            yield made


def array(rows: int, *width: int) -> Any:
    return np.random.default_rng(rows).integers(-9, 9, (rows, *width)).astype(np.float64)


INDICES = st.one_of(
    st.integers(-7, 6), st.slices(7), st.just(...), st.none(), st.lists(st.integers(-7, 6), max_size=4).map(np.array),
    st.lists(st.booleans(), min_size=7, max_size=7).map(np.array),
    st.tuples(st.integers(-7, 6), st.slices(3)), st.tuples(st.slices(7), st.integers(-3, 2)),
    st.tuples(st.just(...), st.integers(-3, 2)), st.tuples(st.none(), st.slices(7)), st.just(()),
    st.tuples(st.slices(7), st.none(), st.just(...)),
)


@settings(max_examples=amount(60, 2000), deadline=None)
@given(st.integers(1, 9), st.booleans(), INDICES, st.booleans())
def test_every_form_of_index(servers: Partitioned, shards: int, is_table: bool, key: Any, in_function: bool) -> None:
    if isinstance(key, np.ndarray) and not key.size:
        key = key.astype(int)
    expected = array(7, 3)
    variable = servers.make(expected, shards, sparse_gradient=is_table)
    found = servers.run(lambda: variable[key]) if in_function else variable[key]
    assert np.array_equal(found, expected[key])
    assert np.shape(found) == np.shape(expected[key])


def test_indices_that_are_none(servers: Partitioned) -> None:
    variable = servers.make(array(7, 3), 3, name="table")
    for key in (7, -8):
        with pytest.raises(IndexError, match=rf"row {key} of variable 'table' of shape \(7, 3\) is out of bounds"):
            variable[key]
    with pytest.raises(ValueError, match="slice step cannot be zero"):
        variable[::0]
    for pair in ((0, 3), (slice(None), 3)):
        with pytest.raises(IndexError, match="out of bounds"):
            variable[pair]


@settings(max_examples=amount(60, 2000), deadline=None)
@given(
    st.integers(1, 9), st.booleans(), st.booleans(),
    st.lists(
        st.tuples(st.sampled_from([*KINDS, "update", "assign", "assign_add", "read"]),
                  st.lists(st.integers(0, 6), max_size=5)),
        max_size=6,
    ),
)
@example(2, True, True, [("add", [1, 5]), ("read", [5, 1, 2])])
@example(2, True, True, [("update", [1, 5]), ("add", [5]), ("read", [5, 1, 2])])
@example(1, True, True, [("add", [1]), ("read", [2]), ("add", [5]), ("read", [5]), ("update", [1]), ("read", [1])])
@example(1, True, True, [("add", [1]), ("assign_add", []), ("update", [5]), ("add", [5]), ("read", [5, 1])])
def test_writes_of_rows_in_any_order(
    servers: Partitioned, shards: int, is_table: bool, in_function: bool, writes: list[tuple[str, list[int]]]
) -> None:
    """What a function has written it reads; what it has written counts once."""
    variable = servers.make(array(7, 3), shards, sparse_gradient=is_table)

    def act() -> list[Any]:
        found = []
        for number, (kind, rows) in enumerate(writes):
            values = np.arange(3 * len(rows)).reshape(len(rows), 3) + number + 1.0
            if kind == "read":
                found.append(variable.sparse_read(rows))
            elif kind.startswith("assign"):
                getattr(variable, kind)(np.full((7, 3), number + 1.0))
            else:
                getattr(variable, f"scatter_{kind}")(mpidist.IndexedSlices(values, np.array(rows, int)))
        return found

    found = servers.run(act) if in_function else act()
    expected = array(7, 3)
    for number, (kind, rows) in enumerate(writes):
        values = np.arange(3 * len(rows)).reshape(len(rows), 3) + number + 1.0
        if kind == "read":
            np.testing.assert_allclose(found.pop(0), expected[rows].reshape(len(rows), 3), rtol=1e-12)
        elif kind == "assign":
            expected[...] = number + 1.0
        elif kind == "assign_add":
            expected += number + 1.0
        elif kind == "update":
            expected[rows] = values
        else:
            KINDS[kind](expected, rows, values)
    np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-12)


def test_a_sharded_variable_is_an_array(servers: Partitioned) -> None:
    expected = array(7, 3)
    variable: Any = servers.make(expected, 3, name="table")
    assert type(variable) is ShardedVariable is mpidist.ShardedVariable
    assert isinstance(variable, mpidist.Variable)
    assert [one.name for one in variable.variables] == ["table/part_0", "table/part_1", "table/part_2"]
    assert [one.shape for one in variable] == [(3, 3), (2, 3), (2, 3)], "iteration is over the shards"
    assert (variable.shape, variable.dtype.name, len(variable), variable.ndim) == ((7, 3), "float64", 7, 2)
    assert variable.is_sharded_variable
    for call in (operator.add, operator.mul, operator.sub):
        assert np.array_equal(call(variable, 2), call(expected, 2))
    assert np.array_equal(np.ones((2, 7)) @ variable, np.ones((2, 7)) @ expected)
    assert np.array_equal(np.asarray(variable), expected)
    with pytest.raises(ValueError, match=r"'table': expected a value of shape \(7, 3\), got \(8, 3\)"):
        variable.assign(np.ones((8, 3)))
    with pytest.raises(ValueError, match=r"'table': expected a value of shape \(7, 3\), got \(6, 3\)"):
        variable.assign_add(np.ones((6, 3)))
    variable.assign_sub(np.ones((7, 3)))
    assert np.array_equal(variable.read_value(), expected - 1)
    with pytest.raises(ValueError, match="'table': expected indices from 0 to 6, got 0 to 7"):
        variable.scatter_add(mpidist.IndexedSlices(np.ones((2, 3)), np.array([0, 7])))


def test_a_sharded_variable_of_what_does_not_fit(servers: Partitioned) -> None:
    first, other, wide, plain = (servers.make(value, 1) for value in (
        np.ones((2, 2)), np.ones((3, 2), np.float32), np.ones((2, 3)), np.ones((4, 2))
    ))
    wrong_lists: tuple[Any, ...] = ([], None, [np.ones(2)], first, [mpidist.Variable(1.0)])
    for given_list in wrong_lists:
        with pytest.raises(TypeError, match=r"expected .* of parameter servers as shards"):
            ShardedVariable(given_list)
    for wrong in (other, wide, servers.make(1.0, 1)):
        with pytest.raises(ValueError, match="expected shards of 'all' of one dtype, whose shapes differ in the first"):
            ShardedVariable([first, wrong], "all")
    whole = ShardedVariable([first, plain], "all")
    assert whole.shape == (6, 2)
    assert plain.whole is whole
    with pytest.raises(ValueError, match="is a shard of 'all' already"):
        ShardedVariable([plain])


def test_what_is_not_cut(servers: Partitioned) -> None:
    assert servers.make(1.0, 3).parts[0].shape == ()
    assert not isinstance(servers.make(np.ones(1), 3), ShardedVariable)
    assert not isinstance(servers.make(np.ones((0, 3)), 3), ShardedVariable)
    metric = servers.make(np.zeros(4), 3, synchronization="ON_READ", aggregation="SUM")
    assert not isinstance(metric, ShardedVariable)
    whole = servers.make(np.ones(4), 2)
    with servers.strategy.scope(), servers.strategy.extended.colocate_vars_with(whole):
        assert not isinstance(mpidist.Variable(np.ones(4)), ShardedVariable)


def test_initial_values_shard_by_shard(servers: Partitioned) -> None:
    asked: list[Any] = []

    def by_info(shard_info: Any) -> Any:
        asked.append(tuple(shard_info))
        return shard_info.offset[0] + np.arange(shard_info.shape[0] * 2.0).reshape(shard_info.shape)

    def names(partition_shape: Any, partition_offset: Any) -> Any:
        asked.append((partition_shape, partition_offset))
        return np.full(partition_shape, partition_offset[0])

    by_names: Any = names

    made = servers.make(by_info, 2, shape=(5, 2), dtype="float64")
    assert asked == [((3, 2), (0, 0)), ((2, 2), (3, 0))]
    assert np.array_equal(made, [[0, 1], [2, 3], [4, 5], [3, 4], [5, 6]])
    assert np.array_equal(servers.make(by_names, 2, shape=(5,), dtype="float32"), [0, 0, 0, 3, 3])
    # Outside of the strategy there is one shard, the whole.
    asked.clear()
    assert np.array_equal(mpidist.Variable(by_names, shape=(3,), dtype="float32"), [0, 0, 0])
    assert asked == [((3,), (0,))]
    for value in (lambda: np.arange(5.0), np.arange(5.0)):
        assert np.array_equal(servers.make(value, 3, shape=(5,), dtype="float64"), np.arange(5))
    with pytest.raises(ValueError, match=r"'bad': expected an initial value of shape \(2,\), .* got \(3,\)"):
        mpidist.Variable(np.ones(3), shape=(2,), name="bad")
    with pytest.raises(TypeError, match="'bad': `shape` must be a tuple of sizes, got 'a'"):
        mpidist.Variable(1.0, shape="a", name="bad")  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("shape", [(11, 3), (7,), (5, 2, 3), (0, 4)], ids=str)
@pytest.mark.parametrize("make", [
    lambda seed: mpidist.initializers.Constant(0.5 + seed),
    lambda seed: mpidist.initializers.RandomUniform(-1, 2, seed),
    lambda seed: mpidist.initializers.RandomNormal(1, 2, seed),
], ids=["constant", "uniform", "normal"])
def test_initializers_do_not_know_shards(servers: Partitioned, make: Any, shape: tuple[int, ...]) -> None:
    whole = mpidist.Variable(make(3), shape=shape, dtype="float32").numpy()
    for shards in (1, 2, 3, 5):
        made = servers.make(make(3), shards, shape=shape, dtype="float32", sparse_gradient=shards > 2)
        assert np.array_equal(made.numpy(), whole)
    other = mpidist.Variable(make(4), shape=shape, dtype="float32").numpy()
    assert not whole.size or not np.array_equal(other, whole)


def test_initializers_draw_from_their_distributions() -> None:
    drawn = [
        np.asarray(mpidist.Variable(make, shape=(400, 100), dtype="float64")) for make in (
            mpidist.initializers.RandomUniform(-1, 3, seed=5), mpidist.initializers.RandomNormal(1, 2, seed=5)
        )
    ]
    uniform, normal = (np.sort(one.ravel()) for one in drawn)
    # The distance between the distributions (Kolmogorov 1933) is above 0.01 in one of 1400 samples of this size.
    shares = (np.arange(uniform.size) + 0.5) / uniform.size
    assert np.abs((uniform + 1) / 4 - shares).max() < 0.01
    expected = np.array([0.5 * (1 + math.erf((one - 1) / 2 / math.sqrt(2))) for one in normal])
    assert np.abs(expected - shares).max() < 0.01
    for values in drawn:
        rows = np.corrcoef(values)
        assert np.abs(rows[~np.eye(400, dtype=bool)]).max() < 0.6, "no two rows are alike"


@pytest.mark.parametrize("shape", [(1 << 15, 64), (3, 700_001), (2_100_000,), ()], ids=str)
@pytest.mark.parametrize("make", [mpidist.initializers.RandomUniform, mpidist.initializers.RandomNormal])
def test_random_values_are_made_with_little_memory_beside_them(make: Any, shape: tuple[int, ...]) -> None:
    offset = (5, 0)[: len(shape)]
    initial = ShardedInitial(make(seed=5), shape, "float32", "table")
    tracemalloc.start()
    try:
        value = np.asarray(initial.shard(shape, offset))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A row of the second shape is a piece of its own.
    assert peak < value.nbytes + (64 << 20) * (shape[:1] == (3,)) + (20 << 20), f"{peak >> 20} MB"
    assert np.array_equal(value, make(seed=5)(ShardInfo(shape, offset)).astype("float32"))


def test_wrong_arguments_of_initializers() -> None:
    with pytest.raises(ValueError, match="`maxval` must not be below `minval`, got 0 and 1"):
        mpidist.initializers.RandomUniform(1, 0)
    with pytest.raises(ValueError, match="`stddev` must not be negative, got -1"):
        mpidist.initializers.RandomNormal(stddev=-1)
    with pytest.raises(ValueError, match=r"`seed` must be below 2\*\*128"):
        mpidist.initializers.RandomNormal(seed=1 << 128)


@pytest.mark.parametrize("name", [*WITH_ROWS, *WITH_OPTIONS, *CLIPPED_BY_NORM])
@pytest.mark.parametrize("shards", [1, 3])
def test_rows_are_updated_as_in_one_process(servers: Partitioned, name: str, shards: int) -> None:
    start, rng = array(11, 3), np.random.default_rng(7)
    sizes = [5, 0, 3, 11]
    steps = [(rng.normal(size=(size, 3)), rng.integers(0, 11, size)) for size in sizes]
    one = mpidist.Variable(start, sparse_gradient=True)
    make = MAKERS[name]
    alone = make()
    table = servers.make(start, shards, sparse_gradient=True)
    there = make()
    there.build([table])

    def step(values: Any, rows: Any) -> None:
        there.apply_gradients([(mpidist.IndexedSlices(values, rows), table)])

    for values, rows in steps:
        alone.apply_gradients([(mpidist.IndexedSlices(values, rows), one)])
        servers.run(step, values, rows)
        assert np.array_equal(table.numpy(), one.numpy())
    assert there.iterations == alone.iterations == len(steps)
    for mine, other in zip(there.variables, alone.variables, strict=True):
        assert np.array_equal(mine.numpy(), other.numpy())


@pytest.mark.parametrize("clips", [{"clipnorm": 0.5}, {"global_clipnorm": 0.5}, {"clipvalue": 0.1}], ids=str)
def test_gradients_of_shards_and_of_the_whole_are_the_same(servers: Partitioned, clips: dict[str, Any]) -> None:
    gradient = np.random.default_rng(3).normal(size=(7, 3))
    wholes = [servers.make(array(7, 3), shards) for shards in (1, 3, 3)]
    optimizers = [mpidist.optimizers.Adam(0.1, **clips) for _ in wholes]
    optimizers[0].build([wholes[0]])
    optimizers[1].build([wholes[1]])
    # As a module lists them.
    optimizers[2].build(wholes[2].variables)
    assert list(optimizers[2].built_on) == [wholes[2]]

    def step() -> None:
        for optimizer, whole in zip(optimizers[:2], wholes, strict=False):
            optimizer.apply_gradients([(gradient, whole)])
        cut = [gradient[:3], gradient[3:5], gradient[5:]]
        optimizers[2].apply_gradients(zip(cut, wholes[2].variables, strict=True))

    servers.run(step)
    for other in wholes[1:]:
        np.testing.assert_allclose(other.numpy(), wholes[0].numpy(), rtol=1e-14)


def test_some_shards_have_a_gradient(servers: Partitioned) -> None:
    whole = servers.make(np.zeros((7, 3)), 3)
    optimizer = mpidist.optimizers.SGD(1.0)
    optimizer.build([whole])
    first, second, third = whole.variables

    def step(pairs: Any) -> None:
        optimizer.apply_gradients(pairs)

    servers.run(step, [(None, first), (np.ones((2, 3)), second), (None, third)])
    assert whole.numpy().sum(axis=1).tolist() == [0, 0, 0, -3, -3, 0, 0]
    for pairs, text in (
        ([(np.ones((2, 3)), second)] * 2, "'.*/part_1' appears twice in the list"),
        ([(np.ones((2, 3)), second), (np.ones((7, 3)), whole)], "is in the list, and so are shards of it"),
        ([(np.ones((3, 3)), second)], r"expected a value of shape \(2, 3\), got \(3, 3\)"),
    ):
        with pytest.raises(ValueError, match=text):
            servers.coordinator.schedule(step, (pairs,), on_error="keep").fetch()
    assert optimizer.iterations == 1


def test_gradients_of_a_table_that_do_not_fit(servers: Partitioned) -> None:
    table = servers.make(array(7, 3), 3, sparse_gradient=True, name="table")
    optimizer = mpidist.optimizers.SGD(1.0)
    optimizer.build([table])

    def step(gradient: Any) -> None:
        optimizer.apply_gradients([(gradient, table)])

    for gradient, error, text in (
        (np.ones((7, 3)), TypeError, "sparse_gradient=True: expected IndexedSlices as its gradient, got ndarray"),
        (mpidist.IndexedSlices(np.ones((1, 3)), np.array([7])), ValueError, "'table': expected indices from 0 to 6"),
        (mpidist.IndexedSlices(np.ones((1, 2)), np.array([0])), ValueError, "'table': expected rows of an array"),
    ):
        with pytest.raises(error, match=text):
            servers.coordinator.schedule(step, (gradient,), on_error="keep").fetch()

    def read_after() -> Any:
        optimizer.apply_gradients([(mpidist.IndexedSlices(np.ones((1, 3)), np.array([0])), table)])
        return table.sparse_read([0])

    with pytest.raises(RuntimeError, match="has applied gradients of optimizer 'SGD' to a variable, and reads it"):
        servers.coordinator.schedule(read_after, on_error="keep").fetch()
    for refused in (mpidist.optimizers.LAMB(), mpidist.optimizers.LARS(), mpidist.optimizers.SGD(use_ema=True)):
        with pytest.raises(ValueError, match="updates only the rows with a gradient of variable 'table'"):
            refused.build([table])
    with pytest.raises(ValueError, match="ON_READ"):
        servers.make(np.zeros(3), 1, synchronization="ON_READ", sparse_gradient=True)
    with pytest.raises(ValueError, match="sparse_gradient=True is for variables of at least one dimension"):
        servers.make(1.0, 1, sparse_gradient=True)


class Model(mpidist.Module):
    """A table and a dense variable."""

    def __init__(self, value: Any, make: Any) -> None:
        self.table = make(value, sparse_gradient=True)
        self.dense = make(value)


@pytest.mark.parametrize("rows", [5, 1000, 100_000], ids=["in one page", "in few pages", "in many pieces"])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 5), (4, 0), (0, 4)])
def test_saved_as_one_variable_and_restored_in_other_shards(
    servers: Partitioned, tmp_path: Path, rows: int, before: int, after: int
) -> None:
    """Zero shards: a variable of no server."""
    assert (rows * 3 * 8 > PAGE_BYTES) == (rows > 5)
    start = np.arange(3.0 * rows).reshape(rows, 3)

    def program(shards: int, value: Any) -> Any:
        make = functools.partial(servers.make, shards=shards) if shards else mpidist.Variable
        model, optimizer = Model(value, make), mpidist.optimizers.Adam(0.5)
        optimizer.build([model.table, model.dense])

        def step() -> None:
            chosen = np.array([0, rows - 1, rows // 2, 0])
            rows_of = mpidist.IndexedSlices(np.ones((4, 3)), chosen)
            optimizer.apply_gradients([(rows_of, model.table), (np.ones((rows, 3)), model.dense)])

        return model, optimizer, lambda: servers.run(step) if shards else step()

    model, optimizer, step = program(before, start)
    step()
    path = mpidist.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "c")
    other, its, other_step = program(after, np.zeros((rows, 3)))
    mpidist.Checkpoint(model=other, optimizer=its).restore(path)
    for _ in range(2):
        for mine, copied in zip(
            (model.table, model.dense, *optimizer.variables), (other.table, other.dense, *its.variables), strict=True
        ):
            assert np.array_equal(mine.numpy(), copied.numpy())
        assert optimizer.iterations == its.iterations
        step()
        other_step()


@pytest.mark.parametrize("shards", [1, 3])
def test_a_step_moves_its_rows_alone(servers: Partitioned, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of a step do not depend on the size of the table."""
    moved: list[int] = []
    chief = servers.strategy.chief
    assert chief is not None
    window = chief.station.window
    for name in ("get", "put"):
        def counted(call: Any, rank: int, offset: int, given_array: Any) -> None:
            moved.append(given_array.nbytes)
            call(rank, offset, given_array)

        monkeypatch.setattr(window, name, functools.partial(counted, getattr(window, name)))

    def bytes_of(rows: int) -> int:
        table = servers.make(np.zeros((rows, 8)), shards, sparse_gradient=True)
        optimizer = mpidist.optimizers.Adam(0.1)
        optimizer.build([table])

        def step() -> None:
            ids = np.array([rows - 1, 0, rows // 2, 0])
            found = mpidist.embedding_lookup(table, ids)
            optimizer.apply_gradients([(mpidist.embedding_gradient(table, ids, found + 1), table)])

        servers.run(step)
        moved.clear()
        servers.run(step)
        return sum(moved)

    assert bytes_of(60) < 4096
    assert abs(bytes_of(60_000) - bytes_of(600_000)) < 64


def test_arguments_of_a_partitioner() -> None:
    with pytest.raises(ValueError, match=r"`variable_partitioner` must be a function of shape and dtype, .* got 3"):
        ParameterServerStrategy(variable_partitioner=3)  # type: ignore[arg-type]  # that is the point
    assert partitioners.FixedShardsPartitioner(2)((4, 4), "float32") == [2, 1]
