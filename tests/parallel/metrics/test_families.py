"""Every metric over ranks: the result is that of all data on one rank; merged, reset, saved and restored."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpidist import metrics
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.comm.group.communicator import Communicator
from mpidist.metrics import Metric
from tests.metrics import COUNT, OVER_RANKS, VALUES, WEIGHTS
from tests.parallel.layouts import make_strategy

pytestmark = pytest.mark.mpi


def parts(communicator: Communicator) -> list[Any]:
    """This replica's batches: two, of sizes that differ over ranks; the first rank's last one is empty."""
    borders = np.sort(np.random.default_rng(communicator.size).integers(0, COUNT, communicator.size - 1))
    mine = np.split(np.arange(COUNT), borders)[communicator.rank]
    return [mine, mine[:0]] if communicator.rank == 0 else np.array_split(mine, 2)


def expected(name: str) -> Any:
    make, values = OVER_RANKS[name]
    whole = make()
    whole.update_state(*values, sample_weight=WEIGHTS)
    return whole.result()


@pytest.mark.parametrize("name", OVER_RANKS)
def test_the_result_is_that_of_all_data(communicator: Communicator, name: str) -> None:
    make, values = OVER_RANKS[name]
    strategy = make_strategy(communicator, "node")
    with strategy.scope():
        metric, other = make(), make()
    batches = parts(communicator)
    for target, part in zip((metric, other), batches, strict=True):
        strategy.run(target.update_state, args=[v[part] for v in values], kwargs={"sample_weight": WEIGHTS[part]})
    metric.merge_state([other])
    assert np.allclose(metric.result(), expected(name), rtol=1e-12)
    assert np.array_equal(strategy.run(metric.result), metric.result())
    assert communicator.all_gather_object(np.asarray(metric.result()).tolist()) == [
        np.asarray(metric.result()).tolist()
    ] * communicator.size
    metric.reset_states()
    assert not np.any(metric.result())


def test_results_of_scikit_learn(communicator: Communicator) -> None:
    # Here, since its import takes longer than all others together.
    sklearn_metrics = importlib.import_module("sklearn.metrics")
    (labels, chances), (classes, scores) = VALUES["binary"], VALUES["classes"]
    strategy = make_strategy(communicator, "private")
    with strategy.scope():
        area, matrix = metrics.AUC(20001), metrics.ConfusionMatrix(4)
    for part in parts(communicator):
        strategy.run(area.update_state, args=(labels[part], chances[part]))
        strategy.run(matrix.update_state, args=(classes[part], scores[part]))
    assert area.result() == pytest.approx(sklearn_metrics.roc_auc_score(labels, chances))
    assert np.array_equal(matrix.result(), sklearn_metrics.confusion_matrix(classes, scores.argmax(1)))


def make_all(communicator: Communicator) -> dict[str, Metric]:
    with make_strategy(communicator, "node").scope():
        return {name: make() for name, (make, _) in OVER_RANKS.items()}


def test_saved_on_some_ranks_and_restored_on_others(communicator: Communicator, mpi_tmp_path: Path) -> None:
    for savers in range(1, communicator.size + 1):
        group = communicator.split(int(communicator.rank >= savers))
        path = mpi_tmp_path / f"by-{savers}"
        if communicator.rank < savers:
            made = make_all(group)
            for part in parts(group):
                for name, (_, values) in OVER_RANKS.items():
                    made[name].update_state(*(v[part] for v in values), sample_weight=WEIGHTS[part])
            Checkpoint(metrics=made).write(path)
        communicator.barrier()
        for readers in range(1, communicator.size + 1):
            fresh = make_all(communicator.split(int(communicator.rank >= readers)))
            Checkpoint(metrics=fresh).read(path).assert_consumed()
            for name, metric in fresh.items():
                assert np.allclose(metric.result(), expected(name), rtol=1e-10), name
            # It goes on from there.
            fresh["Sum"].update_state(1.0)
            assert fresh["Sum"].result() == pytest.approx(expected("Sum") + fresh["Sum"].sums.group.size)
