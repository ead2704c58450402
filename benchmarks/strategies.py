"""What does each strategy cost: memory of a node, bytes between nodes, and the time of a step?

    python benchmarks/strategies.py --plot strategies.png --json strategies.json

One model, two dense layers of 8.4 million float32 parameters (33.6 MB) with Adam, 32 examples per rank and step, on
virtual hosts of this machine (`tests/hosts`): 2 and 4 ranks on one host, and the same on two. It starts the ranks
itself, by the `mpirun` beside this Python, and looks at them from outside. Memory is what the ranks of the fullest host
hold after the last step (Pss: what they share counts once) above what they held when the strategy was made; freed
memory that the C library keeps does not count, since it depends on the order of frees. Bytes are
those that the busiest host's interface sends in a step. The network between the hosts has no limit, so times say what a
strategy computes and waits for, not what a slow network takes.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

ROOT = Path(__file__).resolve().parents[1]
WIDTH, HIDDEN, EXAMPLES = 2048, 2048, 32
# Hybrid groups exchange every so many steps: some exchanges are measured.
EVERY = 16
WINDOWS = 3
JOB_SECONDS = 200
# The phases at which a program waits until it has been looked at.
BEGIN, FIRST, END = "begin", "first", "end"


class Row(NamedTuple):
    """A strategy in a layout.

    Attributes:
        layout: Ranks of each host.
    """

    kind: str
    layout: tuple[int, ...]


NAMES = {
    "mirrored": "MirroredStrategy",
    "central": "CentralStorageStrategy",
    "multi-worker": "MultiWorkerMirroredStrategy",
    "sharded": "MultiWorkerMirroredStrategy(shard_optimizer=True)",
    "tpu": "TPUStrategy, a replica of 2 ranks",
    "hybrid": f"HybridStrategy(2, every={EVERY})",
    "servers": "ParameterServerStrategy, 1 server",
}
# Which layouts say something: one node or two, two ranks or four. A chief and a server beside a worker take three.
LAYOUTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "mirrored": ((2,), (4,)),
    "central": ((2,), (4,)),
    "multi-worker": ((2,), (4,), (1, 1), (2, 2)),
    "sharded": ((1, 1), (2, 2)),
    "tpu": ((2,), (4,), (2, 2)),
    "hybrid": ((2,), (4,), (1, 1), (2, 2)),
    "servers": ((4,), (2, 2)),
}
ROWS = [Row(kind, layout) for kind, layouts in LAYOUTS.items() for layout in layouts]


def open_strategy(kind: str) -> Any:
    """Collective. Make a row's strategy."""
    mpidist = importlib.import_module("mpidist")
    if kind == "mirrored":
        return mpidist.MirroredStrategy()
    if kind == "central":
        return mpidist.CentralStorageStrategy()
    if kind == "hybrid":
        return mpidist.HybridStrategy(2, every=EVERY)
    if kind == "tpu":
        topology = mpidist.tpu.experimental.initialize_tpu_system()
        assignment = mpidist.tpu.experimental.DeviceAssignment.build(
            topology, computation_shape=[1, 1, 1, 2], num_replicas=max(1, sum(topology.node_sizes) // 2)
        )
        return mpidist.TPUStrategy(experimental_device_assignment=assignment)
    if kind == "sharded":
        return mpidist.MultiWorkerMirroredStrategy(shard_optimizer=True)
    return mpidist.MultiWorkerMirroredStrategy()


def make_model(devices: int = 1) -> tuple[list[Any], Callable[[Any], list[Any]]]:
    """Two layers, their kernels split over the logical devices of a replica; and what computes their gradients."""
    np, mpidist = importlib.import_module("numpy"), importlib.import_module("mpidist")
    parallel = importlib.import_module("mpidist.parallel")
    splits = [{"partition_dimensions": dims} if devices > 1 else {} for dims in ([1, devices], [devices, 1])]
    random = np.random.default_rng(0)
    kernels = [
        mpidist.Variable((random.standard_normal(shape) / shape[0] ** 0.5).astype("f4"), **split)
        for shape, split in zip(((WIDTH, HIDDEN), (HIDDEN, WIDTH)), splits, strict=True)
    ]

    def gradients(x: Any) -> list[Any]:
        first, second = (kernel.value() for kernel in kernels)
        if devices > 1:
            product, product_backward = parallel.column_parallel_matmul(x, first)
            hidden = np.tanh(product)
            result, result_backward = parallel.row_parallel_matmul(hidden, second)
            below, of_second = result_backward((result - x) / len(x))
            return [product_backward(below * (1 - hidden**2))[1], of_second]
        hidden = np.tanh(x @ first)
        error = (hidden @ second - x) / len(x)
        return [x.T @ (error @ second.T * (1 - hidden**2)), hidden.T @ error]

    return kernels, gradients


def train(kind: str, steps: int, wait: Callable[[str], None]) -> list[float]:
    """Collective. The seconds of each step under a strategy whose ranks all make each step.

    Args:
        kind: See `open_strategy`.
        steps: Their number.
        wait: Waits until this program has been looked at, in a phase.
    """
    np, mpidist = importlib.import_module("numpy"), importlib.import_module("mpidist")
    strategy = open_strategy(kind)
    wait(BEGIN)
    with strategy.scope():
        kernels, gradients = make_model(2 if kind == "tpu" else 1)
        optimizer = mpidist.optimizers.Adam(1e-4)
    x = np.random.default_rng(1).standard_normal((EXAMPLES, WIDTH)).astype("f4")

    def step() -> None:
        optimizer.apply_gradients(zip(gradients(x), kernels, strict=True))

    strategy.run(step)
    wait(FIRST)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        strategy.run(step)
        times.append(time.perf_counter() - begin)
    wait(END)
    if kind == "hybrid":
        strategy.finish()
    return times


def train_on_servers(steps: int, wait: Callable[[str], None]) -> list[float]:
    """The seconds of each step of a worker under a coordinator; see `train`."""
    np, mpidist = importlib.import_module("numpy"), importlib.import_module("mpidist")
    resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=1)
    strategy = mpidist.ParameterServerStrategy(resolver, options=mpidist.ServerOptions(heap_bytes=1 << 29))
    wait(BEGIN)
    with strategy.scope():
        kernels, gradients = make_model()
    optimizer = mpidist.optimizers.Adam(1e-4)
    optimizer.build(kernels)
    x = np.random.default_rng(1).standard_normal((EXAMPLES, WIDTH)).astype("f4")

    def step() -> None:
        strategy.run(lambda: optimizer.apply_gradients(zip(gradients(x), kernels, strict=True)))

    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
    workers = len(strategy.roles.workers)

    def train_for(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count * workers):
            coordinator.schedule(step)
        coordinator.join()
        return (time.perf_counter() - begin) / count

    train_for(1)
    wait(FIRST)
    # A worker's step: so many are made side by side.
    times = [train_for(steps)]
    wait(END)
    return times


