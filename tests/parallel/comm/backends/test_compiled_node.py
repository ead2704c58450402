"""Compiled sums of a node's ranks: the bits of NumPy's on every way, also where only some ranks compile."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic import compiled_sums, compiler
from mpidist.comm.arithmetic.compiler import Code
from mpidist.comm.backends.node import NodeBackend
from mpidist.comm.group.communicator import Communicator
from mpidist.options import CommunicationOptions, ReduceOp
from tests.parallel.layouts import lay_out, open_node

pytestmark = [
    pytest.mark.mpi(min_size=3),
    pytest.mark.skipif(
        importlib.util.find_spec("llvmlite") is None, reason="needs llvmlite: pip install 'mpidist[fast]'"
    ),
]


@pytest.fixture
def count_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often compiled code ran on this rank; arrays of any size are large enough for it."""
    monkeypatch.setattr(compiled_sums, "LEAST_BYTES", 0)
    monkeypatch.setattr(compiled_sums, "LOAD_AFTER_BYTES", 0)
    calls, find = 0, compiled_sums._sum

    def find_and_count(*key: Any) -> Code | None:
        nonlocal calls
        calls += 1
        return find(*key)

    monkeypatch.setattr(compiled_sums, "_sum", find_and_count)
    return lambda: calls


def reduced(communicator: Communicator, options: CommunicationOptions, direct_from: int) -> list[AnyArray]:
    """What all operations with sums give, on every way of the backend. Collective."""
    collective = open_node(communicator, options, direct_from)
    generator = np.random.default_rng(communicator.rank)
    results: list[AnyArray] = []
    for dtype in ("float32", "float64"):
        mine = (generator.standard_normal(100_003) * 10.0 ** generator.integers(-4, 4, 100_003)).astype(dtype)
        for op in (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX):
            results.append(collective.all_reduce(mine, op))
            results.append(collective.all_reduce(mine.copy(), op, in_place=True))
        results.append(collective.reduce_scatter(mine))
        owned = collective.allocate((100_003,), dtype)
        for count in (100_003, 70_001):
            owned[...] = mine
            collective.all_reduce(owned[:count], ReduceOp.MEAN, in_place=True)
            results.append(owned.copy())
    collective.close()
    return results


@pytest.mark.parametrize("reproducible", [False, True], ids=["in order", "in tree"])
@pytest.mark.parametrize("direct_from", [1 << 62, 0], ids=["blocks", "direct"])
@pytest.mark.parametrize("layout", ["node", "first", "last"])
@pytest.mark.parametrize("who", ["all", "some"])
def test_sums_have_numpys_bits(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch, count_calls: Callable[[], int], layout: str,
    direct_from: int, reproducible: bool, who: str,
) -> None:
    laid_out = lay_out(communicator, layout)
    if reproducible and len(laid_out.node_sizes) > 1:
        pytest.skip("the tree is one of all ranks")
    options = CommunicationOptions(reproducible=reproducible)
    monkeypatch.setenv(compiler.VARIABLE, "0")
    expected = reduced(laid_out, options, direct_from)
    assert not count_calls()
    compiles = who == "all" or communicator.rank % 2 == 0
    monkeypatch.setenv(compiler.VARIABLE, str(int(compiles)))
    for number, (mine, other) in enumerate(zip(reduced(laid_out, options, direct_from), expected, strict=True)):
        assert mine.tobytes() == other.tobytes(), f"result {number}"
    takes_part = laid_out.node.size >= 3 and laid_out.node.rank < min(laid_out.node_sizes)
    assert (count_calls() > 0) is (compiles and takes_part)


def test_nothing_is_loaded_for_a_few_sums(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    collective = open_node(communicator, CommunicationOptions())
    assert isinstance(collective.backend, NodeBackend)
    monkeypatch.setattr(compiler, "is_loaded", lambda: False)

    def load(_: int = 1) -> bool:
        raise AssertionError("the compiler was loaded")

    monkeypatch.setattr(compiler, "load", load)
    total = collective.all_reduce(np.ones(1 << 20, np.float32))
    assert (total == communicator.size).all()
