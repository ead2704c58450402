"""What does it cost to read and change a few rows of a table on a parameter server?

    mpirun -n 3 python benchmarks/tables.py --plot tables.png --json tables.json

A chief, one worker and one server, by both ways of a window; each time other rows. Beside them stand raw Get and Put of
as many bytes, in one piece and by an indexed datatype, and TensorFlow's ParameterServerStrategy with gRPC on the same
cores, where `--tensorflow` names an interpreter that has it.
"""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import measure
import numpy as np
from measure import SHARE, WORLD, say
from mpi4py import MPI
from parameter_servers import PEER, WAYS, timed, wait

import mpidist
from mpidist.options import WindowOptions
from mpidist.parameter_server.options import ServerOptions
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy

WIDTH = 64
ROW_BYTES = 4 * WIDTH
_SLOT_BYTES = 16 << 20
# Within one function, so that its own way to the worker and back does not count.
_AT_ONCE = round(20 * SHARE) or 1
# Scheduled one after another, before the first has ended.
_QUEUED = round(200 * SHARE)


def drawn(size: int, count: int, rounds: int) -> list[Any]:
    """Numbers of rows for each round."""
    rng = np.random.default_rng(0)
    return [rng.choice(size // ROW_BYTES, count, replace=False) for _ in range(rounds)]


def raw(sizes: Sequence[int], count: int, rounds: int) -> dict[int, dict[str, float]]:
    """Microseconds on the first rank: Get and Put of the last rank's memory."""
    last = WORLD.size - 1
    heap = max(sizes) if WORLD.rank == last else 0
    win = MPI.Win.Allocate(heap, 1, comm=WORLD)
    win.Lock_all()
    if heap:
        np.frombuffer(memoryview(win.tomemory()), np.uint8)[:] = 1  # type: ignore[arg-type]  # mpi4py's buffer is one
    wait()
    found = {}
    for size in sizes if WORLD.rank == 0 else ():
        mine, rows = np.ones(count * ROW_BYTES, np.uint8), itertools.cycle(drawn(size, count, 50))

        def move(call: Callable[..., object], mine: Any = mine) -> None:
            call([mine, MPI.BYTE], last)
            win.Flush(last)

        def move_rows(call: Callable[..., object], mine: Any = mine, rows: Any = rows) -> None:
            kind = MPI.BYTE.Create_hindexed_block(ROW_BYTES, (next(rows) * ROW_BYTES).tolist()).Commit()
            call([mine, MPI.BYTE], last, [0, 1, kind])
            win.Flush(last)
            kind.Free()

        found[size] = {
            "Get": timed(lambda: move(win.Get), rounds), "Put": timed(lambda: move(win.Put), rounds),
            "Get of rows": timed(lambda: move_rows(win.Get), rounds),
            "Put of rows": timed(lambda: move_rows(win.Put), rounds),
        }
    wait()
    win.Unlock_all()
    win.Free()
    return found


def training(way: str, sizes: Sequence[int], count: int, rounds: int) -> dict[str, Any]:
    """The figures of the chief; nothing on other ranks."""
    options = ServerOptions(
        heap_bytes=max(sizes) + max(sizes) // 256 + 8 * _SLOT_BYTES, window=WindowOptions(way=way),
        slot_bytes=_SLOT_BYTES,
    )
    strategy = ParameterServerStrategy(
        mpidist.cluster_resolver.MPIClusterResolver(num_ps=1), serve=False, options=options
    )
    if strategy.chief is None:
        strategy.serve()
        strategy.close()
        wait()
        return {}
    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
    found = {f"{size >> 20} MB": sparse(strategy, coordinator, size, count, rounds) for size in sizes}
    strategy.close()
    wait()
    return found


def queued(
    coordinator: mpidist.coordinator.ClusterCoordinator, function: Callable[[Any], object], given: Iterator[Any]
) -> float:
    """Microseconds of a function where many are scheduled before the first has ended."""
    begin = time.perf_counter()
    for _ in range(_QUEUED):
        coordinator.schedule(function, (next(given),))
    coordinator.join()
    return (time.perf_counter() - begin) / _QUEUED * 1e6


def sparse(
    strategy: ParameterServerStrategy, coordinator: mpidist.coordinator.ClusterCoordinator, size: int, count: int,
    rounds: int,
) -> dict[str, float]:
    """Microseconds of functions that read rows, and change them; of a read alone, and of the least change there is."""
    with strategy.scope():
        scalar = mpidist.Variable(0)
        table = mpidist.Variable(
            mpidist.initializers.Constant(0.5), shape=(size // ROW_BYTES, WIDTH), dtype="float32", sparse_gradient=True
        )
    optimizer = mpidist.optimizers.SGD(0.5)
    optimizer.build([table])
    ones = np.ones((count, WIDTH), "float32")
    rows = itertools.cycle(drawn(size, count, 50))

    def pull(ids: Any) -> None:
        table.sparse_read(ids)

    def add(ids: Any) -> None:
        table.sparse_read(ids)
        table.scatter_add(mpidist.IndexedSlices(ones, ids))

    def add_often(ids: Sequence[Any]) -> None:
        for one in ids:
            add(one)

    def step(ids: Any) -> None:
        found = mpidist.embedding_lookup(table, ids)
        optimizer.apply_gradients([(mpidist.embedding_gradient(table, ids, found), table)])

    def least(_: Any) -> None:
        scalar.assign_add(1)

    def reads(ids: Sequence[Any]) -> float:
        begin = time.perf_counter()
        for one in ids:
            table.sparse_read(one)
        return (time.perf_counter() - begin) / len(ids) * 1e6

    def ran(function: Callable[[Any], object]) -> Callable[[], object]:
        return lambda: coordinator.schedule(function, (next(rows),)).get()

    some = drawn(size, count, _AT_ONCE)
    alone = sorted(coordinator.schedule(reads, (some,)).get() for _ in range(rounds))
    return {
        "pull": timed(ran(pull), rounds), "pull and add": timed(ran(add), rounds),
        "pull and SGD": timed(ran(step), rounds), "add to a scalar": timed(ran(least), rounds),
        "pull within a function": float(alone[len(alone) // 2]),
        "pull and add within a function":
            timed(lambda: coordinator.schedule(add_often, (some,)).get(), rounds) / _AT_ONCE,
        "pull and add, queued": queued(coordinator, add, rows),
        "within a function, queued": queued(coordinator, add_often, itertools.repeat(some)) / _AT_ONCE,
    }


def peer(python: str | None, sizes: Sequence[int], count: int, rounds: int) -> dict[str, Any]:
    """TensorFlow's figures, measured by a process of its own."""
    if python is None or WORLD.rank:
        return {}
    case = f"--rows={count}x{WIDTH}x{_AT_ONCE}x{_QUEUED}"
    command = [python, str(PEER), "1", "1", str(rounds), *map(str, sizes), case]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=600)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def plot(path: str, figures: dict[str, Any]) -> None:
    """Bars: microseconds of a function that reads and adds, for each size."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    names = [name for name in (*WAYS, "TensorFlow") if figures.get(name)]
    sizes = list(figures[WAYS[0]])
    figure, axis = pyplot.subplots(figsize=(6, 3.4), constrained_layout=True)
    for number, size in enumerate(sizes):
        places = np.arange(len(names)) + 0.35 * number
        axis.bar(places, [figures[name][size]["pull and add"] for name in names], 0.3, label=f"table of {size}")
    axis.set_xticks(np.arange(len(names)) + 0.35 * (len(sizes) - 1) / 2, names)
    axis.set_yscale("log")
    axis.set_ylabel("us")
    axis.set_title(f"read and change {figures['rows']} rows of {ROW_BYTES} bytes")
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    say(f"wrote {path}")


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--megabytes", default=(64, 1024), show_default=True, multiple=True, help="Sizes of tables.")
@click.option("--rows", default=32, show_default=True, help="Rows of 256 bytes that a function names.")
@click.option("--rounds", default=300, show_default=True, help="Functions of each case.")
@click.option("--tensorflow", help="A Python that has tensorflow-cpu.")
@click.option("--plot", "plot_path", help="Write a bar chart.")
@click.option("--json", "json_path", help="Write the figures.")
def main(
    megabytes: Sequence[int], rows: int, rounds: int, tensorflow: str | None, plot_path: str | None,
    json_path: str | None,
) -> None:
    if WORLD.size != 3:
        raise click.UsageError("it takes a chief, a worker and a server: mpirun -n 3 python benchmarks/tables.py")
    sizes = [size << 20 for size in megabytes]
    figures: dict[str, Any] = {"rows": rows}
    figures["raw, us"] = {f"{size >> 20} MB": times for size, times in raw(sizes, rows, rounds).items()}
    for way in WAYS:
        figures[way] = training(way, sizes, rows, rounds)
    figures["TensorFlow"] = peer(tensorflow, sizes, rows, rounds)
    wait(0.1)
    if WORLD.rank == 0:
        show(figures)
        if plot_path:
            plot(plot_path, figures)
    measure.record(json_path, figures)


def show(figures: dict[str, Any]) -> None:
    """Print the table, and how the largest one compares with the smallest."""
    names = [name for name in (*WAYS, "TensorFlow") if figures[name]]
    say(f"{figures['rows']} rows of {ROW_BYTES} bytes, us".ljust(34) + "".join(f"{name:>14}" for name in names))
    sizes = list(figures[WAYS[0]])
    for size in sizes:
        say(f"table of {size}: raw " + ", ".join(f"{name} {us:.1f}" for name, us in figures["raw, us"][size].items()))
        for case in figures[WAYS[0]][size]:
            say(f"  {case:32}" + "".join(f"{figures[name][size].get(case, float('nan')):14.1f}" for name in names))
    if len(sizes) > 1:
        say(f"{sizes[-1]} / {sizes[0]}")
        for case in figures[WAYS[0]][sizes[0]]:
            ratios = [figures[name][sizes[-1]].get(case, float("nan")) / figures[name][sizes[0]].get(case, 1.0)
                      for name in names]
            say(f"  {case:32}" + "".join(f"{ratio:14.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
