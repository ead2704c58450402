"""Compiled updates have NumPy's bits, for every family and any sequence of operations; what cannot, stays in NumPy."""

from __future__ import annotations

import importlib
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.arrays import AnyArray
from mpidist.comm.arithmetic import compiler
from mpidist.comm.arithmetic.compiled_sums import MOST_ARRAYS
from mpidist.comm.arithmetic.tree_order import leaves, pairing
from mpidist.optimizers.families.adam import AdamKernel
from mpidist.optimizers.families.ftrl import FtrlKernel
from mpidist.optimizers.families.sgd import SGDKernel
from mpidist.variables.step.bundle import Block
from mpidist.variables.step.sums import adder
from mpidist.variables.update import compiled
from mpidist.variables.update.compiled import CompiledUpdate, JoinedRuns
from mpidist.variables.update.fused import UnknownOperationError, record
from mpidist.variables.update.kernel import Kernel, LayerKernel, Update
from mpidist.variables.update.llvm_text import extremes_are_known, loop_of, text_of
from mpidist.variables.update.rows import RowArithmetic, Rows
from tests.optimizers import SETTINGS, WITH_ROWS

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llvmlite") is None, reason="needs llvmlite: pip install 'mpidist[fast]'"
)

COUNT = 1003
DTYPES: list[np.dtype[Any]] = [np.dtype("float32"), np.dtype("float64")]


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LEAST_BLOCK_BYTES", 0)


@pytest.fixture
def only_compiled() -> Callable[[Update], Update]:
    """An update that fails where it is called on arrays, and so shows that it was compiled."""
    def checked(update: Update) -> Update:
        def run(parameter: Any, *others: Any) -> None:
            assert not isinstance(parameter, np.ndarray), "the update was left to NumPy"
            update(parameter, *others)

        return run

    return checked


def require_same_bits(mine: AnyArray, expected: AnyArray, name: str) -> None:
    """NaNs count as one number: their payload is not promised."""
    assert mine.dtype == expected.dtype
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(mine), nan, err_msg=name)
    word = np.uint32 if mine.dtype.itemsize == 4 else np.uint64
    np.testing.assert_array_equal(mine.view(word)[~nan], expected.view(word)[~nan], err_msg=name)


def special(dtype: np.dtype[Any]) -> AnyArray:
    """Zeros, infinities, NaN, subnormal, smallest and largest numbers, and such that sums and products round."""
    info = np.finfo(dtype)
    return np.array([
        0.0, -0.0, np.inf, -np.inf, np.nan, info.smallest_subnormal, -3 * info.smallest_subnormal, info.tiny,
        -info.tiny, info.max, -info.max, 1.0, -1.0, 1 + info.eps, 1 / 3, -0.1, 1e-20, 1e20, 2.5,
    ], dtype)


def values(dtype: np.dtype[Any], count: int, seed: int) -> AnyArray:
    generator = np.random.default_rng(seed)
    array: AnyArray = (generator.standard_normal(count) * 10.0 ** generator.integers(-4, 4, count)).astype(dtype)
    some = special(dtype)
    places = generator.permutation(count)[: 4 * len(some)]
    array[places] = np.tile(some, 4)[: len(places)]
    return array


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if not setting.family.has_powers])
def test_each_family_has_numpys_bits(
    name: str, dtype: np.dtype[Any], only_compiled: Callable[[Update], Update]
) -> None:
    kernel = SETTINGS[name]().kernel
    parameter = values(dtype, COUNT, 0)
    slots = [np.full(COUNT, start, dtype) for start in kernel.slots.values()]
    scratch = [np.full(COUNT, np.nan, dtype) for _ in range(kernel.scratch_count)]
    mine, mine_slots = parameter.copy(), [slot.copy() for slot in slots]
    for step in range(1, 4):
        gradient = values(dtype, COUNT, step)
        mine_gradient = gradient.copy()
        updates: list[tuple[Update, bool]] = []
        if isinstance(kernel, LayerKernel):
            direct = kernel.direct(step)
            updates += [(direct, True)] if direct is not None else []
            updates += [(kernel.prepare(step, 0.1 / step, 30.0 + step, 20.0), False)]
        else:
            updates += [(kernel.prepare(step, 0.1 / step), False)]
        for update, keeps in updates:
            with np.errstate(all="ignore"):
                update(parameter, gradient, slots, scratch)
            compiled_update = CompiledUpdate(only_compiled(update), len(slots), len(scratch), keeps_gradient=keeps)
            compiled_update(mine, mine_gradient, mine_slots, scratch)
            if keeps:
                require_same_bits(mine_gradient, gradient, "gradient")
        require_same_bits(mine, parameter, "parameter")
        for number, slot in enumerate(slots):
            require_same_bits(mine_slots[number], slot, f"slot {number}")


