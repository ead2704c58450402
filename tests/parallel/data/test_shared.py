"""`Dataset.shared`: one copy per node, read once, the same rows; private memory where it must be."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.data import Dataset
from mpidist.data.reading.shared_memory import share_arrays
from mpidist.errors import MismatchError

pytestmark = pytest.mark.mpi

MEGABYTES = 48


def proportional_memory() -> int:
    """Bytes of memory of this process, shared pages counted in proportion."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def arrays() -> Any:
    return {"x": np.arange(60.0).reshape(20, 3), "y": (np.arange(20, dtype=np.int8), np.array(["a", "bc"] * 10))}


def test_a_shared_dataset_gives_the_same_batches(communicator: Communicator) -> None:
    def plain() -> Dataset:
        return Dataset.from_tensor_slices(arrays()).shuffle(20, seed=1).batch(6)

    shared = Dataset.from_tensor_slices(arrays()).shared().shuffle(20, seed=1).batch(6)
    later = plain().shared()
    for ours in (shared, later):
        for a, b in zip(plain(), ours, strict=True):
            assert (a["x"] == b["x"]).all()
            assert (a["y"][0] == b["y"][0]).all()
            assert (a["y"][1] == b["y"][1]).all()
            b["x"][...] = -1
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        inside = Dataset.from_tensor_slices(arrays()["x"]).shared()
    rows = [row for b in strategy.experimental_distribute_dataset(inside.batch(5)) for row in b[:, 0].tolist()]
    everyone = [row for rows in communicator.all_gather_object(rows) for row in rows]
    assert sorted(everyone) == np.arange(0.0, 60, 3).tolist()


# One rank keeps its private array, which may lie in memory that the process had before and so add nothing.
@pytest.mark.mpi(min_size=2)
def test_a_node_holds_one_copy(communicator: Communicator) -> None:
    def measured() -> int:
        gc.collect()
        # What earlier tests have dropped is given back when a communicator opens.
        communicator.split(0).close()
        communicator.barrier()
        total = sum(communicator.all_gather_object(proportional_memory()))
        communicator.barrier()
        return total

    before = measured()
    dataset = Dataset.from_tensor_slices(np.ones((MEGABYTES, 2**20), np.uint8)).shared()
    assert sum(int(row[0]) for row in dataset) == MEGABYTES
    grown = (measured() - before) / 2**20
    assert MEGABYTES * 0.9 < grown < MEGABYTES * 1.2 + 4 * communicator.size
    del dataset


def test_lazy_arrays_are_read_once_per_node(communicator: Communicator) -> None:
    read: list[int] = []

    class Lazy:
        shape = (21, 2)
        dtype = np.dtype(np.int64)

        def __getitem__(self, index: Any) -> Any:
            rows = np.arange(42).reshape(21, 2)[index]
            read.extend((np.atleast_2d(rows)[:, 0] // 2).tolist())
            return rows

    dataset = Dataset.from_tensor_slices(Lazy()).shared()
    everyone = [row for rows in communicator.node.all_gather_object(read) for row in rows]
    assert sorted(everyone) == list(range(21))
    assert [row.tolist() for row in dataset] == np.arange(42).reshape(21, 2).tolist()
    assert sum(map(len, communicator.node.all_gather_object(read))) == 21


def test_hdf5_and_memory_maps(communicator: Communicator, mpi_tmp_path: Path) -> None:
    data = np.random.default_rng(0).random((11, 4))
    if communicator.rank == 0:
        np.save(mpi_tmp_path / "x.npy", data)
        with h5py.File(mpi_tmp_path / "x.h5", "w") as file:
            file["x"] = data
    communicator.barrier()
    with h5py.File(mpi_tmp_path / "x.h5") as file:
        lazy = (file["x"], np.load(mpi_tmp_path / "x.npy", mmap_mode="r"))
        dataset = Dataset.from_tensor_slices(lazy).shared()
    (batch,) = dataset.batch(11)
    assert (batch[0] == data).all()
    assert (batch[1] == data).all()


def test_private_memory_where_it_cannot_be_shared(
    communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIDIST_SHARED_MEMORY", "/nowhere/at/all")
    if communicator.rank == 0 and communicator.size > 1:
        with pytest.warns(RuntimeWarning, match="node memory"):
            dataset = Dataset.from_tensor_slices(np.arange(5)).shared()
    else:
        dataset = Dataset.from_tensor_slices(np.arange(5)).shared()
    assert [int(x) for x in dataset] == list(range(5))


def test_what_cannot_be_shared_is_an_error_on_every_rank(communicator: Communicator) -> None:
    last = communicator.rank == communicator.size - 1
    with pytest.raises(ValueError, match="dataset of arrays"):
        (Dataset.range(3) if last else Dataset.from_tensor_slices(np.arange(3))).shared()
    with pytest.raises(ValueError, match="Python objects"):
        share_arrays(np.array([None]), communicator)
    if communicator.size > 1:
        with pytest.raises(MismatchError, match="shapes and dtypes"):
            Dataset.from_tensor_slices(np.arange(3 + last)).shared()


def test_empty_arrays_can_be_shared(communicator: Communicator) -> None:
    assert list(Dataset.from_tensor_slices(np.zeros((0, 3))).shared()) == []
