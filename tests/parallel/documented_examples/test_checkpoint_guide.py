"""The blocks of TensorFlow's guide "Training checkpoints"."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.parallel.documented_examples.dense import Array

pytestmark = pytest.mark.mpi


class Dense(mpidist.Module):
    """Stands for `tf.keras.layers.Dense(5)` of one input."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.kernel = mpidist.Variable(np.full((1, units), 0.1, np.float32))
        self.bias = mpidist.Variable(np.zeros(units, np.float32))

    def __call__(self, x: Array) -> Array:
        return np.asarray(x @ self.kernel.value() + self.bias.value())


class Net(mpidist.Module):
    """A simple linear model."""

    def __init__(self) -> None:
        super().__init__()
        self.l1 = Dense(5)

    def __call__(self, x: Array) -> Array:
        return self.l1(x)


def toy_dataset() -> mpidist.data.Dataset:
    inputs = np.arange(10.0, dtype=np.float32)[:, np.newaxis]
    labels = inputs * 5.0 + np.arange(5.0, dtype=np.float32)[np.newaxis, :]
    return mpidist.data.Dataset.from_tensor_slices(
        {"x": inputs, "y": labels}).repeat().batch(2)


def train_step(net: Net, example: dict[str, Array], optimizer: Any) -> Array:
    """Trains `net` on `example` using `optimizer`."""
    output = net(example["x"])
    size = 2 * 5
    errors = output - example["y"]
    slopes = np.sign(errors) / np.float32(size)
    optimizer.apply_gradients(
        zip([example["x"].T @ slopes, slopes.sum(axis=0)], [net.l1.kernel, net.l1.bias], strict=True))
    return np.asarray(np.abs(errors).sum() / size)


class Program:
    """The guide's blocks up to `train_and_checkpoint`: called again, they stand for a new start of the program."""

    def __init__(self, folder: Path) -> None:
        self.strategy = mpidist.MultiWorkerMirroredStrategy()
        with self.strategy.scope():
            self.net = Net()
            self.opt = mpidist.optimizers.Adam(0.1)
            self.iterator = iter(self.strategy.experimental_distribute_dataset(toy_dataset()))
            self.ckpt = mpidist.Checkpoint(
                step=mpidist.Variable(1), optimizer=self.opt, net=self.net, iterator=self.iterator
            )
        self.manager = mpidist.CheckpointManager(self.ckpt, folder, max_to_keep=3)

    def train_and_checkpoint(self) -> tuple[bool, list[int], list[float]]:
        """Whether it was restored, the steps that were saved, and their losses."""
        ckpt, manager = self.ckpt, self.manager
        ckpt.restore(manager.latest_checkpoint)
        is_restored = bool(manager.latest_checkpoint)
        steps, losses = [], []
        for _ in range(50):
            example = next(self.iterator)
            loss = self.strategy.reduce(
                "SUM", self.strategy.run(train_step, args=(self.net, example, self.opt)), axis=None)
            ckpt.step.assign_add(1)
            if int(ckpt.step) % 10 == 0:
                manager.save()
                steps.append(int(ckpt.step))
                losses.append(float(loss))
        manager.close()
        return is_restored, steps, losses


def test_a_training_is_saved_restored_and_looked_at(mpi_tmp_path: Path) -> None:
    folder = mpi_tmp_path / "tf_ckpts"
    is_restored, steps, losses = Program(folder).train_and_checkpoint()
    assert (is_restored, steps) == (False, [10, 20, 30, 40, 50])
    # As printed: 23.x at step 10, falling.
    assert losses == sorted(losses, reverse=True)
    second = Program(folder)
    is_restored, steps, more = second.train_and_checkpoint()
    assert (is_restored, steps) == (True, [60, 70, 80, 90, 100])
    assert max(more) < min(losses)
    # List the three remaining checkpoints
    assert [os.path.basename(path) for path in second.manager.checkpoints] == ["ckpt-8.h5", "ckpt-9.h5", "ckpt-10.h5"]

    # Parts of the object graph are restored, and later ones when they come.
    to_restore = mpidist.Variable(np.zeros([5], np.float32))
    fake_layer: Any = mpidist.Checkpoint(bias=to_restore)
    fake_net = mpidist.Checkpoint(l1=fake_layer)
    new_root = mpidist.Checkpoint(net=fake_net)
    status = new_root.restore(mpidist.latest_checkpoint(str(folder)))
    assert to_restore.numpy().tolist() == second.net.l1.bias.numpy().tolist()
    deferred_restore = mpidist.Variable(np.zeros([1, 5], np.float32))
    assert not deferred_restore.numpy().any()  # Not restored; still zeros
    fake_layer.kernel = deferred_restore
    assert deferred_restore.numpy().tolist() == second.net.l1.kernel.numpy().tolist()  # Restored
    status.assert_existing_objects_matched()
    with pytest.raises(AssertionError, match="optimizer/"):
        status.assert_consumed()

    # Manual inspection of checkpoints
    reader = mpidist.load_checkpoint(folder)
    shape_from_key = reader.get_variable_to_shape_map()
    dtype_from_key = reader.get_variable_to_dtype_map()
    assert {"net/l1/bias", "net/l1/kernel", "save_counter", "step"} < set(shape_from_key)
    key = "net/l1/kernel"
    assert (shape_from_key[key], dtype_from_key[key].name) == ([1, 5], "float32")
    assert reader.get_tensor(key).tolist() == deferred_restore.numpy().tolist()


def test_lists_and_dictionaries(mpi_tmp_path: Path) -> None:
    with mpidist.MultiWorkerMirroredStrategy().scope():
        save: Any = mpidist.Checkpoint()
        save.listed = [mpidist.Variable(1.0)]
        save.listed.append(mpidist.Variable(2.0))
        save.mapped = {"one": save.listed[0]}
        save.mapped["two"] = save.listed[1]
        save_path = save.save(mpi_tmp_path / "tf_list_example")

        restore: Any = mpidist.Checkpoint()
        v2 = mpidist.Variable(0.0)
        assert v2.numpy() == 0.0  # Not restored yet
        restore.mapped = {"two": v2}
        status = restore.restore(save_path)
        assert v2.numpy() == 2.0

        restore.listed = []
        v1 = mpidist.Variable(0.0)
        restore.listed.append(v1)
        # A list of Python tells nobody what it gets: the guide's last line is true after this one.
        status.restore_new()
        assert v1.numpy() == 1.0


def test_an_iterator_of_a_plain_dataset_keeps_its_position(mpi_tmp_path: Path) -> None:
    dataset = mpidist.data.Dataset.range(10)
    with mpidist.MultiWorkerMirroredStrategy().scope():
        iterator = iter(dataset)
        path = mpidist.Checkpoint(step=mpidist.Variable(1), iterator=iterator)
        assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
        saved = path.save(mpi_tmp_path / "plain")
        iterator = iter(dataset)
        mpidist.Checkpoint(step=mpidist.Variable(1), iterator=iterator).restore(saved).assert_consumed()
        assert int(next(iterator)) == 3
