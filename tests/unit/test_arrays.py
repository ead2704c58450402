"""Arrays of other libraries: lent without a copy, and results given back in their kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist import arrays


def test_a_tensor_is_lent_and_given_back_without_a_copy() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensor = torch.zeros(3)
    lent = arrays.lend(tensor)
    lent[...] = 2
    assert tensor.tolist() == [2, 2, 2]
    result = np.ones(3, np.float32)
    back = arrays.give_back(result, tensor)
    back[0] = 5
    assert result.tolist() == [5, 1, 1]


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_a_read_only_result_is_copied(library: str) -> None:
    xp = pytest.importorskip(library, reason=f"{library.partition('.')[0]} is not installed")
    result = np.arange(3, dtype=np.float32)
    result.flags.writeable = False
    back = arrays.give_back(result, xp.zeros(3, dtype=xp.float32))
    assert isinstance(back, type(xp.zeros(1)))
    assert np.asarray(back).tolist() == [0, 1, 2]
    assert not np.shares_memory(np.asarray(back), result)


def test_a_scalar_is_lent_as_a_read_only_copy() -> None:
    lent = arrays.lend(np.complex64(1j))
    assert lent[()] == 1j
    assert lent.shape == ()
    assert lent.dtype == np.complex64
    assert not lent.flags.writeable


@pytest.mark.parametrize("value", [[1, 2], 3.0, "text", None])
def test_what_is_no_array_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="expected an array of NumPy, CuPy or any library that supports DLPack"):
        arrays.lend(value)


def test_a_tensor_that_records_gradients_is_refused_with_its_reason() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with pytest.raises(TypeError, match=r"NumPy cannot view .* without a copy: .*detach"):
        arrays.lend(torch.zeros(2, requires_grad=True))


@pytest.mark.parametrize("library", ["torch", "jax.numpy"])
def test_bfloat16_is_lent_and_given_back(library: str) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes", reason="bfloat16 comes from ml_dtypes").bfloat16
    xp = pytest.importorskip(library, reason=f"{library.partition('.')[0]} is not installed")
    given = xp.asarray([1.5, -2.0, 3.0], dtype=xp.bfloat16)
    lent = arrays.lend(given)
    assert lent.dtype == bfloat16
    assert lent.astype("float32").tolist() == [1.5, -2, 3]
    back = arrays.give_back(lent + bfloat16(1), given)
    assert isinstance(back, type(given))
    assert back.dtype == xp.bfloat16
    assert back.tolist() == [2.5, -1, 4]


def test_bfloat16_of_torch_is_not_copied() -> None:
    pytest.importorskip("ml_dtypes", reason="bfloat16 comes from ml_dtypes")
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensor = torch.zeros((2, 3), dtype=torch.bfloat16)
    arrays.lend(tensor)[0] = 2
    assert tensor.tolist() == [[2, 2, 2], [0, 0, 0]]


class OnlyDLPack:
    """An array of a library that knows nothing of NumPy."""

    def __init__(self, held: arrays.AnyArray) -> None:
        self.held = held

    def __dlpack__(self, **options: Any) -> object:
        return self.held.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.held.__dlpack_device__()


def test_an_array_that_has_dlpack_only_is_taken() -> None:
    held = np.arange(3.0)
    assert np.shares_memory(arrays.as_array(OnlyDLPack(held)), held)


def test_an_array_of_objects_stays_one() -> None:
    held = np.array([None, 1], object)
    assert arrays.as_array(held) is held


def test_bfloat16_of_torch_is_an_array() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes", reason="bfloat16 comes from ml_dtypes").bfloat16
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensor = torch.tensor([[1.5, 2.0]], dtype=torch.bfloat16)
    array = arrays.as_array(tensor)
    assert array.dtype == bfloat16
    assert array.tolist() == [[1.5, 2.0]]
    array[0, 0] = 3
    assert tensor[0, 0] == 3


def test_what_numpy_cannot_convert_says_why() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with pytest.raises(TypeError, match="to_dense"):
        arrays.as_array(torch.ones(2).to_sparse())


def test_a_mask_is_not_lost() -> None:
    masked = np.ma.array(np.ones(3), mask=[False, True, False])
    with pytest.raises(TypeError, match=r"shape \(3,\) of which 1 numbers are masked.*filled"):
        arrays.as_array(masked)
    plain = arrays.as_array(np.ma.array(np.ones(3)))
    assert type(plain) is np.ndarray
    assert plain.tolist() == [1, 1, 1]
