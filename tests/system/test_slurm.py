"""The scripts in slurm/, submitted to a Slurm of four nodes: what their jobs compute, and where."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from tests.hosts.virtual_hosts import ROOT
from tests.launching import run_program
from tests.slurm.private_slurm import PrivateSlurm, copy_tree

pytestmark = pytest.mark.timeout_seconds(180)

EPOCHS = 2
RATE = 0.1


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file of images: a class is the brightest of four quarters."""
    random = np.random.default_rng(1)
    images = random.uniform(0, 1, (400, 8, 8)).astype(np.float32)
    labels = random.integers(0, 4, 400)
    for image, label in zip(images, labels, strict=True):
        image[label // 2 * 4 : label // 2 * 4 + 4, label % 2 * 4 : label % 2 * 4 + 4] += 1
    path = tmp_path_factory.mktemp("data") / "data.npz"
    images /= 2
    np.savez(path, x_train=images[:320], y_train=labels[:320], x_test=images[320:], y_test=labels[320:])
    return path


@pytest.fixture(scope="module")
def losses_alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> npt.NDArray[Any]:
    """The losses of one rank, without Slurm."""
    folder = tmp_path_factory.mktemp("alone")
    options = ("--data", data, "--epochs", EPOCHS, "--checkpoint-dir", folder)
    result = run_program(1, ROOT / "examples" / "train.py", *options)
    assert result.returncode == 0, result.stderr
    return losses(folder)


def losses(folder: Path) -> npt.NDArray[Any]:
    """The loss of each step, from the last checkpoint."""
    with h5py.File(folder / f"ckpt-{EPOCHS}.h5") as file:
        return np.asarray(file["history/losses"])


def accuracy(output: str) -> float:
    """What the program has printed last."""
    return float(re.findall("test accuracy ([0-9.]+)", output)[-1])


def test_training_on_two_nodes(
    slurm: PrivateSlurm, data: Path, losses_alone: npt.NDArray[Any], tmp_path: Path
) -> None:
    folder = copy_tree(tmp_path)
    number = slurm.submit("slurm/train.sbatch", "--data", data, "--epochs", EPOCHS, folder=folder)
    job = slurm.wait(number)
    assert (job.state, job.code, job.restarts) == ("COMPLETED", 0, 0), job.output
    assert "MultiWorkerMirroredStrategy: 4 replica(s), 320 training examples" in job.output
    assert accuracy(job.output) > 0.9
    np.testing.assert_allclose(losses(folder / f"checkpoints-{number}"), losses_alone, rtol=2e-5)


def test_mpirun_in_a_job_takes_its_nodes(
    slurm: PrivateSlurm, data: Path, losses_alone: npt.NDArray[Any], tmp_path: Path
) -> None:
    folder = copy_tree(tmp_path)
    command = f"mpirun python examples/train.py --data {data} --epochs {EPOCHS} --checkpoint-dir checkpoints"
    job = slurm.wait(slurm.submit_command(command, folder=folder, options=["--nodes=2", "--ntasks=3"]))
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    assert "MultiWorkerMirroredStrategy: 3 replica(s)" in job.output
    np.testing.assert_allclose(losses(folder / "checkpoints"), losses_alone, rtol=2e-5)


def test_each_element_of_an_array_has_its_own_training(
    slurm: PrivateSlurm, data: Path, losses_alone: npt.NDArray[Any], tmp_path: Path
) -> None:
    folder = copy_tree(tmp_path)
    number = slurm.submit("slurm/array.sbatch", "--data", data, "--epochs", EPOCHS, folder=folder)
    jobs = [slurm.wait(f"{number}_{index}") for index in range(3)]
    assert [(job.state, job.code) for job in jobs] == [("COMPLETED", 0)] * 3, jobs
    # The rates of the script; the second one is the program's default.
    found = [losses(folder / f"checkpoints-{number}-{index}") for index in range(3)]
    np.testing.assert_allclose(found[1], losses_alone, rtol=2e-5)
    # A smaller rate learns less in so few steps.
    assert found[0][-1] < found[1][-1] < found[2][-1]
    assert all("2 replica(s)" in job.output for job in jobs)


SERVERS = """
import json, socket
import numpy as np
import mpidist
strategy = mpidist.ParameterServerStrategy()
with strategy.scope():
    variable = mpidist.Variable(np.zeros(3))
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
index = mpidist.coordinator.experimental_get_current_worker_index

def add():
    variable.assign_add(np.ones(3))
    return index(), socket.gethostname()

values = [coordinator.schedule(add) for _ in range(60)]
coordinator.join()
places = sorted(set(coordinator.fetch(values)))
print(json.dumps([strategy.cluster_resolver.cluster_spec().as_dict(), variable.numpy().tolist(), places]))
"""


def test_components_of_a_heterogeneous_job_are_roles(slurm: PrivateSlurm, tmp_path: Path) -> None:
    folder = copy_tree(tmp_path)
    (folder / "program.py").write_text(SERVERS)
    job = slurm.wait(slurm.submit("slurm/parameter_server.sbatch", "program.py", folder=folder))
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    spec, value, places = json.loads(job.output.splitlines()[-1])
    hosts = {name: [address.partition(":")[0] for address in addresses] for name, addresses in spec.items()}
    assert {name: len(found) for name, found in hosts.items()} == {"chief": 1, "ps": 2, "worker": 3}
    # A node belongs to one component, and workers run where Slurm has put theirs.
    assert len({*hosts["chief"], *hosts["ps"], *hosts["worker"]}) == 4
    assert value == [60.0] * 3
    assert all(hosts["worker"][index] == host for index, host in places), (places, hosts)


def test_parallel_tests_of_the_library(slurm: PrivateSlurm, tmp_path: Path) -> None:
    folder = copy_tree(tmp_path)
    job = slurm.wait(slurm.submit("slurm/tests.sbatch", folder=folder))
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    assert re.search(r"size: 3\b", job.output), job.output
    assert re.search(r"\b[1-9]\d* passed", job.output), job.output
    assert "failed" not in job.output
