"""The saves of one checkpoint: how many there were, and what the program is told that they do not hold."""

from __future__ import annotations

import logging

from mpidist.checkpoint.restoring import listed
from mpidist.checkpoint.walk.found import Found

logger = logging.getLogger("mpidist")


class Saves:
    """Saves of a `Checkpoint`, as it remembers them.

    Attributes:
        count: Their number, in this program and before the restored checkpoint.
        seconds: What the last one took on this rank; None before the first one of this program.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds: float | None = None
        # By path, as they were when a walk first found them; None where a warning has named them.
        self._numbers: dict[str, tuple[object, ...] | None] = {}
        self._told_caches = False

    def begin_with(self, found: Found) -> None:
        """Local. Note the plain numbers of objects that the checkpoint gets."""
        self._numbers.update(found.numbers)

    def warn(self, found: Found, path: str) -> None:
        """Local. Warn of what a save has left out though the program may need it.

        Args:
            found: The objects that were saved.
            path: The path of the file.
        """
        if found.caches and not self._told_caches:
            self._told_caches = True
            logger.warning(
                "checkpoint %r does not hold %s: arrays in attributes of modules that begin with `_` count as caches",
                path, listed(found.caches),
            )
        changed = []
        for name, numbers in found.numbers.items():
            if self._numbers.setdefault(name, numbers) not in (numbers, None):
                self._numbers[name] = None
                changed.append(name)
        if changed:
            logger.warning(
                "checkpoint %r does not hold %s: plain numbers, which have changed since the Checkpoint was made. Make "
                "each number that must be restored a mpidist.Variable, or give its object `state` and `load_state`",
                path, listed(sorted(changed)),
            )
