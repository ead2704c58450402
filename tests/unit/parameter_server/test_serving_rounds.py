"""The mean of a round on a server: those that give no gradient of a variable count as well."""

from __future__ import annotations

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.indexed_slices import IndexedSlices
from mpidist.parameter_server.heap.rows import pack, unpack
from mpidist.parameter_server.server.mean_of_round import mean
from mpidist.variables.kinds.served import ServedPlace


def place(dtype: str, *, block_rows: int = 0) -> ServedPlace:
    return ServedPlace(1, 0, 0, (64, 128), (6, 2), dtype, block_rows)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "float16"])
@pytest.mark.parametrize("given", [1, 2, 3])
def test_who_gives_no_gradient_counts_as_zeros(dtype: str, given: int) -> None:
    gradients = [(np.full(12, 4.0 * number, dtype), 0.5) for number in range(1, 1 + given)]
    found = mean(place(dtype), gradients, 4)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.full(12, sum(range(1, 1 + given)) / 2, dtype))


def test_who_gives_no_row_counts_as_zeros() -> None:
    def rows(*numbers: int) -> AnyArray:
        return pack(IndexedSlices(np.full((len(numbers), 2), 6.0), np.array(numbers)))

    table = place("float64", block_rows=3)
    numbers, values = unpack(mean(table, [(rows(0, 5), 1.0), (rows(5), 1.0)], 3), table)
    assert dict(zip(numbers.tolist(), values.tolist(), strict=True)) == {0: [2.0, 2.0], 5: [4.0, 4.0]}
