"""Recorded updates: their C, compiled for the CPU, does what NumPy does, for every family of optimizers."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.optimizers.families.ftrl import FtrlKernel
from mpidist.optimizers.families.rmsprop import RMSpropKernel
from mpidist.optimizers.families.sgd import SGDKernel
from mpidist.variables.update.fused import Program, UnknownOperationError, fused, record
from mpidist.variables.update.kernel import Kernel, LayerKernel, Update
from tests.optimizers import SETTINGS

COMPILER = shutil.which("g++") or shutil.which("c++")
COUNT = 1000

KERNELS: dict[str, Kernel] = {}
LAYER_KERNELS: dict[str, LayerKernel] = {}
for _name, _setting in SETTINGS.items():
    _kernel = _setting().kernel
    if isinstance(_kernel, LayerKernel):
        LAYER_KERNELS[_name] = _kernel
    else:
        KERNELS[_name] = _kernel


class OnCpu:
    """Compiles a program's C for one type, and runs it over arrays, as a GPU would element by element."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.compiled: dict[tuple[object, ...], Any] = {}

    def run(self, program: Program, dtype: np.dtype[Any], blocks: dict[str, AnyArray]) -> None:
        key = (program.names, program.body, len(program.scalars), dtype)
        if key not in self.compiled:
            self.compiled[key] = self.compile(program, dtype)
        scalars = np.array(program.scalars, dtype)
        pointers = [blocks[name].ctypes.data_as(ctypes.c_void_p) for name in program.names]
        self.compiled[key](ctypes.c_long(COUNT), scalars.ctypes.data_as(ctypes.c_void_p), *pointers)

    def compile(self, program: Program, dtype: np.dtype[Any]) -> Any:
        if COMPILER is None:
            pytest.skip("needs a C++ compiler")
        scalars = "".join(f"T k{number} = k[{number}]; (void)k{number};\n" for number in range(len(program.scalars)))
        source = self.folder / f"update{len(self.compiled)}.cpp"
        source.write_text(
            f"#include <cmath>\nusing namespace std;\ntypedef {'float' if dtype == np.float32 else 'double'} T;\n"
            f'extern "C" void update(long n, const T *k, {", ".join(f"T *a_{name}" for name in program.names)}) {{\n'
            f"{scalars}for (long i = 0; i < n; i++) {{\n{program.body}\n}}\n}}\n"
        )
        library = source.with_suffix(".so")
        command = [COMPILER, "-O2", "-ffp-contract=off", "-Wall", "-Werror", "-shared", "-fPIC"]
        built = subprocess.run(
            [*command, str(source), "-o", str(library)], capture_output=True, text=True, timeout=60, check=False
        )
        assert built.returncode == 0, built.stderr + source.read_text()
        return ctypes.CDLL(str(library)).update


@pytest.fixture
def on_cpu(tmp_path: Path) -> OnCpu:
    return OnCpu(tmp_path)


def values(dtype: np.dtype[Any], seed: int) -> AnyArray:
    array: AnyArray = np.random.default_rng(seed).standard_normal(COUNT).astype(dtype)
    array[:3] = 0
    return array


