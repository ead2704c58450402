"""How fast are checkpoints: saving and restoring, beside raw writes and reads of the same bytes.

    mpirun -n 2 python benchmarks/checkpoint.py --megabytes 300 --plot checkpoint.png --json checkpoint.json

Saves are written to the disk (fsync) and restores come from the cache of the system, into memory that was touched
before; the slowest rank counts. The cases take turns. Of a save in the background the wait is measured, beside one copy
in memory. `--variables 10000` measures as many of 32 bytes, and what creating them takes; `--elements 2147483659` one
variable of so many int8 numbers. DCP is PyTorch's distributed checkpoint, and Orbax that of JAX, of arrays that are
divided over the ranks; where they are installed, and followed by an fsync of their files.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import h5py
import measure
import numpy as np
from measure import WORLD, Case, say
from mpi4py import MPI

import mpidist

PARTS = 12


class Raw:
    """One file without any format, of which each rank writes and reads its part; or a file of each rank."""

    def __init__(self, folder: str, total: int, *, apart: bool = False) -> None:
        self.path = os.path.join(folder, f"raw-{WORLD.rank}" if apart else "raw")
        self.mine = np.ones(total // WORLD.size, np.uint8)
        self.offset = 0 if apart else WORLD.rank * self.mine.size
        self.deletes = apart or WORLD.rank == 0

    def save(self) -> None:
        """Write and sync."""
        if self.deletes:
            Path(self.path).unlink(missing_ok=True)
        WORLD.Barrier()
        descriptor = os.open(self.path, os.O_CREAT | os.O_WRONLY)
        self._move(lambda view, place: os.pwrite(descriptor, view, place))
        os.fsync(descriptor)
        os.close(descriptor)

    def restore(self) -> None:
        """Read."""
        descriptor = os.open(self.path, os.O_RDONLY)
        self._move(lambda view, place: os.preadv(descriptor, [view], place))
        os.close(descriptor)

    def _move(self, call: Callable[[memoryview, int], int]) -> None:
        view, place = memoryview(self.mine.data).cast("B"), self.offset
        while view:
            count = call(view[: 1 << 30], place)
            view, place = view[count:], place + count


class FirstRank:
    """h5py on the first rank, and a broadcast."""

    def __init__(self, folder: str, arrays: list[Any]) -> None:
        self.path, self.arrays = os.path.join(folder, "first.h5"), arrays

    def save(self) -> None:
        """Write and sync."""
        if WORLD.rank == 0:
            with h5py.File(self.path, "w") as file:
                for number, array in enumerate(self.arrays):
                    file[str(number)] = array
            sync(self.path)

    def restore(self) -> None:
        """Read, and send to the other ranks."""
        if WORLD.rank == 0:
            with h5py.File(self.path) as file:
                for number, array in enumerate(self.arrays):
                    file[str(number)].read_direct(array)
        for array in self.arrays:
            WORLD.Bcast(array)


def sync(path: str) -> None:
    """Sync a file, or all files of a directory."""
    files = [path] if os.path.isfile(path) else [str(one) for one in Path(path).rglob("*") if one.is_file()]
    for name in files:
        descriptor = os.open(name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def dcp_cases(folder: str, arrays: list[Any]) -> dict[str, tuple[Case, Case]]:
    """PyTorch's distributed checkpoint of the same arrays, the same on every rank."""
    if importlib.util.find_spec("torch") is None:
        return {}
    torch: Any = importlib.import_module("torch")
    dcp: Any = importlib.import_module("torch.distributed.checkpoint")
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK=str(WORLD.rank), WORLD_SIZE=str(WORLD.size)
    )
    torch.distributed.init_process_group("gloo")
    state = {str(number): torch.from_numpy(array) for number, array in enumerate(arrays)}
    path = os.path.join(folder, "dcp")

    def save() -> None:
        dcp.save(state, checkpoint_id=path)
        if WORLD.rank == 0:
            sync(path)

    return {"DCP": (save, lambda: dcp.load(state, checkpoint_id=path))}


