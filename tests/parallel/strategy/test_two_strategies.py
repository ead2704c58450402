"""Two strategies over the same ranks, in another order on the last rank: never the numbers of the other one."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.comm.calls.schedule import USUAL
from mpidist.comm.group.communicator import Communicator
from mpidist.errors import MismatchError, is_shared
from mpidist.options import CommunicationOptions
from tests.helpers.strategies import ArenaStrategy
from tests.parallel.layouts import lay_out

pytestmark = pytest.mark.mpi(min_size=2)

NAMED = r"strategy number \d+.*strategy number \d+.*`set`"


class Model:
    """A strategy with what belongs to it."""

    def __init__(self, communicator: Communicator, value: float, way: str = "NODE") -> None:
        self.strategy, self.value = ArenaStrategy(communicator, options=CommunicationOptions(implementation=way)), value
        self.way = way
        with self.strategy.scope():
            self.variable = mpidist.Variable(np.zeros(4, "float32"))
            self.sums = mpidist.Variable(np.zeros(4, "float32"), synchronization="ON_READ", aggregation="SUM")
            self.metric = mpidist.metrics.Mean()
        self.optimizer = mpidist.optimizers.SGD(1.0)
        self.lenient = mpidist.optimizers.SGD(1.0, missing_gradients="zero")
        self.accumulating = mpidist.optimizers.SGD(1.0, gradient_accumulation_steps=2)
        for optimizer in (self.lenient, self.accumulating):
            optimizer.build([self.variable])

    def step(self) -> Any:
        """A step of the optimizer."""
        self.variable.assign(np.zeros(4))
        gradient = np.full(4, -self.value / self.strategy.num_replicas_in_sync, "float32")
        self.strategy.run(lambda: self.optimizer.apply_gradients([(gradient, self.variable)]))
        return self.variable.numpy()[0]

    def only_step(self) -> Any:
        """A step of the optimizer, and nothing else."""
        self.optimizer.apply_gradients([(np.zeros(4, "float32"), self.variable)])
        return self.value

    def step_that_may_lack_gradients(self) -> Any:
        """A step that first asks which gradients there are."""
        self.lenient.apply_gradients([(np.zeros(4, "float32"), self.variable)])
        return self.value

    def flush(self) -> Any:
        """An update before the last call; here there were no calls."""
        self.accumulating.flush()
        return self.value

    def assign(self) -> Any:
        """A write to a variable."""
        self.variable.assign(np.full(4, self.value))
        return self.variable.numpy()[0]

    def scatter(self) -> Any:
        """A write to a row."""
        self.variable.scatter_update(mpidist.IndexedSlices(np.array([self.value], "float32"), np.array([1])))
        return self.variable.numpy()[1]

    def assign_sums(self) -> Any:
        """A write to a variable that is added up when it is read."""
        self.sums.assign(np.full(4, self.value))
        return self.sums.value()[0]

    def result(self) -> Any:
        """The result of a metric."""
        self.metric.reset_state()
        self.metric.update_state([self.value])
        return self.metric.result()

    def create(self) -> Any:
        """A variable."""
        with self.strategy.scope():
            return mpidist.Variable(np.full(4, self.value)).numpy()[0]

    def build(self) -> Any:
        """An optimizer."""
        mpidist.optimizers.SGD(1.0).build([self.variable])
        return self.value

    def reduce(self) -> Any:
        """A reduction."""
        return self.strategy.reduce("MEAN", np.full(3, self.value), axis=None)[0]

    def reduce_along_an_axis(self) -> Any:
        """A reduction along an axis."""
        return self.strategy.reduce("MEAN", np.full(3, self.value), axis=0)

    def all_reduce(self) -> Any:
        """A reduction inside `run`, with options of its own."""
        options = CommunicationOptions(bytes_per_pack=64, implementation=self.way)
        return self.strategy.run(
            lambda: replica_context().all_reduce("MEAN", np.full(2, self.value), options)
        )[0]

    def all_reduce_async(self) -> Any:
        """A reduction in the background."""
        return self.strategy.extended.all_reduce_async("MEAN", np.full(2, self.value)).wait()[0]

    def gather(self) -> Any:
        """Rows of all ranks."""
        return self.strategy.gather(np.full(1, self.value), axis=0).mean()

    def broadcast(self) -> Any:
        """The first rank's array."""
        return self.strategy.extended.broadcast_to(np.full(2, self.value))[0]

    def gather_object(self) -> Any:
        """Objects of all ranks."""
        return np.mean(self.strategy.gather_object(self.value))

    def all_gather_object(self) -> Any:
        """Objects of all ranks, inside `run`."""
        return np.mean(self.strategy.run(lambda: replica_context().all_gather_object(self.value)))

    def gradients(self) -> Any:
        """Micro-batches."""
        size = self.strategy.num_replicas_in_sync
        return self.strategy.gradients(lambda rows: rows.sum(0), np.full((1, 2), self.value), size)[0] / size


