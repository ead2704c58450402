"""What cannot be done, or would be wrong in silence, is one error on every rank that says what and the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is in the extra 'keras'")

import keras

import mpidist.keras
from mpidist.comm.group.communicator import Communicator

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

layers = keras.layers
X, Y = np.ones((12, 4), "float32"), np.ones((12, 2), "float32")


@pytest.fixture(autouse=True)
def _needs_several(communicator: Communicator) -> None:
    if communicator.size < 2:
        pytest.skip("ranks cannot differ")


def make_model() -> Any:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    model.compile("sgd", "mse")
    return model


class State(keras.metrics.Metric):  # type: ignore[misc]
    """A metric whose state is no sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.most = self.add_variable((), "zeros", name="most", aggregation="only_first_replica")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.most


def test_a_metric_whose_state_is_no_sum(strategy: Strategy) -> None:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    model.compile("sgd", "mse", metrics=[State()])
    mpidist.keras.distribute(model, strategy)
    with pytest.raises(ValueError, match=r"metric .*largest.* the aggregation 'only_first_replica', expected 'sum'"):
        model.fit(X, Y, verbose=0)


def test_no_strategy_and_two_strategies_and_a_closed_one(communicator: Communicator) -> None:
    with pytest.raises(ValueError, match="strategy="):
        mpidist.keras.distribute(make_model())
    with mpidist.MultiWorkerMirroredStrategy() as one:
        model = mpidist.keras.distribute(make_model())
        assert mpidist.keras.distribute(model) is model
        with mpidist.MultiWorkerMirroredStrategy() as other:
            with pytest.raises(ValueError, match="strategy="):
                mpidist.keras.distribute(make_model())
            with pytest.raises(ValueError, match="is distributed over another strategy"):
                mpidist.keras.distribute(model, other)
        model.fit(X, Y, verbose=0)
        del one
    with pytest.raises(RuntimeError, match="closed"):
        model.fit(X, Y, verbose=0)


def test_something_else_than_a_model(strategy: Strategy) -> None:
    with pytest.raises(TypeError, match=r"expected a keras.Model, .* got Dense"):
        mpidist.keras.distribute(layers.Dense(3), strategy)


def test_a_failure_on_one_rank_is_raised_on_all(strategy: Strategy) -> None:
    model, rank = mpidist.keras.distribute(make_model(), strategy), strategy.communicator.rank
    with pytest.raises(ValueError, match=r"[Cc]ardinality"):
        model.fit(X, Y[:5] if rank == 1 else Y, verbose=0)

    def broken() -> Iterator[Any]:
        for number in range(4):
            if number == 2 and rank == 1:
                raise OSError("the file is gone")
            yield X, Y

    with pytest.raises(OSError, match="the file is gone"):
        model.fit(broken(), verbose=0)
    # The model is as it was.
    model.fit(X, Y, verbose=0)


def test_inputs_that_differ_between_ranks(strategy: Strategy) -> None:
    model, rank = mpidist.keras.distribute(make_model(), strategy), strategy.communicator.rank
    with pytest.raises(ValueError, match=r"the input: all ranks must give the same.*12.*on rank 0.*11.*on rank 1"):
        model.fit(X[:11] if rank == 1 else X, Y[:11] if rank == 1 else Y, verbose=0)
    with pytest.raises(ValueError, match=r"fit: all ranks must give the same"):
        model.fit(X, Y, epochs=1 + rank, verbose=0)

    def longer() -> Iterator[Any]:
        for _ in range(4 if rank == 1 else 3):
            yield X, Y

    with pytest.raises(ValueError, match=r"batch 3 of the input: .* the end of the input on rank 0; 12 rows.* rank 1"):
        model.fit(longer(), verbose=0)

    def other() -> Iterator[Any]:
        yield X, Y
        yield X, Y + rank

    with pytest.raises(ValueError, match="batch 1 of the input: all ranks must read the same global batches"):
        model.fit(other(), verbose=0)


def test_an_optimizer_outside_of_fit_and_run(strategy: Strategy) -> None:
    optimizer = mpidist.keras.distribute(keras.optimizers.SGD(0.1), strategy)
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer.build([variable])
    with pytest.raises(RuntimeError, match=r"in a function that `strategy\.run` calls"):
        optimizer.apply([keras.ops.ones(2)], [variable])


def test_a_creator_without_steps(strategy: Strategy) -> None:
    model = mpidist.keras.distribute(make_model(), strategy)
    creator = mpidist.keras.DatasetCreator(lambda context: mpidist.data.Dataset.range(3))
    with pytest.raises(ValueError, match="a DatasetCreator needs `steps_per_epoch=`"):
        model.fit(creator, verbose=0)


def test_several_logical_devices(communicator: Communicator) -> None:
    if communicator.size != 2:
        pytest.skip("for two ranks")
    resolver = mpidist.cluster_resolver.TPUClusterResolver(tpu="")
    topology = mpidist.tpu.experimental.initialize_tpu_system(resolver)
    shape = [1, 1, 1, 2]
    assignment = mpidist.tpu.experimental.DeviceAssignment.build(topology, computation_shape=shape, num_replicas=1)
    with (
        mpidist.TPUStrategy(resolver, experimental_device_assignment=assignment) as strategy,
        pytest.raises(ValueError, match=r"mpidist\.parallel"),
    ):
        mpidist.keras.distribute(make_model(), strategy)
