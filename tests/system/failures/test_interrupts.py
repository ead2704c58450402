"""Programs that are interrupted at random moments, and save: nothing is torn, and no rank is left behind."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.helpers.amounts import amount
from tests.helpers.launching import run_code

pytestmark = pytest.mark.timeout_seconds(120)

SIZE = 200_000
TRAINING = f"""
import os, random, signal, sys, threading, time
import numpy as np
import mpidist
folder, seed, which = sys.argv[1], int(sys.argv[2]), sys.argv[3]
strategy = mpidist.MultiWorkerMirroredStrategy()
rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync
chance = random.Random(seed)
delay, chosen = chance.uniform(0, 0.6), chance.randrange(size)
with strategy.scope():
    large = mpidist.Variable(np.zeros({SIZE}, "float32"), name="large")
    small = mpidist.Variable(np.zeros(3, "float32"), name="small")
    optimizer = mpidist.optimizers.SGD(1.0, momentum=0.0, gradient_accumulation_steps=2 if seed % 2 else None)
optimizer.build([large, small])
checkpoint = mpidist.Checkpoint(large=large, small=small, optimizer=optimizer)
gradients = np.ones({SIZE}, "float32"), np.ones(3, "float32")

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

if which == "all" or rank == chosen:
    threading.Timer(delay, interrupt).start()
try:
    while True:
        optimizer.apply_gradients(zip(gradients, (large, small)))
        if chance.random() < 0.3:
            strategy.reduce("SUM", 1.0, axis=None)
except KeyboardInterrupt:
    checkpoint.save(folder + "/interrupted")
    print("saved", flush=True)
"""


@pytest.mark.parametrize("which", ["all", "one"])
@pytest.mark.parametrize("seed", range(amount(2, 100)))
def test_what_is_saved_after_an_interrupt_is_whole(tmp_path: Path, which: str, seed: int) -> None:
    """Each of the saved checkpoints is one that an undisturbed program could have saved."""
    result, text = run_code(tmp_path, TRAINING, tmp_path, seed, which, ranks=2)
    assert result.returncode == 0, text
    assert result.stdout.count("saved") == 2, text
    (saved,) = tmp_path.glob("interrupted*.h5")
    with h5py.File(saved) as file:
        large, small = file["large"][...], file["small"][...]
        iterations = int(file["optimizer/iterations"][()])
    updates = iterations // (2 if seed % 2 else 1)
    assert (large == large[0]).all(), set(large)
    assert (small == large[0]).all(), (small, large[0])
    # The mean over accumulated calls, and the sum over ranks.
    np.testing.assert_allclose(large[0], -2 * updates)


ALONE = """
import os, signal, sys, threading, time
import numpy as np
# A shell lets what it starts in the background ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
import mpidist
strategy = mpidist.get_strategy()
variables = [mpidist.Variable(np.zeros(100_000, "float32")) for _ in range(20)]
optimizer = mpidist.optimizers.SGD(1.0)
gradients = [np.ones(100_000, "float32")] * 20
threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    while True:
        optimizer.apply_gradients(zip(gradients, variables))
except KeyboardInterrupt:
    values = {float(value) for variable in variables for value in (variable.numpy().min(), variable.numpy().max())}
    assert values == {-float(optimizer.iterations)}, (values, optimizer.iterations)
    print("whole")
"""


@pytest.mark.parametrize("delay", [0.1, 0.15, 0.2])
def test_one_process_finishes_its_step(tmp_path: Path, delay: float) -> None:
    result, _ = run_code(tmp_path, ALONE, delay, ranks=1)
    assert "whole" in result.stdout, result.stdout + result.stderr


WAITING = """
import os, signal, threading
import mpidist
from tests.helpers.waiting import until_process_waits_in
strategy = mpidist.MultiWorkerMirroredStrategy()

def interrupt():
    until_process_waits_in(os.getpid(), "all_reduce")
    os.kill(os.getpid(), signal.SIGINT)

if strategy.communicator.rank == 1:
    threading.Event().wait()
threading.Thread(target=interrupt, daemon=True).start()
strategy.reduce("SUM", 1.0, axis=None)
"""


@pytest.mark.parametrize("implementation", ["NODE", "MPI"])
def test_a_call_that_does_not_end_after_an_interrupt_ends_the_job(tmp_path: Path, implementation: str) -> None:
    """Rank 0 waits in a call when it is interrupted: it says where, and the job ends."""
    result, text = run_code(tmp_path, WAITING, ranks=2, MPIDIST_COLLECTIVE=implementation)
    assert result.returncode != 0, text
    assert "was interrupted, and its call has not ended within 5 s" in text, text
    assert "program.py" in text, text


OUTSIDE = """
import os, signal, threading, time
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
os.kill(os.getpid(), signal.SIGINT)
begin = time.monotonic()
try:
    threading.Event().wait()
except KeyboardInterrupt:
    print(f"raised {time.monotonic() - begin > 4}", flush=True)
strategy.communicator.barrier()
"""


def test_outside_of_calls_an_interrupt_comes_after_five_seconds(tmp_path: Path) -> None:
    result, _ = run_code(tmp_path, OUTSIDE, ranks=2)
    assert result.stdout.count("raised True") == 2, result.stdout + result.stderr


ASYNCHRONOUS = """
import os, signal, sys, threading
import numpy as np
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
array = np.ones(200_000, "float32")
strategy.extended.all_reduce_async("SUM", array.copy()).wait()
if strategy.communicator.rank == 1:
    threading.Timer(float(sys.argv[1]), lambda: os.kill(os.getpid(), signal.SIGINT)).start()
