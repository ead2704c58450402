"""What does a window cost: a message from ring to poll, and reading and writing the heap of another rank?

    mpirun -n 2 python benchmarks/windows.py --plot windows.png --json windows.json

Rank 0 offers a heap and serves, rank 1 reads, writes and rings, by both ways in turns. Beside them stand raw MPI (Send
and Recv, Get and Put of one call on a window of its own) and a copy of the same bytes in memory.
"""

from __future__ import annotations

import functools
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import measure
import numpy as np
import numpy.typing as npt
from measure import WORLD, say
from mpi4py import MPI

from mpidist.comm.group.opening import open_communicator
from mpidist.comm.windows.window import Window, open_window
from mpidist.options import WindowOptions

Times = dict[str, float]
Bytes = npt.NDArray[np.uint8]
END = b"END"
WAYS = ("RMA", "SOCKETS")
RAW, COPY = "raw MPI", "memory copy"


def summary(seconds: Sequence[float]) -> Times:
    """Microseconds."""
    return {"min": min(seconds) * 1e6, "median": statistics.median(seconds) * 1e6}


def answer(window: Window) -> None:
    """Rank 0: send every message back until the last one."""
    while True:
        found = window.poll(60.0)
        if found is None or found[1] == END:
            return
        window.ring(*found)


def round_trips(window: Window, count: int, pause: float) -> list[float]:
    """Rank 1: seconds from a ring of 64 bytes to the answer, halved."""
    message, times = bytes(64), []
    for _ in range(count):
        if pause:
            time.sleep(pause)
        begin = time.perf_counter()
        window.ring(0, message)
        while window.poll(60.0) is None:
            pass
        times.append((time.perf_counter() - begin) / 2)
    window.ring(0, END)
    return times


def raw_round_trips(count: int, pause: float) -> list[float]:
    """The same by Send and Recv, on both ranks."""
    buffer, times = bytearray(64), []
    for _ in range(count):
        if WORLD.rank == 0:
            WORLD.Recv(buffer, 1)
            WORLD.Send(buffer, 1)
        else:
            if pause:
                time.sleep(pause)
            begin = time.perf_counter()
            WORLD.Send(buffer, 0)
            WORLD.Recv(buffer, 0)
            times.append((time.perf_counter() - begin) / 2)
    return times


def latencies(windows: Mapping[str, Window], count: int, pause: float) -> dict[str, Times]:
    """Microseconds from ring to poll of each way."""
    found = {}
    for name, window in windows.items():
        WORLD.Barrier()
        if WORLD.rank == 0:
            answer(window)
        else:
            found[name] = summary(round_trips(window, count, pause))
    WORLD.Barrier()
    raw = raw_round_trips(count, pause)
    if WORLD.rank == 1:
        found[RAW] = summary(raw)
    result: dict[str, Times] = WORLD.bcast(found, 1)
    return result


def moves(
    windows: Mapping[str, Window], raw: MPI.Win, size: int, rounds: int
) -> dict[str, dict[str, Times]]:
    """Microseconds of a get and a put of so many bytes, flush included."""
    mine, other = np.ones(size, np.uint8), np.empty(size, np.uint8)

    def get(window: Window) -> None:
        window.get(0, 0, mine)
        window.flush(0)

    def put(window: Window) -> None:
        window.put(0, 0, mine)
        window.flush(0)

    def raw_get() -> None:
        raw.Get([mine, MPI.BYTE], 0)
        raw.Flush(0)

    def raw_put() -> None:
        raw.Put([mine, MPI.BYTE], 0)
        raw.Flush(0)

    calls: dict[str, dict[str, Callable[[], object]]] = {
        "get": {**{name: functools.partial(get, window) for name, window in windows.items()}, RAW: raw_get},
        "put": {**{name: functools.partial(put, window) for name, window in windows.items()}, RAW: raw_put},
    }
    times: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds + 1):
        for what, cases in calls.items():
            for name, case in {**cases, COPY: lambda: np.copyto(other, mine)}.items():
                WORLD.Barrier()
                taken = timed(case, windows.get(name))
                if number:  # the first round touches memory, and opens connections
                    times.setdefault(what, {}).setdefault(name, []).append(taken)
    found = {what: {name: summary(one) for name, one in cases.items()} for what, cases in times.items()}
    result: dict[str, dict[str, Times]] = WORLD.bcast(found, 1)
    return result


