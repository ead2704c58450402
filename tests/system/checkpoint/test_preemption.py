"""Programs that get signals at random moments: they save and end by themselves, and go on to the same bits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.amounts import amount
from tests.helpers.launching import run_program

pytestmark = pytest.mark.timeout_seconds(amount(180, 1200))

STEPS = 60
# So many steps after the first in which it may come a signal has been sent, and after so many more all ranks know.
SENT_AFTER, KNOWN_AFTER = 5, 3
TRAINING = f"""
import os, random, signal, sys, threading
from tests.helpers.waiting import let_pass
import numpy as np
import mpidist
from mpidist.experimental import PreemptionCheckpointHandler, TerminationConfig
strategy = mpidist.MultiWorkerMirroredStrategy()
rank, size = strategy.communicator.rank, strategy.num_replicas_in_sync

class Ended(Exception):
    pass

def end():
    raise Ended

def moment(seed):
    # The step in which a signal is sent, or in one of the next few; how much later; and to whom.
    chance = random.Random(seed)
    return chance.randrange({STEPS}), chance.uniform(0, 0.02), chance.randrange(size)

def train(folder, seed, which, name, exit_fn=None):
    (at, delay, chosen), random_numbers = moment(seed), np.random.default_rng(3)
    dataset = mpidist.data.Dataset.range(1000).shuffle(1000, seed=1).batch(8).repeat()
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(5000, "float32"), name="variable")
        optimizer = mpidist.optimizers.Adam(0.1)
    optimizer.build([variable])
    checkpoint = mpidist.Checkpoint(
        variable=variable, optimizer=optimizer, batches=batches, random_numbers=random_numbers
    )
    config = TerminationConfig(exit_code=75, exit_fn=exit_fn)
    handler = PreemptionCheckpointHandler(strategy.cluster_resolver, checkpoint, folder, config)

    def step():
        noise = random_numbers.standard_normal(5000).astype("float32")
        gradient = noise * float(next(batches).sum() % 7) + variable.numpy()
        optimizer.apply_gradients([(gradient, variable)])
        # Also other calls, and time without any.
        if strategy.reduce("MAX", int(optimizer.iterations), axis=None) % 5 == 0:
            let_pass(0.01 * (1 + rank))

    comes = threading.Event()

    def tell():
        comes.wait()
        let_pass(delay)
        os.kill(os.getpid(), getattr(signal, name))

    teller = threading.Thread(target=tell, daemon=True)
    if name != "none" and (which == "all" or rank == chosen):
        teller.start()
    try:
        while handler.total_run_calls < {STEPS}:
            if handler.total_run_calls == at:
                comes.set()
            if handler.total_run_calls == at + {SENT_AFTER} and teller.is_alive():
                teller.join()
            handler.run(step)
        return variable.numpy().tobytes()
    finally:
        # A signal after the end is no test.
        comes.set()
        if teller.is_alive():
            teller.join()
        handler.close()

folder, how = sys.argv[1:3]
if how != "lives":
    value = train(folder + "/checkpoints", int(sys.argv[3]), *sys.argv[4:])
    if rank == 0:
        open(folder + "/result", "wb").write(value)
    print("done", flush=True)
    sys.exit()
expected, ended = train(folder + "/undisturbed", 0, "all", "none"), 0
for seed in range(int(sys.argv[3])):
    place = folder + f"/{{seed}}"
    try:
        value = train(place, seed, ("one", "all")[seed // 2 % 2], ("SIGTERM", "SIGUSR1")[seed % 2], end)
    except Ended:
        ended += 1
        value = train(place, 0, "all", "none")
    assert value == expected, seed
if rank == 0:
    open(folder + "/expected", "wb").write(expected)
certain = sum(moment(seed)[0] + {SENT_AFTER} + {KNOWN_AFTER} < {STEPS} for seed in range(int(sys.argv[3])))
assert ended >= certain > int(sys.argv[3]) / 2, (ended, certain)
print("same", flush=True)
"""


def train(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(TRAINING)
    return run_program(2, program, folder, *arguments, timeout_seconds=amount(100, 1000))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What a run without signals gives, and so do many with one, in one process."""
    folder = tmp_path_factory.mktemp("lives")
    result = train(folder, "lives", amount(5, 100))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("same") == 2, result.stdout + result.stderr
    return (folder / "expected").read_bytes()


@pytest.mark.parametrize("seed", range(amount(1, 100)))
def test_a_run_that_is_preempted_goes_on_to_the_same_bits(tmp_path: Path, expected: bytes, seed: int) -> None:
    """The program ends by itself, with its code; the next one goes on."""
    name, which = ("SIGUSR1", "SIGTERM")[seed % 2], ("one", "all")[seed // 2 % 2]
    for told in (name, "none"):
        result = train(tmp_path, "once", seed, which, told)
        text = result.stdout + result.stderr
        assert result.stdout.count("done") == (0 if result.returncode else 2), text
        assert result.returncode in ((0,) if told == "none" else (0, 75)), text
        # No rank was ended by another one's exit.
        assert "the job ends" not in text, text
    assert (tmp_path / "result").read_bytes() == expected


DIFFERING = """
import mpidist
from mpidist.experimental import PreemptionCheckpointHandler
import sys
strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    checkpoint = mpidist.Checkpoint(v=mpidist.Variable(0.0))
handler = PreemptionCheckpointHandler(None, checkpoint, sys.argv[1])
for _ in range(2 if strategy.communicator.rank else 3):
    handler.run(lambda: None)
strategy.reduce("SUM", 1.0, axis=None)
"""


def test_ranks_that_call_it_differently_often_are_told(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(DIFFERING)
    result = run_program(2, program, tmp_path / "checkpoints", timeout_seconds=60)
    assert result.returncode != 0
    text = result.stdout + result.stderr
    assert "after looking for preemption" in text, text
