"""The iterator over a worker's own dataset, which reports its end, and its position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from mpidist.data.pipeline.iterator import DatasetIterator
from mpidist.errors import EndOfDataError


class OwnDataEnd(StopIteration):
    """The end of a worker's own data. After pickling it is the error that `RemoteValue.get` raises.

    Args:
        number: The number of the iterator, as a resource.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return EndOfDataError, (
            "the function has no value: its data has ended on every worker that may run it. Check `is_at_end` of the "
            "value, which raises no error",
        )


class NotMade(NamedTuple):
    """The place of a value or a dataset of a worker that could not be made."""

    error: BaseException


class PassPart(NamedTuple):
    """A part of a pass over the data of workers: elements that one worker was to read, from some number on.

    Attributes:
        pipelines: The number of workers among which the data was dealt when the pass began.
        pipeline: The worker among them whose dataset has the elements.
        start: The number of the first element in this dataset's pass.
        stride: The distance to the next one: more than 1 where several workers share what one of them had left.
        pass_state: The pass itself, such as its number and the seeds of its order: an iterator's `state` without the
            place in it. Empty for a pass that has not begun.
    """

    pipelines: int
    pipeline: int
    start: int = 0
    stride: int = 1
    pass_state: Mapping[str, int] = {}

    def after(self, place: int) -> PassPart:
        """Local. The rest of this part.

        Args:
            place: See `OwnIterator.place`.
        """
        return self._replace(start=place if self.stride == 1 else self.start + self.stride * place)

    def dealt(self, count: int) -> list[PassPart]:
        """Local. This part, cut into several ones by turns."""
        return [
            self._replace(start=self.start + number * self.stride, stride=self.stride * count)
            for number in range(count)
        ]

    def open(self, dataset: Any) -> DatasetIterator:
        """Local. Begin to read it.

        Args:
            dataset: The dataset that has the elements.

        Raises:
            ValueError: The dataset is another one than when the position was saved.
        """
        iterator: DatasetIterator = iter(dataset)
        state = {**iterator.state(), **self.pass_state, "batch": self.start}
        if self.stride > 1 and state.get("batch_size", 0) != iterator.state().get("batch_size", 0):
            raise ValueError(
                f"the saved position of a dataset has batches of {state['batch_size']} examples, which {self.stride} "
                f"workers share, got batches of {iterator.state().get('batch_size', 0)}: keep the batch size until the "
                "pass has ended"
            )
        # Sets the seeds, which the streams that are made of it share.
        iterator.load_state(state)
        if self.stride == 1:
            return iterator
        every: DatasetIterator = iter(dataset.skip(self.start).shard(self.stride, 0))
        every.load_state({**every.state(), "iteration": state["iteration"]})
        return every


def pass_state_of(iterator: DatasetIterator) -> dict[str, int]:
    """Local. The state of an iterator's pass; see `PassPart.pass_state`."""
    return {name: number for name, number in iterator.state().items() if name != "batch"}


class OwnIterator(Iterator[Any]):
    """The iterator of a worker over its own dataset; it has all attributes of the dataset's iterator.

    Args:
        dataset: The dataset, from its beginning.
        parts: The parts that it reads instead, one after another: functions that open them.

    Attributes:
        number: The number of the iterator, as a resource; 0 before the worker knows it.
    """

    def __init__(self, dataset: Iterable[Any], parts: Iterable[Callable[[], Iterator[Any]]] | None = None) -> None:
        self.number = 0
        self._parts = deque([lambda: iter(dataset)] if parts is None else parts)
        # The number of the part that is read, and the last report to the coordinator.
        self._part = -1
        self._told: tuple[int, int] | None = None
        self._is_new_pass = False
        self._elements: Iterator[Any] = iter(())
        self._open_next()

    def be_resource(self, number: int) -> None:
        """Local. Set the number of the resource, which the function that makes it does not know."""
        self.number = number

    def __next__(self) -> Any:
        while True:
            try:
                return next(self._elements)
            except StopIteration:
                if not self._open_next():
                    raise OwnDataEnd(self.number) from None

    def _open_next(self) -> bool:
        if not self._parts:
            return False
        opened = self._parts[0]()
        # Where it fails, the next try is the same one.
        self._parts.popleft()
        self.close()
        self._elements = opened
        self._part += 1
        self._is_new_pass = self._part > 0
        return True

    def load_state(self, state: Mapping[str, int]) -> None:
        """Local. See `DatasetIterator.load_state`, where it is one."""
        self._elements.load_state(state)  # type: ignore[attr-defined]  # any iterator may have it
        self._is_new_pass = True

    @property
    def begun(self) -> dict[str, int] | str:
        """Local. The state of the pass that it reads first; the type of its elements' iterator if that has none."""
        if not isinstance(self._elements, DatasetIterator):
            return type(self._elements).__name__
        return pass_state_of(self._elements)

    @property
    def place(self) -> tuple[int, int]:
        """Local. The number of the part that is read, and the number of elements taken of it.

        With a stride of 1 the elements before its start count, too.
        """
        return self._part, self._elements.taken if isinstance(self._elements, DatasetIterator) else 0

    def news(self) -> tuple[Any, ...] | None:
        """Local. The news for the coordinator: `(number, part, place)`, then a new pass; None if there is none."""
        if not isinstance(self._elements, DatasetIterator) or (self.place == self._told and not self._is_new_pass):
            return None
        self._told = self.place
        new = (pass_state_of(self._elements),) if self._is_new_pass else ()
        self._is_new_pass = False
        return self.number, *self.place, *new

    def take_over(self, other: OwnIterator) -> None:
        """Local. Take the content of another iterator. Functions that were sent have captured this object."""
        self.close()
        vars(self).update(vars(other))

    def fail(self, error: BaseException) -> None:
        """Local. Raise an error in place of all elements: this iterator could not be made again."""

        def raise_it() -> Iterator[Any]:
            raise error

        self.close()
        self._elements = iter(())
        self._parts = deque([raise_it])

    def close(self) -> None:
        """Local. See `DatasetIterator.close`, where it is one."""
        if isinstance(self._elements, DatasetIterator):
            self._elements.close()

    def __getattr__(self, name: str) -> Any:
        if name == "_elements":
            raise AttributeError(name)
        return getattr(self._elements, name)


def ended(error: BaseException) -> int:
    """Local. The number of the iterator whose end a function has met and not handled; 0 for another error."""
    return error.number if isinstance(error, OwnDataEnd) else 0