def timed(case: Callable[[], object], window: Window | None) -> float:
    """Seconds of the case on rank 1, while rank 0 serves the window, or waits."""
    if WORLD.rank == 0:
        if window is not None:
            answer(window)
        return 0.0
    begin = time.perf_counter()
    case()
    taken = time.perf_counter() - begin
    if window is not None:
        window.ring(0, END)
    return taken


def plot(path: str, figures: Mapping[str, Any]) -> None:
    """Bars: gigabytes per second of each way and size."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.6), constrained_layout=True, sharey=True)
    for axis, what in zip(axes, ("get", "put"), strict=True):
        for number, name in enumerate((*WAYS, RAW, COPY)):
            rates = [int(size) / one[what][name]["median"] / 1e3 for size, one in figures["moves_us"].items()]
            axis.bar(np.arange(len(rates)) + 0.2 * number, rates, 0.2, label=name)
        axis.set_xticks(np.arange(len(figures["moves_us"])) + 0.3, [f"{int(s) >> 20} MB" for s in figures["moves_us"]])
        axis.set_title(what)
    axes[0].set_ylabel("GB/s")
    axes[0].legend(fontsize=8)
    mpi = " ".join(measure.machine()["mpi"].split())
    figure.suptitle(f"Heap of another rank of the host, {mpi[:40]}")
    figure.savefig(path, dpi=110)
    say(f"wrote {Path(path)}")


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--megabytes", default=(1, 16, 64), show_default=True, multiple=True, help="Sizes to move.")
@click.option("--rounds", default=15, show_default=True, help="Moves of each case.")
@click.option("--messages", default=1000, show_default=True, help="Messages of each way.")
@click.option("--plot", "plot_path", help="Write a bar chart.")
@click.option("--json", "json_path", help="Write the figures.")
def main(megabytes: Sequence[int], rounds: int, messages: int, plot_path: str | None, json_path: str | None) -> None:
    if WORLD.size != 2:
        raise click.UsageError("it measures between two ranks: mpirun -n 2 python benchmarks/windows.py")
    communicator = open_communicator(purpose="benchmark")
    heap = max(megabytes) << 20 if WORLD.rank == 0 else 0
    windows = {way: open_window(communicator, heap, WindowOptions(way=way)) for way in WAYS}
    for window in windows.values():
        window.memory[:] = 1
    raw = MPI.Win.Allocate(heap, 1, comm=WORLD)
    raw.Lock_all()
    if heap:
        np.frombuffer(memoryview(raw.tomemory()), np.uint8)[:] = 1  # type: ignore[arg-type]  # mpi4py's buffer is one
    figures: dict[str, Any] = {
        "latencies_us": {
            "in a row": latencies(windows, messages, 0),
            "after 20 ms of quiet": latencies(windows, max(messages // 20, 1), 0.02),
        },
        "moves_us": {str(size << 20): moves(windows, raw, size << 20, rounds) for size in megabytes},
    }
    say(f"{'ring to poll, 64 bytes, us':34}" + "".join(f"{name:>12}" for name in (*WAYS, RAW)))
    for name, times in figures["latencies_us"].items():
        say(f"{name:34}" + "".join(f"{times[one]['median']:12.1f}" for one in (*WAYS, RAW)))
    say(f"\n{'median us, in memory copies':34}" + "".join(f"{name:>18}" for name in (*WAYS, RAW, COPY)))
    for size, one in figures["moves_us"].items():
        for what, times in one.items():
            least = times[COPY]["median"]
            medians = [times[name]["median"] for name in (*WAYS, RAW, COPY)]
            cells = "".join(f"{median:11.0f}{median / least:7.2f}" for median in medians)
            say(f"{what + ' ' + str(int(size) >> 20) + ' MB':34}{cells}")
    figures["of_raw_mpi"] = {
        size: {what: {way: times[way]["median"] / times[RAW]["median"] for way in WAYS} for what, times in one.items()}
        for size, one in figures["moves_us"].items()
    }
    measure.record(json_path, figures)
    if plot_path and WORLD.rank == 0:
        plot(plot_path, figures)
    raw.Unlock_all()
    raw.Free()
    for window in windows.values():
        window.close()


if __name__ == "__main__":
    main()
