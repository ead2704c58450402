"""The scripts in slurm/, submitted to a Slurm of four nodes: what their jobs compute, and where."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.containers import PACKAGES, site_mpi
from tests.hosts.virtual_hosts import ROOT
from tests.slurm.private_slurm import PrivateSlurm, copy_tree
from tests.slurm.training import Array, losses, train_without_slurm, write_data

pytestmark = pytest.mark.timeout_seconds(180)

EPOCHS = 2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is learnt."""
    return write_data(tmp_path_factory.mktemp("data") / "data.npz", 320)


@pytest.fixture(scope="module")
def losses_alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Array:
    """The losses of one rank, without Slurm."""
    return train_without_slurm(1, tmp_path_factory.mktemp("alone"), data, EPOCHS)


def accuracy(output: str) -> float:
    """What the program has printed last."""
    return float(re.findall("test accuracy ([0-9.]+)", output)[-1])


def test_training_on_two_nodes(
    slurm: PrivateSlurm, data: Path, losses_alone: Array, tmp_path: Path
) -> None:
    folder = copy_tree(tmp_path)
    number = slurm.submit("slurm/train.sbatch", "--data", data, "--epochs", EPOCHS, folder=folder)
    job = slurm.wait(number)
    assert (job.state, job.code, job.restarts) == ("COMPLETED", 0, 0), job.output
    assert "MultiWorkerMirroredStrategy: 4 replica(s), 320 training examples" in job.output
    assert accuracy(job.output) > 0.9
    np.testing.assert_allclose(losses(folder / f"checkpoints-{number}"), losses_alone, rtol=2e-5)


def test_mpirun_in_a_job_takes_its_nodes(
    slurm: PrivateSlurm, data: Path, losses_alone: Array, tmp_path: Path
) -> None:
    folder = copy_tree(tmp_path)
    command = f"mpirun python examples/train.py --data {data} --epochs {EPOCHS} --checkpoint-dir checkpoints"
    job = slurm.wait(slurm.submit_command(command, folder=folder, options=["--nodes=2", "--ntasks=3"]))
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    assert "MultiWorkerMirroredStrategy: 3 replica(s)" in job.output
    np.testing.assert_allclose(losses(folder / "checkpoints"), losses_alone, rtol=2e-5)


def test_each_element_of_an_array_has_its_own_training(
    slurm: PrivateSlurm, data: Path, losses_alone: Array, tmp_path: Path
) -> None:
    folder = copy_tree(tmp_path)
    number = slurm.submit("slurm/array.sbatch", "--data", data, "--epochs", EPOCHS, folder=folder)
    jobs = [slurm.wait(f"{number}_{index}") for index in range(3)]
    assert [(job.state, job.code) for job in jobs] == [("COMPLETED", 0)] * 3, jobs
    # The rates of the script; the second one is the program's default.
    found = [losses(folder / f"checkpoints-{number}-{index}") for index in range(3)]
    np.testing.assert_allclose(found[1], losses_alone, rtol=2e-5)
    # All begin alike; then a larger rate learns more, once the momentum counts.
    assert found[0][0] == found[1][0] == found[2][0]
    assert np.all(found[0][2:5] + 0.05 < found[1][2:5])
    assert np.all(found[2][1:] > found[1][1:])
    assert all("2 replica(s)" in job.output for job in jobs)


SEEN_GPUS = """
import os
from mpidist.cluster_resolver import SlurmClusterResolver
resolver = SlurmClusterResolver()
seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all"), os.environ["SLURM_GPUS_ON_NODE"]
print(resolver.step.hosts[resolver.task_id], resolver.task_id, *seen, resolver.num_accelerators().get("GPU"))
"""
# As `mpidist sbatch` writes it, and one GPU for each task.
OTHER_GPUS = """
export SLURM_MPI_TYPE=none
srun python examples/train.py
echo ---
srun --gpus-per-task=1 --gpus-per-node=2 python examples/train.py
"""


