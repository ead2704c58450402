"""Declared sparse gradients: the lazy forms of the optimizers, against PyTorch's; and what cannot be had."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import mpidist
from mpidist.indexed_slices import IndexedSlices
from mpidist.optimizers import LAMB, LARS, SGD, Adam, LossScaleOptimizer, Optimizer
from mpidist.options import VariableSynchronization
from tests.optimizers import FAMILIES, Family, Setting

ROWS, WIDTH = 30, 5


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("family", [one for one in FAMILIES if one.sparse_torch], ids=lambda family: family.name)
def test_agrees_with_torchs_sparse_embedding(family: Family) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    case = family.sparse_torch
    assert case is not None
    generator = np.random.default_rng(1)
    start = generator.normal(size=(ROWS, WIDTH))
    table = mpidist.Variable(start, sparse_gradient=True)
    embedding = torch.nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
    embedding.weight.data = torch.tensor(start)
    ours, theirs = Setting(family, case.arguments)(), case.make(torch, [embedding.weight], 0.1)
    for number in range(20):
        chosen = generator.integers(0, ROWS if number % 2 else 3, 12)
        weights = generator.normal(size=(12, WIDTH))
        theirs.zero_grad()
        (embedding(torch.tensor(chosen)) * torch.tensor(weights)).sum().backward()
        theirs.step()
        ours.apply_gradients([(IndexedSlices(weights, chosen), table)])
    np.testing.assert_allclose(table.numpy(), embedding.weight.detach().numpy(), rtol=1e-12, atol=1e-14)


def test_other_rows_and_their_state_stand_still() -> None:
    table = mpidist.Variable(np.ones((6, 2)), sparse_gradient=True)
    optimizer = Adam(0.1, weight_decay=0.5)
    optimizer.apply_gradients([(IndexedSlices(np.ones((1, 2)), np.array([4])), table)])
    after_one = [table.numpy(), *[slot.numpy() for slot in optimizer.variables]]
    optimizer.apply_gradients([(IndexedSlices(np.ones((3, 2)), np.array([1, 0, 1])), table)])
    for before, now in zip(after_one, [table.numpy(), *[v.numpy() for v in optimizer.variables]], strict=True):
        np.testing.assert_array_equal(now[2:], before[2:])
        assert (now[:2] != before[:2]).all()
    assert (table.numpy()[[2, 3, 5]] == 1).all()
    assert optimizer.iterations == 2


def test_norms_are_of_the_merged_rows() -> None:
    # Merged, row 1 is (3, 4); unmerged the norm would be another.
    rows = IndexedSlices(np.array([[1.0, 4.0], [2.0, 0.0]]), np.array([1, 1]))
    makers: list[Callable[[], Optimizer]] = [lambda: SGD(1.0, clipnorm=1.0), lambda: SGD(1.0, global_clipnorm=1.0)]
    for make in makers:
        table = mpidist.Variable(np.zeros((3, 2)), sparse_gradient=True)
        make().apply_gradients([(rows, table)])
        np.testing.assert_allclose(table.numpy(), np.array([[0, 0], [-0.6, -0.8], [0, 0]]))
    table = mpidist.Variable(np.zeros((3, 2)), sparse_gradient=True)
    SGD(1.0, clipvalue=3.5).apply_gradients([(rows, table)])
    np.testing.assert_array_equal(table.numpy()[1], [-3, -3.5])
    assert rows.values[0, 0] == 1, "what the caller passes is not changed"


def test_a_scaled_loss() -> None:
    table = mpidist.Variable(np.zeros((3, 2)), sparse_gradient=True)
    optimizer = LossScaleOptimizer(SGD(1.0), 4.0)
    optimizer.apply_gradients([(IndexedSlices(np.full((1, 2), 4.0), np.array([1])), table)])
    optimizer.apply_gradients([(IndexedSlices(np.array([[1.0, np.inf]]), np.array([2])), table)])
    np.testing.assert_array_equal(table.numpy(), [[0, 0], [-1, -1], [0, 0]])
    assert optimizer.dynamic_scale == 2


@pytest.mark.parametrize(("make", "text"), [
    (lambda: LAMB(0.1), "takes the norm of whole variables"),
    (lambda: LARS(0.1), "takes the norm of whole variables"),
    (lambda: SGD(0.1, use_ema=True), "with use_ema=True averages all rows"),
    (lambda: SGD(0.1, gradient_accumulation_steps=2), "with gradient_accumulation_steps keeps the sums of all rows"),
])
def test_what_needs_all_rows_is_refused(make: Callable[[], Optimizer], text: str) -> None:
    table = mpidist.Variable(np.zeros((3, 2)), name="words", sparse_gradient=True)
    optimizer = make()
    with pytest.raises(ValueError, match=rf"{text}.*'words'.*make it without"):
        optimizer.build([table])
    optimizer.build([mpidist.Variable(np.zeros((3, 2)))])


def test_a_dense_gradient_is_refused() -> None:
    table = mpidist.Variable(np.zeros((3, 2)), name="words", sparse_gradient=True)
    optimizer = SGD(0.1)
    with pytest.raises(TypeError, match=r"'words' was made with sparse_gradient=True.*got ndarray of shape \(3, 2\)"):
        optimizer.apply_gradients([(np.zeros((3, 2)), table)])
    with pytest.raises(ValueError, match="'words' was made with sparse_gradient=True and has no dense gradient"):
        optimizer.gradients([table])
    with pytest.raises(ValueError, match="'words': expected indices from 0 to 2, got 3 to 3"):
        optimizer.apply_gradients([(IndexedSlices(np.zeros((1, 2)), np.array([3])), table)])
    assert optimizer.iterations == 0


def test_variables_without_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'s'.*at least one dimension, got a scalar"):
        mpidist.Variable(1.0, name="s", sparse_gradient=True)
    with pytest.raises(ValueError, match=r"'r'.*got ON_READ; leave it out"):
        mpidist.Variable([1.0], name="r", synchronization=VariableSynchronization.ON_READ, sparse_gradient=True)


@pytest.mark.parametrize("shape", [(0, 4), (5, 0)])
def test_empty_tables(shape: tuple[int, ...]) -> None:
    table = mpidist.Variable(np.zeros(shape), sparse_gradient=True)
    optimizer = Adam(0.1)
    count = min(shape[0], 2)
    optimizer.apply_gradients([(IndexedSlices(np.zeros((count, shape[1])), np.arange(count)), table)])
    assert [slot.shape for slot in optimizer.variables] == [shape, shape]
