"""The way of a function from `schedule` to its value, on chief, server and worker: what it enters of ours."""

from __future__ import annotations

import sys
import time
from types import FrameType

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.helpers.calls import PACKAGE
from tests.parallel.serving.test_parameter_server import on_chief

pytestmark = pytest.mark.mpi(min_size=3)

CLOSURES = 8
# No more than that: what is done for every function is read, and paid for, with every function. What they do, and why
# there are not fewer, is in docs/architecture.md.
MOST_FUNCTIONS, MOST_FILES = 234, 55
# What Python makes a function of, and what is none for who reads it; in later versions it is none for Python either.
EXPRESSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


def test_a_function_goes_a_short_way(communicator: Communicator) -> None:
    """Steps of an optimizer, one function after another; what only some of them enter belongs to waits for messages."""
    entered: list[tuple[float, str, str]] = []
    spans: list[tuple[float, float]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name not in EXPRESSIONS:
            file, name = code.co_filename[len(PACKAGE) :], f"{code.co_name} {code.co_firstlineno}"
            entered.append((time.monotonic(), file, name))

    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            weights = mpidist.Variable(np.zeros((4, 4), np.float32))
            optimizer = mpidist.optimizers.SGD(0.1)
        optimizer.build([weights])

        def step() -> float:
            optimizer.apply_gradients([(np.ones((4, 4), np.float32) + weights.value(), weights)])
            return 1.0

        for _ in range(CLOSURES):
            begin = time.monotonic()
            assert coordinator.schedule(step, worker=0).fetch() == 1
            spans.append((begin, time.monotonic()))
            coordinator.join()

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        on_chief(communicator, program)
    finally:
        sys.setprofile(before)
    # The first ones bring the function, and meet what is done once.
    steady = communicator.broadcast_object(spans, 0)[2:]
    mine = set.intersection(*(
        {(file, name) for at, file, name in entered if begin <= at <= end} for begin, end in steady
    ))
    found = set().union(*communicator.all_gather_object(mine))
    files = {file for file, _ in found}
    assert len(found) <= MOST_FUNCTIONS, sorted(found)
    assert len(files) <= MOST_FILES, sorted(files)
