"""Every kernel of the optimizers through CUDA's compiler, as CuPy's own generator expands it. No GPU is needed."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpidist.variables.update import fused
from mpidist.variables.update.fused import Program, record
from tests.gpu.test_device_collectives import SLOW
from tests.unit.optimizers.test_optimizers_fused import KERNELS, LAYER_KERNELS

pytestmark = [pytest.mark.timeout_seconds(240)]

# Architectures of GPUs: one of each generation.
PINNED = "80"
OTHERS = ("70", "90", "120")
FUNCTIONS = {"power", "exp", "log", "tanh"}
BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


@functools.cache
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="needs CuPy")


def benchmark_kernel() -> str:
    """The hand-written kernel of the benchmark; its folder is no package."""
    return re.search(r'PLAIN_ADAM = """(.*?)"""', BENCHMARK.read_text(), re.DOTALL)[1]  # type: ignore[index]


def programs(dtype: np.dtype[Any]) -> Iterator[Program]:
    """Of every optimizer, and one with every operation that can be recorded."""
    for kernel in KERNELS.values():
        yield record(kernel.prepare(1, 0.01), dtype, len(kernel.slots), kernel.scratch_count)
    for layer in LAYER_KERNELS.values():
        yield record(layer.prepare(1, 0.01, 30.0, 20.0), dtype, len(layer.slots), layer.scratch_count)
        update = layer.direct(1)
        if update is not None:
            yield record(update, dtype, len(layer.slots), layer.scratch_count, keeps_gradient=True)

    def every(parameter: Any, gradient: Any, slots: Any, scratch: Any) -> None:
        np.add(parameter, gradient, out=scratch[0])
        for name in ("subtract", "multiply", "divide", "power", "maximum", "minimum"):
            getattr(np, name)(scratch[0], 2.5, out=parameter)
        for name in ("negative", "positive", "square", "reciprocal", "absolute", "sqrt", "exp", "log", "tanh", "sign"):
            getattr(np, name)(parameter, out=parameter)
        np.clip(gradient, -1, 2, out=slots[0])
        for name in fused._COMPARISONS:
            np.copyto(slots[1], gradient, where=getattr(np, name)(gradient, parameter))

    yield record(every, dtype, 2, 1)


def sources(kernel: Any, dtype: np.dtype[Any]) -> Iterator[str]:
    """What CuPy gives to the compiler, for indices of 32 and of 64 bits."""
    generator: Any = importlib.import_module("cupy._core._kernel")
    carray: Any = importlib.import_module("cupy._core._carray")
    scalar: Any = importlib.import_module("cupy._core._scalar")
    # The numbers that CuPy has for the kinds of arguments.
    array, indexer, number = 1, 2, 3
    for has_32_bits in (True, False):
        infos = [
            generator._ArgInfo(array, cupy().ndarray, dtype.type, 1, True, has_32_bits) if parameter.raw
            else generator._ArgInfo(number, scalar.CScalar, dtype.type, 0, True, True)
            for parameter in kernel.params if parameter.name != "_ind"
        ]
        infos.append(generator._ArgInfo(
            indexer, getattr(carray, "_CIndexer", None) or carray.CIndexer, None, 1, True, has_32_bits
        ))
        yield generator._get_elementwise_kernel_code(
            tuple(infos), generator._TypeMap((("T", dtype.type),)), kernel.params, kernel.operation, kernel.name,
            kernel.preamble, "", "", kernel.options if hasattr(kernel, "options") else (),
        )


def compile_for(
    architecture: str, source: str, kind: str = "cubin", options: tuple[str, ...] = ("--fmad=false",)
) -> bytes:
    """The binary, or the text in CUDA's assembly language (`ptx`), with the options that CuPy adds."""
    compiler: Any = importlib.import_module("cupy.cuda.compiler")
    core: Any = importlib.import_module("cupy._core.core")
    compiled: list[bytes] = []
    target = f"-arch={'sm' if kind == 'cubin' else 'compute'}_{architecture}"

    class Compiled(Exception):  # noqa: N818 - no error
        pass

    def compile_module(text: str, options: tuple[str, ...] = (), **_: Any) -> None:
        program = compiler._NVRTCProgram(text, "kernel.cu", (), (), method=kind)
        binary, _ = program.compile((*options, "-ftz=true", target))
        compiled.append(binary)
        raise Compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_compile_module_with_cache", compile_module)
        with pytest.raises(Compiled):
            core.compile_with_cache(source, options)
    return compiled[0]


