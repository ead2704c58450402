"""Attributes that a program sets act, or are refused: nothing is set that does nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import optimizers
from mpidist.attributes import FixedAttributes
from mpidist.data import Dataset, Options
from mpidist.metrics.metric import Metric
from mpidist.optimizers.families.sgd import SGDKernel


def manager(folder: Path) -> mpidist.CheckpointManager:
    return mpidist.CheckpointManager(mpidist.Checkpoint(v=mpidist.Variable(1.0)), folder, 3)


def handler(folder: Path) -> Any:
    return mpidist.experimental.PreemptionCheckpointHandler(None, mpidist.Checkpoint(v=mpidist.Variable(1.0)), folder)


def coordinator(_: Path) -> Any:
    return mpidist.coordinator.ClusterCoordinator(mpidist.ParameterServerStrategy())


MAKERS: dict[str, Callable[[Path], Any]] = {
    "Optimizer": lambda _: optimizers.SGD(0.5),
    "LossScaleOptimizer": lambda _: optimizers.LossScaleOptimizer(optimizers.SGD(0.5)),
    "Metric": lambda _: mpidist.metrics.Mean(),
    "Dataset": lambda _: Dataset.range(3),
    "DistributedDataset": lambda _: mpidist.get_strategy().experimental_distribute_dataset(Dataset.range(3).batch(1)),
    "DefaultStrategy": lambda _: mpidist.get_strategy(),
    "OneDeviceStrategy": lambda _: mpidist.OneDeviceStrategy("cpu:0"),
    "MirroredStrategy": lambda _: mpidist.MirroredStrategy(),
    "MultiWorkerMirroredStrategy": lambda _: mpidist.MultiWorkerMirroredStrategy(),
    "ParameterServerStrategy": lambda _: mpidist.ParameterServerStrategy(),
    "ClusterCoordinator": coordinator,
    "CheckpointManager": manager,
    "PreemptionCheckpointHandler": handler,
    "TerminationConfig": lambda _: mpidist.experimental.TerminationConfig(),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_an_attribute_that_does_nothing_is_refused(kind: str, tmp_path: Path) -> None:
    made = MAKERS[kind](tmp_path)
    assert type(made).__name__ == kind
    with pytest.raises(AttributeError, match=rf"^{kind}\.max_to_kepp cannot be set, since it does not exist"):
        made.max_to_kepp = 3
    assert not hasattr(made, "max_to_kepp")
    public = {name for name in vars(made) if not name.startswith("_")}
    for name in public - made._assignable:
        with pytest.raises(AttributeError, match=rf"^{kind}\.{name} cannot be set, since it is fixed when"):
            setattr(made, name, getattr(made, name))
    # Known to subclasses of programs, too.
    assert public <= made._fixed | made._assignable
    # Methods are not hidden by values: `metric.result = 3`.
    for method in dir(type(made)):
        if not method.startswith("_") and callable(getattr(type(made), method, None)):
            with pytest.raises(AttributeError, match=rf"^{kind}\.{method} cannot be set"):
                setattr(made, method, 3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lr", "set `learning_rate`"),
        ("learning_rte", "did you mean 'learning_rate'"),
        ("iteration", "did you mean 'iterations'"),
        ("momentum", "`momentum` is an argument of SGD: make another optimizer"),
        ("clipnorm", "`clipnorm` is an argument of SGD: make another optimizer"),
        ("clip_norm", "`clipnorm` is an argument of SGD"),
        ("weight_decay", "`weight_decay` is an argument of SGD"),
        ("use_emma", "`use_ema` is an argument of SGD"),
        ("beta_1", "only iterations, learning_rate, name may be set; settings are arguments"),
        ("options", "it is fixed when the object is created"),
        ("kernel", "it is fixed when the object is created"),
    ],
)
def test_a_setting_of_an_optimizer_names_the_way_out(name: str, text: str) -> None:
    variable, optimizer = mpidist.Variable(np.zeros(1)), optimizers.SGD(0.5, momentum=0.5)
    with pytest.raises(AttributeError, match=text):
        setattr(optimizer, name, 0.25)
    # The rate is the one setting that follows.
    optimizer.learning_rate = 0.25
    optimizer.apply_gradients([(np.ones(1), variable)])
    assert variable.numpy().tolist() == [-0.25]


def test_beta_1_is_a_setting_of_adam() -> None:
    with pytest.raises(AttributeError, match="`beta_1` is an argument of AdamW: make another optimizer"):
        optimizers.AdamW().beta_1 = 0.5  # type: ignore[attr-defined]


def test_a_scale_that_is_set_acts() -> None:
    variable, scaled = mpidist.Variable([1.0]), optimizers.LossScaleOptimizer(optimizers.SGD(0.5), 4.0)
    scaled.dynamic_scale = 8.0
    scaled.apply_gradients([(np.full(1, 8, "f"), variable)])
    assert variable.numpy().tolist() == [0.5]


class OwnOptimizer(optimizers.Optimizer):
    """A program's own."""

    def __init__(self) -> None:
        self.before = 1
        super().__init__(SGDKernel(), 0.5, name="Own")
        self.momentum = 2


