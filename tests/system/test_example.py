"""The training example, as a user starts it: one command under mpirun, killed, started again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.helpers.amounts import amount
from tests.helpers.digits import write_digits
from tests.helpers.launching import end, run_program, start_program
from tests.helpers.leftovers import files_left_behind
from tests.helpers.limits import limit
from tests.helpers.processes import descendants
from tests.helpers.waiting import until

# Eight ranks on two busy cores take their time.
pytestmark = pytest.mark.timeout_seconds(240)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train.py"
# So many that a run is killed long before its end.
MANY_EPOCHS = ("--epochs", amount(30, 60))
# Enough for the accuracy that the default of 30 comes to.
FEW_EPOCHS = ("--epochs", amount(12, 30))
# Epochs in which losses are compared.
COMPARED = amount(4, 8)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The option that lets the example learn its digits from a file."""
    return "--data", write_digits(tmp_path_factory.mktemp("digits") / "digits.npz")


def train(ranks: int, *options: object) -> str:
    """The output of the example, which must end well."""
    return run(ranks, EXAMPLE, *options)


def run(ranks: int, program: Path, *options: object) -> str:
    """The output of a program, which must end well."""
    result = run_program(ranks, program, *options, timeout_seconds=100)
    assert result.returncode == 0, result.stderr + result.stdout
    return result.stdout + result.stderr


def test_accuracy_of_97_percent_on_8_ranks(data: tuple[str, Path], tmp_path: Path) -> None:
    before = os.times()
    output = train(8, *data, *FEW_EPOCHS, "--plot", tmp_path / "curve.png")
    after = os.times()
    # What the cores have done for the job: other programs may have most of them, so that ranks wait, and look, longer.
    assert after.children_user + after.children_system - before.children_user - before.children_system < limit(20)
    assert float(re.findall("test accuracy ([0-9.]+)", output)[-1]) >= 0.97
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_accuracy_of_97_percent_in_the_epochs_of_the_default() -> None:
    output = train(1)
    assert "epoch 30" in output
    assert float(re.findall("test accuracy ([0-9.]+)", output)[-1]) >= 0.97


@pytest.fixture(scope="module")
def losses_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The losses of one rank, with data that no file has, which those of several are compared with."""
    path = tmp_path_factory.mktemp("losses") / "1"
    train(1, "--epochs", COMPARED, "--losses", path)
    return path


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_losses_do_not_depend_on_the_number_of_ranks(
    ranks: int, data: tuple[str, Path], losses_alone: Path, tmp_path: Path
) -> None:
    train(ranks, *data, "--epochs", COMPARED, "--losses", tmp_path / str(ranks))
    alone, together = np.loadtxt(losses_alone), np.loadtxt(tmp_path / str(ranks))
    assert alone.shape == together.shape == (COMPARED * 23,)
    np.testing.assert_allclose(together, alone, rtol=2e-5)


# Memory is private, so that each rank has a part of the state. The state of how many variables that was is printed.
SHARDED = """
import atexit, os, runpy, sys
os.environ["MPIDIST_COLLECTIVE"] = "MPI"
from mpidist.variables.kinds.sharded_state import ShardedState

made, make = [], ShardedState.__init__

def note(*arguments, **keywords):
    made.append(make(*arguments, **keywords))

ShardedState.__init__ = note
atexit.register(lambda: print(f"{len(made)} in shards"))
sys.argv = sys.argv[1:]
# As Python does for the program that it is given.
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("strategy", ["mirrored", "central-storage", "tpu", "sharded"])
def test_losses_do_not_depend_on_the_strategy(
    strategy: str, data: tuple[str, Path], losses_alone: Path, tmp_path: Path
) -> None:
    program = [EXAMPLE]
    options = (*data, "--strategy", strategy, "--epochs", COMPARED, "--losses", tmp_path / "losses")
    if strategy == "sharded":
        program.insert(0, tmp_path / "program.py")
        program[0].write_text(SHARDED)
    output = run(2, *program, *options)
    # The momentum of three kernels and three biases, on both ranks.
    assert output.count("6 in shards") == (2 if strategy == "sharded" else 0), output
    np.testing.assert_allclose(np.loadtxt(tmp_path / "losses"), np.loadtxt(losses_alone), rtol=2e-5)


def test_groups_come_to_the_same_accuracy(data: tuple[str, Path]) -> None:
    output = train(amount(2, 4), *data, "--strategy", "hybrid", *FEW_EPOCHS)
    assert float(re.findall("test accuracy ([0-9.]+)", output)[-1]) >= 0.97