def compare(
    on_cpu: OnCpu, steps: Sequence[Callable[[int], Update]], kernel: Kernel | LayerKernel, dtype: np.dtype[Any]
) -> None:
    """Several steps by NumPy, and by the compiled C, from the same values."""
    parameter = values(dtype, 0)
    slots = [np.full(COUNT, start, dtype) for start in kernel.slots.values()]
    mine = {"p": parameter.copy(), **{f"s{number}": slot.copy() for number, slot in enumerate(slots)}}
    scratch = [np.full(COUNT, np.nan, dtype) for _ in range(kernel.scratch_count)]
    bodies = set()
    for step in range(1, 5):
        gradient = values(dtype, step)
        mine["g"] = gradient.copy()
        for number, prepare in enumerate(steps):
            is_last = number == len(steps) - 1
            update = prepare(step)
            program = record(
                update, dtype, len(slots), len(scratch), keeps_gradient=not is_last
            )
            bodies.add(program.body)
            update(parameter, gradient, slots, scratch)
            on_cpu.run(program, dtype, mine)
            if not is_last:
                np.testing.assert_array_equal(mine["g"], gradient)
    assert len(bodies) == len(steps), "another step must not need another program"
    exact = not isinstance(kernel, FtrlKernel)
    for name, expected in [("p", parameter), *((f"s{number}", slot) for number, slot in enumerate(slots))]:
        if exact:
            np.testing.assert_array_equal(mine[name], expected, err_msg=name)
        else:
            # Powers are rounded by other libraries in other ways.
            tolerance = 2e-5 if dtype == np.float32 else 1e-12
            np.testing.assert_allclose(mine[name], expected, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("dtype", [np.dtype("float32"), np.dtype("float64")], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_the_c_of_each_family_has_numpys_bits(on_cpu: OnCpu, name: str, dtype: np.dtype[Any]) -> None:
    kernel = KERNELS[name]
    compare(on_cpu, [lambda step: kernel.prepare(step, 0.1 / step)], kernel, dtype)


@pytest.mark.parametrize("dtype", [np.dtype("float32"), np.dtype("float64")], ids=str)
@pytest.mark.parametrize("name", LAYER_KERNELS)
def test_the_c_of_families_that_look_at_whole_variables(on_cpu: OnCpu, name: str, dtype: np.dtype[Any]) -> None:
    kernel = LAYER_KERNELS[name]
    steps: list[Callable[[int], Update]] = [lambda step: kernel.prepare(step, 0.1 / step, 30.0 + step, 20.0)]
    if kernel.direct(1) is not None:
        def direct(step: int) -> Update:
            update = kernel.direct(step)
            assert update is not None
            return update

        steps.insert(0, direct)
    compare(on_cpu, steps, kernel, dtype)


def test_scratch_blocks_are_registers_and_nothing_is_stored_in_vain() -> None:
    program = record(RMSpropKernel(0.9, 0.0, 1e-7, centered=False).prepare(1, 0.1), np.dtype("float32"), 1, 1)
    assert program.names == ("p", "g", "s0")
    stores = [line for line in program.body.splitlines() if line.startswith("a_")]
    assert stores == ["a_p[i] = p;", "a_s0[i] = s0;"]
    assert "a_t0" not in program.body


def test_numbers_are_arguments() -> None:
    first, second = (record(SGDKernel(0.9).prepare(1, rate), np.dtype("float32"), 1, 0) for rate in (0.1, 0.2))
    assert first.body == second.body
    assert (first.scalars, second.scalars) == ((0.1, 0.9), (0.2, 0.9))


def test_nans_and_infinities_go_numpys_way(on_cpu: OnCpu) -> None:
    def update(
        parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
    ) -> None:
        np.maximum(parameter, gradient, out=slots[0])
        np.minimum(gradient, parameter, out=slots[1])
        np.sign(gradient, out=slots[2])
        np.clip(gradient, -1, 2, out=slots[3])
        np.absolute(gradient, out=slots[4])
        np.copyto(slots[5], gradient, where=np.greater(gradient, parameter))

    special = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.5, -2.5, 3.0], np.float32)
    pairs = np.array(np.meshgrid(special, special)).reshape(2, -1)
    blocks = {"p": np.zeros(COUNT, np.float32), "g": np.zeros(COUNT, np.float32)}
    blocks["p"][: pairs.shape[1]], blocks["g"][: pairs.shape[1]] = pairs
    expected = [np.zeros(COUNT, np.float32) for _ in range(6)]
    blocks |= {f"s{number}": slot.copy() for number, slot in enumerate(expected)}
    on_cpu.run(record(update, np.dtype("float32"), 6, 0), np.dtype("float32"), blocks)
    update(blocks["p"], blocks["g"], expected, [])
    for number, slot in enumerate(expected):
        np.testing.assert_array_equal(blocks[f"s{number}"], slot)


@pytest.mark.parametrize("dtype", ["complex64", "int32", "longdouble"])
def test_other_dtypes_have_no_c(dtype: str) -> None:
    with pytest.raises(UnknownOperationError, match="blocks of dtype"):
        record(SGDKernel().prepare(1, 0.1), np.dtype(dtype), 0, 0)


def test_what_has_no_c_is_told() -> None:
    def update(
        parameter: AnyArray, gradient: AnyArray, slots: Sequence[AnyArray], scratch: Sequence[AnyArray]
    ) -> None:
        np.arctan(gradient, out=parameter)

    with pytest.raises(UnknownOperationError, match=r"np\.arctan"):
        record(update, np.dtype("float32"), 0, 0)


def test_on_host_arrays_the_update_runs_as_it_is() -> None:
    parameter, gradient = np.ones(5, np.float32), np.full(5, 2, np.float32)
    fused(SGDKernel().prepare(1, 0.25), 0, 0)(parameter, gradient, [], [])
    np.testing.assert_array_equal(parameter, np.full(5, 0.5, np.float32))
