"""`apply` and `reduce`: a function of a whole dataset, and one value of all its elements."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

from mpidist import tree
from mpidist.arguments import described
from mpidist.data.dataset_base import BaseDataset, D
from mpidist.data.items.stream import INFINITE
from mpidist.data.reading import element as elements
from mpidist.data.transformations.replayed import next_state


def apply(dataset: D, transformation_func: Callable[[D], D]) -> D:
    """Local. The dataset that a function makes of this one.

    >>> from mpidist.data import Dataset
    >>> def even(dataset):
    ...     return dataset.filter(lambda x: x % 2 == 0)
    >>> [int(x) for x in Dataset.range(5).apply(even)]
    [0, 2, 4]

    Raises:
        TypeError: `transformation_func` is not a function, or does not return a dataset.
    """
    if not callable(transformation_func):
        raise TypeError(f"apply: expected a function of a dataset, got {described(transformation_func)}")
    transformed = transformation_func(dataset)
    if not isinstance(transformed, BaseDataset):
        raise TypeError(
            f"apply: expected `transformation_func` to return a dataset, got "
            f"{described(transformed)}"
        )
    return transformed


def reduce(dataset: BaseDataset, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
    """Local. The last state that a function makes of a state and an element, over a whole pass.

    >>> import numpy as np
    >>> from mpidist.data import Dataset
    >>> int(Dataset.range(5).reduce(np.int64(0), lambda total, x: total + x))
    10

    Args:
        dataset: The dataset. The pass counts as an iteration of it.
        initial_state: An array, or a tuple or dictionary of arrays; the result where there is no element.
        reduce_func: A function of the state and the element, two arguments also where the element is a tuple. It
            returns the next state, of the same structure.

    Raises:
        TypeError: `reduce_func` is not a function, or returns a state of another structure.
        ValueError: The dataset never ends.
    """
    if not callable(reduce_func):
        raise TypeError(f"reduce: expected a function `reduce_func(state, element)`, got {described(reduce_func)}")
    if dataset.cardinality() == INFINITE:
        raise ValueError("reduce: expected a dataset that ends, got one that is infinite. Call `take(count)` first")
    # A copy: the function may write to its state.
    state = tree.map_leaves(lambda leaf: leaf.copy(), elements.convert(initial_state))
    with closing(iter(dataset)) as iterator:
        for element in iterator:
            state = next_state("reduce", state, reduce_func(state, element))
    return state
