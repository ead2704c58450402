"""Where variables lie: on which server, and beside which other variable."""

from __future__ import annotations

import numpy as np
import pytest

import mpidist
from mpidist.comm.group.communicator import Communicator
from mpidist.coordinator.coordinator import ClusterCoordinator
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from tests.parallel.serving.test_parameter_server import on_chief


@pytest.mark.mpi(min_size=4)
def test_variables_are_placed_by_bytes_or_beside_another_one(communicator: Communicator) -> None:
    def program(strategy: ParameterServerStrategy, coordinator: ClusterCoordinator) -> None:
        with strategy.scope():
            first, second = mpidist.Variable(np.ones(100)), mpidist.Variable(np.ones(10))
            with strategy.extended.colocate_vars_with(first):
                beside = mpidist.Variable(3.0)
            third = mpidist.Variable(np.ones(10))
            optimizer = mpidist.optimizers.Adam(0.1)
        optimizer.build([first, second])
        tasks = [one.device for one in (first, second, beside, third)]
        assert tasks == [f"/job:ps/replica:0/task:{task}/device:CPU:0" for task in (0, 1, 0, 1)]
        assert [one.device for one in optimizer.variables] == [first.device, second.device] * 2
        # Also on a worker, and of what a function gives back it is the same object.
        assert coordinator.schedule(lambda: [first.device, beside.device]).get() == [tasks[0], tasks[2]]
        assert coordinator.schedule(lambda: second).get() is second
        assert strategy.extended.variable_created_in_scope(first)
        mine = mpidist.Variable(1.0)
        refused = pytest.raises(ValueError, match="must only be passed a variable created in this")
        with strategy.scope(), refused, strategy.extended.colocate_vars_with(mine):
            pass

    on_chief(communicator, program, servers=2)
