"""The one warning of a restore in part, and the form of lists in warnings and errors."""

from __future__ import annotations

import logging
from collections.abc import Iterable

logger = logging.getLogger("mpidist")


class RestoreReport:
    """The rest of a restore in part, for one warning.

    Local. The warning comes when the status is deleted, at the next restore or save, or at the program's end: until
    then objects that come later may take values, and `expect_partial` may silence it.

    Attributes:
        unfit: The reason why a value was not taken, by the path of its object.
        missing: The paths of objects of which the file has nothing.
        unused: The paths of values that no object has taken.

    Args:
        name: The checkpoint, in words.
    """

    def __init__(self, name: str) -> None:
        self.unfit: dict[str, str] = {}
        self.missing: list[str] = []
        self.unused: list[str] = []
        self._name = name
        self._is_silent = False

    def silence(self) -> None:
        """Local. Log nothing."""
        self._is_silent = True

    def log(self) -> None:
        """Local. Log the warning once, unless everything was restored."""
        parts = []
        if self.unfit:
            texts = list(self.unfit.values())
            more = f" and {len(texts) - 20} more" if len(texts) > 20 else ""
            parts.append(f"values that do not fit were left out ({'; '.join(texts[:20])}{more})")
        if self.missing:
            parts.append(f"the file has nothing for {listed(self.missing)}, which keep their values")
        if self.unused:
            parts.append(f"no object has taken {listed(self.unused)}")
        if parts and not self._is_silent:
            logger.warning(
                "%s was restored in part: %s. `expect_partial()` on what `restore` returned silences this", self._name,
                "; ".join(parts),
            )
        self._is_silent = True


def listed(paths: Iterable[str]) -> str:
    """Local. Some paths, 20 at most, as a text for a message."""
    names = list(paths)
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(repr(name) for name in names[:20]) + more if names else "nothing"