def test_each_rank_sees_all_gpus_of_its_node(slurm: PrivateSlurm, tmp_path: Path) -> None:
    """They are fake, so another program stands in the example's place."""
    (tmp_path / "slurm").mkdir(exist_ok=True)
    (tmp_path / "examples").mkdir(exist_ok=True)
    script = (ROOT / "slurm" / "train_gpu.sbatch").read_text()
    # What the cluster has.
    assert script.count("-per-node=4\n") == 2
    (tmp_path / "slurm" / "train_gpu.sbatch").write_text(script.replace("-per-node=4\n", "-per-node=2\n"))
    (tmp_path / "examples" / "train.py").write_text(SEEN_GPUS)
    options = ["--cpus-per-task=1", "--nodelist=n1,n2"]
    other = slurm.submit_command(OTHER_GPUS, folder=tmp_path, options=[
        "--nodelist=n3", "--ntasks-per-node=2", "--gpus-per-node=2",
    ])
    job = slurm.wait(slurm.submit("slurm/train_gpu.sbatch", folder=tmp_path, options=options))
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    places = [("n1", 0), ("n1", 1), ("n2", 2), ("n2", 3)]
    assert sorted(job.output.splitlines()) == [f"{node} {rank} all 2 None" for node, rank in places], job
    job = slurm.wait(other)
    # `srun` says there where it waits for the nodes.
    said = "".join(line for line in job.output.splitlines(keepends=True) if not line.startswith("srun: "))
    together, bound = (sorted(part.splitlines()) for part in said.split("---\n"))
    assert together == ["n3 0 0,1 2 1", "n3 1 0,1 2 1"], job
    assert bound == ["n3 0 0 2 1", "n3 1 1 2 1"], job


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
    # Slurm's PMI2 misreads the long addresses of MPICH's UCX with all transports: of eight such jobs in a row none
    # started, and all of eight with these.
    job = slurm.wait(slurm.submit("slurm/tests.sbatch", folder=folder, UCX_TLS="tcp,self,sysv"))
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    assert re.search(r"size: 3\b", job.output), job.output
    assert re.search(r"\b[1-9]\d* passed", job.output), job.output
    assert "failed" not in job.output


# Prints where each rank is, after messages that MPI would copy from process to process, and after training.
IN_CONTAINERS = """
import json, os, pathlib
import numpy as np
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
ranks = strategy.communicator
with strategy.scope():
    variable = mpidist.Variable(np.zeros(1_000_000))
    optimizer = mpidist.optimizers.SGD(0.5)
for _ in range(3):
    strategy.run(lambda: optimizer.apply_gradients([(np.full(1_000_000, ranks.rank + 1.0), variable)]))
from mpi4py import MPI
right, left, received = (ranks.rank + 1) % 4, (ranks.rank - 1) % 4, np.empty(1_000_000)
MPI.COMM_WORLD.Sendrecv(np.full(1_000_000, float(ranks.rank)), right, recvbuf=received, source=left)
libraries = {line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if "libmpi." in line}
told = ranks.all_gather_object([
    ranks.node_sizes, float(variable.numpy()[-1]), bool(received[-1] == left), mpidist.__file__, sorted(libraries),
    os.environ["APPTAINER_CONTAINER"], pathlib.Path("/requirements.txt").exists(), os.listdir("/bound"),
    os.readlink("/proc/self/ns/user"),
])
if ranks.rank == 0:
    print(json.dumps(told))
"""


@pytest.fixture
def containers(image: Path, tmp_path: Path) -> dict[str, str]:
    """What `container.sbatch` is told: the image, the MPI of this environment as that of a site, and its folders."""
    found = site_mpi(tmp_path)
    if found is None:
        pytest.skip(f"no libmpi.so in {sys.prefix}/lib: MPI is not that of Python's packages")
    mpi, libraries = found
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    # No mpidist but the image's.
    return {
        "IMAGE": str(image), "MPI_DIR": str(mpi), "BIND": f"{libraries},{other}:/bound", "PYTHONPATH": "",
    }


def test_each_rank_trains_in_a_container(
    slurm: PrivateSlurm, containers: dict[str, str], data: Path, losses_alone: Array, tmp_path: Path
) -> None:
    """As where Apptainer has no setuid program, which is the default: each container has a namespace of users."""
    # The checkout may lie where containers do not see it.
    for name in ("slurm", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, dirs_exist_ok=True)
    number = slurm.submit(
        "slurm/container.sbatch", "--data", data, "--epochs", EPOCHS, folder=tmp_path, APPTAINER_USERNS="1",
        **containers,
    )
    job = slurm.wait(number)
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    assert "MultiWorkerMirroredStrategy: 4 replica(s)" in job.output
    np.testing.assert_allclose(losses(tmp_path / f"checkpoints-{number}"), losses_alone, rtol=2e-5)


@pytest.mark.parametrize("users", ["", "1"])
def test_ranks_in_containers_share_their_node(
    slurm: PrivateSlurm, containers: dict[str, str], users: str, tmp_path: Path
) -> None:
    """Also where each container has a namespace of users, in which MPI may not copy from process to process."""
    (tmp_path / "examples").mkdir(exist_ok=True)
    (tmp_path / "examples" / "train.py").write_text(IN_CONTAINERS)
    script = ROOT / "slurm" / "container.sbatch"
    job = slurm.wait(slurm.submit(script, folder=tmp_path, APPTAINER_USERNS=users, **containers))
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    assert "ERROR" not in job.output
    told = json.loads(job.output.splitlines()[-1])
    for sizes, value, is_received, module, libraries, image, is_image, bound, _ in told:
        assert (sizes, value, is_received, bound) == ([2, 2], -15.0, True, ["file"])
        assert (image, is_image, module) == (containers["IMAGE"], True, f"/{PACKAGES}/mpidist/__init__.py")
        # The kernel knows the library by the name behind the links.
        assert libraries == [str((Path(containers["MPI_DIR"]) / "lib" / "libmpi.so").resolve())]
    assert len({one[-1] for one in told}) == (4 if users else 1)