def orbax_cases(folder: str, arrays: list[Any]) -> dict[str, tuple[Case, Case]]:
    """Orbax's checkpoint of arrays of this size, each of which is divided over the ranks."""
    if importlib.util.find_spec("orbax") is None:
        return {}
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax: Any = importlib.import_module("jax")
    orbax: Any = importlib.import_module("orbax.checkpoint")
    if WORLD.size > 1:
        jax.distributed.initialize("127.0.0.1:29518", WORLD.size, WORLD.rank)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("ranks",))
    divided = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
    part = arrays[0].size // WORLD.size
    state = {
        str(number): jax.make_array_from_process_local_data(divided, array[:part], (part * WORLD.size,))
        for number, array in enumerate(arrays)
    }
    like = jax.tree.map(orbax.utils.to_shape_dtype_struct, state)
    checkpointer = orbax.Checkpointer(orbax.StandardCheckpointHandler())
    path = os.path.join(folder, "orbax")

    def save() -> None:
        checkpointer.save(path, args=orbax.args.StandardSave(state), force=True)
        if WORLD.rank == 0:
            sync(path)

    return {"Orbax": (save, lambda: checkpointer.restore(path, args=orbax.args.StandardRestore(like)))}


def compare(folder: str, megabytes: int, rounds: int) -> dict[str, Any]:
    """Seconds to save and to restore `megabytes` in a few variables."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    size = (megabytes << 20) // (4 * PARTS)
    # Random: Orbax compresses.
    value = np.random.default_rng(0).standard_normal(size, np.float32)
    with strategy.scope():
        checkpoint = mpidist.Checkpoint(variables=[mpidist.Variable(value) for _ in range(PARTS)])
    path = os.path.join(folder, "c")
    arrays = [value.copy() for _ in range(PARTS)]
    raw, apart = (Raw(folder, 4 * size * PARTS, apart=apart) for apart in (False, True))
    first = FirstRank(folder, arrays)
    ways: dict[str, tuple[Case, Case]] = {
        "raw": (raw.save, raw.restore),
        "raw, n files": (apart.save, apart.restore),
        "mpidist": (lambda: checkpoint.write(path), lambda: checkpoint.read(path)),
        "h5py, rank 0": (first.save, first.restore),
        **dcp_cases(folder, arrays),
        **orbax_cases(folder, arrays),
    }
    result: dict[str, Any] = {"megabytes": megabytes}
    for index, act in enumerate(("save", "restore")):
        times = measure.interleaved({name: way[index] for name, way in ways.items()}, rounds)
        result[act] = {name: one["min"] / 1e3 for name, one in times.items()}
        raw_seconds = result[act]["raw"]
        say(f"{megabytes} MiB, {act}: " + ", ".join(
            f"{name} {seconds:.3f} s ({raw_seconds / seconds:.2f} of raw)" for name, seconds in result[act].items()
        ))
    result["in the background"] = behind(checkpoint, path, rounds)
    return result


def behind(checkpoint: mpidist.Checkpoint, path: str, rounds: int) -> dict[str, float]:
    """Seconds that the program waits for a save in the background, and those of one copy of the ranks' shares."""
    live = [variable.value().reshape(-1) for variable in checkpoint.variables]
    share = live[0].size // WORLD.size
    mine = [one[WORLD.rank * share : (WORLD.rank + 1) * share] for one in live]
    copies = [one.copy() for one in mine]

    def copy() -> None:
        for target, one in zip(copies, mine, strict=True):
            np.copyto(target, one)

    times: dict[str, list[float]] = {"one copy": [], "wait": [], "until it is complete": []}
    for _ in range(rounds + 1):
        WORLD.Barrier()
        begin = time.perf_counter()
        copy()
        times["one copy"].append(WORLD.allreduce(time.perf_counter() - begin, MPI.MAX))
        begin = time.perf_counter()
        checkpoint.write(path, background=True)
        wait = time.perf_counter() - begin
        checkpoint.sync()
        times["until it is complete"].append(WORLD.allreduce(time.perf_counter() - begin, MPI.MAX))
        times["wait"].append(WORLD.allreduce(wait, MPI.MAX))
    # In the first round the memory of the copies is new.
    result = {name: min(seconds[1:]) for name, seconds in times.items()}
    result["first wait"] = times["wait"][0]
    say("in the background: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in result.items()) + (
        f"; the wait is {result['wait'] / result['one copy']:.2f} copies"
    ))
    return result


