"""Elements: nested structures of arrays, converted as tf.data does, stacked into batches and cut out of batches.

Tuples, named tuples and dictionaries are structure. A list is an array written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist import tree
from mpidist.arguments import described
from mpidist.arrays import AnyArray, as_array


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one array of an element.

    Attributes:
        shape: The shape; None for a length that differs between elements.
        dtype: A NumPy dtype.
    """

    shape: tuple[int | None, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class DatasetSpec:
    """The elements of a dataset that is itself an element, as a window is.

    Attributes:
        element_spec: The structure with an `ArraySpec` for each array.
    """

    element_spec: Any


def convert(value: Any, *, keeps_datasets: bool = False) -> Any:
    """Local. The structure with its leaves as arrays.

    Arrays keep their dtype. Python numbers, and lists of them, get the dtypes of tf.data: float32, int32 (int64 where
    int32 is too small) or bool.

    Args:
        value: The structure.
        keeps_datasets: Whether a leaf may be a dataset.

    Raises:
        TypeError: A leaf is not an array, and cannot be converted to one.
        ValueError: A list is ragged.
    """
    if isinstance(value, (np.ndarray, np.generic)) or (keeps_datasets and _is_dataset(value)):
        return value
    if not _is_node(value):
        return _to_array(value)
    return _rebuild(value, [convert(child, keeps_datasets=keeps_datasets) for child in _children(value)])


def convert_loaded(value: Any) -> Any:
    """Local. `convert` for elements of a foreign loader, where a list of arrays counts as a tuple.

    A PyTorch `DataLoader`, for example, gives `[inputs, labels]`.
    """
    if isinstance(value, list) and any(_is_node(one) or len(getattr(one, "shape", ())) > 0 for one in value):
        value = tuple(value)
    if not _is_node(value):
        return convert(value)
    return _rebuild(value, [convert_loaded(child) for child in _children(value)])


def is_array(value: Any) -> bool:
    """Local. Whether the value is an array that can stay as it is: an array of NumPy, h5py or CuPy."""
    return isinstance(getattr(value, "dtype", None), np.dtype) and hasattr(value, "shape")


def call(function: Callable[..., Any], element: Any) -> Any:
    """Local. Call a user's function with an element, and convert its result to an element.

    The components of a tuple are passed as several arguments, as in tf.data.
    """
    result = plain_call(function, element)
    try:
        return convert(result, keeps_datasets=True)
    except (TypeError, ValueError) as error:
        name = getattr(function, "__qualname__", type(function).__name__)
        raise TypeError(f"the function {name!r} must return an element: {error}") from error


def plain_call(function: Callable[..., Any], element: Any) -> Any:
    """Local. Call a user's function with an element as `call` does, and return the result unconverted.

    Raises:
        RuntimeError: It raised StopIteration.
    """
    try:
        return function(*element) if type(element) is tuple else function(element)
    except StopIteration as error:
        raise stopped(f"the function {getattr(function, '__qualname__', type(function).__name__)!r}") from error


def stopped(what: str) -> RuntimeError:
    """Local. The error for a StopIteration in a user's function, which the iterators around it would take for the end.

    Args:
        what: The thing that raised it.
    """
    return RuntimeError(
        f"{what} raised StopIteration, expected an element. A `next` in it has reached the end of its iterator: end "
        "the data with take or take_while"
    )


def stack(elements: Sequence[Any]) -> Any:
    """Local. Stack elements of the same structure, at least one, into one batch.

    Raises:
        ValueError: Structures, shapes or dtypes differ.
    """
    if isinstance(elements[0], (np.ndarray, np.generic)):
        return _stack_leaf(elements)
    flat = [tree.flatten(element) for element in elements]
    spec = flat[0][1]
    for leaves, other in flat:
        if other != spec:
            raise ValueError(
                f"batch: all elements must have the same structure, got {spec} and {other} ({leaves!r}). Give them one "
                "structure in a map before batch"
            )
    return tree.unflatten(spec, [_stack_leaf(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)])


def concatenate(batches: Sequence[Any], order: AnyArray) -> Any:
    """Local. Put the rows of batches of the same structure into one batch.

    Args:
        batches: The batches, at least one.
        order: The order of the rows, numbered through all batches.

    Raises:
        ValueError: Shapes of rows, or dtypes, differ.
    """

    def join(*leaves: Any) -> Any:
        _require_alike({(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves})
        return np.concatenate(leaves)[order]

    return tree.map_leaves(join, *batches)


def split(batch: Any) -> Iterator[Any]:
    """Local. The elements of a batch in their order, as views of it.

    Raises:
        ValueError: The arrays do not have the same first dimension.
    """
    leaves, spec = tree.flatten(batch)
    for row in range(first_dimension(batch)):
        yield tree.unflatten(spec, [leaf[row] for leaf in leaves])


def row_of(batch: Any) -> Any:
    """Local. The first element of a batch; zeros where the batch is empty.

    Raises:
        ValueError: The arrays do not have the same first dimension.
    """
    for row in split(batch):
        return row
    return tree.map_leaves(lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype)[()], batch)


def have_rows(element: Any) -> bool:
    """Local. Whether an element can be cut into rows: all its arrays have the same first dimension."""
    shapes = {getattr(leaf, "shape", ())[:1] for leaf in tree.flatten(element)[0]}
    return len(shapes) == 1 and () not in shapes


def require_rows(element: Any, expected: str, way_out: str) -> None:
    """Local. Raise unless the element can be cut into rows.

    Args:
        element: An element.
        expected: The beginning of the error.
        way_out: The end of the error.

    Raises:
        ValueError: The arrays do not have the same first dimension.
    """
    if not have_rows(element):
        got = ", ".join(f"{_shape_of(leaf)} for {path or 'the element'}" for path, leaf in tree.leaf_paths(element))
        raise ValueError(f"{expected}, got {got or 'no array'}. {way_out}")


def cut(batch: Any, piece: slice) -> Any:
    """Local. The rows `piece` of every array of a batch, as views of it. An array without dimensions has no rows."""
    return tree.map_leaves(lambda leaf: leaf[piece] if leaf.shape else leaf, batch)


def first_dimension(batch: Any, *, with_scalars: bool = True) -> int:
    """Local. The number of rows that all arrays of the structure have in common.

    Args:
        batch: A structure of arrays.
        with_scalars: Whether arrays without dimensions count; with False they are left out where there are other
            arrays.

    Raises:
        ValueError: The numbers differ, an array has no dimension, or there is no array at all.
    """
    shapes = {path or "the array": tuple(leaf.shape) for path, leaf in tree.leaf_paths(batch)}
    rows = [shape for shape in shapes.values() if shape or with_scalars]
    counts = {shape[:1] for shape in rows or shapes.values()}
    if len(counts) == 1 and () not in counts:
        return int(counts.pop()[0])
    got = ", ".join(f"{shape!r} for {path}" for path, shape in shapes.items()) or "no array"
    raise ValueError(f"all arrays must have the same first dimension, got shapes {got}")


def spec_of(element: Any) -> Any:
    """Local. The structure with an `ArraySpec` for each array, and a `DatasetSpec` for each dataset."""
    return tree.map_leaves(
        lambda leaf: DatasetSpec(leaf.element_spec)
        if _is_dataset(leaf)
        else ArraySpec(tuple(as_leaf(leaf).shape), np.dtype(as_leaf(leaf).dtype)),
        element,
    )


def as_leaf(value: Any) -> Any:
    """Local. A leaf with shape and dtype. A row of an array of objects has none, such as a text from HDF5."""
    if hasattr(value, "dtype"):
        return value
    leaf = np.empty((), object)
    leaf[()] = value
    return leaf


def without_rows(spec: Any) -> Any:
    """Local. The `ArraySpec` of batches of any size; other specifications stay what they are."""
    if not isinstance(spec, ArraySpec):
        return spec
    return ArraySpec((None, *spec.shape[1:])[: len(spec.shape)], spec.dtype)


def _shape_of(leaf: Any) -> str:
    return "a dataset" if _is_dataset(leaf) else f"the shape {tuple(getattr(leaf, 'shape', ()))!r}"


def _is_node(value: Any) -> bool:
    return isinstance(value, (tuple, dict))


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value)


