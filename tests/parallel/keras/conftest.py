"""What tests of Keras models share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator

if TYPE_CHECKING:
    from mpidist.strategy.base import Strategy

# Keras reads it when it is imported. `tests/system/keras` runs these files with jax.
os.environ.setdefault("KERAS_BACKEND", "torch")

for name in ("keras", "torch"):
    pytest.importorskip(name, reason="Keras and PyTorch are in the extra 'keras'")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give compilers time: with jax most tests compile several programs."""
    if os.environ["KERAS_BACKEND"] == "jax":
        for item in items:
            item.add_marker(pytest.mark.timeout_seconds(200), append=False)


@pytest.fixture
def alone(communicator: Communicator) -> Iterator[Strategy]:
    """A strategy of one replica, on every rank for itself: what the results are compared with."""
    with mpidist.OneDeviceStrategy("cpu:0") as made:
        yield made
