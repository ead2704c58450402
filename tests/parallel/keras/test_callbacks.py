"""Callbacks: all ranks stop together, the first one writes, and what it has restored is that of all."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is in the extra 'keras'")

import keras

import mpidist.keras

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

layers = keras.layers
X = np.random.default_rng(1).standard_normal((32, 8)).astype("float32")
Y = np.random.default_rng(2).standard_normal((32, 4)).astype("float32")


def make_model(strategy: Strategy, optimizer: Any = "sgd") -> Any:
    model = keras.Sequential([keras.Input((8,)), layers.Dense(4)])
    model.compile(optimizer, "mse", metrics=["mae"])
    return mpidist.keras.distribute(model, strategy)


class Counted(keras.callbacks.Callback):  # type: ignore[misc]
    """Counts steps and epochs, and asks to stop after one of them on one rank."""

    def __init__(self, stops: bool, *, after_step: int | None = None, after_epoch: int | None = None) -> None:
        super().__init__()
        self.steps, self.epochs, self.stops = 0, 0, stops
        self.after_step, self.after_epoch = after_step, after_epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.stops and self.steps == self.after_step:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1
        if self.stops and self.epochs == self.after_epoch:
            self.model.stop_training = True


@pytest.mark.parametrize(("after", "steps"), [({"after_step": 2}, 3), ({"after_step": 8}, 8), ({"after_epoch": 1}, 8)])
def test_all_ranks_stop_after_the_same_step(after: dict[str, int], steps: int, strategy: Strategy) -> None:
    size = strategy.num_replicas_in_sync
    callback = Counted(strategy.communicator.rank == size - 1, **after)
    make_model(strategy).fit(X, Y, batch_size=4, epochs=3, verbose=0, callbacks=[callback])
    if size == 1 and "after_step" in after:
        steps = after["after_step"]
    assert callback.steps == steps


def test_the_first_rank_writes(strategy: Strategy, tmp_path: Path) -> None:
    callbacks = [
        keras.callbacks.CSVLogger(tmp_path / "log.csv"), keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras"),
        keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", save_best_only=True, monitor="val_loss"),
    ]
    history = make_model(strategy).fit(
        X, Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks, validation_data=(X, Y)
    ).history
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ([] if strategy.communicator.rank else ["1.keras", "2.keras", "best.keras", "log.csv"])
    everyone = strategy.extended.all_gather_object(history)
    assert all(one == everyone[0] for one in everyone)


def test_a_training_that_was_broken_off_goes_on_everywhere(strategy: Strategy, alone: Strategy, tmp_path: Path) -> None:
    def train(one: Strategy, folder: Path, stops: bool) -> tuple[Any, list[int]]:
        keras.utils.set_random_seed(1)
        model = make_model(one, keras.optimizers.SGD(0.1, momentum=0.9))
        epochs: list[int] = []

        class Broken(keras.callbacks.Callback):  # type: ignore[misc]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                epochs.append(epoch)
                if stops and epoch == 2:
                    raise KeyboardInterrupt

        backup = keras.callbacks.BackupAndRestore(folder)
        # Two epochs are in the backup then.
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(X, Y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=[backup, Broken()])
        return model, epochs

    undisturbed, _ = train(alone, tmp_path / "undisturbed", stops=False)
    train(strategy, tmp_path / "backup", stops=True)
    model, epochs = train(strategy, tmp_path / "backup", stops=False)
    assert epochs == [2, 3]
    np.testing.assert_allclose(model.get_weights()[0], undisturbed.get_weights()[0], atol=1e-6)


class Adversaries(keras.Model):  # type: ignore[misc]
    """Two optimizers that Keras's own `compile` does not know."""

    def __init__(self, *, uses: bool = True) -> None:
        super().__init__()
        self.maker, self.judge, self.uses = layers.Dense(8), layers.Dense(1), uses

    def compile(self, judge: Any, maker: Any) -> None:
        super().compile(loss="mse", optimizer=None)
        self.optimizers = {"judge": judge, "maker": maker}

    def call(self, inputs: Any) -> Any:
        return self.judge(self.maker(inputs))

    def train_step(self, data: Any) -> Any:
        torch = pytest.importorskip("torch")
        for name, layer in (("judge", self.judge), ("maker", self.maker)):
            self.zero_grad()
            loss = keras.ops.mean(self(data[0]) ** 2)
            loss.backward()
            if self.uses:
                with torch.no_grad():
                    gradients = [one.value.grad for one in layer.trainable_weights]
                    self.optimizers[name].apply(gradients, layer.trainable_weights)
        return {"maker_loss": loss}


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="the step of another backend is written otherwise")
def test_every_optimizer_takes_part(strategy: Strategy, alone: Strategy) -> None:
    weights = []
    for one in (alone, strategy):
        keras.utils.set_random_seed(1)
        model = Adversaries()
        model(X[:1])
        model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
        mpidist.keras.distribute(model, one)
        history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history
        assert len(set(strategy.extended.all_gather_object(history["maker_loss"][0]))) == 1
        weights.append(np.concatenate([np.ravel(weight) for weight in model.get_weights()]))
    np.testing.assert_allclose(weights[1], weights[0], atol=1e-6)


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="the step of another backend is written otherwise")
def test_an_epoch_without_a_reduction_is_an_error(strategy: Strategy) -> None:
    if strategy.num_replicas_in_sync < 2:
        pytest.skip("nothing is reduced")
    model = Adversaries(uses=False)
    model(X[:1])
    model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
    mpidist.keras.distribute(model, strategy)
    with pytest.raises(RuntimeError, match=r"epoch 0 ended without a reduction .*: `train_step` of Adversaries"):
        model.fit(X, Y, verbose=0)


def test_variables_that_differ_are_named(strategy: Strategy) -> None:
    if strategy.num_replicas_in_sync < 2:
        pytest.skip("there is one copy")
    model, rank = make_model(strategy), strategy.communicator.rank

    class Meddling(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1 and rank == 1:
                bias = self.model.layers[0].bias
                bias.assign(bias + 1e-3)

    with pytest.raises(RuntimeError, match=r"epoch 1: the ranks' copies of \S*bias differ"):
        model.fit(X, Y, epochs=3, verbose=0, callbacks=[Meddling()])