def supported() -> tuple[str, ...]:
    """The architectures for which the installed compiler compiles."""
    cupy()
    library: Any = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    return tuple(map(str, library.getSupportedArchs()))


def kernel_of(program: Program) -> Any:
    cuda: Any = importlib.import_module("mpidist.comm.gpu.cuda")
    names = [f"T k{number}" for number in range(len(program.scalars))]
    return cuda.elementwise_kernel(names, [f"raw T a_{name}" for name in program.names], program.body)


def test_the_compiler_knows_the_first_architecture_and_others() -> None:
    """What it does not know is skipped under `--long`: later versions forget old ones."""
    known = [one for one in (PINNED, *OTHERS) if one in supported()]
    assert PINNED in known, supported()
    assert len(known) > 1, supported()


@pytest.mark.parametrize("architecture", [PINNED, *(pytest.param(one, marks=pytest.mark.long) for one in OTHERS)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_kernel_compiles(dtype: str, architecture: str) -> None:
    if architecture not in supported() and architecture != PINNED:
        pytest.skip(f"this compiler knows the architectures {', '.join(supported())}")
    found: set[str] = set()
    for program in programs(np.dtype(dtype)):
        found.update(sources(kernel_of(program), np.dtype(dtype)))
    assert len(found) >= 20
    assert all(compile_for(architecture, source) for source in sorted(found))


def test_kernels_of_benchmark_and_tests_compile() -> None:
    kernel = cupy().ElementwiseKernel(
        "T b1, T b2, T rate, T c1, T c2, T epsilon, raw T g", "raw T p, raw T m, raw T v", benchmark_kernel(),
        "plain_adam", no_return=True,
    )
    assert all(compile_for(PINNED, source) for source in [*sources(kernel, np.dtype("float32")), SLOW])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_arithmetic_is_rounded_as_numpys(dtype: str) -> None:
    """No instruction that is less exact, or fuses two operations, except in functions that differ by their nature."""
    cupy()
    found = set()
    for program in programs(np.dtype(dtype)):
        if not FUNCTIONS & {one.operation for one in program.statements}:
            text = compile_for(PINNED, next(iter(sources(kernel_of(program), np.dtype(dtype)))), "ptx").decode()
            found.update(re.findall(r"\b(?:add|sub|mul|div|sqrt|rcp|fma|ex2|lg2)\.[\w.]*f\d\d\b", text))
    # CuPy computes with halves in float32.
    kind = "f64" if dtype == "float64" else "ftz.f32"
    assert found == {f"{name}.rn.{kind}" for name in ("add", "sub", "mul", "div", "sqrt")}


def test_what_would_keep_small_numbers_is_without_effect() -> None:
    """The documentation says so: of two such options the last one counts, and CuPy's is the last."""
    cupy()
    text = compile_for(PINNED, SLOW.replace("= value;", "*= value;"), "ptx", ("--fmad=false", "-ftz=false")).decode()
    assert "mul.rn.ftz.f32" in text


def test_cupy_still_makes_small_numbers_zero() -> None:
    """The documentation says so."""
    compiler: Any = importlib.import_module(cupy().__name__ + ".cuda.compiler")
    lines = Path(compiler.__file__).read_text().split("def _compile_with_cache_cuda(")[1].split("\ndef ")[0]
    assert "options += ('-ftz=true',)" in lines


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_extra_brings_all_libraries() -> None:
    cupy()
    said = run(
        "from cupy.cuda import nccl, nvrtc\n"
        "assert nccl.available and nccl.get_version() >= 21800 and nvrtc.getVersion()[0] >= 12\n"
        "from cuda import pathfinder; pathfinder.load_nvidia_dynamic_lib('cublas')\n"
        "import cupy_backends.cuda.libs.cublas as library; print(library.__name__)"
    )
    assert "cublas" in said


def test_without_nccl_nothing_is_said() -> None:
    cupy()
    said = run(
        "import cupy, sys\n"
        "from cupy import _environment\n"
        "def fail(name):\n    raise ImportError('no library ' + name)\n"
        "_environment._preload_library = fail\n"
        "import mpidist.comm.gpu.cuda as cuda\n"
        "assert 'cupy_backends.cuda.libs.nccl' not in sys.modules\n"
        "print(cuda.load_nccl().available)"
    )
    assert said.strip() == "False"