@pytest.fixture(scope="module")
def losses_undisturbed(data: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The losses of two ranks in many epochs."""
    path = tmp_path_factory.mktemp("losses") / "undisturbed"
    train(2, *data, *MANY_EPOCHS, "--losses", path)
    return path


@pytest.mark.parametrize("ranks_after", [2, 3])
def test_a_killed_run_goes_on_and_ends_where_an_undisturbed_one_does(
    ranks_after: int, data: tuple[str, Path], losses_undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    process = start_program(2, EXAMPLE, *data, *MANY_EPOCHS, "--checkpoint-dir", folder)
    for number in (1, 2, 3):
        # It goes on, however slowly: the limit is that of one epoch.
        until_saved(folder, number, process)
    kill_all_ranks(process)
    assert files_left_behind() == []
    output = train(ranks_after, *data, *MANY_EPOCHS, "--checkpoint-dir", folder, "--losses", tmp_path / "resumed")
    assert "resumed after epoch" in output
    undisturbed, resumed = np.loadtxt(losses_undisturbed), np.loadtxt(tmp_path / "resumed")
    if ranks_after == 2:
        np.testing.assert_array_equal(resumed, undisturbed)
    else:
        np.testing.assert_allclose(resumed, undisturbed, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("strategy", ["one-device", "default"])
def test_independent_programs_warn_once_and_show_one_progress(
    strategy: str, data: tuple[str, Path], tmp_path: Path
) -> None:
    output = train(3, *data, "--strategy", strategy, "--epochs", 2, "--checkpoint-dir", tmp_path / "checkpoints")
    assert output.count("runs 3 independent programs") == 1
    assert output.count("training: 46/46") == 1
    with h5py.File(tmp_path / "checkpoints" / "ckpt-2.h5") as file:
        assert file["network/kernels/0"].shape == (64, 256)


@pytest.mark.parametrize("kind", ["npz", "h5"])
def test_data_from_a_file_without_a_launcher(kind: str, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (120, 5, 5), dtype=np.uint8)
    labels = (images.reshape(120, -1).mean(1) > 127).astype(np.uint8)
    arrays = {"x_train": images[:90], "y_train": labels[:90], "x_test": images[90:], "y_test": labels[90:]}
    path = tmp_path / f"data.{kind}"
    if kind == "npz":
        np.savez(path, **arrays)
    else:
        with h5py.File(path, "w") as file:
            file.update(arrays)
    assert "test accuracy" in train(1, "--data", path, "--epochs", 2)


def test_a_file_without_the_arrays_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "wrong.npz", x=np.zeros(3))
    result = run_program(1, EXAMPLE, "--data", tmp_path / "wrong.npz", timeout_seconds=60)
    assert result.returncode != 0
    assert "wrong.npz has no x_train, y_train, x_test, y_test" in result.stderr


def kill_all_ranks(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the launcher and to everything that it started, whose process groups may be others."""
    for pid in descendants(process.pid):
        # It may have ended with the one before.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    end(process)


def until_saved(folder: Path, number: int, process: subprocess.Popen[str]) -> None:
    """Wait until a checkpoint or a later one is there; the last three are kept."""

    def is_saved() -> bool:
        return any(int(path.stem.partition("-")[2]) >= number for path in folder.glob("ckpt-*.h5"))

    until(is_saved, f"epoch {number} is saved", job=process)


@pytest.mark.parametrize("program", ["train.py", "embeddings.py"])
def test_a_plot_into_a_missing_folder_is_refused_before_the_training(program: str, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "plot.png"
    result = run_program(1, EXAMPLE.parent / program, "--plot", path, timeout_seconds=60)
    assert result.returncode == 2, result.stdout + result.stderr
    assert f"there is no folder {path.parent}" in result.stderr
    assert "epoch" not in result.stdout + result.stderr


# Of the others `tests/unit/test_examples.py`.
@pytest.mark.parametrize("program", ["train.py", "coupled/learn.py"])
def test_the_help_of_an_example_keeps_its_lines(program: str) -> None:
    path = EXAMPLE.parent / program
    wanted = [line for line in path.read_text().split('"""')[1].splitlines() if line.startswith("    ")]
    assert wanted
    result = run_program(1, path, "--help", timeout_seconds=60, COLUMNS="80")
    assert result.returncode == 0, result.stderr
    for line in wanted:
        assert line in result.stdout, result.stdout
