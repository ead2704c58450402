"""`DatasetCreator`: a function that makes each worker's dataset, as input of `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpidist.data.input_context import InputContext
    from mpidist.options import InputOptions


class DatasetCreator:
    """Local. The input of `Model.fit` that calls a function on each worker, as `tf.keras.utils.experimental` has it.

    Args:
        dataset_fn: A function that takes an `InputContext` and returns a `mpidist.data.Dataset`, batched for one
            worker.
        input_options: As those of `strategy.distribute_datasets_from_function`.

    Raises:
        TypeError: `dataset_fn` is not a function.
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Any],
        input_options: InputOptions | None = None,
    ) -> None:
        if not callable(dataset_fn):
            raise TypeError(
                "DatasetCreator: expected a function that takes an InputContext and returns a dataset, got "
                f"{dataset_fn!r}"
            )
        self.dataset_fn, self.input_options = dataset_fn, input_options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Local. The dataset that the function makes."""
        return self.dataset_fn(*args, **kwargs)
