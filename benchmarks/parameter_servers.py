"""How fast are parameter servers: closures, and pulling and pushing of dense variables?

    mpirun -n 3 python benchmarks/parameter_servers.py --plot ps.png --json ps.json

A chief, workers and one server, by both ways of a window. Beside them stand raw Get and Put of the same bytes, a copy
in memory, and TensorFlow's ParameterServerStrategy with gRPC on the same cores, where `--tensorflow` names an
interpreter that has it. Functions that compute for a while are also timed with `prefetch`, by which the pull of the
next one overlaps. More ranks are more workers.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import measure
import numpy as np
from measure import WORLD, say
from mpi4py import MPI

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.comm.group.opening import open_communicator
from mpidist.comm.windows.window import open_window
from mpidist.failures.peers import Key
from mpidist.options import WindowOptions
from mpidist.parameter_server.heap.layout import slots_of
from mpidist.parameter_server.options import ServerOptions
from mpidist.parameter_server.protocol.endpoint import Station
from mpidist.parameter_server.protocol.messages import Applied, Call, Drop, Message, Prepared, Push, Send
from mpidist.parameter_server.server.server import VariableServer
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy

WAYS = ("RMA", "SOCKETS")
PEER = Path(__file__).with_name("parameter_servers_peer.py")
_TICKS = os.sysconf("SC_CLK_TCK")
# A function computes so long, without the interpreter's lock.
_COMPUTE_SECONDS = 5e-3
# Numbers of a small variable, and variables that a function reads.
_SMALL, _SEVERAL = 1000, 20
# So many are made.
_MANY = 5000


def timed(
    call: Callable[[], object], rounds: int, warm: int = 3, before: Callable[[], object] | None = None
) -> float:
    """Median microseconds of a call, after another one that does not count."""
    times = []
    for _ in range(rounds + warm):
        if before is not None:
            before()
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[warm:]) * 1e6


def wait(seconds: float = 0.01) -> None:
    """Wait for all ranks, and leave the cores to those that work."""
    barrier = WORLD.Ibarrier()
    while not barrier.Test():
        time.sleep(seconds)


def core_seconds(pid: int) -> float:
    """What a process has used of the cores so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


class Answers:
    """The role of a coordinator that takes note of a server's answers, and of a server that is told to end."""

    def __init__(self) -> None:
        self.prepared = 0
        self.has_ended = False

    def take(self, _: int, message: Message) -> None:
        """Take note of one of them."""
        self.prepared += isinstance(message, Prepared)
        self.has_ended |= isinstance(message, Call)


def doorbell(communicator: Communicator, way: str, count: int) -> float:
    """Median microseconds from the ring of an update to `prepared`, between the first rank and the last one."""
    last, rank = communicator.size - 1, communicator.rank
    window = open_window(communicator, 1 << 20 if rank == last else 0, WindowOptions(way=way))
    station, answers = Station(window, str, lambda rank: Key("", rank, ""), frozenset({0, last})), Answers()
    found = 0.0
    if rank == last:
        VariableServer(station, 0, slots_of(1 << 20, [0], None), 0)
        station.route([(Call, "end")], answers.take)
        while not answers.has_ended:
            station.step(0.05)
    elif rank == 0:
        station.route([Prepared, Applied], answers.take)
        times = []
        for number in range(1, count + 1):
            begin = time.perf_counter()
            station.send(Send(last, Push(number, 1, 0, 0, True)))
            while answers.prepared < number:
                station.step(0.05)
            times.append(time.perf_counter() - begin)
            # Of its own update, which nobody answers.
            station.send(Send(last, Drop(0, number, 1)))
        station.send(Send(last, Call(0, "end", b"")))
        found = statistics.median(times) * 1e6
    wait()
    window.close()
    return found