def _rebuild(value: Any, children: list[Any]) -> Any:
    if isinstance(value, dict):
        return dict(zip(value, children, strict=True))
    return type(value)(*children) if hasattr(value, "_fields") else tuple(children)


def _is_dataset(value: Any) -> bool:
    return hasattr(value, "element_spec")


def _to_array(value: Any) -> Any:
    if is_array(value):
        return value
    if hasattr(value, "to_numpy"):
        return value.to_numpy()
    try:
        array = as_array(value)
    except ValueError:
        raise ValueError(
            f"expected lists that make an array, got {described(value)}, whose parts differ in length. Pad them, or "
            "use from_iterable and padded_batch"
        ) from None
    if array.dtype == object:
        raise TypeError(
            "expected arrays, numbers, or tuples and dictionaries of them, got "
            f"{described(value)}. Convert it to an array first"
        )
    if not _is_python_number(value):
        return array
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype == np.int64 and (array.size == 0 or (array.min() >= -(2**31) and array.max() < 2**31)):
        return array.astype(np.int32)
    return array


def _is_python_number(value: Any) -> bool:
    """Whether the first number in nested lists is a Python number; `np.float64`, a subclass of float, is not."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return isinstance(value, (int, float, list)) and not isinstance(value, np.generic)


def _stack_leaf(leaves: Sequence[Any]) -> Any:
    if not all(hasattr(leaf, "dtype") for leaf in leaves):
        leaves = [as_leaf(leaf) for leaf in leaves]
    _require_alike({(tuple(leaf.shape), leaf.dtype) for leaf in leaves})
    return np.stack(leaves)


def _require_alike(kinds: set[tuple[tuple[int, ...], np.dtype[Any]]]) -> None:
    """Raise unless there is one shape and dtype: NumPy would find a dtype for all, and digits may be lost there."""
    if len(kinds) > 1:
        (first, first_dtype), (second, second_dtype) = sorted(kinds, key=str)[:2]
        raise ValueError(
            f"batch: all elements must have the same shape and dtype, got {first!r} {first_dtype} and {second!r} "
            f"{second_dtype}. Pad, cut or convert them in a map before batch, or use padded_batch"
        )
