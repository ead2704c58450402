"""Compiled updates in a step: the bits of NumPy's, in every layout of memory, on all ranks or on some of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic import compiled_sums, compiler
from mpidist.comm.group.communicator import Communicator
from mpidist.indexed_slices import IndexedSlices
from mpidist.optimizers import LAMB, SGD, Adam, AdamW, Optimizer
from mpidist.options import CommunicationOptions
from mpidist.variables.update import compiled
from mpidist.variables.variable import BaseVariable
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import LAYOUTS, make_strategy

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        importlib.util.find_spec("llvmlite") is None, reason="needs llvmlite: pip install 'mpidist[fast]'"
    ),
]

SHAPES: tuple[tuple[int, ...], ...] = ((70, 50), (), (999,), (3, 4))
TABLE = (40, 8)
OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "SGD": lambda: SGD(0.1),
    "Adam": lambda: Adam(0.05),
    "AdamW, clipped by value": lambda: AdamW(0.05, 0.1, clipvalue=0.4, amsgrad=True),
    "momentum, clipped by norm": lambda: SGD(0.1, 0.9, nesterov=True, global_clipnorm=0.5),
    "average of the weights": lambda: Adam(0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "LAMB": lambda: LAMB(0.05),
    "accumulated": lambda: Adam(0.05, gradient_accumulation_steps=2),
}


@pytest.fixture
def count_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often compiled code ran on this rank; everything is large enough for it."""
    monkeypatch.setattr(compiled, "LEAST_BYTES", 0)
    monkeypatch.setattr(compiled, "LEAST_BLOCK_BYTES", 0)
    calls = 0
    compile_loop = compiled._compile

    class Counted:
        def __init__(self, code: Any) -> None:
            self.code = code

        def call(self, *arguments: Any) -> None:
            nonlocal calls
            calls += 1
            self.code.call(*arguments)

    monkeypatch.setattr(compiled, "_compile", lambda loop: Counted(compile_loop(loop)))
    return lambda: calls


def trained(strategy: ArenaStrategy, make: Callable[[], Optimizer], dtype: str, *, has_table: bool) -> list[AnyArray]:
    """Parameters after a few steps. Collective."""
    generator = np.random.default_rng(1)
    with strategy.scope():
        variables: list[BaseVariable] = [
            mpidist.Variable(generator.normal(size=shape).astype(dtype)) for shape in SHAPES
        ]
        if has_table:
            variables.append(mpidist.Variable(generator.normal(size=TABLE).astype(dtype), sparse_gradient=True))
    optimizer, rank = make(), strategy.communicator.rank
    for step in range(4):
        generator = np.random.default_rng((step, rank))
        gradients: list[Any] = [
            None if (step + number) % 4 == 3 else generator.normal(size=v.shape).astype(dtype)
            for number, v in enumerate(variables[: len(SHAPES)])
        ]
        if has_table:
            rows = np.unique(generator.integers(0, TABLE[0], 20))
            gradients.append(IndexedSlices(generator.normal(size=(len(rows), TABLE[1])).astype(dtype), rows, TABLE))
        strategy.run(optimizer.apply_gradients, args=(list(zip(gradients, variables, strict=True)),))
    return [variable.numpy().copy() for variable in variables]


def compare(
    make_one: Callable[[], ArenaStrategy], monkeypatch: pytest.MonkeyPatch, make: Callable[[], Optimizer], dtype: str,
    compiles: bool, *, has_table: bool,
) -> None:
    """Collective. `compiles`: whether this rank does."""
    monkeypatch.setenv(compiler.VARIABLE, "0")
    expected = trained(make_one(), make, dtype, has_table=has_table)
    monkeypatch.setenv(compiler.VARIABLE, "1" if compiles else "0")
    mine = trained(make_one(), make, dtype, has_table=has_table)
    for one, other in zip(mine, expected, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *((layout, "AdamW, clipped by value") for layout in LAYOUTS),
        *((layout, name) for layout in ("node", "first") for name in OPTIMIZERS if "AdamW" not in name),
    ],
)
def test_training_has_numpys_bits(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, count_calls: Callable[[], int], layout: str, name: str
) -> None:
    def make_one() -> ArenaStrategy:
        return make_strategy(communicator, layout)

    has_table = name not in ("LAMB", "average of the weights", "accumulated")
    compare(make_one, monkeypatch, OPTIMIZERS[name], "float32", compiles=True, has_table=has_table)
    assert count_calls()


@pytest.mark.parametrize("layout", ["node", "pairs"])
def test_ranks_may_differ_in_whether_they_compile(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, count_calls: Callable[[], int], layout: str
) -> None:
    compiles = communicator.rank % 2 == 0
    compare(
        lambda: make_strategy(communicator, layout), monkeypatch, OPTIMIZERS["Adam"], "float64", compiles,
        has_table=False,
    )
    assert (count_calls() > 0) is compiles


def test_reproducible_sums_keep_their_order(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, count_calls: Callable[[], int]
) -> None:
    def make_one() -> ArenaStrategy:
        return ArenaStrategy(communicator, options=CommunicationOptions(reproducible=True))

    compare(make_one, monkeypatch, OPTIMIZERS["Adam"], "float32", compiles=True, has_table=False)
    assert count_calls()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["momentum, clipped by norm", "LAMB"])
def test_sums_before_the_norms_have_numpys_bits(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, count_calls: Callable[[], int], layout: str, name: str
) -> None:
    monkeypatch.setattr(compiled_sums, "LEAST_BYTES", 0)
    # BLAS adds the squares up, in its order.
    monkeypatch.setattr(compiled_sums, "_squares", lambda char: None)
    sums, find = [], compiled_sums._sum

    def find_and_count(*key: Any) -> Any:
        sums.append(key)
        return find(*key)

    monkeypatch.setattr(compiled_sums, "_sum", find_and_count)
    compare(
        lambda: make_strategy(communicator, layout), monkeypatch, OPTIMIZERS[name], "float32", compiles=True,
        has_table=False,
    )
    assert count_calls()
    if layout == "node" and communicator.size >= 3:
        assert sums


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("name", ["momentum, clipped by norm", "LAMB"])
def test_norms_are_compiled_unless_their_bits_are_promised(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, count_calls: Callable[[], int], name: str,
    reproducible: bool,
) -> None:
    monkeypatch.setattr(compiled_sums, "LEAST_BYTES", 0)
    norms, find = [], compiled_sums._squares

    def find_and_count(char: str) -> Any:
        norms.append(char)
        return find(char)

    monkeypatch.setattr(compiled_sums, "_squares", find_and_count)

    def train() -> list[AnyArray]:
        strategy = ArenaStrategy(communicator, options=CommunicationOptions(reproducible=reproducible))
        return trained(strategy, OPTIMIZERS[name], "float64", has_table=False)

    monkeypatch.setenv(compiler.VARIABLE, "0")
    expected = train()
    assert not norms
    monkeypatch.setenv(compiler.VARIABLE, "1")
    mine = train()
    assert bool(norms) is not reproducible
    gathered = zip(*communicator.all_gather_object(mine), strict=True)
    for one, other, everyones in zip(mine, expected, gathered, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)
        assert {array.tobytes() for array in everyones} == {one.tobytes()}
        if reproducible:
            assert one.tobytes() == other.tobytes()