def many(folder: str, count: int, rounds: int) -> dict[str, float]:
    """Seconds to create, save and restore `count` variables of 32 bytes, and to list them from outside."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    value = np.ones(8, np.float32)
    WORLD.Barrier()
    begin = time.perf_counter()
    with strategy.scope():
        variables = [mpidist.Variable(value) for _ in range(count)]
    created = WORLD.allreduce(time.perf_counter() - begin, MPI.MAX)
    checkpoint = mpidist.Checkpoint(variables=variables)
    path = checkpoint.write(os.path.join(folder, "many"))
    cases: dict[str, Case] = {
        "save": lambda: checkpoint.write(os.path.join(folder, "many")), "restore": lambda: checkpoint.read(path),
        "open from outside": lambda: mpidist.list_variables(path),
    }
    times = measure.interleaved(cases, rounds)
    result = {"create": created, **{name: one["min"] / 1e3 for name, one in times.items()}}
    say(f"{count} variables: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in result.items()))
    return result


def single(folder: str, elements: int, rounds: int) -> dict[str, Any]:
    """Seconds to save and to restore one variable of `elements` int8 numbers."""
    value = np.resize(np.arange(101, dtype=np.int8), elements)
    with mpidist.MultiWorkerMirroredStrategy().scope():
        variable = mpidist.Variable(value)
    del value
    checkpoint, path, raw = mpidist.Checkpoint(variable=variable), os.path.join(folder, "single"), Raw(folder, elements)
    result: dict[str, Any] = {"elements": elements}
    cases: dict[str, dict[str, Case]] = {
        "save": {"raw": raw.save, "mpidist": lambda: checkpoint.write(path)},
        "restore": {"raw": raw.restore, "mpidist": lambda: checkpoint.read(path)},
    }
    for act, calls in cases.items():
        times = measure.interleaved(calls, rounds)
        result[act] = {name: one["min"] / 1e3 for name, one in times.items()}
        share = result[act]["raw"] / result[act]["mpidist"]
        say(f"{elements} elements, {act}: {result[act]['mpidist']:.2f} s ({share:.2f} of raw)")
    if int(variable.value()[-1]) != (elements - 1) % 101:
        raise RuntimeError("the last element was not restored")
    return result


def plot(path: str, result: dict[str, Any]) -> None:
    """Bars: seconds of each way; above, what part of the speed of raw calls that is."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.6), constrained_layout=True)
    for axis, act in zip(axes, ("save", "restore"), strict=True):
        seconds = result[act]
        bars = axis.bar(list(seconds), list(seconds.values()))
        axis.bar_label(bars, [f"{seconds['raw'] / one:.2f}" for one in seconds.values()])
        axis.margins(y=0.15)
        axis.tick_params("x", labelsize=7, rotation=15)
        axis.set_title(f"{act}, {result['megabytes']} MiB")
        axis.set_ylabel("seconds")
    figure.suptitle(f"Checkpoints on {WORLD.size} ranks; above the bars: part of the speed of raw calls", fontsize=10)
    figure.savefig(path, dpi=110)
    say(f"wrote {path}")


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--megabytes", default=300, show_default=True, help="Size of the checkpoint; 0 leaves it out.")
@click.option("--variables", default=0, show_default=True, help="Number of variables of 32 bytes; 0 leaves them out.")
@click.option("--elements", default=0, show_default=True, help="Elements of one variable of bytes; 0 leaves it out.")
@click.option("--rounds", default=5, show_default=True, help="Repetitions of each case.")
@click.option("--folder", help="A directory on the disk that is measured.  [default: that of temporary files]")
@click.option("--plot", "plot_path", help="Write a bar chart.")
@click.option("--json", "json_path", help="Write the figures.")
def main(
    megabytes: int, variables: int, elements: int, rounds: int, folder: str | None, plot_path: str | None,
    json_path: str | None,
) -> None:
    place = WORLD.bcast(tempfile.mkdtemp(dir=folder) if WORLD.rank == 0 else None)
    try:
        # First, without the threads and the objects of other libraries.
        small = many(place, variables, rounds) if variables else None
        one = single(place, elements, rounds) if elements else None
        figures = {"large": compare(place, megabytes, rounds) if megabytes else None}
    finally:
        WORLD.Barrier()
        if WORLD.rank == 0:
            shutil.rmtree(place)
    measure.record(json_path, {**figures, "many": small, "single": one})
    if plot_path and figures["large"] and WORLD.rank == 0:
        plot(plot_path, figures["large"])


if __name__ == "__main__":
    main()
