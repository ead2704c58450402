"""The marker `mpi` and the option `--with-mpi` of pytest-mpi, for runs in which no other plugin has them."""

from __future__ import annotations

import pytest

from mpidist import launch

# Not that of pytest-mpi's option of the same name: whether it is there says whose the marker is.
_DESTINATION = "mpidist_with_mpi"


def add_option(parser: pytest.Parser) -> None:
    """Local. Add `--with-mpi` unless another plugin has; all plugins of the run must be loaded already.

    Args:
        parser: The run's parser of options.
    """
    known = parser.parse_known_args([])
    if not hasattr(known, "with_mpi") and not hasattr(known, _DESTINATION):
        parser.getgroup("mpidist").addoption(
            "--with-mpi", action="store_true", dest=_DESTINATION, help="run the tests that are marked mpi"
        )


def make_marker(config: pytest.Config) -> Marker | None:
    """Local. The plugin that skips tests by the marker; None where pytest-mpi does.

    Args:
        config: The run's configuration.
    """
    is_on = getattr(config.option, _DESTINATION, None)
    return None if is_on is None else Marker(is_on=is_on)


class Marker:
    """Skips tests that are marked `mpi` and need the option, or more ranks.

    Args:
        is_on: Whether the option was given.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on

    def pytest_configure(self, config: pytest.Config) -> None:
        """Register the marker."""
        config.addinivalue_line("markers", "mpi(min_size): needs --with-mpi, and so many ranks")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip marked tests without the option."""
        for item in items if not self.is_on else ():
            if item.get_closest_marker("mpi") is not None:
                item.add_marker(pytest.mark.skip(reason="need --with-mpi option to run"))

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a test that needs more ranks; on all ranks, which have one size."""
        for mark in item.iter_markers("mpi") if self.is_on else ():
            if mark.args or set(mark.kwargs) - {"min_size"}:
                raise pytest.UsageError(f"expected @pytest.mark.mpi(min_size=2), got {mark.args} and {mark.kwargs}")
            least, size = mark.kwargs.get("min_size"), launch.world_size()
            if least is not None and size < least:
                pytest.skip(f"the test needs {least} ranks, and the run has {size}")
