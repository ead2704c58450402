"""Training with logical replicas: the same bits on any number of ranks, and after a kill on another number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.launching import run_program, start_program
from tests.helpers.waiting import until_exists
from tests.system.test_example import kill_all_ranks

# Eight ranks on two busy cores take their time.
pytestmark = pytest.mark.timeout_seconds(300)

# Digits would do, too; numbers of our own need no package. The last batch of an epoch has 37 rows of 64.
PROGRAM = '''
import os, sys
from pathlib import Path
import numpy as np
import mpidist
from mpidist.experimental import CommunicationOptions
from mpidist.variables.arena import Arena
from mpidist.variables.replicas import Replicas

out, names, layout, way, steps, folder = *sys.argv[1:5], int(sys.argv[5]), sys.argv[6]
options = CommunicationOptions(reproducible=way == "logical")
shared = {"shared": True, "private": False}.get(layout)
if layout == "nodes":
    # Ranks of this host count as nodes of two.
    from mpidist.comm.group import opening as communicators
    ranks = communicators.open_communicator()
    if ranks.size > 1:
        from mpidist.testing import fake_nodes
        ranks = fake_nodes(ranks, 2)
    replicas = Replicas(ranks, options)
    strategy = mpidist.Strategy(replicas, Arena(replicas))
else:
    shared = shared if int(os.environ["RANKS"]) > 1 else None
    strategy = mpidist.MultiWorkerMirroredStrategy(communication_options=options, shared=shared)
rank, size = strategy.communicator.rank, strategy.communicator.size
random = np.random.default_rng(7)
x = random.normal(size=(293, 40)).astype("float32")
labels = (x @ random.normal(size=(40, 10))).argmax(1)
initial = [random.normal(size=s).astype("float32") * 0.2 for s in [(40, 1800), (1800,), (1800, 10), (10,)]]

def train(name):
    with strategy.scope():
        weights = [mpidist.Variable(array) for array in initial]
        optimizer = {
            "adam": lambda: mpidist.optimizers.Adam(1e-3, global_clipnorm=0.5),
            "momentum": lambda: mpidist.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.3),
            "lamb": lambda: mpidist.optimizers.LAMB(1e-2),
        }[name]()

    def loss_and_gradients(batch):
        x, labels, count = batch["x"], batch["labels"], batch["count"]
        w1, b1, w2, b2 = [variable.value() for variable in weights]
        hidden = np.maximum(x @ w1 + b1, 0)
        z = hidden @ w2 + b2
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        rows = np.arange(len(labels))
        loss = -np.log(p[rows, labels]).sum(dtype="float32") / count[0]
        p[rows, labels] -= 1
        p /= count[0]
        back = (p @ w2.T) * (hidden > 0)
        return loss, [x.T @ back, back.sum(0), hidden.T @ p, p.sum(0)]

    class Progress(mpidist.Module):
        def __init__(self):
            self.step = mpidist.Variable(0, trainable=False)

    with strategy.scope():
        progress = Progress()
    checkpoint = mpidist.Checkpoint(weights=weights, optimizer=optimizer, progress=progress, numerics=strategy.numerics)
    saved = sorted(Path(folder).glob("*.h5"), key=lambda path: int(path.stem.split("-")[-1])) if folder != "-" else []
    if saved:
        checkpoint.restore(str(saved[-1]))
    losses = []
    while int(progress.step) < steps:
        step = int(progress.step)
        begin = step % 5 * 64
        rows = np.arange(begin, min(begin + 64, 293))
        mine = np.array_split(rows, size)[rank]
        batch = {"x": x[mine], "labels": labels[mine], "count": np.full(len(mine), len(rows), np.float32)}
        if way == "logical":
            loss, gradients = strategy.gradients(loss_and_gradients, batch, logical_replicas=8)
            optimizer.apply_gradients(zip(gradients, weights), skip_gradients_aggregation=True)
        else:
            _, gradients = strategy.run(loss_and_gradients, args=(batch,))
            optimizer.apply_gradients(zip(gradients, weights))
        progress.step.assign_add(1)
        if folder != "-" and (step + 1) % 5 == 0:
            checkpoint.write(f"{folder}/ckpt-{step + 1}")
    if rank == 0:
        arrays = [*weights, *optimizer.variables]
        np.save(out.replace("NAME", name), np.concatenate([array.numpy().ravel() for array in arrays]))

for name in names.split("+"):
    train(name)
'''


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(PROGRAM)
    return path


def train(
    program: Path, ranks: int, names: str, layout: str, way: str, steps: int, folder: object = "-"
) -> list[bytes]:
    """What optimizers of these names, with a plus between them, have made of their weights, and their states."""
    out = program.parent / f"{ranks}-{layout}-{way}-NAME.npy"
    files = [Path(str(out).replace("NAME", name)) for name in names.split("+")]
    for file in files:
        file.unlink(missing_ok=True)
    arguments = (out, names, layout, way, steps, folder)
    result = run_program(ranks, program, *arguments, timeout_seconds=120, RANKS=str(ranks))
    assert result.returncode == 0, result.stderr + result.stdout
    return [np.load(file).tobytes() for file in files]


# One program for all: most of its time is its start.
OPTIMIZERS = "adam+momentum+lamb"


@pytest.fixture(scope="module")
def alone(program: Path) -> list[bytes]:
    return train(program, 1, OPTIMIZERS, "shared", "logical", 12)


@pytest.mark.parametrize(
    ("ranks", "layout"), [(2, "shared"), (2, "private"), (3, "shared"), (3, "nodes"), (4, "nodes"), (8, "shared")]
)
def test_parameters_and_state_are_the_same_on_any_number_of_ranks(
    program: Path, alone: list[bytes], ranks: int, layout: str
) -> None:
    assert all(np.isfinite(np.frombuffer(one, np.float32)).all() for one in alone)
    assert len(set(alone)) == 3
    assert train(program, ranks, OPTIMIZERS, layout, "logical", 12) == alone


def test_without_logical_replicas_the_bits_differ(program: Path) -> None:
    """What the test above compares can differ: rank counts show where each rank sums its own part."""
    alone, *others = (train(program, ranks, "momentum", "shared", "plain", 12)[0] for ranks in (1, 2, 3))
    assert alone not in others
    np.testing.assert_allclose(
        np.frombuffer(others[1], np.float32), np.frombuffer(alone, np.float32), rtol=1e-2, atol=1e-4
    )


def test_a_killed_run_goes_on_with_the_same_bits_on_other_ranks(program: Path, tmp_path: Path) -> None:
    undisturbed = train(program, 1, "lamb", "shared", "logical", 30)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    process = start_program(2, program, tmp_path / "never.npy", "lamb", "shared", "logical", 10**6, folder, RANKS="2")
    until_exists(folder / "ckpt-10.h5", job=process)
    kill_all_ranks(process)
    # Ranks may have gone on for some steps; what is beyond step 30 is of no use here.
    for path in folder.glob("*"):
        if path.suffix != ".h5" or int(path.stem.split("-")[-1]) > 10:
            path.unlink()
    assert train(program, 3, "lamb", "shared", "logical", 30, folder) == undisturbed
