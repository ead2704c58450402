"""An exception on one rank after a notice of the end: all ranks save, and the next program goes on to the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import run_program

pytestmark = pytest.mark.timeout_seconds(180)

STEPS = 30
TRAINING = f"""
import atexit, os, signal, sys, threading
import numpy as np
import mpidist
from mpidist.checkpoint.preemption import handler as preemption
from mpidist.comm.group.opening import open_communicator
from mpidist.experimental import PreemptionCheckpointHandler, TerminationConfig
from mpidist.testing import fake_nodes
from tests.helpers.strategies import ArenaStrategy
from tests.helpers.waiting import until

folder, when, told, layout, number = sys.argv[1:6]
preemption.PATIENCE_SECONDS = 1.0 if when == "stuck" else 60.0
if when == "left":
    # As that of a Pool whose worker has died with a lock.
    preemption.EXIT_SECONDS = 1.0
    atexit.register(threading.Event().wait)
# Each rank a node of its own: what they wait in is MPI's.
is_across = layout == "each"
strategy = ArenaStrategy(fake_nodes(open_communicator(), 1)) if is_across else mpidist.MultiWorkerMirroredStrategy()
rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync
random_numbers = np.random.default_rng(3)
dataset = mpidist.data.Dataset.range(1000).shuffle(1000, seed=1).batch(8).repeat()
batches = iter(strategy.experimental_distribute_dataset(dataset))
with strategy.scope():
    variable = mpidist.Variable(np.zeros(5000, "float32"), name="variable")
    own = mpidist.Variable(
        0.0, synchronization=mpidist.VariableSynchronization.ON_READ, aggregation=mpidist.VariableAggregation.SUM
    )
    optimizer = mpidist.optimizers.Adam(0.1)
optimizer.build([variable])
checkpoint = mpidist.Checkpoint(
    variable=variable, optimizer=optimizer, batches=batches, random_numbers=random_numbers, own=own
)
handler = PreemptionCheckpointHandler(
    strategy.cluster_resolver, checkpoint, folder + "/checkpoints", TerminationConfig(exit_code=75)
)
start = handler.total_run_calls

def note():
    if start == 0 and handler.total_run_calls == int(number) and (told == "all" or (told == "one" and rank == 1)):
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: handler._notice.reason)

def fails(place):
    if start == 0 and rank == 1 and place == when and handler.total_run_calls == int(number) + (place == "between"):
        if place == "stuck":
            threading.Event().wait()
        raise OSError("a worker has died")

def step():
    noise = random_numbers.standard_normal(5000).astype("float32")
    note()
    fails("begin")
    fails("stuck")
    gradient = noise * float(next(batches).sum() % 7) + variable.numpy()
    fails("before")
    optimizer.apply_gradients([(gradient, variable)])
    strategy.reduce("MAX", int(optimizer.iterations), axis=None)
    strategy.run(lambda: own.assign_add(1.0))
    fails("after")

while handler.total_run_calls < {STEPS}:
    handler.run(step)
    fails("between")
assert float(own.numpy()) == {STEPS} * size, own.numpy()
if rank == 0:
    open(folder + "/result", "wb").write(variable.numpy().tobytes())
print("done", flush=True)
"""


def train(folder: Path, when: str, told: str, layout: str = "node", number: int = 10) -> tuple[int, str]:
    program = folder / "program.py"
    program.write_text(TRAINING)
    result = run_program(2, program, folder, when, told, layout, number, timeout_seconds=100)
    return result.returncode, result.stdout + result.stderr


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The result of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, text = train(folder, "never", "nobody")
    assert code == 0, text
    return (folder / "result").read_bytes()


@pytest.mark.parametrize(
    ("when", "told", "layout", "number"),
    [
        ("begin", "all", "node", 10), ("before", "one", "node", 10), ("after", "all", "node", 10),
        ("between", "one", "node", 10), ("stuck", "all", "node", 10),
        # The first 16 steps are compared in another way.
        ("before", "all", "each", 10), ("after", "one", "each", 20),
    ],
)
def test_all_ranks_save_the_last_complete_step(
    tmp_path: Path, expected: bytes, when: str, told: str, layout: str, number: int
) -> None:
    code, text = train(tmp_path, when, told, layout, number)
    assert code == 75, text
    assert "after a notice that the job is about to end, rank 1 has failed" in text, text
    assert ("StuckError: " if when == "stuck" else "OSError: a worker has died") in text, text
    assert "(SIGUSR1): saved" in text, text
    code, text = train(tmp_path, when, told, layout)
    assert code == 0, text
    assert (tmp_path / "result").read_bytes() == expected


def test_an_exit_function_that_never_returns_keeps_no_job(tmp_path: Path) -> None:
    code, text = train(tmp_path, "left", "all")
    assert code == 75, text
    assert "(SIGUSR1): saved" in text, text


# The first handler's step has ended on rank 0, which waits in that of the second one.
TAKING_TURNS = """
import os, signal, sys
import numpy as np
import mpidist
from mpidist.experimental import PreemptionCheckpointHandler
from tests.helpers.waiting import until

def make(name):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(3), name=name)
        optimizer = mpidist.optimizers.SGD(1.0)
    optimizer.build([variable])
    checkpoint = mpidist.Checkpoint(variable=variable, optimizer=optimizer)
    handler = PreemptionCheckpointHandler(strategy.cluster_resolver, checkpoint, sys.argv[1] + "/" + name)

    def step(fails):
        optimizer.apply_gradients([(np.ones(3), variable)])
        if fails and strategy.communicator.rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            until(lambda: handler._notice.reason)
            raise OSError("a worker has died")

    return handler, step

pairs = [make("teacher"), make("student")]
for number in range(20):
    for index, (handler, step) in enumerate(pairs):
        handler.run(step, (number, index) == (5, int(sys.argv[2])))
"""


@pytest.mark.parametrize("index", [0, 1])
def test_handlers_that_take_turns_do_not_meet_each_other(tmp_path: Path, index: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(TAKING_TURNS)
    result = run_program(2, program, tmp_path, index)
    text = result.stdout + result.stderr
    assert result.returncode not in (0, 42), text
    assert "rank 1 of 2" in text, text
    assert "OSError: a worker has died" in text, text
    assert text.count("this program has several PreemptionCheckpointHandlers") == 1, text
