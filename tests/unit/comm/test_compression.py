"""Parameters of compressions, and which arrays they are for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist.comm.choice.selection import choose
from mpidist.comm.compression.compression import ERROR, CompressionState, with_error
from mpidist.comm.compression.power_sgd import PowerSGD, matrix_shape
from mpidist.comm.compression.top_k import TopK
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.options import CommunicationOptions


@pytest.mark.parametrize(
    ("shape", "matrix"),
    [((), (1, 1)), ((5,), (5, 1)), ((3, 7), (3, 7)), ((64, 32, 3, 3), (64, 288)), ((3, 3, 32, 64), (288, 64))],
)
def test_an_array_is_a_matrix_with_few_rows_and_columns(shape: tuple[int, ...], matrix: tuple[int, int]) -> None:
    assert matrix_shape(shape) == matrix


def test_what_is_worth_it() -> None:
    single, double = np.dtype("float32"), np.dtype("float64")
    assert PowerSGD(4).compresses((100, 100), single)
    assert not PowerSGD(26).compresses((100, 100), single)
    assert not PowerSGD(1).compresses((10_000,), single)
    assert not PowerSGD(1).compresses((), single)
    assert not PowerSGD(1).compresses((0, 0), single)
    assert not PowerSGD(1).compresses((0, 0, 3), single)
    assert not PowerSGD(1).compresses((100, 100), np.dtype("complex64"))
    assert not TopK(0.5).compresses((1023,), single)
    assert TopK(0.5).compresses((1024,), single)
    assert TopK(0.5).compresses((512,), double)
    assert not TopK(0.5).compresses((1024,), np.dtype("int64"))
    assert [TopK(0.001).count(size) for size in (0, 1, 1000, 1001)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        (TopK, {"ratio": 0}, "above 0 and at most 1, got 0"),
        (TopK, {"ratio": 1.5}, "got 1.5"),
        (TopK, {"ratio": float("nan")}, "got nan"),
        (PowerSGD, {"rank": 0}, "`rank` must be an integer of at least 1, got 0"),
        (PowerSGD, {"rank": 2, "start_step": -1}, "`start_step`"),
    ],
)
def test_parameters_that_make_no_sense(kind: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        kind(**arguments)


@pytest.mark.parametrize(
    ("name", "value"), [("rank", True), ("rank", "2"), ("seed", 0.5), ("start_step", np.float32(1))]
)
def test_parameters_that_are_no_integers(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"`{name}` must be an integer of at least"):
        PowerSGD(**{name: value})


def test_the_option() -> None:
    assert CommunicationOptions(compression=PowerSGD(4)) == CommunicationOptions(compression=PowerSGD(rank=4))
    assert "PowerSGD(rank=4" in str(CommunicationOptions(compression=PowerSGD(4)))
    for wrong in ("PowerSGD", 4, PowerSGD, np.ones(3)):
        with pytest.raises(TypeError, match=r"`compression` must be a Compression, for instance PowerSGD\(rank=4\)"):
            CommunicationOptions(compression=wrong)
    with pytest.raises(ValueError, match="`reproducible` must not"):
        CommunicationOptions(compression=TopK(0.1), reproducible=True)


def test_gradients_that_cannot_be_compressed() -> None:
    with pytest.raises(TypeError, match="floating dtype can be compressed, got int64"):
        with_error(np.ones(3, "int64"), {})
    with pytest.raises(ValueError, match="C-contiguous"):
        with_error(np.ones((3, 4)).T, {})


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_what_rounding_leaves_out_is_sent_later(ratio: float) -> None:
    """Of float16: 1e-4 is too little to be seen beside 1, and would be lost at each step."""
    collective, steps = choose(SoloCommunicator(), CommunicationOptions()), 40
    state: CompressionState = {ERROR: np.full(4096, 1e-4, np.float32)}
    gradient = np.ones(4096, np.float16)
    TopK(ratio).all_reduce(collective, gradient, state)
    sent = gradient.astype(np.float64)
    np.testing.assert_allclose(sent + state[ERROR], 1 + 1e-4, rtol=1e-7)
    for _ in range(steps):
        gradient[...] = 0.1
        TopK(ratio).all_reduce(collective, gradient, state)
        sent += gradient
    np.testing.assert_allclose(sent + state[ERROR], 1 + 1e-4 + steps * float(np.float16(0.1)), rtol=1e-6)
