"""Files that earlier versions wrote, in `tests/samples`, are read and restored."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import VariableAggregation, VariableSynchronization
from mpidist.checkpoint.reader import load_checkpoint

SAMPLES = Path(__file__).resolve().parents[2] / "samples"
ON_READ = VariableSynchronization.ON_READ


class History:
    """What the sample has of an object with state."""

    def __init__(self) -> None:
        self.saved: Any = None

    def state(self) -> dict[str, Any]:
        return {"losses": np.zeros(2), "note": "", "empty": "", "count": 0}

    def load_state(self, saved: Any) -> None:
        self.saved = saved


@pytest.mark.parametrize("number", [1, 2])
def test_a_checkpoint_of_an_earlier_format_is_restored(number: int) -> None:
    """The sample of format 2 was saved by a program that had restored that of format 1."""
    types = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    per_replica: dict[str, Any] = {"synchronization": ON_READ, "aggregation": VariableAggregation.NONE}
    summed: dict[str, Any] = {"synchronization": ON_READ, "aggregation": VariableAggregation.SUM}
    kernel = mpidist.Variable(np.zeros((2, 3), "f4"))
    model = {
        "a/b": kernel, ".x": mpidist.Variable(np.zeros(3, types.bfloat16)), "flags": mpidist.Variable([False, False]),
        "wave": mpidist.Variable(np.zeros(1, "c16")), "large": mpidist.Variable(np.zeros(3000, "i2")),
    }
    each, total = mpidist.Variable(np.zeros(2), **per_replica), mpidist.Variable(np.int32(0), **summed)
    adam, history, generator = mpidist.optimizers.Adam(0.5), History(), random.Random(1)
    adam.build([kernel])
    checkpoint = mpidist.Checkpoint(
        model=model, again=[kernel], each=each, total=total, adam=adam, history=history, generator=generator
    )
    checkpoint.restore(SAMPLES / f"checkpoint_{number}.h5").assert_consumed()
    assert load_checkpoint(SAMPLES / f"checkpoint_{number}.h5").format == number
    assert kernel.numpy().tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert model[".x"].numpy().astype("f4").tolist() == [1.5, -2.0, 3.0]
    assert model["flags"].numpy().tolist() == [True, False]
    assert model["wave"].numpy().tolist() == [1 + 2j]
    np.testing.assert_array_equal(model["large"].numpy(), np.arange(3000))
    assert (each.numpy().tolist(), int(total.numpy())) == ([1.0, 1.0], 11)
    assert (int(adam.iterations), adam.learning_rate, checkpoint.save_counter) == (1, 0.25, number)
    assert {key: str(history.saved[key]) for key in ("note", "empty", "count")} == {
        "note": "größe", "empty": "", "count": "3"
    }
    assert history.saved["losses"].numpy().tolist() == [0.5, 0.25]
    assert generator.random() == random.Random(7).random()