def raw(sizes: Sequence[int], rounds: int) -> dict[int, dict[str, float]]:
    """Microseconds on the first rank: Get and Put of the last rank's memory, and a copy of the same bytes.

    Both are of the same memory each time, which may stay in a cache. "in turns" is a Get and then a Put as training
    makes them: two versions of a variable and two slots take turns, and the values and gradients are other memory.
    """
    last = WORLD.size - 1
    heap = 4 * max(sizes) if WORLD.rank == last else 0
    win = MPI.Win.Allocate(heap, 1, comm=WORLD)
    win.Lock_all()
    if heap:
        np.frombuffer(memoryview(win.tomemory()), np.uint8)[:] = 1  # type: ignore[arg-type]  # mpi4py's buffer is one
    wait()
    found = {}
    for size in sizes if WORLD.rank == 0 else ():
        mine, other = np.ones(size, np.uint8), np.ones(size, np.uint8)

        def get(mine: Any = mine) -> None:
            win.Get([mine, MPI.BYTE], last)
            win.Flush(last)

        def put(mine: Any = mine) -> None:
            win.Put([mine, MPI.BYTE], last)
            win.Flush(last)

        def copy(mine: Any = mine, other: Any = other) -> None:
            np.copyto(other, mine)

        places = itertools.cycle((0, size))

        def both(mine: Any = mine, other: Any = other, size: int = size, places: Any = places) -> None:
            place = next(places)
            win.Get([mine, MPI.BYTE], last, place)
            win.Flush(last)
            win.Put([other, MPI.BYTE], last, 2 * size + place)
            win.Flush(last)

        found[size] = {
            "Get": timed(get, rounds), "Put": timed(put, rounds), "copy": timed(copy, rounds),
            "in turns": timed(both, rounds),
        }
    wait()
    win.Unlock_all()
    win.Free()
    return found


def training(way: str, sizes: Sequence[int], closures: int, rounds: int, idle_seconds: float) -> dict[str, Any]:
    """The figures of the chief; nothing on other ranks."""
    options = ServerOptions(
        heap_bytes=(16 << 20) + (3 + 2 * (WORLD.size - 1)) * max(sizes), window=WindowOptions(way=way),
        slot_bytes=max(sizes) + (1 << 16),
    )
    strategy = ParameterServerStrategy(
        mpidist.cluster_resolver.MPIClusterResolver(num_ps=1), serve=False, options=options
    )
    pids = WORLD.allgather(os.getpid())
    if strategy.chief is None:
        strategy.serve()
        strategy.close()
        wait()
        return {}
    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
    workers = len(strategy.roles.workers)

    def nothing() -> None:
        pass

    found: dict[str, Any] = {"null closure, us": timed(lambda: coordinator.schedule(nothing).get(), closures, 50)}
    begin = time.perf_counter()
    for _ in range(4 * closures):
        coordinator.schedule(nothing)
    coordinator.join()
    found["closures per second"] = 4 * closures / (time.perf_counter() - begin)
    for size in sizes:
        found[f"{size >> 20} MB"] = dense(strategy, coordinator, size, rounds, workers)
    found |= small(strategy, coordinator, closures)
    found |= making(strategy)
    server = pids[strategy.roles.servers[0]]
    used = core_seconds(server)
    time.sleep(idle_seconds)
    found["idle server, % of a core"] = 100 * (core_seconds(server) - used) / idle_seconds if idle_seconds else 0.0
    strategy.close()
    wait()
    return found