_BLOCKS = ("p", "g", "s0", "s1", "t0")
_BINARY: list[Any] = [np.add, np.subtract, np.multiply, np.divide, np.maximum, np.minimum]
_UNARY: list[Any] = [np.sqrt, np.square, np.negative, np.positive, np.absolute, np.reciprocal, np.sign]
_COMPARISONS: list[Any] = [np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal]
_NAMES = st.sampled_from(_BLOCKS)
_OPERANDS = st.one_of(_NAMES, st.sampled_from([0, -0.0, 0.5, 1e-7, -3.0, 1e30, 0.1]))
_STATEMENTS = st.one_of(
    st.tuples(st.sampled_from(_BINARY), _NAMES, _NAMES, _OPERANDS),
    st.tuples(st.sampled_from(_UNARY), _NAMES, _NAMES),
    # A processor does both at once, and rounds once, where a compiler lets it.
    st.tuples(st.sampled_from(["multiply, add", "multiply, subtract"]), _NAMES, _NAMES, _OPERANDS, _NAMES),
    st.tuples(st.just(np.clip), _NAMES, st.sampled_from([(-0.0, 0.0), (0.0, 1.0), (-1.5, 0.1), (2.0, -2.0)])),
    st.tuples(st.just(np.copyto), _NAMES, st.sampled_from(_COMPARISONS), _NAMES, _OPERANDS),
)


def run_statements(statements: Sequence[tuple[Any, ...]], blocks: dict[str, Any]) -> None:
    def of(operand: Any) -> Any:
        return blocks[operand] if isinstance(operand, str) else operand

    for function, target, *rest in statements:
        if function is np.clip:
            np.clip(blocks[target], *rest[0], out=blocks[target])
        elif function is np.copyto:
            comparison, left, right = rest
            np.copyto(blocks[target], blocks[left], where=comparison(blocks[target], of(right)))
        elif isinstance(function, str):
            left, right, other = map(of, rest)
            np.multiply(left, right, out=blocks["t0"])
            (np.add if "add" in function else np.subtract)(other, blocks["t0"], out=blocks[target])
        else:
            function(*map(of, rest), out=blocks[target])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=30, deadline=None)
