"""How many examples a second do groups train on hosts between which bandwidth is limited, beside one synchronous group?

    python benchmarks/hybrid_hosts.py --plot hybrid_hosts.png --json hybrid_hosts.json

Virtual hosts of this machine (`tests/hosts`) with one rank each and the given bandwidth between them (`tc`, the token
bucket filter). A network of 1.1 million parameters, AdamW, 64 examples a rank and step. Groups exchange increments
every 16 steps, and their time includes `finish`. Beside them stand synchronous training by the library and by PyTorch's
DistributedDataParallel over gloo (where torch is installed), and the limit: the gradients' bytes through the interface.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
# See `hosts.py`.
BURST_BYTES = 1 << 17
JOB_SECONDS = 280
SIZES, BATCH = (64, 1024, 1024, 10), 64
PARAMETERS = sum((before + 1) * after for before, after in itertools.pairwise(SIZES))
WAYS = ("groups, every=16", "groups, every=4", "MultiWorkerMirroredStrategy", "PyTorch DDP, gloo", "one host alone")


def limit(megabits: int, hosts: int) -> float:
    """Examples per second of synchronous training whose steps take no more than its bytes need."""
    seconds = 2 * (hosts - 1) / hosts * PARAMETERS * 4 * 8 / (megabits * 1e6)
    return hosts * BATCH / seconds


def by_library(way: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """A step, and the end of the training, of a strategy."""
    np, mpi, mpidist = (importlib.import_module(name) for name in ("numpy", "mpi4py.MPI", "mpidist"))
    strategy: Any
    if way.startswith("groups"):
        strategy = mpidist.HybridStrategy(mpi.COMM_WORLD.size, every=int(way.partition("=")[2]))
    elif way == "one host alone":
        strategy = mpidist.MultiWorkerMirroredStrategy(communicator=mpi.COMM_SELF)
    else:
        strategy = mpidist.MultiWorkerMirroredStrategy()
    random = np.random.default_rng(0)
    pairs = list(itertools.pairwise(SIZES))
    with strategy.scope():
        kernels = [mpidist.Variable((random.normal(size=pair) / 32).astype(np.float32)) for pair in pairs]
        biases = [mpidist.Variable(np.zeros(after, np.float32)) for _, after in pairs]
        optimizer = mpidist.optimizers.AdamW(1e-3)
    x, y = random.random((BATCH, SIZES[0]), np.float32), random.integers(0, SIZES[-1], BATCH)
    size = np.float32(BATCH * strategy.num_replicas_in_sync)

    def step() -> None:
        layers = [x]
        for kernel, bias in zip(kernels, biases, strict=True):
            z = layers[-1] @ kernel.value() + bias.value()
            layers.append(np.maximum(z, 0) if kernel is not kernels[-1] else z)
        exponentials = np.exp(layers[-1] - layers[-1].max(axis=1, keepdims=True))
        delta = exponentials / exponentials.sum(axis=1, keepdims=True)
        delta[np.arange(BATCH), y] -= 1
        delta /= size
        gradients = []
        for number in reversed(range(len(kernels))):
            gradients += [(layers[number].T @ delta, kernels[number]), (delta.sum(axis=0), biases[number])]
            if number:
                delta = (delta @ kernels[number].value().T) * (layers[number] > 0)
        optimizer.apply_gradients(gradients)

    end = strategy.finish if way.startswith("groups") else lambda: None
    return lambda: strategy.run(step), end


def by_torch() -> tuple[Callable[[], object], Callable[[], object]]:
    """A step of DistributedDataParallel."""
    torch, mpi = importlib.import_module("torch"), importlib.import_module("mpi4py.MPI")
    distributed = importlib.import_module("torch.distributed")
    world = mpi.COMM_WORLD
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    address = world.bcast(socket.gethostbyname(socket.gethostname()))
    distributed.init_process_group(
        "gloo", init_method=f"tcp://{address}:29512", rank=world.rank, world_size=world.size
    )
    torch.set_num_threads(1)
    layers: list[Any] = []
    for before, after in itertools.pairwise(SIZES):
        layers += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    loss = torch.nn.CrossEntropyLoss()
    x, y = torch.rand(BATCH, SIZES[0]), torch.randint(0, SIZES[-1], (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    return step, distributed.destroy_process_group


def work(path: str, way: str, steps: int) -> None:
    """Measure as a rank: examples per second of all ranks."""
    # Only here: it starts MPI.
    measure = importlib.import_module("measure")
    world = measure.WORLD
    step, end = by_torch() if "DDP" in way else by_library(way)
    # Plans, connections, and the first increments.
    for _ in range(3):
        step()
    world.Barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    if "DDP" not in way:
        end()
    seconds = world.allreduce(time.perf_counter() - begin, importlib.import_module("mpi4py.MPI").MAX)
    replicas = 1 if way == "one host alone" else world.size
    if world.rank == 0:
        figures = {"machine": measure.machine(), "rate": replicas * BATCH * steps / seconds}
        Path(path).write_text(json.dumps(figures))
    if "DDP" in way:
        end()


def run_job(way: str, steps: int, megabits: int, hosts: int) -> dict[str, Any] | None:
    """The figures of a job on so many hosts; None where torch is missing."""
    if "DDP" in way and importlib.util.find_spec("torch") is None:
        return None
    sys.path.insert(0, str(ROOT))
    virtual_hosts = importlib.import_module("tests.hosts.virtual_hosts")
    launching = importlib.import_module("tests.helpers.launching")
    with virtual_hosts.VirtualHosts(hosts) as rack, tempfile.TemporaryDirectory() as folder:
        for name in rack.names:
            rate = f"tbf rate {megabits}mbit burst {BURST_BYTES} latency 50ms"
            made = launching.finish(rack.execute(name, f"tc qdisc add dev eth0 root {rate}"), "tc", 60)
            if made.returncode:
                raise click.ClickException(f"tc cannot limit the bandwidth here: {made.stderr.strip()}")
        out = f"{folder}/figures.json"
        words = ["--rank-writes", out, "--way", way, "--steps", steps]
        result = rack.run([1] * hosts, Path(__file__), *words, timeout_seconds=JOB_SECONDS)
        if not Path(out).exists():
            raise click.ClickException(result.stdout + result.stderr)
        figures: dict[str, Any] = json.loads(Path(out).read_text())
        return figures


def draw(path: str, rates: dict[str, float], bound: float, title: str) -> None:
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axis = pyplot.subplots(figsize=(7, 3), constrained_layout=True)
    axis.barh([*rates], [*rates.values()])
    axis.axvline(bound, color="black", linewidth=0.8, linestyle="--", label="limit of synchronous steps")
    axis.set(xlabel="examples per second, of all hosts", title=title)
    axis.invert_yaxis()
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--hosts", default=2, show_default=True, type=click.IntRange(2))
@click.option("--megabits", default=100, show_default=True, help="Per second, from each host.")
@click.option("--steps", default=96, show_default=True, type=click.IntRange(1), help="Of those that do not wait.")
@click.option("--way", "ways", default=WAYS, multiple=True, help="Only these.")
@click.option("--plot", "plot_path", help="Write a bar chart.")
@click.option("--json", "json_path", help="Write the figures.")
@click.option("--rank-writes", hidden=True)
def main(
    hosts: int, megabits: int, steps: int, ways: tuple[str, ...], plot_path: str | None, json_path: str | None,
    rank_writes: str | None,
) -> None:
    if rank_writes:
        work(rank_writes, ways[0], steps)
        return
    # A step that waits for all bytes takes long.
    counts = {way: steps if way.startswith(("groups", "one")) else max(1, steps // 6) for way in ways}
    found = {way: run_job(way, counts[way], megabits, hosts) for way in ways}
    rates = {way: float(one["rate"]) for way, one in found.items() if one is not None}
    bound = limit(megabits, hosts)
    for way, rate in rates.items():
        click.echo(f"{way:28} {rate:8.0f} examples/s   {rate / bound:6.2f} of the limit of synchronous steps")
    if plot_path:
        draw(plot_path, rates, bound, f"{hosts} hosts, {megabits} Mbit/s, {PARAMETERS:,} parameters")
    if json_path:
        machine = next(one["machine"] for one in found.values() if one is not None)
        text = {"machine": machine, "megabits": megabits, "hosts": hosts, "limit": bound, "examples_per_second": rates}
        Path(json_path).write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