caught = turns = after = 0
while after < 50 and turns < 20_000:
    turns += 1
    after += caught
    try:
        handles = [strategy.extended.all_reduce_async("SUM", array, in_place=False) for _ in range(3)]
        strategy.reduce("SUM", 1.0, axis=None)
        for handle in handles:
            assert (handle.wait() == 2).all()
    except KeyboardInterrupt:
        caught += 1
print(f"caught {caught}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("delay", [0.1, 0.3])
def test_an_interrupt_comes_once_while_asynchronous_reductions_are_under_way(tmp_path: Path, delay: float) -> None:
    """The communication thread takes no part: it would raise the same interrupt again, and for ever."""
    result, _ = run_code(tmp_path, ASYNCHRONOUS, delay, ranks=2)
    assert result.stdout.count("caught 1\n") == 2, result.stdout + result.stderr


def test_an_interrupt_of_another_rank_than_the_first_says_so(tmp_path: Path) -> None:
    result, _ = run_code(
        tmp_path, "import threading, mpidist\n"
        "strategy = mpidist.MultiWorkerMirroredStrategy()\n"
        "if strategy.communicator.rank == 1:\n"
        "    raise KeyboardInterrupt\n"
        "threading.Event().wait()\n", ranks=2,
    )
    assert result.returncode != 0
    assert "mpidist: interrupted" in result.stderr, result.stdout + result.stderr


OWN_HANDLER = """
import os, signal, sys, threading, time
import mpidist
from tests.helpers.waiting import until
seen = []
if sys.argv[1] == "before":
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
strategy = mpidist.MultiWorkerMirroredStrategy()
if sys.argv[1] == "after":
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))

def interrupt():
    for number in range(3):
        until(lambda: len(seen) == number)
        os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
until(lambda: len(seen) == 3)
begin = time.monotonic()
# Longer than an interrupt without a handler waits.
while strategy.reduce("MIN", time.monotonic() - begin, axis=None) < 6:
    pass
print(f"seen {len(seen)}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_handler_of_the_programs_own_is_the_only_one(tmp_path: Path, moment: str) -> None:
    """It may only set a flag: neither a second interrupt nor five seconds end the job."""
    result, _ = run_code(tmp_path, OWN_HANDLER, moment, ranks=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("seen 3\n") == 2, result.stdout + result.stderr


OPENING = """
import os, signal, sys, threading
import numpy as np
import mpidist
from tests.helpers.waiting import until_exists, until_process_waits_in
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.communicator.rank
def handle(*_):
    raise InterruptedError("by a handler")
def interrupt():
    until_process_waits_in(os.getpid())
    os.kill(os.getpid(), signal.SIGALRM)
    # In MPI the handler runs when the others have come.
    open(sys.argv[1], "w").close()
signal.signal(signal.SIGALRM, handle)
if rank == 1:
    threading.Thread(target=interrupt).start()
else:
    until_exists(sys.argv[1])
try:
    strategy.communicator.open_sibling("tests")
except InterruptedError:
    print("caught", flush=True)
print("sum", strategy.reduce("SUM", 1.0, axis=None), flush=True)
"""


def test_a_rank_that_leaves_the_opening_of_a_communicator_ends_the_job(tmp_path: Path) -> None:
    """The others wait inside of it, in no call that was noted before."""
    result, text = run_code(tmp_path, OPENING, tmp_path / "left", ranks=3)
    assert result.returncode != 0, text
    assert "sum" not in result.stdout, text
    assert "opening a communicator was left in the middle by InterruptedError: by a handler" in text, text


SERVED = """
import os, random, signal, sys, threading, time
import numpy as np
signal.signal(signal.SIGINT, signal.default_int_handler)
import mpidist
SIZE, ROUNDS = 20_000, 30
resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps=1)
strategy = mpidist.ParameterServerStrategy(resolver, options=mpidist.ServerOptions(heap_bytes=1 << 24))
coordinator = mpidist.coordinator.ClusterCoordinator(strategy, queue_size=4)
with strategy.scope():
    counts = mpidist.Variable(np.zeros(SIZE, "int8"))

def work(number):
    one = np.zeros(SIZE, "int8")
    one[number] = 1
    counts.assign_add(one)
    return number

chance, number, values = random.Random(int(sys.argv[1])), 0, {}

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

for _ in range(ROUNDS):
    try:
        threading.Timer(chance.uniform(0, 0.05), interrupt).start()
        while True:
            if number < SIZE:
                number += 1
                values[number - 1] = coordinator.schedule(work, (number - 1,))
            kind = chance.random()
            if kind < 0.1:
                coordinator.join()
            elif kind < 0.3:
                coordinator.fetch(values[chance.choice(list(values))])
    except KeyboardInterrupt:
        pass
coordinator.join()
assert coordinator.fetch(values) == {one: one for one in values}
applied = counts.numpy()
# Where `schedule` itself was interrupted, its function runs or does not.
assert all(applied[one] == 1 for one in values), [one for one in values if applied[one] != 1]
assert set(applied.tolist()) <= {0, 1} and applied.sum() <= number and number - len(values) <= ROUNDS
print("whole", number, len(values))
"""


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("seed", range(amount(1, 20)))
def test_functions_count_once_where_the_chief_is_interrupted(tmp_path: Path, ranks: int, seed: int) -> None:
    result, _ = run_code(tmp_path, SERVED, seed, ranks=ranks, timeout_seconds=100)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "whole" in result.stdout, result.stdout + result.stderr