def replica_context() -> Any:
    """The current one."""
    return mpidist.get_replica_context()


KINDS: dict[str, Callable[[Model], Any]] = {
    name: method for name, method in vars(Model).items() if callable(method) and not name.startswith("_")
}


@pytest.fixture(scope="module")
def models(communicator: Communicator) -> list[Model]:
    """Two of them. In node memory ranks whose calls differ come out of them; AUTO passes small arrays to MPI on some
    machines, and what becomes of such calls there is for whole programs.
    """
    return [Model(communicator, 1.0), Model(communicator, 100.0)]


def in_order(models: list[Model]) -> list[Model]:
    """The order in which this rank uses them."""
    communicator = models[0].strategy.communicator
    return models[::-1] if communicator.rank == communicator.size - 1 else models


@pytest.mark.parametrize("calls", [0, 20])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "all_reduce_async"])
def test_on_one_node_an_error_comes_before_any_number(models: list[Model], kind: str, calls: int) -> None:
    use = KINDS[kind]
    for _ in range(calls):
        assert [use(model) for model in models] == [1, 100]
    for model in in_order(models):
        with pytest.raises(MismatchError, match=NAMED) as caught:
            use(model)
        assert is_shared(caught.value)
    # The ranks agree again.
    assert [use(model) for model in models] == [1, 100]


def test_reductions_in_the_background(communicator: Communicator) -> None:
    strategies = differ_in_the_background(communicator)
    # What goes with the first collection is held by finalizers, which hold more.
    gc.collect()
    gc.collect()
    # The error that the ranks had holds frames of this program, and nobody holds the error.
    assert [strategy() for strategy in strategies] == [None, None]


def differ_in_the_background(communicator: Communicator) -> list[weakref.ref[ArenaStrategy]]:
    """Reduce for two strategies, in the end in another order on the last rank, and close them."""
    models = [Model(communicator, value) for value in (1.0, 100.0)]
    for _ in range(20):
        assert [model.all_reduce_async() for model in models] == [1, 100]
    for model in in_order(models):
        with pytest.raises(MismatchError, match=NAMED):
            model.all_reduce_async()
    for model in models:
        model.strategy.close()
    return [weakref.ref(model.strategy) for model in models]


def test_what_differs_in_something_else_names_no_strategy(models: list[Model]) -> None:
    communicator = models[1].strategy.communicator
    with pytest.raises(MismatchError) as caught:
        models[1].strategy.reduce("SUM", np.ones(2 + (communicator.rank == 0)), axis=None)
    assert "strategy number" not in str(caught.value)
    assert "\x1f" not in str(caught.value)


@pytest.mark.parametrize("layout", ["each", "pairs"])
@pytest.mark.parametrize("kind", ["reduce", "assign", "result"])
def test_between_nodes_an_error_comes_at_the_next_step_save_or_after_32_calls(
    communicator: Communicator, layout: str, kind: str, mpi_tmp_path: Path
) -> None:
    """All ranks of the last node use the other order: among the ranks of one node an error comes at once."""
    laid_out = lay_out(communicator, layout)
    if len(laid_out.node_sizes) == 1:
        pytest.skip("these ranks are on one node")
    models = [Model(laid_out, value, "AUTO") for value in (1.0, 100.0)]
    use, first = KINDS[kind], models[0].strategy
    is_other = laid_out.node_index == len(laid_out.node_sizes) - 1
    path = mpi_tmp_path / "checkpoint"

    def many_calls() -> None:
        for _ in range(2 * USUAL.every):
            first.reduce("MAX", np.ones(3), axis=None)

    def all_calls(end: Callable[[], object]) -> None:
        for model in models[::-1] if is_other else models:
            use(model)
        end()

    for _ in range(20):
        assert [use(model) for model in models] == [1, 100]
    save = functools.partial(mpidist.Checkpoint(v=models[0].variable).write, path)
    for end in (models[0].only_step, save, many_calls):
        with pytest.raises(MismatchError):
            all_calls(end)
        # Rank 0 has taken away what it began to write.
        models[0].only_step()
        assert not list(mpi_tmp_path.iterdir())


def test_a_checkpoint_of_variables_of_another_strategy(models: list[Model], mpi_tmp_path: Path) -> None:
    """They have one number, each in its strategy."""
    ordered = in_order(models)
    checkpoint = mpidist.Checkpoint(a=models[0].sums, b=ordered[0].variable, c=ordered[1].variable)
    with pytest.raises(MismatchError, match=r"strategy number \d+, variable number 1 .*strategy number \d+"):
        checkpoint.write(mpi_tmp_path / "mixed")
    models[0].only_step()
    assert not list(mpi_tmp_path.iterdir())
