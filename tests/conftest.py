"""What all tests share: the plugin where mpidist is not installed, GPUs, and repeatable random examples."""

from __future__ import annotations

from importlib.metadata import entry_points

import hypothesis
import pytest

from mpidist.cluster.devices import visible_gpus

# An installed mpidist has its plugin loaded by pytest itself; a checkout on PYTHONPATH has not.
_INSTALLED = any(point.value == "mpidist.testing.plugin" for point in entry_points(group="pytest11"))
pytest_plugins = [] if _INSTALLED else ["mpidist.testing.plugin"]

# All ranks must draw the same examples, and machines that run tests are slow at times.
hypothesis.settings.register_profile("mpidist", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("mpidist")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip GPU tests where there is no GPU."""
    if item.get_closest_marker("gpu") and not visible_gpus():
        pytest.skip("needs a visible GPU, this machine has none")
