"""The part of a checkpoint file that a restore takes, and the paths in the program that it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np

from mpidist.arguments import described, flag
from mpidist.checkpoint.file.layout import OF_ML_DTYPES, SAVE_COUNTER
from mpidist.errors import CheckpointError

Rename = Mapping[str, str] | Callable[[str], str | None]


@dataclass(frozen=True)
class Choice:
    """The part of a file that a restore takes; see `Checkpoint.restore`.

    Args:
        partial: Whether values that do not fit are left out, and not an error.
        rename: The paths in the program by those in the file, or a function that gives them.
        cast: Whether values are converted to the dtypes of the program's variables.
        only: The paths in the program that are restored, or one of them; None restores all.
    """

    partial: bool = False
    rename: Rename | None = None
    cast: bool = False
    only: str | Sequence[str] | None = None

    def require_possible(self) -> None:
        """Local. Raise TypeError unless the arguments have the right types."""
        flag("partial", self.partial)
        flag("cast", self.cast)
        if self.only is not None and not isinstance(self.only, str) and not (
            isinstance(self.only, (list, tuple, set, frozenset)) and all(isinstance(path, str) for path in self.only)
        ):
            raise TypeError(f"`only` must be a path or a list of paths, got {described(self.only)}")
        is_mapping = isinstance(self.rename, Mapping) and all(
            isinstance(text, str) for pair in self.rename.items() for text in pair
        )
        if self.rename is not None and not is_mapping and not callable(self.rename):
            raise TypeError(
                "`rename` must be a dictionary of paths in the file and paths in the program, or a function of the "
                f"first that returns the second, got {described(self.rename)}"
            )

    def takes(self, path: str) -> bool:
        """Local. Whether `only` includes a path of the program."""
        if self.only is None:
            return True
        chosen = [self.only] if isinstance(self.only, str) else self.only
        return any(path == one or path.startswith(f"{one}/") or not one for one in chosen)

    def places(self, paths: Iterable[str], shared: Mapping[str, str]) -> dict[str, str]:
        """Local. Find the path in the program of each path in the file; those that are not restored are left out.

        Args:
            paths: The paths of all arrays.
            shared: See `layout.encode_index`.

        Raises:
            CheckpointError: A path of `rename` or `only` is none of the file's, or two arrays would have one path.
            TypeError: A function of `rename` returned no path.
        """
        every = [*paths, *shared, *shared.values()]
        self._require_there("rename", self.rename if isinstance(self.rename, Mapping) else (), every)
        places = {path: place for path in every if (place := self.place_of(path)) is not None}
        chosen = () if self.only is None else [self.only] if isinstance(self.only, str) else self.only
        self._require_there("only", chosen, places.values())
        first: dict[str, str] = {}
        for path in paths:
            place = places.get(path)
            if place is not None and first.setdefault(place, path) != path:
                raise CheckpointError(
                    f"`rename` gives {first[place]!r} and {path!r} of the file one path in the program, {place!r}"
                )
        return places

    def place_of(self, path: str) -> str | None:
        """Local. The path in the program of a path in the file; None where that is left out."""
        if self.rename is None:
            return path
        if not isinstance(self.rename, Mapping):
            place = self.rename(path)
            if place is not None and not isinstance(place, str):
                raise TypeError(f"`rename` must return a path or None, got {described(place)} for {path!r}")
            return place
        for end in (len(path), *(at for at in range(len(path) - 1, 0, -1) if path[at] == "/")):
            if path[:end] in self.rename:
                return (self.rename[path[:end]] + path[end:]).strip("/")
        if "" in self.rename and path != SAVE_COUNTER:
            return f"{self.rename['']}/{path}".strip("/")
        return path

    @staticmethod
    def _require_there(argument: str, chosen: Iterable[str], every: Iterable[str]) -> None:
        known = {path[:at] for path in every for at in range(len(path)) if path[at] == "/"} | {*every, ""}
        for path in chosen:
            if path not in known:
                close = get_close_matches(path, known, 3)
                hint = f"; it has {', '.join(map(repr, close))}" if close else ""
                raise CheckpointError(f"`{argument}`: the checkpoint has nothing at {path!r}{hint}")


EVERYTHING = Choice()


def can_cast(saved: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Local. Whether `cast=True` converts: numbers, where no part of them is dropped but digits."""
    order = "biufc"
    kinds = ["f" if one.isbuiltin == OF_ML_DTYPES and "int" not in one.name else one.kind for one in (saved, dtype)]
    kinds = ["i" if kind == "V" or kind == "u" else kind for kind in kinds]
    return all(kind in order for kind in kinds) and order.index(kinds[0]) <= order.index(kinds[1])
