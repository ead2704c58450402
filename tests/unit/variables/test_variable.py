"""The variable as an array, on one rank."""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.variables.coercion import default_array
from mpidist.variables.variable import BaseVariable


def make(value: Any, **options: Any) -> BaseVariable:
    variable: BaseVariable = mpidist.Variable(value, **options)
    return variable


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        (1.5, "float32", ()), (3, "int32", ()), (2**40, "int64", ()), (-(2**63), "int64", ()), (True, "bool", ()),
        ([1, 2], "int32", (2,)), ([[1.0], [2.0]], "float32", (2, 1)), ([], "float32", (0,)), (1j, "complex128", ()),
        (np.float64(1), "float64", ()), (np.arange(3), "int64", (3,)), (np.zeros((2, 0), "float16"), "float16", (2, 0)),
        (np.arange(3, dtype=">f4"), "float32", (3,)), (lambda: np.ones(2), "float64", (2,)),
        (np.asfortranarray(np.ones((2, 3))), "float64", (2, 3)),
    ],
)
def test_dtype_and_shape(value: Any, dtype: str, shape: tuple[int, ...]) -> None:
    variable = make(value)
    assert (variable.dtype, variable.shape) == (np.dtype(dtype), shape)
    assert variable.dtype.isnative
    assert (variable.ndim, variable.size) == (len(shape), math.prod(shape))
    np.testing.assert_array_equal(variable.numpy(), value() if callable(value) else value)


def test_an_initial_value_is_copied() -> None:
    array = np.zeros(3)
    variable = make(array)
    array[0] = 1
    assert variable.numpy().tolist() == [0, 0, 0]
    other = make(variable)
    variable.assign([1.0, 2.0, 3.0])
    assert other.numpy().tolist() == [0, 0, 0]
    assert make(variable, dtype="int8").dtype == np.int8


def test_large_integers_stay() -> None:
    assert default_array(-(2**63)).item() == -(2**63)
    assert default_array([-(2**31), 2**31 - 1]).dtype == np.int32
    assert default_array([-(2**31) - 1]).dtype == np.int64