@given(statements=st.lists(_STATEMENTS, min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_any_sequence_of_operations_has_numpys_bits(
    dtype: np.dtype[Any], statements: list[tuple[Any, ...]], seed: int
) -> None:
    """Not where a compiler contracts a product and a sum, reorders, flushes small numbers, or confuses zeros."""
    compiled.LEAST_BLOCK_BYTES = 0
    is_numpys = False

    def update(parameter: Any, gradient: Any, slots: Sequence[Any], scratch: Sequence[Any]) -> None:
        nonlocal is_numpys
        is_numpys = isinstance(parameter, np.ndarray)
        blocks = dict(zip(_BLOCKS, (parameter, gradient, *slots, *scratch), strict=True))
        np.multiply(parameter, gradient, out=blocks["t0"])
        run_statements(statements, blocks)

    some = special(dtype)
    pairs = np.array(np.meshgrid(some, some), dtype).reshape(2, -1)
    start = [np.concatenate([own, values(dtype, 200, seed + i)]) for i, own in enumerate((*pairs, *pairs[::-1]))]
    mine, expected = [block.copy() for block in start], [block.copy() for block in start]
    scratch = [np.empty_like(start[0])]
    with np.errstate(all="ignore"):
        update(expected[0], expected[1], expected[2:], scratch)
    CompiledUpdate(update, 2, 1, keeps_gradient=True)(mine[0], mine[1], mine[2:], scratch)
    assert not is_numpys, "the update was left to NumPy"
    for name, own, other in zip(_BLOCKS, mine, expected, strict=False):
        require_same_bits(own, other, f"{name} after {statements}")


def make_blocks(dtype: np.dtype[Any], gradient_count: int, slot_count: int, length: int) -> list[Block]:
    """Blocks that lie end to end."""
    whole = [values(dtype, COUNT, number) for number in range(1 + gradient_count + slot_count)]
    for slot in whole[1 + gradient_count :]:
        slot[...] = 0
    room = np.empty(length, dtype)

    def block(at: int) -> Block:
        parameter, *others = (array[at : at + length] for array in whole)
        gradients, slots = others[:gradient_count], others[gradient_count:]
        return Block(parameter, tuple(gradients), tuple(slots), room[: parameter.size], ())

    return [block(at) for at in range(0, COUNT, length)]


@pytest.mark.parametrize("in_tree", [False, True], ids=["in order", "in tree"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_gradients_are_added_in_the_order_of_numpys_sums(
    count: int, in_tree: bool, only_compiled: Callable[[Update], Update]
) -> None:
    dtype, kernel = np.dtype("float32"), AdamKernel(0.9, 0.999, 1e-7)
    mine, expected = (make_blocks(dtype, count, 2, 200) for _ in range(2))
    add, update = adder(dtype, count, 1 << 18, in_tree=in_tree), kernel.prepare(1, 0.1)
    if in_tree:
        assert add.pairs == tuple(pairing(leaves(count)))
    gradients = [gradient.copy() for block in mine for gradient in block.gradients]
    assert CompiledUpdate(only_compiled(update), 2, 0).sum_and_update(JoinedRuns(mine), add.pairs)
    for block in expected:
        with np.errstate(all="ignore"):
            update(block.parameter, add.function(block.gradients, block.total), block.slots, block.scratch)
    for number, (own, other) in enumerate(zip(mine, expected, strict=True)):
        require_same_bits(own.parameter, other.parameter, f"block {number}")
        for mine_slot, slot in zip(own.slots, other.slots, strict=True):
            require_same_bits(mine_slot, slot, f"slot of block {number}")
    kept = [gradient for block in mine for gradient in block.gradients]
    for one, before in zip(kept, gradients, strict=True):
        require_same_bits(one, before, "a gradient")


def test_more_gradients_than_are_fetched_ahead_are_left_to_numpy() -> None:
    blocks = make_blocks(np.dtype("float32"), MOST_ARRAYS + 1, 0, 200)
    pairs = tuple((0, number) for number in range(1, MOST_ARRAYS + 1))
    assert not CompiledUpdate(SGDKernel().prepare(1, 0.1), 0, 0).sum_and_update(JoinedRuns(blocks), pairs)


def test_blocks_that_touch_are_one_run_and_others_are_not() -> None:
    blocks = make_blocks(np.dtype("float32"), 2, 2, 200)
    (arguments,) = JoinedRuns(blocks).arguments(("p", "g", "s1"))
    first = blocks[0]
    assert arguments == (
        COUNT, first.parameter.ctypes.data, *(g.ctypes.data for g in first.gradients), first.slots[1].ctypes.data,
    )
    assert len(JoinedRuns([blocks[0], *blocks[2:]]).arguments(("p",))) == 2
    # The parameters touch, and the state lies elsewhere.
    moved = [block._replace(slots=tuple(slot.copy() for slot in block.slots)) for block in blocks]
    assert len(JoinedRuns(moved).arguments(("p",))) == len(blocks)
    sizes = [count for count, *_ in JoinedRuns(moved).arguments(("p",))]
    assert sum(sizes) == COUNT
    assert not JoinedRuns([]).arguments(("p",))


def test_work_without_blocks_is_done() -> None:
    assert CompiledUpdate(SGDKernel().prepare(1, 0.1), 0, 0).sum_and_update(JoinedRuns([]), ())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_update_aside_leaves_the_parameter(dtype: np.dtype[Any]) -> None:
    kernel = AdamKernel(0.9, 0.999, 1e-7)
    parameter, gradient = values(dtype, COUNT, 0), values(dtype, COUNT, 1)
    before, new, slots = parameter.copy(), np.full(COUNT, 7, dtype), [np.zeros(COUNT, dtype) for _ in range(2)]
    assert CompiledUpdate(kernel.prepare(1, 0.1), 2, 0).aside(parameter, new, gradient, slots)
    expected, expected_slots = parameter.copy(), [np.zeros(COUNT, dtype) for _ in range(2)]
    with np.errstate(all="ignore"):
        kernel.prepare(1, 0.1)(expected, gradient.copy(), expected_slots, [])
    require_same_bits(parameter, before, "the parameter")
    require_same_bits(new, expected, "the new parameter")
    for mine, slot in zip(slots, expected_slots, strict=True):
        require_same_bits(mine, slot, "a slot")


def test_what_changes_nothing_is_no_failure_of_the_compiler(caplog: pytest.LogCaptureFixture) -> None:
    parameter, gradient = values(np.dtype("float32"), COUNT, 0), values(np.dtype("float32"), COUNT, 1)
    CompiledUpdate(lambda *_: None, 0, 0, keeps_gradient=True)(parameter, gradient, [], [])
    require_same_bits(gradient, values(np.dtype("float32"), COUNT, 1), "the gradient")
    assert not caplog.records


def test_what_leaves_the_parameter_alone_is_not_done_aside() -> None:
    def move(parameter: Any, gradient: Any, slots: Sequence[Any], scratch: Sequence[Any]) -> None:
        np.add(slots[0], gradient, out=slots[0])

    arrays = [np.ones(COUNT, np.float32) for _ in range(4)]
    assert not CompiledUpdate(move, 1, 0).aside(arrays[0], arrays[1], arrays[2], arrays[3:])
    assert (arrays[3] == 1).all()


def scaled_by(number: Any) -> Update:
    def update(parameter: Any, gradient: Any, slots: Sequence[Any], scratch: Sequence[Any]) -> None:
        np.multiply(parameter, number, out=parameter)

    return update


@pytest.mark.parametrize("number", [np.float64(0.1), np.array(0.1), np.int32(3), 2**53 + 1], ids=repr)
def test_numbers_of_a_wider_dtype_stay_in_numpy(number: Any) -> None:
    dtype = np.dtype("float32")
    program = record(scaled_by(number), dtype, 0, 0)
    assert program.widens
    with pytest.raises(UnknownOperationError, match="wider dtype"):
        loop_of(program, dtype)
    parameter, expected = (values(dtype, COUNT, 0) for _ in range(2))
    with np.errstate(all="ignore"):
        CompiledUpdate(scaled_by(number), 0, 0)(parameter, parameter.copy(), [], [])
        scaled_by(number)(expected, expected.copy(), [], [])
    require_same_bits(parameter, expected, "the parameter")


@pytest.mark.parametrize("number", [0.1, 3, np.float32(0.1), np.array(0.1, np.float32), np.float16(0.1)], ids=repr)
def test_numbers_of_the_blocks_dtype_are_compiled(number: Any, only_compiled: Callable[[Update], Update]) -> None:
    parameter, expected = (values(np.dtype("float32"), COUNT, 0) for _ in range(2))
    with np.errstate(all="ignore"):
        scaled_by(number)(expected, expected, [], [])
    CompiledUpdate(only_compiled(scaled_by(number)), 0, 0)(parameter, parameter.copy(), [], [])
    require_same_bits(parameter, expected, "the parameter")


def test_powers_and_half_precision_stay_in_numpy() -> None:
    ftrl = FtrlKernel(-0.5, 0.1, 0.01, 0.02, 0.03, 0.1).prepare(1, 0.1)
    float32 = np.dtype("float32")
    with pytest.raises(UnknownOperationError, match="last bit"):
        text_of(loop_of(record(ftrl, float32, 2, 2), float32))
    for dtype in (np.dtype("float16"), np.dtype(">f4")):
        with pytest.raises(UnknownOperationError, match="blocks of dtype"):
            loop_of(record(SGDKernel().prepare(1, 0.1), np.dtype("float32"), 0, 0), dtype)
    parameter, gradient = np.ones(COUNT, np.float16), np.full(COUNT, 2, np.float16)
    CompiledUpdate(SGDKernel().prepare(1, 0.25), 0, 0)(parameter, gradient, [], [])
    np.testing.assert_array_equal(parameter, np.full(COUNT, 0.5, np.float16))


def test_arrays_that_are_not_contiguous_stay_in_numpy() -> None:
    parameter, gradient = np.ones(2 * COUNT, np.float32)[::2], np.full(COUNT, 2, np.float32)
    CompiledUpdate(SGDKernel().prepare(1, 0.25), 0, 0)(parameter, gradient, [], [])
    np.testing.assert_array_equal(parameter, np.full(COUNT, 0.5, np.float32))


def test_small_blocks_stay_in_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LEAST_BLOCK_BYTES", 4 * COUNT + 1)
    seen: list[int] = []

    def update(parameter: Any, gradient: Any, slots: Sequence[Any], scratch: Sequence[Any]) -> None:
        seen.append(parameter.size)

    CompiledUpdate(update, 0, 0)(np.ones(COUNT, np.float32), np.ones(COUNT, np.float32), [], [])
    assert seen == [COUNT]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads instructions of x86")
def test_the_loop_is_vectorized_and_nothing_is_contracted() -> None:
    dtype = np.dtype("float32")
    program = record(AdamKernel(0.9, 0.999, 1e-7).prepare(1, 0.1), dtype, 2, 0)
    code = compiled._compile(loop_of(program, dtype, ((0, 1),)))
    assert code is not None
    assembly = code.assembly
    assert "fmadd" not in assembly
    assert "fmsub" not in assembly
    assert "fnmadd" not in assembly
    assert "sqrtps" in assembly
    assert "rsqrt" not in assembly
    assert "rcp" not in assembly


def test_another_step_compiles_nothing() -> None:
    compiled._compile.cache_clear()
    parameter, gradient, *slots = (np.ones(COUNT, np.float32) for _ in range(4))
    for step in range(1, 5):
        update = AdamKernel(0.9, 0.999, 1e-7).prepare(step, 0.1 / step)
        CompiledUpdate(update, 2, 0)(parameter, gradient, slots, [])
    assert compiled._compile.cache_info().misses == 1


def test_extremes_of_zeros_are_asked_for_before_they_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = np.dtype("float32")
    program = record(AdamKernel(0.9, 0.999, 1e-7, amsgrad=True).prepare(1, 0.1), dtype, 3, 0)
    monkeypatch.setattr("mpidist.variables.update.llvm_text.extremes_are_known", lambda: False)
    with pytest.raises(UnknownOperationError, match="another zero"):
        text_of(loop_of(program, dtype))
    assert platform.machine() != "x86_64" or extremes_are_known()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    compiler._compiler.cache_clear()
    yield
    compiler._compiler.cache_clear()


def test_plans_are_compiled_from_a_size_on_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fresh_compiler: None
) -> None:
    monkeypatch.delenv(compiler.VARIABLE, raising=False)
    caplog.set_level(logging.INFO, "mpidist")
    assert not compiled.is_wanted(compiled.LEAST_BYTES - 1)
    assert not caplog.records
    assert compiled.is_wanted(compiled.LEAST_BYTES)
    assert compiled.is_wanted(compiled.LEAST_BYTES)
    (line,) = [one.getMessage() for one in caplog.records]
    assert "are compiled by LLVM" in line
    assert "MPIDIST_COMPILE=0" in line
    monkeypatch.setenv(compiler.VARIABLE, "0")
    assert not compiled.is_wanted(1 << 40)


def test_without_the_package_numpy_updates_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fresh_compiler: None
) -> None:
    monkeypatch.delenv(compiler.VARIABLE, raising=False)
    monkeypatch.delitem(sys.modules, "mpidist.comm.arithmetic.machine_code", raising=False)
    # Python's own way to say that there is no such module.
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    caplog.set_level(logging.INFO, "mpidist")
    assert not compiled.is_wanted(1 << 40)
    assert not compiled.is_wanted(1 << 40)
    (line,) = [one.getMessage() for one in caplog.records]
    assert "pip install 'mpidist[fast]'" in line


def test_a_library_that_cannot_be_loaded_leaves_updates_to_numpy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fresh_compiler: None
) -> None:
    def fail(name: str) -> Any:
        raise OSError("libllvmlite.so: cannot open shared object file")

    monkeypatch.delenv(compiler.VARIABLE, raising=False)
    monkeypatch.setattr(compiler, "importlib", SimpleNamespace(import_module=fail))
    caplog.set_level(logging.INFO, "mpidist")
    assert not compiled.is_wanted(1 << 40)
    assert "cannot open shared object file" in caplog.text


def test_a_compiler_that_fails_leaves_the_update_to_numpy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled._compile.cache_clear()
    monkeypatch.setattr(compiled, "text_of", lambda loop: "this is no text of LLVM's")
    parameter, gradient = np.ones(COUNT, np.float32), np.full(COUNT, 2, np.float32)
    CompiledUpdate(SGDKernel().prepare(1, 0.25), 0, 0)(parameter, gradient, [], [])
    compiled._compile.cache_clear()
    np.testing.assert_array_equal(parameter, np.full(COUNT, 0.5, np.float32))
    assert "could not be compiled" in caplog.text


def test_importing_the_library_loads_no_compiler() -> None:
    program = (
        "import sys, numpy as np, mpidist\n"
        "v = mpidist.Variable(np.zeros(1000, np.float32))\n"
        "mpidist.optimizers.SGD(0.1).apply_gradients([(np.ones(1000, np.float32), v)])\n"
        "print('llvmlite' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, env=dict(os.environ)
    )
    assert done.stdout.split() == ["False"]


def test_pairs_name_places_that_still_hold_a_sum() -> None:
    """The loop relies on it: a place that went into another sum is not used again."""
    for count in range(1, 9):
        gone: set[int] = set()
        for left, right in pairing(leaves(count)):
            assert not {left, right} & gone
            gone.add(right)
        assert gone == set(range(1, count))


def test_compiled_code_lives_as_long_as_the_update_that_runs_it() -> None:
    """However many others were compiled since, of which only some are kept for later updates."""
    program = """
import gc
import numpy as np
from mpidist.variables.update import compiled
compiled.LEAST_BLOCK_BYTES = 0
update = compiled.CompiledUpdate(lambda p, g, slots, scratch: np.add(p, g, out=p), 0, 0)
zeros = [np.zeros(1000, "float32") for _ in range(2)]
update(zeros[0], zeros[1], [], [])
assert any(function is not None for function in update._functions.values()), "the update was left to NumPy"
compiled._compile.cache_clear()
gc.collect()
for _ in range(20):
    others = [compiled.CompiledUpdate(lambda p, g, slots, scratch: np.subtract(p, g, out=p), 0, 0)]
    others[0](zeros[0], zeros[1], [], [])
    parameter = np.zeros(1000, "float32")
    update(parameter, np.ones(1000, "float32"), [], [])
    assert (parameter == 1).all(), parameter
print("alive")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout) == (0, "alive\n"), result.stderr


def rows_to_update(kernel: Kernel, dtype: np.dtype[Any], width: int) -> tuple[AnyArray, list[AnyArray], Rows]:
    """A table, its state, and some rows of a gradient."""
    table = values(dtype, 200 * width, 0).reshape(200, width)
    slots = [np.full_like(table, start) for start in kernel.slots.values()]
    rows = np.sort(np.random.default_rng(width).permutation(200)[:77])
    return table, slots, (rows, values(dtype, 77 * width, 1).reshape(77, width))


@pytest.mark.parametrize("is_aside", [False, True], ids=["in place", "aside"])
@pytest.mark.parametrize("width", [1, 3, 64, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name, setting in WITH_ROWS.items() if not setting.family.has_powers])
def test_rows_of_a_table_have_numpys_bits(
    name: str, dtype: np.dtype[Any], width: int, is_aside: bool, only_compiled: Callable[[Update], Update]
) -> None:
    kernel = WITH_ROWS[name]().kernel
    assert not isinstance(kernel, LayerKernel)
    mine, mine_slots, given_rows = rows_to_update(kernel, dtype, width)
    expected, slots, same_rows = rows_to_update(kernel, dtype, width)
    for step in (1, 2):
        update = kernel.prepare(step, 0.1)
        for table, states, (rows, gradient), one in (
            (mine, mine_slots, given_rows, CompiledUpdate(only_compiled(update), len(slots), kernel.scratch_count)),
            (expected, slots, same_rows, update),
        ):
            arithmetic, merged = RowArithmetic(table, states, kernel.scratch_count), (rows, gradient.copy())
            before = table.copy()
            with np.errstate(all="ignore"):
                (arithmetic.apply_aside if is_aside else arithmetic.apply)(merged, one)
            if is_aside:
                assert table.tobytes() == before.tobytes(), "readers see a half-written version"
                arithmetic.write_back(merged)
    require_same_bits(mine, expected, "table")
    for number, (mine_slot, slot) in enumerate(zip(mine_slots, slots, strict=True)):
        require_same_bits(mine_slot, slot, f"slot {number}")


def test_rows_that_are_not_contiguous_are_updated_by_numpy() -> None:
    kernel = SGDKernel()
    table, _, (rows, gradient) = rows_to_update(kernel, np.dtype("float32"), 4)
    strided = np.repeat(gradient, 2, axis=1)[:, ::2]
    arithmetic, expected = RowArithmetic(table, [], 0), table.copy()
    with np.errstate(all="ignore"):
        expected[rows] -= np.float32(0.1) * gradient
        arithmetic.apply_aside((rows, strided), CompiledUpdate(kernel.prepare(1, 0.1), 0, 0))
    arithmetic.write_back((rows, strided))
    np.testing.assert_array_equal(table, expected)


@pytest.mark.parametrize("rows", [[-1, 3], [0, 200], [1], [0, 1, 2]])
def test_rows_that_are_not_there_are_refused(rows: list[int]) -> None:
    table, _, _ = rows_to_update(SGDKernel(), np.dtype("float32"), 4)
    before = table.copy()
    with pytest.raises(IndexError, match="expected 2 rows between 0 and 199"):
        RowArithmetic(table, [], 0).apply(
            (np.array(rows), np.ones((2, 4), np.float32)), CompiledUpdate(SGDKernel().prepare(1, 0.1), 0, 0)
        )
    assert table.tobytes() == before.tobytes()
