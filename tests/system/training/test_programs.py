"""Whole programs with a trainer: an evaluator beside it, signals in its steps, errors of its callbacks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.launching import run_code

pytestmark = pytest.mark.timeout_seconds(120)

BESIDE = """
import os, signal, sys
from pathlib import Path
import mpidist
from mpidist import training
from tests.helpers import marks
from tests.helpers.fitting import Line, points
from tests.helpers.waiting import until_exists, until_has_died, until_has_ended

folder, kind, fate = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
resolver = mpidist.cluster_resolver.MPIClusterResolver(num_evaluators=1, num_ps=int(kind == "servers"))
if kind == "servers":
    strategy = mpidist.ParameterServerStrategy(resolver, options=mpidist.ServerOptions(heap_bytes=1 << 20))
else:
    strategy = mpidist.MultiWorkerMirroredStrategy(resolver)
line = Line(strategy, folder / "run")

class Evaluated(training.Callback):
    # The training waits for the evaluation of each epoch.
    def on_epoch_begin(self, epoch, logs=None):
        if epoch:
            marks.read(folder / f"evaluated-{epoch}")
        if epoch == 2 and fate == "stops":
            until_exists(folder / "run" / training.STOP_FILE)
        if epoch == 2 and fate in ("fails", "dies"):
            (until_has_ended if fate == "fails" else until_has_died)(2)

class Evaluating(training.Callback):
    def on_epoch_end(self, epoch, logs=None):
        marks.put(folder / f"evaluated-{epoch + 1}")
        if fate == "fails":
            raise LookupError("the evaluator has failed")
        if fate == "dies":
            os.kill(os.getpid(), signal.SIGKILL)

stopping = training.EarlyStopping("val_loss", min_delta=1e9, patience=1) if fate == "stops" else None
history = training.train_and_evaluate(
    line.trainer, points(), points(13), epochs=4,
    callbacks=[Evaluated(), *([stopping] if stopping else [])], evaluate_callbacks=[Evaluating()],
)
end = history.epoch, sorted(history.history), line.trainer.stop_training
sys.stdout.write(f"{strategy.cluster_resolver.task_type} {end}\\n")
"""


@pytest.mark.parametrize("kind", ["synchronous", "servers"])
def test_an_evaluator_ends_the_training(tmp_path: Path, kind: str) -> None:
    """Within one checkpoint, without a call of all ranks; and evaluates the last checkpoint."""
    result, text = run_code(tmp_path, BESIDE, tmp_path, kind, "stops", ranks=3 if kind == "synchronous" else 4)
    assert result.returncode == 0, text
    training = re.findall(r"(?:chief|worker) \((.*)\)", result.stdout)
    assert training == ["[0, 1, 2], ['error', 'loss'], True"] * (2 if kind == "synchronous" else 1), text
    assert "evaluator ([1, 2, 3], ['val_error', 'val_loss'], True)" in result.stdout, text


@pytest.mark.parametrize("fate", ["fails", "dies"])
def test_the_end_of_an_evaluator_does_not_end_the_training(tmp_path: Path, fate: str) -> None:
    code = BESIDE.replace("if epoch:\n", "if epoch == 1:\n")
    _, text = run_code(tmp_path, code, tmp_path, "synchronous", fate, ranks=3, kills=fate == "dies")
    assert len(re.findall(r"(?:chief|worker) \(\[0, 1, 2, 3\], \['error', 'loss'\], False\)", text)) == 2, text
    assert ("LookupError: the evaluator has failed" in text) == (fate == "fails"), text


SIGNALLED = """
import os, signal, sys
from pathlib import Path
import mpidist
from mpidist import training
from mpidist.experimental import TerminationConfig
from tests.helpers.fitting import STEPS, Line, points

folder, fate = Path(sys.argv[1]), sys.argv[2]
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.communicator.rank
line = Line(strategy, None if fate == "undisturbed" else folder / "run")
number = 0

def step(x, y):
    global number
    number += 1
    # In the middle of the second epoch, on one rank.
    if number == STEPS + 2 and rank == 1:
        if fate == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        if fate == "SIGINT":
            os.kill(os.getpid(), signal.SIGINT)
    return line.step(x, y)

class Failing(training.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if fate == "callback" and rank == 1 and number == STEPS + 2:
            raise LookupError("a callback has failed")

if line.manager is not None:
    del line.checkpoint.trainer
trainer = mpidist.Trainer(strategy, step, checkpoint=line.manager, evaluate_step=line.evaluate_step)
callbacks = [Failing()]
if fate in ("SIGTERM", "resumed"):
    callbacks.append(training.Preemption(TerminationConfig(exit_code=75)))
try:
    history = trainer.fit(points(), 3, validation_data=points(13), callbacks=callbacks)
except KeyboardInterrupt:
    line.manager.save()
    print("saved after step", trainer.position.total, flush=True)
    raise
sys.stdout.write(f"result {history.history} {line.weight.numpy().ravel().tolist()} {number}\\n")
"""


def ends_of(text: str) -> list[tuple[str, int]]:
    """What the ranks have at the end, and in how many steps of this program."""
    return [(values, int(number)) for values, number in re.findall(r"result (.*) (\d+)\n", text)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int]]:
    """What the ranks of a program without signals have at its end."""
    folder = tmp_path_factory.mktemp("undisturbed")
    result, text = run_code(folder, SIGNALLED, folder, "undisturbed", ranks=2)
    assert result.returncode == 0, text
    return ends_of(result.stdout)


@pytest.mark.parametrize("fate", ["SIGTERM", "SIGINT"])
def test_a_signal_in_a_step(tmp_path: Path, undisturbed: list[tuple[str, int]], fate: str) -> None:
    """All ranks leave together, and the next program continues to the same bits."""
    result, text = run_code(tmp_path, SIGNALLED, tmp_path, fate, ranks=2)
    assert result.returncode == (75 if fate == "SIGTERM" else 130), text
    assert ends_of(result.stdout) == [], text
    if fate == "SIGINT":
        assert len(set(re.findall(r"saved after step (\d+)", text))) == 1, text
    result, text = run_code(tmp_path, SIGNALLED, tmp_path, "resumed", ranks=2)
    assert result.returncode == 0, text
    resumed = ends_of(result.stdout)
    assert len(resumed) == 2, text
    assert resumed[0][1] < undisturbed[0][1], text
    assert [values for values, _ in resumed] == [values for values, _ in undisturbed], text


def test_an_error_of_a_callback_on_one_rank_ends_the_job(tmp_path: Path) -> None:
    result, text = run_code(tmp_path, SIGNALLED, tmp_path, "callback", ranks=2)
    assert result.returncode != 0, text
    assert "LookupError: a callback has failed" in text, text
    assert "rank 1 of 2" in text, text
    assert ends_of(result.stdout) == [], text
