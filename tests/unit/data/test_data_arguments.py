"""Wrong arguments of datasets: the error names the method and the argument, what was expected and what was given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpidist.data import Dataset, hdf5_reader, read_npy, read_npz
from mpidist.data.reading.file_names import resolve_file_names

six = Dataset.range(6)
# Values of wrong types.
wrong: Any = "a"
half: Any = 2.5
no: Any = "no"
yes: Any = True
bool_of_numpy: Any = np.bool_(False)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: six.repeat(-5),
            ValueError,
            r"repeat: `count` must be an integer of at least -1, got -5",
        ),
        (lambda: six.repeat(half), TypeError, r"repeat: `count` must be an integer of at least -1, got 2.5 of type"),
        (lambda: six.take(wrong), TypeError, r"take: `count` must be an integer of at least -1, got 'a' of type str"),
        (lambda: six.take(-2), ValueError, r"take: `count` must be an integer of at least -1, got -2"),
        (lambda: six.skip(half), TypeError, r"skip: `count` must be an integer of at least -1, got 2.5"),
        (lambda: six.skip(-2), ValueError, r"skip: `count` must be an integer of at least -1, got -2"),
        (lambda: six.batch(yes), TypeError, r"batch: `batch_size` must be an integer of at least 1, got True"),
        (lambda: six.batch(2, no), TypeError, r"batch: `drop_remainder` must be True or False, got 'no'"),
        (lambda: six.padded_batch(2, drop_remainder=no), TypeError, r"padded_batch: `drop_remainder` must be True"),
        (lambda: six.shuffle(4, half), TypeError, r"shuffle: `seed` must be an integer, got 2.5"),
        (
            lambda: six.shuffle(4, 1, no),
            TypeError,
            r"shuffle: `reshuffle_each_iteration` must be True or False, got 'no'",
        ),
        (lambda: six.shard(2, wrong), TypeError, r"shard: `index` must be an integer, got 'a'"),
        (lambda: six.shard(2, -2), ValueError, r"shard: `index` must be one of 0 to 1, got -2"),
        (lambda: six.prefetch(wrong), TypeError, r"prefetch: `buffer_size` must be an integer of at least -1, got 'a'"),
        (lambda: six.enumerate(half), TypeError, r"enumerate: `start` must be an integer.*, got 2.5"),
        (
            lambda: six.padded_batch(2, (-5,)),
            ValueError,
            r"padded_batch: a size in `padded_shapes` .* got the shape \(-5,\)",
        ),
        (lambda: six.padded_batch(2, wrong), TypeError, r"padded_batch: `padded_shapes` must hold shapes"),
        (lambda: Dataset.range(half), TypeError, r"range: 'float' object cannot be"),
        (lambda: Dataset.range(9, output_type="nothing"), TypeError, r"range: data type 'nothing' not understood"),
        (
            lambda: Dataset.range(300, output_type=np.uint8),
            ValueError,
            r"range: .*`output_type` can hold, got range\(0, 300\)",
        ),
        (lambda: Dataset.range(-1, 3, output_type=np.uint8), ValueError, r"can hold, got range\(-1, 3\) and uint8"),
        (
            lambda: Dataset.range(10**5, output_type=np.float16),
            ValueError,
            r"can hold, got range\(0, 100000\) and float16",
        ),
        (lambda: Dataset.range(3, output_type=str), ValueError, r"dtype of numbers"),
        (lambda: Dataset.range(2**64, 2**64 + 2, output_type=float), ValueError, r"can hold, got range\(1844"),
        (lambda: Dataset.from_tensor_slices(None), TypeError, r"from_tensor_slices: expected arrays.*got None"),
        (lambda: Dataset.from_tensor_slices(six), TypeError, r"from_tensor_slices: expected arrays.*of type Dataset"),
        (
            lambda: Dataset.from_tensor_slices([[1], [1, 2]]),
            ValueError,
            r"from_tensor_slices: .*parts differ in length\. Pad",
        ),
        (lambda: Dataset.from_tensors(None), TypeError, r"from_tensors: expected arrays.*got None"),
        (lambda: Dataset.from_iterable([1], batched=no), TypeError, r"from_iterable: `batched` must be True or False"),
        (lambda: list(Dataset.from_iterable(lambda: half)), TypeError, r"an iterable that is not a dataset, got 2.5"),
        (lambda: list(Dataset.from_iterable(lambda: six)), TypeError, r"not a dataset, got .* Dataset\. A"),
        (lambda: Dataset.list_files(half), TypeError, r"list_files: expected a file name.*got 2.5"),
        (lambda: Dataset.list_files(["a", half]), TypeError, r"list_files: expected a file name.*got 2.5"),
        (lambda: Dataset.list_files("a", seed=half), TypeError, r"list_files: `seed` must be an integer, got 2.5"),
        (lambda: Dataset.from_files("a", half), TypeError, r"from_files: expected a reader.*got 2.5"),
        (
            lambda: list(six.interleave(lambda _: half)),
            TypeError,
            r"interleave.* return a dataset.*got 2.5 of type float",
        ),
        (lambda: list(Dataset.from_files("a", lambda _: half)), TypeError, r"from_files.* return a dataset.*got 2.5"),
        (lambda: list(six.map(lambda _: None)), TypeError, r"function '.*<lambda>' must return an element: .*got None"),
        (lambda: list(six.filter(lambda _: np.ones(2))), TypeError, r"filter: .*got an array of shape \(2,"),
        (lambda: list(six.filter(lambda _: no)), TypeError, r"filter: expected the predicate to return one"),
        (lambda: list(six.take_while(lambda _: (1, 2))), TypeError, r"take_while: expected the predicate"),
        (lambda: six.enumerate(2**63 - 2), ValueError, r"enumerate: `start`: .*can hold, got range\(9"),
        (hdf5_reader, TypeError, r"hdf5_reader: expected the names of datasets, at least one, got \(\)"),
        (lambda: iter(six).load_state(half), TypeError, r"load_state: expected what state\(\) has returned.*got 2.5"),
        (
            lambda: iter(six).load_state({"iteration": half, "batch": 0}),
            ValueError,
            r"integers and none of them negative",
        ),
        (
            lambda: iter(six).load_state({"iteration": wrong, "batch": 0}),
            ValueError,
            r"integers and none of them negative",
        ),
    ],
)
def test_errors_say_what_is_wrong_and_what_was_expected(
    call: Callable[[], object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call()


def test_numbers_of_numpy_are_integers() -> None:
    dataset = six.repeat(np.int32(2)).take(np.int64(9)).batch(np.uint8(4), bool_of_numpy)
    assert [batch.tolist() for batch in dataset] == [[0, 1, 2, 3], [4, 5, 0, 1], [2]]
    assert [int(number) for number, _ in six.enumerate(2**62 - 1)][:2] == [2**62 - 1, 2**62]
    assert int(next(iter(Dataset.range(255, 256, output_type=np.uint8)))) == 255


def test_errors_do_not_print_the_elements_of_arrays() -> None:
    data: Any = np.arange(1000)
    with pytest.raises(TypeError, match=r"an array of shape \(1000,\) and dtype int64, of type ndarray$"):
        six.take(data)
    with pytest.raises(TypeError, match=r"got \[0, 1, 2, 3, 4, 5, \.\.\.\] of type list$"):
        six.take(data.tolist())


@pytest.mark.parametrize(
    ("value", "dtype"), [(-1, "u1"), (300, "i1"), (1.5, "i8"), (1j, "f8"), ("a", "i8"), (np.nan, "i4")]
)
def test_a_padding_value_that_the_array_cannot_hold_is_refused(value: Any, dtype: str) -> None:
    dataset = Dataset.range(1, 4).map(lambda x: np.ones(x, dtype)).padded_batch(2, padding_values=value)
    with pytest.raises(ValueError, match=r"expected a padding value that the dtype .* can hold"):
        list(dataset)


def test_padding_values_that_arrays_can_hold() -> None:
    for value, dtype in ((0.1, "f4"), (-1, "f4"), (True, "i4"), (np.nan, "f8"), (1, "c16"), (255, "u1"), ("?", "U3")):
        dataset = (
            Dataset.range(1, 3).map(lambda x, dtype=dtype: np.ones(x, dtype)).padded_batch(2, padding_values=value)
        )
        (batch,) = dataset
        assert batch.dtype == np.dtype(dtype)
        np.testing.assert_equal(batch[0, 1], np.array(value).astype(dtype)[()])


def test_padding_by_other_names_than_the_elements_is_refused() -> None:
    dataset = Dataset.range(1, 3).map(lambda x: {"a": np.ones(x)})
    with pytest.raises(ValueError, match=r"with the keys of an element, \['a'\], got \['b'\]"):
        list(dataset.padded_batch(2, padded_shapes={"b": (3,)}))
    with pytest.raises(ValueError, match=r"with the keys of an element, \['a'\], got \['b'\]"):
        list(dataset.padded_batch(2, padding_values={"b": 3}))


def test_readers_name_the_file(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"no data")
    empty = tmp_path / "empty"
    empty.touch()
    np.save(tmp_path / "one.npy", np.arange(3))
    cut = tmp_path / "cut.npy"
    cut.write_bytes((tmp_path / "one.npy").read_bytes()[:-8])
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(3)
        file.create_group("group")
    for path in (other, empty, cut):
        with pytest.raises(ValueError, match=rf"read_npy: '{path}' cannot be read as a \.npy file"):
            list(Dataset.from_files(path, read_npy))
    for path in (other, empty):
        with pytest.raises(ValueError, match=rf"read_npz: '{path}' cannot be read as a \.npz file"):
            list(Dataset.from_files(path, read_npz))
        with pytest.raises(OSError, match=rf"hdf5_reader: '{path}' cannot be opened as an HDF5 file"):
            list(Dataset.from_files(path, hdf5_reader("x")))
    with pytest.raises(ValueError, match=r"it holds one array\. Use read_npy"):
        read_npz(tmp_path / "one.npy")
    for name in ("y", "group"):
        with pytest.raises(
            KeyError, match=rf"expected a dataset '{name}' in '{tmp_path}/x.h5', got .*\['group', 'x'\]"
        ):
            list(Dataset.from_files(tmp_path / "x.h5", hdf5_reader("x", name)))
    for reader in (read_npy, read_npz, hdf5_reader("x")):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            list(Dataset.from_files(tmp_path / "nowhere", reader))


def test_a_file_whose_name_looks_like_a_pattern_is_found(tmp_path: Path) -> None:
    for number, name in enumerate(("1.npy", "[1].npy", "2.npy")):
        np.save(tmp_path / name, np.array([number]))
    for given, expected in (
        (["[1].npy"], [1]), (["2.npy", "[1].npy"], [2, 1]), (["[12].npy"], [0, 2]), (["*.npy"], [0, 2, 1]),
    ):
        files = [str(tmp_path / name) for name in given]
        assert [int(x) for x in Dataset.from_files(files, read_npy)] == expected
        assert [str(x) for x in Dataset.list_files(files, shuffle=False)] == list(resolve_file_names(files))