def work(kind: str, steps: int, folder: Path) -> None:
    """Train as a rank. The first rank says when it has come to a phase, and writes the milliseconds of a step."""
    measure = importlib.import_module("measure")

    def wait(phase: str) -> None:
        # The C library gives freed memory back (glibc).
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        if kind != "servers":
            measure.WORLD.Barrier()
        if measure.WORLD.rank == 0:
            (folder / phase).touch()
            while not (folder / f"{phase}.seen").exists():
                time.sleep(0.02)
        if kind != "servers":
            measure.WORLD.Barrier()

    times = train_on_servers(steps, wait) if kind == "servers" else train(kind, steps, wait)
    if measure.WORLD.rank == 0:
        figures = {"ms": statistics.median(times) * 1e3, "machine": measure.machine()}
        (folder / "figures.json").write_text(json.dumps(figures))


class Seen(NamedTuple):
    """A look at a running job.

    Attributes:
        memory: Bytes of the ranks of each host.
        sent: Bytes that each host has sent.
    """

    memory: dict[str, int]
    sent: dict[str, int]


def look(hosts: Any, names: Sequence[str], folder: Path) -> Seen:
    """The memory of the job's ranks by host, and what each host has sent."""
    launching = importlib.import_module("tests.helpers.launching")
    memory: dict[str, int] = {}
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            # The command of a rank, and not the launcher's, which names it too.
            if Path(words[0].decode()).name.startswith("python") and str(folder).encode() in words:
                host = str((process / "ns" / "net").readlink())
                lines = (process / "smaps_rollup").read_text().splitlines()
                pss = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
                memory[host] = memory.get(host, 0) + pss
        except (OSError, IndexError):
            continue
    sent = {}
    for name in names:
        result = launching.finish(hosts.execute(name, "cat /sys/class/net/eth0/statistics/tx_bytes"), "cat", 60)
        sent[name] = int(result.stdout)
    return Seen(memory, sent)


