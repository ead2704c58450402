"""The digits that the training example learns by default, in a file: an import of sklearn costs more than a second."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

# Of all, those of the test.
_TESTS = 360


def write_digits(path: Path) -> Path:
    """Write them as `examples/train.py --data` reads them, in the order of its default: a run has the same losses."""
    spec = find_spec("sklearn")
    assert spec is not None
    assert spec.origin is not None
    rows = np.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    rows = rows[np.random.default_rng(0).permutation(len(rows))]
    x, y = rows[:, :-1].astype(np.float32) / 16, rows[:, -1].astype(np.int64)
    np.savez(path, x_train=x[_TESTS:], y_train=y[_TESTS:], x_test=x[:_TESTS], y_test=y[:_TESTS])
    return path
