"""The iterator over a worker's own data set, which says when it has ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mpidist.errors import EndOfDataError


class OwnDataEnd(StopIteration):
    """The end of a worker's own data. Pickled, it is the error of whoever wants the function's value.

    Args:
        number: Of the iterator, as a resource.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return EndOfDataError, (
            "the function has no value: its data has ended on every worker that may run it. Ask `is_at_end` of the "
            "value, which is no error",
        )


class OwnIterator(Iterator[Any]):
    """The iterator of a worker over its own data set; it has all that the data set's iterator has.

    Args:
        dataset: The data set.

    Attributes:
        number: As a resource; the worker sets it.
    """

    def __init__(self, dataset: Iterable[Any]) -> None:
        self.number = 0
        self._elements = iter(dataset)

    def __next__(self) -> Any:
        try:
            return next(self._elements)
        except StopIteration:
            raise OwnDataEnd(self.number) from None

    def __getattr__(self, name: str) -> Any:
        if name == "_elements":
            raise AttributeError(name)
        return getattr(self._elements, name)


def ended(error: BaseException) -> int:
    """Local. The number of the iterator whose end a function has met and not handled; 0 for another error."""
    return error.number if isinstance(error, OwnDataEnd) else 0
