"""What collectives are compared with: the memory's limit, MPI from Python and from C, PyTorch's gloo, Horovod."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from measure import WORLD, Case, say
from mpi4py import MPI
from native_mpi import NativeAllReduce

from mpidist.comm.group.communicator import Communicator
from mpidist.comm.memory.node_memory import NodeMemory

Array = npt.NDArray[Any]

CHUNKS_KB = (256, 1024, 4096, 16384)
LIMIT_BLOCK_BYTES = 1 << 18
BUCKET_BYTES = 25 << 20
HOROVOD_VERSION = "0.28.1+restarts"
HOROVOD_CYCLES_MS = (0.1, 1.0)
HOROVOD_FUSION_MB = (1, 4, 16, 64, 128)  # larger tensors are not packed: at 1 MB, 6 % of ResNet-50's bytes are
HOROVOD_DEFAULTS = "1 ms, 128 MB"
HOROVOD_WARM_CALLS = 3


class Way(NamedTuple):
    """One way to all-reduce.

    Attributes:
        written: Arrays that every rank writes just before the time is taken, as a program that computes gradients.
        run: Does it so many times.
        turn: What is there only while it is this way's turn: a thread that polls would slow all others down.
    """

    written: Sequence[Array]
    run: Callable[[int], object]
    turn: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


def repeated(case: Case) -> Callable[[int], None]:
    """A case, so many times."""

    def run(calls: int) -> None:
        for _ in range(calls):
            case()

    return run


def limit_way(communicator: Communicator, count: int) -> Way:
    """What the memory allows: each rank adds its slice of all ranks' arrays and writes the sum to all of them.

    The arrays are in memory that the ranks share, so that nothing is copied: each rank reads as many bytes as its
    array has, and writes as many. Blocks of 256 KB stay in a cache between the reads and the writes.
    """
    size, rank = communicator.size, communicator.rank
    rows = NodeMemory(communicator, size * count * 4).bytes.view(np.float32).reshape(size, count)
    begin, end = rank * count // size, (rank + 1) * count // size
    length = LIMIT_BLOCK_BYTES // 4
    blocks = [[row[i : min(i + length, end)] for row in rows] for i in range(begin, end, length)]

    def case() -> None:
        for block in blocks:
            for other in block[1:]:
                np.add(block[0], other, out=block[0])
            for other in block[1:]:
                other[...] = block[0]
        # Nobody goes on while others still write.
        communicator.barrier()

    return Way((rows[rank],), repeated(case))


def mpi_ways(array: Array, total: Array) -> dict[str, Way]:
    """Raw mpi4py: one call, in place, in chunks; what is asked for is computed beforehand."""
    ways = {
        "raw MPI, one call": Way((array,), repeated(lambda: WORLD.Allreduce(array, total))),
        "raw MPI, in place": Way((array,), repeated(lambda: WORLD.Allreduce(MPI.IN_PLACE, array))),
    }
    for kb in CHUNKS_KB:
        if array.nbytes > kb << 10:
            pieces = [array[begin : begin + kb * 256] for begin in range(0, array.size, kb * 256)]
            ways[f"raw MPI, chunks of {kb} KB"] = Way((array,), repeated(_in_chunks(pieces)))
    return ways


def _in_chunks(pieces: Sequence[Array]) -> Case:
    def case() -> None:
        for piece in pieces:
            WORLD.Allreduce(MPI.IN_PLACE, piece)

    return case


def native_ways(native: NativeAllReduce, array: Array, total: Array) -> dict[str, Way]:
    """The same from C."""

    def way(source: Array, target: Array, chunk: int) -> Way:
        return Way((source,), lambda calls: native(source, target, chunk, calls))

    ways = {"C MPI, one call": way(array, total, array.size), "C MPI, in place": way(array, array, array.size)}
    for kb in CHUNKS_KB:
        if array.nbytes > kb << 10:
            ways[f"C MPI, chunks of {kb} KB"] = way(array, array, kb * 256)
    return ways


def open_gloo() -> Any:
    """Collective. `torch.distributed` over gloo, None without PyTorch."""
    if importlib.util.find_spec("torch") is None:
        say("PyTorch is not installed: no gloo")
        return None
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    gloo = importlib.import_module("torch.distributed")
    folder = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else "")
    gloo.init_process_group("gloo", init_method=f"file://{folder}/store", rank=WORLD.rank, world_size=WORLD.size)
    return gloo


def gloo_ways(gloo: Any, array: Array) -> dict[str, Way]:
    """One call, and chunks that are all under way at once."""
    whole = importlib.import_module("torch").from_numpy(array)
    ways = {"gloo, one call": Way((array,), repeated(lambda: gloo.all_reduce(whole)))}
    for kb in (1024, BUCKET_BYTES >> 10):
        if array.nbytes > kb << 10:
            ways[f"gloo, chunks of {kb} KB"] = Way((array,), repeated(_at_once(gloo, whole.split(kb * 256))))
    return ways


def gloo_tensor_ways(gloo: Any, array: Array, tensors: Sequence[Array]) -> dict[str, Way]:
    """Views of one array one by one, in order and all under way at once."""
    views = [importlib.import_module("torch").from_numpy(tensor) for tensor in tensors]

    def one_by_one() -> None:
        for view in views:
            gloo.all_reduce(view)

    return {
        "gloo, per tensor": Way((array,), repeated(one_by_one)),
        "gloo, per tensor at once": Way((array,), repeated(_at_once(gloo, views))),
    }


def _at_once(gloo: Any, pieces: Sequence[Any]) -> Case:
    def case() -> None:
        for work in [gloo.all_reduce(piece, async_op=True) for piece in pieces]:
            work.wait()

    return case


def open_horovod() -> Any:
    """Local. `horovod.torch`, None where it is not what `install_horovod.sh` installs; its ways start it, each anew."""
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        say("Horovod is not installed: see benchmarks/install_horovod.sh")
        return None
    if version != HOROVOD_VERSION:
        say(f"no Horovod: expected version {HOROVOD_VERSION} of benchmarks/install_horovod.sh, got {version}")
        return None
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        say("no Horovod: it calls MPI on a thread of its own, and MPI has no THREAD_MULTIPLE here")
        return None
    importlib.import_module("torch").set_num_threads(1)
    return importlib.import_module("horovod.torch")


def horovod_ways(horovod: Any, array: Array, tensors: Sequence[Array]) -> dict[str, Way]:
    """Its fused path, in place, over its settings: tensors one by one or as a group; its thread packs them.

    And one array as it is, which it need not pack.
    """
    torch = importlib.import_module("torch")
    views = [torch.from_numpy(tensor) for tensor in tensors]
    whole = torch.from_numpy(array)

    def fused() -> None:
        for handle in [horovod.allreduce_async_(v, name=str(i), op=horovod.Sum) for i, v in enumerate(views)]:
            horovod.synchronize(handle)

    def grouped() -> None:
        horovod.grouped_allreduce_(views, name="group", op=horovod.Sum)

    def flat() -> None:
        horovod.allreduce_(whole, name="flat", op=horovod.Sum)

    def way(case: Case, cycle_ms: float, fusion_mb: int) -> Way:
        turn = functools.partial(_horovod_turn, horovod, case, cycle_ms, fusion_mb)
        return Way((array,), repeated(case), turn)

    ways = {}
    for cycle_ms, fusion_mb in itertools.product(HOROVOD_CYCLES_MS, HOROVOD_FUSION_MB):
        setting = f"{cycle_ms:g} ms, {fusion_mb} MB"
        ways[f"Horovod, fused, {setting}"] = way(fused, cycle_ms, fusion_mb)
        ways[f"Horovod, grouped, {setting}"] = way(grouped, cycle_ms, fusion_mb)
    return ways | {"Horovod, flat": way(flat, min(HOROVOD_CYCLES_MS), max(HOROVOD_FUSION_MB))}


@contextlib.contextmanager
def _horovod_turn(horovod: Any, case: Case, cycle_ms: float, fusion_mb: int) -> Iterator[None]:
    """Collective. Horovod at work with these settings, which it reads as it starts, and warm.

    Its first calls agree on the tensors and touch its buffer.
    """
    os.environ["HOROVOD_CYCLE_TIME"] = str(cycle_ms)
    os.environ["HOROVOD_FUSION_THRESHOLD"] = str(fusion_mb << 20)
    horovod.init()
    found = horovod.rank(), horovod.size()
    if WORLD.allreduce(found != (WORLD.rank, WORLD.size), MPI.LOR):
        raise SystemExit(
            f"Horovod runs on another MPI library than mpi4py: expected rank and size {WORLD.rank, WORLD.size}, "
            f"got {found}; build it anew with benchmarks/install_horovod.sh"
        )
    for _ in range(HOROVOD_WARM_CALLS):
        case()
    yield
    horovod.shutdown()
