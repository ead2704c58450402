"""A deliberate fault: a change of the package that some test must notice."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of one place of the package after which some program gets wrong numbers, loses something, or hangs.

    Attributes:
        name: A name for people.
        file: Below mpidist/.
        old: A text that occurs once in the file.
        new: The text in its place.
        tests: Below one folder of tests/, as pytest takes them, with spaces between.
        ranks: The number of ranks that parallel tests need; 1 is without a launcher.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    ranks: int = 1

    def put_into(self, text: str) -> str:
        """The text of the file with the fault.

        Raises:
            ValueError: The old text does not occur just once.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"fault {self.name!r}: expected the old text once in mpidist/{self.file}, got it {count} times. "
                f"Correct it in tests/faults/: {self.old!r}"
            )
        return text.replace(self.old, self.new)

    @property
    def folder(self) -> str:
        """The folder of the tests."""
        return self.tests.split("/")[0]
