"""Programs that repeat something leave no open file and no mapping of node memory behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.amounts import amount
from tests.helpers.launching import run_program

pytestmark = pytest.mark.timeout_seconds(150)

# MPICH has about 2,000 communicators and a process usually 1,024 files. A strategy that kept one of either would not
# get through the long form.
PROGRAM = '''
import gc, json, os, sys
import numpy as np
import mpidist

rounds, folder = int(sys.argv[1]), sys.argv[2]

def held():
    gc.collect()
    with open("/proc/self/maps") as file:
        mapped = sum("mpidist" in line for line in file)
    return len(os.listdir("/proc/self/fd")), mapped

{what}

seen = []
for number in range(rounds):
    round_of(number)
    if number in (9, rounds - 1):
        seen.append(held())
communicator = mpidist.MultiWorkerMirroredStrategy().communicator
everyone = communicator.all_gather_object(seen)
if communicator.rank == 0:
    print(json.dumps(everyone))
'''
STRATEGIES = '''
def round_of(number):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variable = mpidist.Variable(np.full(1000, float(number)))
        optimizer = mpidist.optimizers.Adam(0.1)
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(1000), variable)]))
    assert strategy.reduce("SUM", 1.0, axis=None) == strategy.num_replicas_in_sync
'''
CHECKPOINTS = '''
strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    variables = [mpidist.Variable(np.zeros(100)) for _ in range(20)]
checkpoint = mpidist.Checkpoint(variables=variables)
manager = mpidist.CheckpointManager(checkpoint, folder, max_to_keep=2)

def round_of(number):
    for variable in variables:
        variable.assign(np.full(100, float(number)))
    path = manager.save()
    variables[-1].assign(np.zeros(100))
    checkpoint.restore(path).assert_consumed()
    assert variables[-1].numpy()[-1] == number
'''
INPUT = '''
strategy = mpidist.MultiWorkerMirroredStrategy()

def round_of(number):
    dataset = mpidist.data.Dataset.range(64).shuffle(64, seed=number).batch(8).prefetch(2)
    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(lambda batch: mpidist.get_replica_context().all_reduce("SUM", float(len(batch))), args=(batch,))
'''


@pytest.mark.parametrize("what", [STRATEGIES, CHECKPOINTS, INPUT], ids=["strategies", "checkpoints", "input"])
def test_nothing_grows(tmp_path: Path, what: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("{what}", what))
    result = run_program(2, program, amount(30, 3000), tmp_path / "folder", timeout_seconds=amount(100, 2000))
    assert result.returncode == 0, result.stdout + result.stderr
    for early, late in json.loads(result.stdout.splitlines()[-1]):
        assert late == early, "open files and mappings of node memory after 10 rounds, and at the end"
