"""Calls from compiled programs of JAX into Python: by XLA's foreign function interface, without a compiler."""

from mpidist.xla.call import ProgramCall as Call
from mpidist.xla.call import wait as wait
from mpidist.xla.self_test import reason_for_callbacks as reason_for_callbacks
from mpidist.xla.tracing import is_recorded as is_recorded

__all__ = ["Call", "is_recorded", "reason_for_callbacks", "wait"]
