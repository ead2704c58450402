"""Positions of workers in their own data, by the closures that count. It never communicates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpidist.errors import CheckpointError
from mpidist.parameter_server.worker.dataset_iterator import PassPart

_COLUMNS = ("pipelines", "pipeline", "start", "stride")


@dataclass
class _Place:
    """The place of one worker in one iterator: the parts that it reads, and its position in them."""

    parts: list[PassPart]
    part: int = 0
    place: int | None = None
    # The reason why a position is unknown.
    refusal: str = ""


@dataclass
class Positions:
    """The positions of workers in the iterators over their own data.

    A position counts the closures that are decided, not those that run. A worker's closures are decided in the
    order in which it has finished them, so that all elements before its position count, and none after it. Elements
    that a failed function has read are passed over. A lost worker stays where it was.
    """

    _places: dict[int, dict[int, _Place]] = field(default_factory=dict)

    def begin(self, number: int, parts: Mapping[int, Sequence[PassPart]]) -> None:
        """Local. Note an iterator that workers make, or make again.

        Args:
            number: The number of the iterator, as a resource.
            parts: The parts that each worker reads, by its rank.
        """
        self._places[number] = {rank: _Place(list(its)) for rank, its in parts.items()}

    def built(self, rank: int, number: int, begun: Mapping[str, int] | str) -> None:
        """Local. Note that a worker has made its iterator.

        Args:
            rank: The worker.
            number: The number of the resource; other resources than iterators are ignored.
            begun: See `OwnIterator.begun`; or the error with which it was not made, as a text.
        """
        place = self._places.get(number, {}).get(rank)
        if place is None:
            return
        if isinstance(begun, str):
            place.refusal = begun
        elif place.parts:
            place.parts[0] = place.parts[0]._replace(pass_state=dict(begun))

    def note(self, rank: int, news: Iterable[tuple[Any, ...]]) -> None:
        """Local. Note that a worker has read further, in a closure that counts.

        Args:
            rank: The worker.
            news: See `OwnIterator.news`.
        """
        for number, part, at, *new in news:
            place = self._places.get(number, {}).get(rank)
            if place is not None:
                place.part, place.place = part, at
                if new:
                    place.parts[part] = place.parts[part]._replace(pass_state=new[0])

    def take_over(self, number: int, rank: int, before: Iterable[int], fresh: PassPart) -> list[PassPart] | None:
        """Local. Let a worker read the rest of the data of its place.

        Args:
            number: The number of the resource; other resources than iterators are ignored.
            rank: The worker, which joins.
            before: The lost workers that had its place.
            fresh: The part that it reads if none of them has begun.

        Returns:
            The parts that it reads; None where it begins as the first workers did.
        """
        places = self._places.get(number)
        if places is None:
            return None
        old = [places.pop(one) for one in before if one in places]
        parts = None if not old or old[-1].refusal else _left(old[-1])
        places[rank] = _Place([fresh] if parts is None else list(parts))
        return parts

    def left(self, number: int) -> list[PassPart]:
        """Local. The parts of an iterator that workers have not read yet, those of lost workers included.

        Raises:
            CheckpointError: A worker has no dataset with positions.
        """
        found = []
        for rank, place in self._places[number].items():
            if place.refusal:
                raise CheckpointError(
                    "the dataset positions of workers cannot be saved: expected each worker to read a "
                    f"mpidist.data.Dataset, the one of rank {rank} has {place.refusal}. Let the function of "
                    "`create_per_worker_dataset` return a mpidist.data.Dataset, which `Dataset.from_iterable` makes of "
                    "anything else, or leave the iterator out of the checkpoint"
                )
            found += _left(place)
        return found

    def discard(self, number: int) -> None:
        """Local. Forget an iterator."""
        self._places.pop(number, None)


def _left(place: _Place) -> list[PassPart]:
    """The parts that a worker has not read yet."""
    if not place.parts:
        return []
    first, *more = place.parts[place.part :]
    return [first if place.place is None else first.after(place.place), *more]


def deal(parts: Sequence[PassPart], workers: int) -> list[list[PassPart]]:
    """Local. Divide the remaining parts among some workers, so that each element is read once.

    Args:
        parts: The remaining parts, at least one.
        workers: The number of workers. The same number gets the same parts; fewer workers read several parts, one after
            another; more workers share parts.
    """
    if len(parts) >= workers:
        return [list(parts[worker::workers]) for worker in range(workers)]
    shared = [part.dealt(len(range(number, workers, len(parts)))) for number, part in enumerate(parts)]
    return [[shared[worker % len(parts)][worker // len(parts)]] for worker in range(workers)]


def to_state(parts: Sequence[PassPart]) -> dict[str, Any]:
    """Local. Parts as a checkpoint keeps them: a row for each, and the names of the columns."""
    names = sorted({name for part in parts for name in part.pass_state})
    rows = [[*part[:4], *(part.pass_state.get(name, -1) for name in names)] for part in parts]
    return {"columns": " ".join((*_COLUMNS, *names)), "parts": np.array(rows, np.int64)}


def from_state(saved: Mapping[str, Any]) -> list[PassPart]:
    """Local. The parts of which `to_state` was made.

    Raises:
        CheckpointError: `saved` does not hold such parts.
    """
    if set(saved) != {"columns", "parts"}:
        raise CheckpointError(
            f"the dataset positions of workers are `columns` and `parts`, the checkpoint has {sorted(saved)}: it was "
            "saved with another object of this name"
        )
    columns, rows = str(saved["columns"]).split(), np.asarray(saved["parts"].numpy())
    names = columns[len(_COLUMNS) :]
    if tuple(columns[: len(_COLUMNS)]) != _COLUMNS or rows.ndim != 2 or rows.shape[1] != len(columns) or not len(rows):
        raise CheckpointError(
            f"the dataset positions of workers have the columns {columns} and the shape {rows.shape}: expected a row "
            f"for each part, with {list(_COLUMNS)} first"
        )
    return [
        PassPart(one, two, start, stride, {name: at for name, at in zip(names, numbers, strict=True) if at >= 0})
        for one, two, start, stride, *numbers in rows.tolist()
    ]
