"""Models and optimizers of Keras in checkpoints of mpidist: a training goes on as if it had not been broken off."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is in the extra 'keras'")

import keras
from mpi4py import MPI

import mpidist.keras
from mpidist.cli.checkpoints.look import content_of

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

X = np.random.default_rng(1).standard_normal((24, 8)).astype("float32")
Y = np.random.default_rng(2).standard_normal((24, 4)).astype("float32")


def make_model(strategy: Strategy, seed: int, outputs: int = 4) -> Any:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([
        keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=3),
        keras.layers.Dense(outputs),
    ])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model.optimizer.build(model.trainable_variables)
    return mpidist.keras.distribute(model, strategy)


def fit(model: Any) -> None:
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)


def test_a_restored_training_goes_on(strategy: Strategy, tmp_path: Path) -> None:
    path = strategy.extended.all_gather_object(tmp_path)[0] / "ckpt"
    undisturbed = make_model(strategy, 1)
    fit(undisturbed)
    mpidist.Checkpoint(model=undisturbed, optimizer=undisturbed.optimizer).save(path)
    fit(undisturbed)

    model = make_model(strategy, 2)
    saved = next(iter(path.parent.glob("ckpt*.h5")))
    mpidist.Checkpoint(model=model, optimizer=model.optimizer).restore(saved)
    fit(model)
    for mine, theirs in zip(model.get_weights(), undisturbed.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_another_model_and_one_without_variables_are_errors(strategy: Strategy, tmp_path: Path) -> None:
    path = strategy.extended.all_gather_object(tmp_path)[0] / "ckpt"
    mpidist.Checkpoint(model=make_model(strategy, 1)).save(path)
    saved = next(iter(path.parent.glob("ckpt*.h5")))
    other = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    with pytest.raises(ValueError, match="moving_mean"):
        mpidist.Checkpoint(model=mpidist.keras.distribute(other, strategy)).restore(saved)
    unbuilt = mpidist.keras.distribute(keras.Sequential([keras.layers.Dense(4)]), strategy)
    with pytest.raises(ValueError, match="has no variables yet"):
        mpidist.Checkpoint(model=unbuilt).save(path)


def test_models_are_shown_verified_and_restored_in_part_and_on_other_ranks(
    strategy: Strategy, mpi_tmp_path: Path
) -> None:
    model = make_model(strategy, 1)
    path = mpidist.Checkpoint(model=model, optimizer=model.optimizer).save(mpi_tmp_path / "ckpt")
    shown = {one["path"]: one["shape"] for one in content_of(path)["arrays"]}
    assert shown["model/5_kernel"] == [8, 4]
    assert mpidist.checkpoint.verify(path) > 0
    with mpidist.MultiWorkerMirroredStrategy(communicator=MPI.COMM_SELF) as alone:
        other = make_model(alone, 2)
        mpidist.Checkpoint(model=other, optimizer=other.optimizer).restore(path).assert_consumed()
        for mine, theirs in zip(other.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    part = make_model(strategy, 2, outputs=3)
    part.layers[0].gamma.assign(np.zeros(8))
    kernel = np.array(part.layers[-1].kernel)
    status = mpidist.Checkpoint(model=part, optimizer=part.optimizer).restore(path, partial=True)
    with pytest.raises(AssertionError, match=r"'model/5_kernel': it has shape \(8, 3\).*variables have the shapes"):
        status.assert_existing_objects_matched()
    assert np.array(part.layers[0].gamma).tolist() == [1.0] * 8
    np.testing.assert_array_equal(part.layers[-1].kernel, kernel)