class OwnMetric(Metric):
    """A program's own, without a constructor."""


def test_subclasses_may_have_attributes_of_their_own() -> None:
    own = OwnOptimizer()
    own.before, own.momentum, own.another = 3, 4, 5  # type: ignore[attr-defined]
    assert (own.before, own.momentum, own.another) == (3, 4, 5)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"OwnOptimizer\.kernel cannot be set"):
        own.kernel = SGDKernel(0.5)
    metric = OwnMetric(mpidist.metrics.Mean().measure, name="own")
    metric.total = 1  # type: ignore[attr-defined]
    metric.name = "other"
    with pytest.raises(AttributeError, match=r"OwnMetric\.measure cannot be set"):
        metric.measure = mpidist.metrics.Sum().measure
    assert optimizers.SGD(0.5).name == "SGD"


@pytest.mark.parametrize(
    "made",
    [
        optimizers.CosineDecay(0.5, 10), optimizers.PiecewiseConstantDecay((2,), (0.5, 0.25)), mpidist.RunOptions(),
        mpidist.InputOptions(), mpidist.WindowOptions(), mpidist.ServerOptions(),
        mpidist.experimental.CommunicationOptions(), Options(), Options().experimental_distribute,
        optimizers.OptimizerOptions(),
    ],
    ids=lambda made: type(made).__name__,
)
def test_schedules_and_options_have_only_their_fields(made: Any) -> None:
    for name in ("decay_stepz", "bytes_per_pakc"):
        with pytest.raises(AttributeError, match=name):
            setattr(made, name, 3)


def test_options_of_a_dataset_are_changed_by_with_options() -> None:
    options = Options()
    options.experimental_distribute.auto_shard_policy = "OFF"
    dataset = Dataset.range(3).with_options(options)
    fixed = dataset.options()
    for given in (fixed, copy.deepcopy(fixed), pickle.loads(pickle.dumps(fixed))):
        with pytest.raises(AttributeError, match=r"policy cannot be set on what `dataset.options\(\)` returns"):
            given.experimental_distribute.auto_shard_policy = "DATA"
        with pytest.raises(AttributeError, match=r"deterministic cannot be set on .* `dataset.with_options"):
            given.deterministic = True
        assert given == options
    options.deterministic = True
    again = dataset.with_options(options)
    assert (again.options().deterministic, dataset.options().deterministic) == (True, None)


def test_what_is_fixed_is_so_only_when_the_object_is_made() -> None:
    class Base(FixedAttributes):
        def __init__(self) -> None:
            self.first = 1
            self._settle(Base)

    class Extended(Base):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = 2
            self._settle(Extended)

    for kind in (Base, Extended):
        kind.__module__ = "mpidist.somewhere"
    made: Any = Extended()
    made._third = 3
    assert vars(made) == {"first": 2, "second": 2, "_third": 3, "_is_settled": True}
    for name in ("first", "second", "fourth"):
        with pytest.raises(AttributeError, match=f"Extended.{name} cannot be set"):
            setattr(made, name, 4)