def run_job(row: Row, windows: int) -> dict[str, Any]:
    """The figures of a strategy in a layout."""
    sys.path.insert(0, str(ROOT))
    virtual_hosts = importlib.import_module("tests.hosts.virtual_hosts")
    seen: dict[str, Seen] = {}
    with virtual_hosts.VirtualHosts(len(row.layout)) as hosts, tempfile.TemporaryDirectory() as folder:

        def watch(process: Any) -> None:
            for phase in (BEGIN, FIRST, END):
                while not (Path(folder) / phase).exists():
                    if process.poll() is not None:
                        return
                    time.sleep(0.02)
                seen[phase] = look(hosts, hosts.names, Path(folder))
                (Path(folder) / f"{phase}.seen").touch()

        words = ["--rank-writes", folder, "--only", row.kind, "--windows", windows]
        result = hosts.run(row.layout, Path(__file__), *words, timeout_seconds=JOB_SECONDS, meanwhile=watch)
        record = Path(folder) / "figures.json"
        if not record.exists() or END not in seen:
            raise click.ClickException(f"{NAMES[row.kind]} on {row.layout}: {result.stdout}{result.stderr}")
        figures: dict[str, Any] = json.loads(record.read_text())
    begin, first, end = (seen[phase] for phase in (BEGIN, FIRST, END))
    figures["memory"] = max(end.memory[host] - begin.memory[host] for host in end.memory)
    figures["sent"] = max(end.sent[name] - first.sent[name] for name in end.sent) / (windows * EVERY)
    return figures


def layout_text(layout: Sequence[int]) -> str:
    """As "2+2": the ranks of each host."""
    return "+".join(map(str, layout))


def plot(path: str, results: Sequence[dict[str, Any]]) -> None:
    """Three bar charts side by side."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 0.3 * len(results) + 1.2), sharey=True, constrained_layout=True)
    labels = [f"{one['strategy']}, {one['layout']}" for one in results]
    for axis, key, title, unit in zip(
        axes, ("memory", "sent", "ms"), ("memory of a node, MB", "sent by a node per step, MB", "ms of a step"),
        (1e6, 1e6, 1), strict=True,
    ):
        axis.barh(labels, [one[key] / unit for one in results])
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=8)
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=110)


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--only", "kinds", default=tuple(NAMES), type=click.Choice(list(NAMES)), multiple=True)
@click.option("--layout", "layout", help="Only rows of this layout: the ranks of each host, as 2+2.")
@click.option("--windows", default=WINDOWS, show_default=True, type=click.IntRange(1), help=f"Of {EVERY} steps.")
@click.option("--plot", "plot_path", help="Write bar charts.")
@click.option("--json", "json_path", help="Write the figures.")
@click.option("--rank-writes", hidden=True)
def main(
    kinds: Sequence[str], layout: str | None, windows: int, plot_path: str | None, json_path: str | None,
    rank_writes: str | None,
) -> None:
    if rank_writes:
        work(kinds[0], windows * EVERY, Path(rank_writes))
        return
    results: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    for row in ROWS:
        if row.kind in kinds and layout in (None, layout_text(row.layout)):
            found = run_job(row, windows)
            machine = {key: value for key, value in found.pop("machine").items() if key != "ranks"}
            results.append({"strategy": NAMES[row.kind], "layout": layout_text(row.layout), **found})
            click.echo(
                f"{NAMES[row.kind]}, {layout_text(row.layout)} ranks: {found['memory'] / 1e6:.1f} MB per node, "
                f"{found['sent'] / 1e6:.2f} MB per step and node, {found['ms']:.1f} ms"
            )
    if plot_path:
        plot(plot_path, results)
    if json_path:
        Path(json_path).write_text(json.dumps({"machine": machine, "rows": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
