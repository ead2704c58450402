"""Tiles: which part of an array each logical device has, and which elements are read for it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.variables import tiles
from mpidist.variables.tiles import tiling


@pytest.mark.parametrize(("shape", "dimensions"), [
    ((4,), [2]), ((4, 6), [2, 3]), ((4, 6), [1, 2]), ((6, 4), [3, 1]), ((2, 4, 6), [2, 2, 3]), ((5, 4), [1, 4]),
    ((0, 4), [1, 2]), ((4, 0), [2, 1]),
])
def test_tiles_are_numbered_row_by_row_and_read_by_rows(
    shape: tuple[int, ...], dimensions: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = np.arange(np.prod(shape)).reshape(shape)
    count = int(np.prod(dimensions))
    numbers = np.arange(count).reshape(dimensions)
    # Two rows at a time.
    monkeypatch.setattr(tiles, "_PIECE_BYTES", 2 * 8 * max(1, int(np.prod(shape[1:]))))
    asked: list[int] = []

    def read(start: int, stop: int) -> AnyArray:
        asked.append(stop - start)
        return whole.reshape(-1)[start:stop]

    for device in range(count):
        cut = tiling(shape, dimensions, device, count, "an array")
        place = [int(at[0]) for at in np.nonzero(numbers == device)]
        expected = whole
        for axis, (at, parts) in enumerate(zip(place, dimensions, strict=True)):
            expected = np.split(expected, parts, axis)[at]
        assert cut.take(whole).tolist() == expected.tolist()
        assert cut.tile_shape == expected.shape
        flat = expected.reshape(-1)
        for start, stop in itertools.combinations_with_replacement(range(0, flat.size + 1, max(1, flat.size // 5)), 2):
            assert cut.read(read, start, stop).tolist() == flat[start:stop].tolist()
    assert max(asked) <= 2 * max(1, int(np.prod(shape[1:])))


@pytest.mark.parametrize(("shape", "dimensions", "error", "match"), [
    ((4, 4), [2], ValueError, "a number for each dimension of shape .4, 4., that is 2, got 1"),
    ((4, 5), [1, 2], ValueError, "dimension 1 of shape .4, 5. must be divisible .* got 5 and 2"),
    ((4, 4), [0, 2], ValueError, "dimension 0 .* got 4 and 0"),
    ((4, 4), [2, 2], ValueError, "which is 2, got 4 of"),
    ((4, 4), 2, TypeError, "a list with a whole number for each dimension"),
    ((4, 4), [1.0, 2], TypeError, "a list with a whole number"),
    ((4, 4), [True, 2], TypeError, "a list with a whole number"),
])
def test_what_does_not_fit_is_an_error(
    shape: tuple[int, ...], dimensions: object, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=f"variable 'w': .*{match}"):
        tiling(shape, dimensions, 0, 2, "variable 'w'")
