"""Metrics over ranks: the result is that of all data, however it was dealt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError
from mpidist.metrics import BinaryAccuracy, Mean, Metric, Precision, SparseCategoricalAccuracy
from tests.parallel.layouts import make_strategy

pytestmark = pytest.mark.mpi


def test_the_mean_is_of_all_values(communicator: Communicator) -> None:
    strategy = make_strategy(communicator, "node")
    values = np.arange(11.0)
    parts = np.array_split(values, communicator.size)
    with strategy.scope():
        mean = Mean()
    # Uneven and with an empty batch on the first rank.
    strategy.run(mean.update_state, args=(parts[communicator.rank],))
    if communicator.rank == 0:
        mean.update_state(np.zeros(0))
    assert mean.result() == pytest.approx(values.mean())
    assert mean.result() == pytest.approx(values.mean()), "reading changes nothing"
    mean.reset_state()
    assert mean.result() == 0
    strategy.run(mean.update_state, args=(5.0,), kwargs={"sample_weight": communicator.rank + 1.0})
    assert mean.result() == 5


def test_accuracy_of_all_examples(communicator: Communicator) -> None:
    strategy = make_strategy(communicator, "private")
    generator = np.random.default_rng(0)
    labels, scores = generator.integers(0, 3, 23), generator.normal(size=(23, 3))
    mine = np.array_split(np.arange(23), communicator.size)[communicator.rank]
    with strategy.scope():
        accuracy = SparseCategoricalAccuracy()
    strategy.run(accuracy.update_state, args=(labels[mine, None], scores[mine]))
    assert accuracy.result() == pytest.approx((scores.argmax(1) == labels).mean())
    # Inside `run`, too.
    assert strategy.run(accuracy.result) == accuracy.result()
    # A call gives the result of all batches of all ranks, in `run` and outside.
    accuracy.reset_state()
    first, second = np.array_split(mine, 2)
    begun = np.concatenate([np.array_split(part, 2)[0] for part in np.array_split(np.arange(23), communicator.size)])
    right = scores.argmax(1) == labels
    assert strategy.run(accuracy, args=(labels[first, None], scores[first])) == pytest.approx(right[begun].mean())
    assert accuracy(labels[second, None], scores[second]) == pytest.approx(right.mean())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("one", "other", "match"), [
    (lambda: Precision(thresholds=0.3), lambda: Precision(thresholds=0.7), r"thresholds=\(0.3,\).*0.7"),
    (Precision, lambda: Precision(class_id=1), "class_id=1"),
    (Mean, BinaryAccuracy, "MeanMeasure.*AccuracyMeasure"),
])
def test_another_metric_on_one_rank_is_a_mismatch(
    communicator: Communicator, one: Callable[[], Metric], other: Callable[[], Metric], match: str
) -> None:
    """Sums of different things would be added."""
    strategy = make_strategy(communicator, "node")
    odd = strategy.communicator.rank == strategy.communicator.size - 1
    with strategy.scope(), pytest.raises(MismatchError, match=f"(?s)the settings of metric .*{match}"):
        (other if odd else one)()
