"""How fast is a synchronous step: reduction of ResNet-50's gradients, alone and with SGD and Adam?

    mpirun -n 2 python benchmarks/sync_step.py --plot sync_step.png --json sync_step.json
    mpirun -n 64 python benchmarks/sync_step.py --start      # what the compiler of the extra `fast` costs at the start

Measured in one run, in turns: the memory limit (`numpy.add` of the bytes of the reduction by all ranks at once), the
traffic limit (a compiled loop that moves the bytes of the case, by all ranks at once, and does nothing else), mpidist's
arena without and with the extra `fast`, raw `MPI_Allreduce` in one call, in place and in chunks of 256 KB to 16 MB with
the same NumPy update after it, and PyTorch (gloo, buckets of 25 MB, gradients as views of the buckets, `torch.optim`
plain, foreach and fused).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import measure
import numpy as np
import numpy.typing as npt
import step_plot
from measure import SHARE, WORLD, Case, compiling, say
from mpi4py import MPI

import mpidist
from mpidist.comm.arithmetic import compiler
from mpidist.optimizers.families.adam import AdamKernel
from mpidist.optimizers.families.sgd import SGDKernel
from mpidist.optimizers.optimizer import Optimizer
from mpidist.variables.kinds.mirrored import MirroredVariable
from mpidist.variables.step.plan import Plan
from mpidist.variables.update import compiled
from mpidist.variables.update.kernel import BLOCK_BYTES, Kernel

Array = npt.NDArray[Any]
RATE = 1e-3
HAS_FAST = importlib.util.find_spec("llvmlite") is not None


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The 161 parameter shapes of ResNet-50, 25,557,032 elements; narrower ones for a share of it."""
    channels = first = round(64 * SHARE)
    shapes: list[tuple[int, ...]] = [(first, 3, 7, 7), (first,), (first,)]
    for width, count in ((first, 3), (2 * first, 4), (4 * first, 6), (8 * first, 3)):
        for number in range(count):
            shapes += [(width, channels, 1, 1), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            shapes += [(width * 4, width, 1, 1), (width * 4,), (width * 4,)]
            if number == 0:
                shapes += [(width * 4, channels, 1, 1), (width * 4,), (width * 4,)]
            channels = width * 4
    return [*shapes, (1000, channels), (1000,)]


SHAPES = resnet50_shapes()
COUNT = sum(int(np.prod(shape)) for shape in SHAPES)


def arena_case(kernel: Kernel | None, *, shared: bool | None = None) -> tuple[Case, list[Any]]:
    """A step of mpidist with gradients written in place, without a kernel the reduction alone; and what it needs."""
    strategy = mpidist.MultiWorkerMirroredStrategy(shared=shared)
    with strategy.scope():
        variables = [mpidist.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]
    if kernel is None:
        plan = Plan([v for v in variables if isinstance(v, MirroredVariable)], {})
        for gradient in plan.gradients:
            gradient[...] = 0
        everything = tuple(range(len(variables)))
        return plan.step(everything).reduce, [strategy, variables, plan]
    optimizer = Optimizer(kernel, RATE, name="benchmark")
    gradients = optimizer.gradients(variables)
    for gradient in gradients:
        gradient[...] = 1e-3
    pairs = list(zip(gradients, variables, strict=True))
    return lambda: optimizer.apply_gradients(pairs), [strategy, variables, optimizer]


def traffic_case(read: int, changed: int) -> Case:
    """Each rank goes through its share of so many arrays that are only read, and so many that are changed, too.

    The loop is compiled from a text of its own: a number of each changed array becomes the exclusive or of all numbers.
    """
    share = COUNT // WORLD.size
    arrays = [np.ones(share, np.int32) for _ in range(read + changed)]
    names = [f"%a{number}" for number in range(len(arrays))]
    lines, last = [], "0"
    for number, name in enumerate(names):
        lines += [f"%at{number} = getelementptr i32, ptr {name}, i64 %i", f"%v{number} = load i32, ptr %at{number}"]
        lines += [f"%x{number} = xor i32 {last}, %v{number}"]
        last = f"%x{number}"
    lines += [f"store i32 {last}, ptr %at{number}" for number in range(changed)]
    code = compiler.compile_loop(
        compiler.loop_text(", ".join(f"ptr noalias {name}" for name in names), lines), [ctypes.c_void_p] * len(arrays)
    )
    if code is None:
        raise SystemExit("the traffic limit could not be compiled: see the warning above")
    # The machine code lives as long as its owner.
    owner = code

    def case() -> None:
        owner.call(share, *(array.ctypes.data for array in arrays))

    return case


def limit_case() -> Case:
    """Each rank adds its share of the bytes in place, as the arena does: two streams read, one of them written."""
    share = COUNT // WORLD.size
    a, b = (np.ones(share, np.float32) for _ in range(2))
    block = BLOCK_BYTES // 4
    pieces = [(a[i : i + block], b[i : i + block]) for i in range(0, share, block)]

    def case() -> None:
        for x, y in pieces:
            np.add(x, y, out=x)

    return case


def mpi_cases(kernel: Kernel | None) -> dict[str, Case]:
    """Raw Allreduce at its best; with a kernel, the same update after each chunk, while it is in the cache."""
    flat = np.ones(COUNT, np.float32)
    total = np.empty_like(flat)
    parameter = np.zeros(COUNT, np.float32)
    slots = [np.zeros(COUNT, np.float32) for _ in (kernel.slots if kernel else ())]
    block = BLOCK_BYTES // 4
    scratch = [np.empty(block, np.float32) for _ in range(kernel.scratch_count if kernel else 0)]

    def updated(gradient: Array, begin: int) -> None:
        if kernel is None:
            return
        update = kernel.prepare(1, RATE)
        for at in range(0, gradient.size, block):
            g = gradient[at : at + block]
            here = slice(begin + at, begin + at + g.size)
            update(parameter[here], g, [s[here] for s in slots], [s[: g.size] for s in scratch])

    def one_call() -> None:
        WORLD.Allreduce(flat, total)
        updated(total, 0)

    def in_place() -> None:
        WORLD.Allreduce(MPI.IN_PLACE, total)
        updated(total, 0)

    def chunked(chunk: int) -> Case:
        def case() -> None:
            for at in range(0, COUNT, chunk):
                WORLD.Allreduce(MPI.IN_PLACE, total[at : at + chunk])
                updated(total[at : at + chunk], at)

        return case

    cases: dict[str, Case] = {"one call": one_call, "in place": in_place}
    cases.update({f"chunks of {kb} KB": chunked(kb * 256) for kb in (256, 1024, 4096, 16384)})
    return cases


def torch_cases(algorithm: str | None) -> dict[str, Case]:
    """PyTorch over gloo in buckets of 25 MB, with the optimizer's plain, foreach and fused forms."""
    torch = importlib.import_module("torch")
    gloo = importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    if not gloo.is_initialized():
        folder = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else "")
        gloo.init_process_group("gloo", init_method=f"file://{folder}/store", rank=WORLD.rank, world_size=WORLD.size)
    buckets, parameters = torch_buckets(torch)

    def reduced() -> None:
        for work in [gloo.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()

    if algorithm is None:
        return {"gloo": reduced}
    cases: dict[str, Case] = {}
    for name, options in {"plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}.items():
        try:
            optimizer = getattr(torch.optim, algorithm)(parameters, lr=RATE, **options)
        except (RuntimeError, TypeError) as error:
            say(f"torch.optim.{algorithm}({options}) is not to be had: {error}")
            continue

        def case(optimizer: Any = optimizer) -> None:
            reduced()
            optimizer.step()

        cases[f"gloo, {name}"] = case
    return cases


def torch_buckets(torch: Any) -> tuple[list[Any], list[Any]]:
    """Buckets of 25 MB, and parameters whose gradients are views of them, as in DDP."""
    buckets: list[Any] = []
    parameters: list[Any] = []
    chosen: list[tuple[int, ...]] = []
    for number, shape in enumerate(SHAPES):
        chosen.append(shape)
        size = sum(int(np.prod(s)) for s in chosen)
        if size * 4 < 25 << 20 and number < len(SHAPES) - 1:
            continue
        bucket = torch.full((size,), 1e-3)
        begin = 0
        for one in chosen:
            parameter = torch.zeros(one, requires_grad=True)
            end = begin + parameter.numel()
            parameter.grad = bucket[begin:end].view(one)
            parameters.append(parameter)
            begin = end
        buckets.append(bucket)
        chosen = []
    return buckets, parameters


def compare(what: str, kernel: Kernel | None, algorithm: str | None, rounds: int) -> dict[str, Any]:
    """One figure: mpidist, its private fallback, MPI and PyTorch, each at its best."""
    keep: list[Any] = []
    cases: dict[str, Case] = {"memory limit": limit_case()} if kernel is None else {}
    if HAS_FAST:
        # The sums of a reduction alone go into the first gradients.
        state = 0 if kernel is None else 1 + len(kernel.slots)
        cases["traffic limit"] = traffic_case(WORLD.size - int(not state), state or 1)
    ways = [("mpidist", None, False), ("mpidist, shared=False", False, False)]
    if HAS_FAST and kernel is not None:
        ways += [("mpidist, fast", None, True), ("mpidist, fast, shared=False", False, True)]
    for name, shared, compiles in ways:
        with compiling(compiles=compiles):
            cases[name], kept = arena_case(kernel, shared=shared)
        keep.append(kept)
    cases.update({f"MPI {name}": case for name, case in mpi_cases(kernel).items()})
    if importlib.util.find_spec("torch"):
        cases.update({f"PyTorch {name}": case for name, case in torch_cases(algorithm).items()})
    times = measure.interleaved(cases, rounds)
    keep.clear()
    say(f"\n{what}: {COUNT} float32, {WORLD.size} ranks")
    say(f"{'':28}{'min ms':>9}{'median':>9}{'/ mpidist':>11}")
    for name, t in times.items():
        say(f"{name:28}{t['min']:9.2f}{t['median']:9.2f}{t['median'] / times['mpidist']['median']:11.2f}")
    best = {
        peer: min((t["median"], name) for name, t in times.items() if name.startswith(peer))
        for peer in ("memory limit", "traffic limit", "MPI", "PyTorch")
        if any(name.startswith(peer) for name in times)
    }
    ratios: dict[str, dict[str, float]] = {}
    for name in ("mpidist", "mpidist, fast"):
        if name in times:
            mine = times[name]["median"]
            ratios[name] = {peer: round(value / mine, 3) for peer, (value, _) in best.items()}
            text = ", ".join(f"{peer} {ratio:.2f}" for peer, ratio in ratios[name].items())
            say(f"ratios of medians, peer at its best / {name}: {text}")
    return {"times_ms": times, "ratios": ratios, "best": {peer: name for peer, (_, name) in best.items()}}


def start() -> dict[str, float]:
    """Seconds and bytes that each rank spends on the compiler and on Adam's loop, all ranks at the same time.

    With too many ranks per core, that is nothing: updates stay with NumPy.
    """
    adam = AdamKernel(0.9, 0.999, 1e-7)
    blocks = [np.ones(compiled.LEAST_BLOCK_BYTES, np.float32) for _ in range(4)]
    update = compiled.CompiledUpdate(adam.prepare(1, RATE), 2, 0)
    WORLD.Barrier()
    memory_before, begin, core_begin = measure.proportional_memory(), time.perf_counter(), time.process_time()
    is_loaded = compiled.is_wanted(compiled.LEAST_BYTES, WORLD.size)
    loaded = time.perf_counter()
    if is_loaded:
        update(blocks[0], blocks[1], blocks[2:], [])
    end = time.perf_counter()
    core_seconds = time.process_time() - core_begin
    WORLD.Barrier()
    grown = measure.proportional_memory() - memory_before
    result = {
        "load, s": WORLD.allreduce(loaded - begin, MPI.MAX),
        "compile, s": WORLD.allreduce(end - loaded, MPI.MAX),
        "of a core, s": WORLD.allreduce(core_seconds) / WORLD.size,
        "memory, MB": WORLD.allreduce(grown) / WORLD.size / 1e6,
    }
    if not is_loaded:
        say("\nthe compiler is not loaded: too many ranks share a core")
    say(f"\nthe compiler, on {WORLD.size} ranks and {os.cpu_count()} cores at the same time: slowest load and compile, "
        "and means: " + ", ".join(f"{name} {value:.2f}" for name, value in result.items()))
    return result


def memory() -> dict[str, float]:
    """Bytes that parameters, gradients and Adam's state take on the node, against private copies."""
    result: dict[str, float] = {}
    for name, shared in (("shared", None), ("private", False)):
        WORLD.Barrier()
        before = WORLD.allreduce(measure.proportional_memory())
        step, keep = arena_case(AdamKernel(0.9, 0.999, 1e-7), shared=shared)
        step()
        WORLD.Barrier()
        result[name] = (WORLD.allreduce(measure.proportional_memory()) - before) / (COUNT * 4)
        WORLD.Barrier()
        del step, keep
        gc.collect()  # a strategy and its replica context refer to one another
    n = WORLD.size
    say(
        f"\nmemory of the node with Adam, in copies of the {COUNT * 4 / 1e6:.0f} MB of parameters: shared "
        f"{result['shared']:.2f} (expected 3 + {n} gradients = {3 + n}), private {result['private']:.2f} "
        f"(expected {n} x 4 = {4 * n})"
    )
    return result


@click.command(help=__doc__.replace("\n\n    ", "\n\n\b\n    "))
@click.option("--rounds", default=15, show_default=True, help="Repetitions of each case.")
@click.option("--plot", "plot_path", help="Write a bar chart.")
@click.option("--json", "json_path", help="Write the figures.")
@click.option("--start", "only_start", is_flag=True, help="Only the compiler's cost, which other runs measure first.")
def main(rounds: int, plot_path: str | None, json_path: str | None, *, only_start: bool) -> None:
    cost = start() if HAS_FAST else {}
    if only_start:
        measure.record(json_path, {"compiler": cost})
        return
    adam = AdamKernel(0.9, 0.999, 1e-7)
    copies = memory()  # first: the peers leave memory behind that only shrinks later
    figures = {
        "reduction": compare("reduction", None, None, rounds),
        "with SGD": compare("reduction and SGD", SGDKernel(), "SGD", rounds),
        "with Adam": compare("reduction and Adam", adam, "Adam", rounds),
    }
    results = {"figures": figures, "memory_in_parameter_copies": copies, "compiler": cost}
    measure.record(json_path, results)
    if plot_path and WORLD.rank == 0:
        step_plot.draw({"machine": measure.machine(), **results}).savefig(plot_path, dpi=110)
        say(f"wrote {Path(plot_path)}")


if __name__ == "__main__":
    main()
