"""What all tests share: the plugin where mpidist is not installed, GPUs, long forms, and repeatable random examples."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points

import hypothesis
import pytest

from mpidist.chief import note_role
from mpidist.cluster.devices import visible_gpus
from tests import amounts

# An installed mpidist has its plugin loaded by pytest itself; a checkout on PYTHONPATH has not.
_INSTALLED = any(point.value == "mpidist.testing.plugin" for point in entry_points(group="pytest11"))
pytest_plugins = [] if _INSTALLED else ["mpidist.testing.plugin"]

# All ranks must draw the same examples, and machines that run tests are slow at times.
hypothesis.settings.register_profile("mpidist", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("mpidist-long", hypothesis.settings.get_profile("mpidist"), max_examples=2000)
hypothesis.settings.load_profile("mpidist")

# Long forms may take so many times as long as others.
LONG_TIMES = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--long`."""
    parser.addoption("--long", action="store_true", help="run the long forms of tests, and tests marked `long`")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the long forms before the first test is imported."""
    if config.getoption("--long"):
        amounts.run_long()
        hypothesis.settings.load_profile("mpidist-long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give long forms time."""
    if config.getoption("--long"):
        for item in items:
            marker = item.get_closest_marker("timeout_seconds")
            limit = LONG_TIMES * (float(marker.args[0]) if marker else 60.0)
            # In front: the nearest mark counts.
            item.add_marker(pytest.mark.timeout_seconds(limit), append=False)


@pytest.fixture(autouse=True)
def _forget_roles() -> Iterator[None]:
    """A cluster divides a job for good; here jobs come one after another."""
    yield
    note_role(None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests where there is no GPU, and long tests unless they are asked for."""
    if item.get_closest_marker("gpu") and not visible_gpus():
        pytest.skip("needs a visible GPU, this machine has none")
    if item.get_closest_marker("long") and not item.config.getoption("--long"):
        pytest.skip("takes long: run by --long")