class Table:
    """As one of pandas: an array for NumPy, without a dtype of its own."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.rows, dtype)


@pytest.mark.parametrize("rows", [np.array([[1e-12 + 1]]), np.array([[1, 2]])])
def test_a_table_keeps_its_digits(rows: Any) -> None:
    variable = make(Table(rows))
    assert variable.dtype == rows.dtype
    assert variable.numpy().tolist() == rows.tolist()
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        assert strategy.reduce("SUM", Table(rows), axis=None).tolist() == rows.tolist()


def test_bfloat16_of_torch_is_taken_everywhere() -> None:
    pytest.importorskip("ml_dtypes", reason="bfloat16 comes from ml_dtypes")
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    given = torch.tensor([[1.5], [2.0]], dtype=torch.bfloat16)
    variable = make(given)
    assert variable.dtype.name == "bfloat16"
    wide = make(np.zeros((2, 1), "float32"))
    mpidist.optimizers.SGD(1.0).apply_gradients([(given, wide)])
    assert wide.numpy().tolist() == [[-1.5], [-2.0]]
    assert wide.assign(given).numpy().tolist() == [[1.5], [2.0]]
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        assert strategy.reduce("SUM", given, axis=None).tolist() == [[1.5], [2.0]]
        assert strategy.gather(given, axis=0).tolist() == [[1.5], [2.0]]
    assert mpidist.IndexedSlices(given, np.array([0, 0]), (1, 1)).to_dense().tolist() == [[3.5]]
    assert [row.tolist() for row in mpidist.data.Dataset.from_tensor_slices(given)] == [[1.5], [2.0]]
    mean = mpidist.metrics.Mean()
    mean.update_state(given)
    assert mean.result() == 1.75


@pytest.mark.parametrize("value", [
    "text", None, [object()], np.array(["a"]), np.zeros(2, "M8[s]"), {"a": 1}, np.zeros(3, "V4"),
    np.zeros(2, [("a", "f4")]),
])
def test_what_is_no_array_of_numbers_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"expected an array of numbers as initial value of variable 'w', got dtype"):
        make(value, name="w")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"synchronization": "NONE"}, "`?synchronization`? NONE is not supported"),
        ({"synchronization": "often"}, "'often' is not a valid VariableSynchronization"),
        ({"aggregation": "median"}, "'median' is not a valid VariableAggregation"),
        ({"aggregation": "MEAN"}, "MEAN needs a floating dtype, got int32"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(1, **options)


@pytest.mark.parametrize("argument", ["synchronization", "aggregation"])
def test_a_name_that_is_no_member_names_the_variable(argument: str) -> None:
    with pytest.raises(ValueError, match=f"variable 'w': `{argument}`: 'SOMETIMES' is not a valid"):
        make(1.0, name="w", **{argument: "SOMETIMES"})
    with pytest.raises(TypeError, match=f"variable 'w': Expected `{argument}` to be"):
        make(1.0, name="w", **{argument: 1})


def test_a_variable_on_read_is_not_trained() -> None:
    with pytest.raises(ValueError, match=r"variable 'w': trainable=True is for .* ON_WRITE, got ON_READ"):
        make(1.0, name="w", trainable=True, synchronization="ON_READ")


@pytest.mark.parametrize("strategy", [mpidist.MirroredStrategy, mpidist.ParameterServerStrategy])
def test_booleans_on_read_have_no_sum(strategy: Any) -> None:
    with strategy().scope():
        with pytest.raises(ValueError, match=r"variable 'w': ON_READ with aggregation SUM .* bool.*; use dtype="):
            make([True], name="w", synchronization="ON_READ", aggregation="SUM")
        assert make([True], aggregation="SUM").numpy().tolist() == [True]


@pytest.mark.parametrize(
    "use",
    [
        "mpidist.Variable([1.5], dtype='bfloat16').numpy()", "mpidist.metrics.Mean(dtype='bfloat16').result()",
        "mpidist.experimental.partitioners.MinSizePartitioner(8)((8, 2), 'bfloat16')",
    ],
)
def test_bfloat16_is_known_by_its_name_before_ml_dtypes_is_loaded(use: str) -> None:
    pytest.importorskip("ml_dtypes", reason="bfloat16 comes from ml_dtypes")
    code = f"import sys, mpidist; assert 'ml_dtypes' not in sys.modules; print({use})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_booleans_are_not_subtracted() -> None:
    with pytest.raises(TypeError, match=r"assign_sub is not defined for booleans\. Use assign"):
        make(True).assign_sub(True)


def test_attributes() -> None:
    variable = make(1.0, name="w", aggregation="mean")
    assert (variable.name, variable.trainable) == ("w", True)
    assert variable.synchronization is VariableSynchronization.ON_WRITE
    assert variable.aggregation is VariableAggregation.MEAN
    assert not make(1.0, trainable=False).trainable
    assert not make(1.0, synchronization="ON_READ").trainable
    assert not mpidist.Variable(1.0, False).trainable
    assert isinstance(variable, mpidist.Variable)
    assert isinstance(variable, BaseVariable)


def test_writes() -> None:
    variable = make(np.zeros((2, 2), "float32"))
    assert variable.assign([[1, 2], [3, 4]]) is variable
    variable.assign_add(np.ones((2, 2), "float64"))
    assert variable.assign_sub([[0, 0], [0, 1]]) is variable
    assert variable.numpy().tolist() == [[2, 3], [4, 4]]
    variable.assign(variable * 2)
    variable.assign_add(variable)
    assert variable.numpy().tolist() == [[8, 12], [16, 16]]
    unsigned = make(np.array([5, 6], "uint8"))
    unsigned.assign_sub(np.array([1, 6], "uint8"))
    assert unsigned.numpy().tolist() == [4, 0]


@pytest.mark.parametrize(
    ("initial", "value", "kind", "text"),
    [
        (np.zeros((2, 2)), np.zeros(2), ValueError, r"variable 'w': expected a value of shape \(2, 2\), got \(2,\)"),
        (np.zeros(2), 1.0, ValueError, r"\(2,\), got \(\)"),
        (1, 2.5, TypeError, r"variable 'w': expected a value of dtype int32, got float64.*astype"),
        (1.0, 1j, TypeError, "complex"),
        (np.zeros(1, bool), np.ones(1), TypeError, "bool"),
        (np.int8(1), 300, OverflowError, "300"),
        (np.uint8(1), -1, OverflowError, "-1"),
        (1.0, "text", TypeError, "dtype float32"),
        (1.0, None, TypeError, "dtype float32"),
    ],
)
def test_writes_that_do_not_fit(initial: Any, value: Any, kind: type[Exception], text: str) -> None:
    variable = make(initial, name="w")
    for write in (variable.assign, variable.assign_add, variable.assign_sub):
        with pytest.raises(kind, match=text):
            write(value)
    np.testing.assert_array_equal(variable.numpy(), initial)


def test_it_is_not_written_in_passing() -> None:
    variable = make([1.0, 2.0], name="w")
    array = np.ones(2, "float32")

    def add() -> None:
        nonlocal variable
        variable += 1

    writes: list[Callable[[], object]] = [
        add, lambda: np.add(array, 1, out=variable), lambda: np.add.at(variable, [0], 1.0),  # type: ignore[call-overload]
    ]
    for write in writes:
        with pytest.raises(TypeError, match=r"variable 'w' cannot be written by `\+=`"):
            write()
    with pytest.raises(TypeError, match=r"variable 'w' cannot be written by `v\[\.\.\.\] = value`"):
        variable[0] = 1
    for view in (variable.value(), variable[:1], np.asarray(variable.value()).reshape(1, 2)):
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 5
    array += variable
    np.add.at(array, [0], variable[:1])
    assert array.tolist() == [3, 3]
    assert variable.numpy().tolist() == [1, 2]


def test_it_reads_like_an_array() -> None:
    variable = make([[1.0, 2.0], [3.0, 4.0]])
    for result in (variable + 1, 1 + variable, variable @ variable, -variable, variable**2, np.sqrt(variable)):
        assert type(result) is np.ndarray
        assert result.dtype == np.float32
    assert (variable * variable).tolist() == [[1, 4], [9, 16]]
    assert (variable > 2).tolist() == [[False, False], [True, True]]
    assert (variable == variable.numpy()).all()
    assert variable[1].tolist() == [3, 4]
    assert variable[..., 0].tolist() == [1, 3]
    assert [row.tolist() for row in variable] == [[1, 2], [3, 4]]
    assert len(variable) == 2
    assert np.add.reduce(variable).tolist() == [4, 6]
    assert np.mean(variable) == 2.5
    assert np.concatenate([variable, variable]).shape == (4, 2)
    assert np.asarray(variable, "float64").dtype == np.float64
    assert not np.shares_memory(np.asarray(variable), variable.value())
    assert np.add(variable, 1, out=np.empty((2, 2), "float32")).tolist() == [[2, 3], [4, 5]]
    number = make(2.5)
    assert (float(number), int(number), bool(number)) == (2.5, 2, True)
    with pytest.raises(TypeError, match="len"):
        len(number)


def test_views_live_and_copies_do_not() -> None:
    variable = make([1.0])
    view, copied, read = variable.value(), variable.numpy(), variable.read_value()
    copied[0] = 9
    variable.assign([2.0])
    assert (view.item(), copied.item(), read.item()) == (2, 9, 1)


def test_on_read_on_one_rank_gives_copies() -> None:
    for aggregation in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
        variable = make([1.0], synchronization="ON_READ", aggregation=aggregation)
        before = variable.value()
        variable.assign([2.0])
        assert (before.item(), variable.numpy().item()) == (1, 2)
        assert not before.flags.writeable


def test_identity() -> None:
    first, second = make(1.0), make(1.0)
    assert len({first, second, first}) == 2
    assert {first: "a"}[first] == "a"
    assert first == second
    assert repr(first) == "<mpidist.MirroredVariable 'Variable' shape=() dtype=float32, numpy=1.0>"


def test_the_first_slabs_memory_is_used_again() -> None:
    address = make(np.zeros(1000)).value().ctypes.data
    assert make(np.zeros(1000)).value().ctypes.data == address


@pytest.mark.parametrize("options", [{}, {"synchronization": "ON_READ"}])
def test_it_is_not_copied_behind_the_arenas_back(options: dict[str, Any]) -> None:
    variable = make([1.0], name="w", **options)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"variable 'w' cannot be copied or pickled: `mpidist.Variable"):
            duplicate(variable)


@pytest.mark.parametrize("aggregation", ["NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"])
def test_without_a_strategy_on_read_variables_are_used_as_under_any(aggregation: str) -> None:
    strategy = mpidist.get_strategy()
    dtype = "float32" if aggregation == "MEAN" else "int32"
    seen = mpidist.Variable(0, dtype=dtype, synchronization="ON_READ", aggregation=aggregation)
    strategy.run(lambda: seen.assign_add(5))
    assert strategy.run(seen.numpy) == 5
    assert int(seen) == 5


@pytest.mark.parametrize(("value", "dtype"), [(300, "uint8"), (-1, "uint8"), (2**40, "int32"), ([1, 300], "int8")])
def test_a_number_that_does_not_fit_is_refused(value: Any, dtype: str) -> None:
    with pytest.raises(OverflowError, match=r"initial value of variable 'n': .* out of bounds for"):
        mpidist.Variable(value, dtype=dtype, name="n")


def test_a_variable_is_a_number_where_an_array_is_one() -> None:
    count, share, wave = mpidist.Variable(2), mpidist.Variable(0.126), mpidist.Variable(np.complex128(1j))
    assert complex(wave) == 1j
    assert [10, 20, 30][count] == 30
    assert list(range(count)) == [0, 1]
    assert f"{share:.2f} {count:03d} {count}".startswith("0.13 002 <mpidist.")
    assert round(share, 2) == pytest.approx(0.13)
    assert round(share) == 0
    mask = mpidist.Variable(np.array([True, False]))
    assert np.add(np.ones(2), 1, where=mask, out=np.zeros(2)).tolist() == [2, 0]
    assert np.sum(np.array([3, 4]), where=mask) == 3


def test_dense_rows_of_integers_do_not_wrap() -> None:
    small = np.array([[100, 1], [27, -128], [1, -1]], "int8")
    dense = mpidist.IndexedSlices(small[:2], np.array([2, 2]), (3, 2)).to_dense()
    assert (dense.tolist(), dense.dtype.name) == ([[0, 0], [0, 0], [127, -127]], "int8")
    with pytest.raises(OverflowError, match=r"sum of rows of int8 .* -128 to 127, got 128\. .*astype\(np\.int64\)"):
        mpidist.IndexedSlices(small, np.array([2, 2, 2]), (3, 2)).to_dense()
