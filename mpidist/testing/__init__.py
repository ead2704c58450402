"""Tests for programs of several ranks: the pytest plugin, and the tests of a user's collective (`testing.contract`)."""

from mpidist.comm.group.communicator import Communicator
from mpidist.testing.plugin import communicator, fake_nodes

__all__ = ["Communicator", "communicator", "fake_nodes"]