def dense(
    strategy: ParameterServerStrategy, coordinator: mpidist.coordinator.ClusterCoordinator, size: int, rounds: int,
    workers: int,
) -> dict[str, float]:
    """Microseconds of a pull, of a pull with an add or a step of SGD, and of a step for each worker at a time."""
    with strategy.scope():
        weight = mpidist.Variable(np.zeros(size // 4, "float32"))
    optimizer = mpidist.optimizers.SGD(0.5)
    optimizer.build([weight])
    gradients: Any = coordinator.create_per_worker_value(lambda: np.ones(size // 4, "float32"))

    def pull() -> None:
        weight.value()

    def add() -> None:
        weight.assign_add(weight.value())

    def step() -> None:
        weight.value()
        optimizer.apply_gradients([(gradients, weight)])

    def steps() -> None:
        for _ in range(workers):
            coordinator.schedule(step)
        coordinator.join()

    def ran(function: Callable[[], object]) -> Callable[[], object]:
        return lambda: coordinator.schedule(function).get()

    found = {
        # What has not changed is not fetched again.
        "pull": timed(ran(pull), rounds, before=ran(add)),
        "pull, unchanged": timed(ran(pull), rounds),
        "pull and add": timed(ran(add), rounds),
        "pull and SGD": timed(ran(step), rounds),
    }
    return {**found, "a step of each worker": timed(steps, rounds)}


def small(
    strategy: ParameterServerStrategy, coordinator: mpidist.coordinator.ClusterCoordinator, rounds: int
) -> dict[str, float]:
    """Microseconds in which a function reads one small variable, and several, all of which have changed."""
    with strategy.scope():
        variables = [mpidist.Variable(np.zeros(_SMALL, "float32")) for _ in range(_SEVERAL)]

    def change() -> None:
        for variable in variables:
            variable.assign_add(np.ones(_SMALL, "float32"))

    def one() -> float:
        begin = time.perf_counter()
        variables[0].value()
        return time.perf_counter() - begin

    def several() -> float:
        begin = time.perf_counter()
        for variable in variables:
            variable.value()
        return time.perf_counter() - begin

    found = {}
    for count, function in ((1, one), (_SEVERAL, several)):
        times = []
        for _ in range(rounds):
            coordinator.schedule(change)
            coordinator.join()
            times.append(coordinator.schedule(function).fetch())
        found[f"read of {count} changed, us"] = statistics.median(times[3:]) * 1e6
    return found


def making(strategy: ParameterServerStrategy) -> dict[str, float]:
    """Microseconds until a function could use many small variables and Adam's state of them."""
    begin = time.perf_counter()
    with strategy.scope():
        variables = [mpidist.Variable(np.full(10, number, "float32")) for number in range(_MANY)]
    variables[-1].numpy()
    made = time.perf_counter()
    mpidist.optimizers.Adam().build(variables)
    return {
        f"making {_MANY} variables, us": (made - begin) * 1e6,
        f"making Adam's state of {_MANY}, us": (time.perf_counter() - made) * 1e6,
    }


def overlap(way: str, size: int, rounds: int, *, prefetch: bool) -> float:
    """Microseconds for each function that pulls a variable, computes and makes a step of SGD; 0 on other ranks."""
    options = ServerOptions(
        heap_bytes=(1 << 20) + (3 + 2 * (WORLD.size - 1)) * size, window=WindowOptions(way=way),
        slot_bytes=size + (1 << 16),
    )
    strategy = ParameterServerStrategy(
        mpidist.cluster_resolver.MPIClusterResolver(num_ps=1), serve=False, options=options
    )
    found = 0.0
    if strategy.chief is None:
        strategy.serve()
    else:
        coordinator = mpidist.coordinator.ClusterCoordinator(strategy, prefetch=prefetch)
        with strategy.scope():
            weight = mpidist.Variable(np.zeros(size // 4, "float32"))
        optimizer = mpidist.optimizers.SGD(0.5)
        optimizer.build([weight])
        gradients: Any = coordinator.create_per_worker_value(lambda: np.ones(size // 4, "float32"))

        def work() -> None:
            weight.value()
            time.sleep(_COMPUTE_SECONDS)
            optimizer.apply_gradients([(gradients, weight)])

        def several() -> None:
            for _ in range(rounds):
                coordinator.schedule(work)
            coordinator.join()

        found = timed(several, 3, 1) / rounds
    strategy.close()
    wait()
    return found


def peer(python: str | None, sizes: Sequence[int], closures: int, rounds: int) -> dict[str, Any]:
    """TensorFlow's figures, measured by a process of its own."""
    if python is None or WORLD.rank:
        return {}
    names = [str(size) for size in sizes]
    command = [python, str(PEER), str(WORLD.size - 2), str(closures), str(rounds), *names]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=600)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def plot(path: str, figures: dict[str, Any]) -> None:
    """Bars: milliseconds of a null closure, and of a pull with a push."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    names = [name for name in (*WAYS, "TensorFlow") if figures.get(name)]
    rows = [name for name in figures[names[0]] if name.endswith("MB")]
    figure, axes = pyplot.subplots(1, 1 + len(rows), figsize=(3 * (1 + len(rows)), 3.4), constrained_layout=True)
    axes[0].bar(names, [figures[name]["null closure, us"] / 1e3 for name in names])
    axes[0].set_title("null closure")
    for axis, row in zip(axes[1:], rows, strict=True):
        axis.bar(names, [figures[name][row]["pull and add"] / 1e3 for name in names])
        limit = figures["raw, us"][row]
        axis.axhline((limit["Get"] + limit["Put"]) / 1e3, color="black", linestyle="--", label="raw Get and Put")
        axis.set_title(f"{row}: pull and add")
        axis.legend(fontsize=8)
    axes[0].set_ylabel("ms")
    for axis in axes:
        axis.set_yscale("log")
    figure.savefig(path, dpi=110)
    say(f"wrote {path}")


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--megabytes", default=(16, 64), show_default=True, multiple=True, help="Sizes of variables.")
@click.option("--closures", default=1000, show_default=True, help="Closures one after the other, and messages.")
@click.option("--rounds", default=15, show_default=True, help="Pulls and pushes of each case.")
@click.option("--idle", default=10.0, show_default=True, help="Seconds in which the server has nothing to do.")
@click.option("--tensorflow", help="A Python that has tensorflow-cpu.")
@click.option("--plot", "plot_path", help="Write a bar chart.")
@click.option("--json", "json_path", help="Write the figures.")
def main(
    megabytes: Sequence[int], closures: int, rounds: int, idle: float, tensorflow: str | None, plot_path: str | None,
    json_path: str | None,
) -> None:
    if WORLD.size < 3:
        raise click.UsageError("it takes a chief, a worker and a server: mpirun -n 3 python benchmarks/...")
    sizes = [size << 20 for size in megabytes]
    communicator = open_communicator(purpose="benchmark")
    limits = raw(sizes, rounds)
    figures: dict[str, Any] = {"workers": WORLD.size - 2}
    figures["raw, us"] = {f"{size >> 20} MB": times for size, times in limits.items()}
    for way in WAYS:
        bell = doorbell(communicator, way, closures)
        figures[way] = {**training(way, sizes, closures, rounds, idle), "ring to prepared, us": bell}
        for prefetch in (False, True):
            row = f"{sizes[0] >> 20} MB and {_COMPUTE_SECONDS * 1e3:g} ms{' with prefetch' * prefetch}, us"
            figures[way][row] = overlap(way, sizes[0], rounds, prefetch=prefetch)
    figures["TensorFlow"] = peer(tensorflow, sizes, closures, rounds)
    wait(0.1)
    if WORLD.rank == 0:
        show(figures)
        if plot_path:
            plot(plot_path, figures)
    measure.record(json_path, figures)


def show(figures: dict[str, Any]) -> None:
    """Print the table; pulls and pushes also as multiples of raw calls."""
    names = [name for name in (*WAYS, "TensorFlow") if figures[name]]
    say(f"{figures['workers']} workers".ljust(34) + "".join(f"{name:>20}" for name in names))
    for row, value in figures[WAYS[0]].items():
        if not isinstance(value, dict):
            say(f"{row:34}" + "".join(f"{figures[name].get(row, float('nan')):20.1f}" for name in names))
            continue
        limit = figures["raw, us"][row]
        say(
            f"{row}: Get {limit['Get']:.0f} us, Put {limit['Put']:.0f} us, copy {limit['copy']:.0f} us; "
            f"Get and Put in turns {limit['in turns']:.0f} us"
        )
        for case in value:
            least = limit["Get"] + limit["Put"] * (not case.startswith("pull,") and case != "pull")
            cells = [figures[name][row].get(case, float("nan")) for name in names]
            say(f"  {case + ', us / raw':32}" + "".join(f"{cell:13.0f} /{cell / least:5.2f}" for cell in cells))


if __name__ == "__main__":
    main()
