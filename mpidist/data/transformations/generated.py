"""`from_generator`: the elements that a function yields, checked against what the user said about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mpidist.arguments import described
from mpidist.data.dataset_base import D
from mpidist.data.items.stream import Elements
from mpidist.data.options import Options
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.reading import element as elements
from mpidist.data.reading.source import ElementSource, NoElementError


@dataclass(frozen=True)
class _Wanted:
    """The user's description of an array; a shape of None, and a size of None or -1, may be any."""

    shape: tuple[int | None, ...] | None
    dtype: np.dtype[Any]


def from_generator(
    cls: type[D],
    generator: Callable[..., Iterable[Any]],
    output_types: Any = None,
    output_shapes: Any = None,
    args: Sequence[Any] | None = None,
    output_signature: Any = None,
) -> D:
    """Local. A dataset of the elements that a generator function yields; its length is unknown.

    The function is called in each pass, on every rank, and must yield the same elements in the same order. To continue
    a pass from a saved position, it is called again and the earlier elements are dropped. Every rank reads all
    elements. `experimental_distribute_dataset` takes elements for global batches where their arrays all have the same
    first dimension; call `batch` after a function that yields examples.

    >>> from mpidist.data import ArraySpec, Dataset
    >>> def numbers(count):
    ...     for number in range(count):
    ...         yield number, [float(number)] * number
    >>> signature = (ArraySpec((), "int64"), ArraySpec((None,), "float32"))
    >>> [x.tolist() for _, x in Dataset.from_generator(numbers, args=(3,), output_signature=signature)]
    [[], [1.0], [2.0, 2.0]]

    Args:
        cls: The class of the dataset.
        generator: A function that returns an iterable, for example a generator.
        output_types: The structure of an element with a dtype for each array. Without it and without
            `output_signature` arrays get the dtypes of `from_iterable`.
        output_shapes: The structure of an element with a shape for each array; a size of None may be any. None instead
            of a shape or a structure means that nothing is checked. Only with `output_types`.
        args: The arguments of `generator`, which are passed as arrays.
        output_signature: The structure of an element with an `ArraySpec` for each array, instead of `output_types` and
            `output_shapes`.

    Raises:
        TypeError: `generator` is not a function. While reading: an element has another structure or dtype.
        ValueError: The arguments contradict one another. While reading: an element has another shape.
    """
    if not callable(generator):
        raise TypeError(
            f"from_generator: expected a function that returns an iterable, got {described(generator)}. Pass the "
            "generator function itself, without calling it"
        )
    if (output_signature is not None and output_types is not None) or (output_shapes and output_types is None):
        raise ValueError(
            "from_generator: expected `output_signature`, or `output_types` with or without `output_shapes`, got "
            "another combination of them"
        )
    wanted = output_signature if output_types is None else _wanted(output_types, output_shapes)
    convert = elements.convert_loaded if wanted is None else partial(_fitted, _checked(wanted), path="")
    opened = partial(_opened, generator, tuple(map(elements.convert, args or ())))
    return cls(Pipeline(ElementSource(convert, partial(_first, opened)), Elements(opened), is_assumed=True), Options())


def _wanted(types: Any, shapes: Any) -> Any:
    """A signature of dtypes and shapes."""
    if isinstance(types, (dict, tuple)):
        if shapes is None:
            shapes = dict.fromkeys(types) if isinstance(types, dict) else [None] * len(types)
        is_alike = isinstance(shapes, dict) == isinstance(types, dict) and len(shapes) == len(types)
        if not is_alike or (isinstance(types, dict) and shapes.keys() != types.keys()):
            raise ValueError(
                "from_generator: expected `output_shapes` of the structure of `output_types`, got "
                f"{described(shapes)} for {described(types)}"
            )
        if isinstance(types, dict):
            return {name: _wanted(types[name], shapes[name]) for name in types}
        parts = [_wanted(*one) for one in zip(types, shapes, strict=True)]
        return type(types)(*parts) if hasattr(types, "_fields") else tuple(parts)
    return _Wanted(None if shapes is None else tuple(shapes), np.dtype(types))


def _checked(signature: Any) -> Any:
    """The signature with its leaves as `_Wanted`."""
    if isinstance(signature, dict):
        return {name: _checked(one) for name, one in signature.items()}
    if isinstance(signature, tuple):
        parts = [_checked(one) for one in signature]
        return type(signature)(*parts) if hasattr(signature, "_fields") else tuple(parts)
    if not (hasattr(signature, "shape") and hasattr(signature, "dtype")):
        raise TypeError(
            "from_generator: expected `output_signature` to hold an ArraySpec for each array, got "
            f"{described(signature)}"
        )
    return _Wanted(None if signature.shape is None else tuple(signature.shape), np.dtype(signature.dtype))


def _fitted(wanted: Any, value: Any, path: str) -> Any:
    """An element as the signature describes it."""
    if isinstance(wanted, dict):
        if not isinstance(value, dict) or value.keys() != wanted.keys():
            raise TypeError(f"{_yielded(path)} a dictionary with the keys {list(wanted)}, got {described(value)}")
        return {name: _fitted(one, value[name], f"{path}[{name!r}]") for name, one in wanted.items()}
    if isinstance(wanted, tuple):
        if not isinstance(value, (tuple, list)) or len(value) != len(wanted):
            raise TypeError(f"{_yielded(path)} a tuple of {len(wanted)} parts, got {described(value)}")
        parts = [_fitted(one, part, f"{path}[{k}]") for k, (one, part) in enumerate(zip(wanted, value, strict=True))]
        return type(wanted)(*parts) if hasattr(wanted, "_fields") else tuple(parts)
    try:
        given = np.asarray(value)
    except ValueError:
        raise TypeError(f"{_yielded(path)} an array, got {described(value)}") from None
    are_numbers = given.dtype.kind in "biuf" and wanted.dtype.kind in "biuf"
    is_held = given.size == 0 or are_numbers or np.can_cast(given.dtype, wanted.dtype, "same_kind")
    with np.errstate(invalid="ignore"):
        array = given.astype(wanted.dtype) if is_held else given
    if not is_held or (wanted.dtype.kind in "biu" and (array != given).any()):
        raise TypeError(f"{_yielded(path)} numbers that the dtype {wanted.dtype} can hold, got {described(value)}")
    shape = wanted.shape
    if shape is not None and not (
        len(shape) == array.ndim
        and all(size in (None, -1, got) for size, got in zip(shape, array.shape, strict=True))
    ):
        raise ValueError(f"{_yielded(path)} an array of shape {shape!r}, got one of shape {array.shape!r}")
    return array[()]


def _yielded(path: str) -> str:
    return f"from_generator: expected the generator to yield{f' at {path}' if path else ''}"


def _opened(generator: Callable[..., Iterable[Any]], args: tuple[Any, ...]) -> Iterator[Any]:
    made = generator(*args)
    if not isinstance(made, Iterable):
        raise TypeError(f"from_generator: expected the function to return an iterable, got {described(made)}")
    return iter(made)


def _first(opened: Callable[[], Iterator[Any]]) -> Any:
    for element in opened():
        return element
    raise NoElementError("from_generator: expected a generator that yields at least one element, got none")
