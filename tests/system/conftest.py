"""What tests of whole programs share: hosts to run them on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.hosts.virtual_hosts import VirtualHosts, why_unavailable


@pytest.fixture
def virtual_hosts() -> Iterator[Callable[[int], VirtualHosts]]:
    """Opens so many hosts; they end with the test. Skips where this machine does not allow them."""
    reason = why_unavailable()
    if reason:
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield lambda count: stack.enter_context(VirtualHosts(count))
