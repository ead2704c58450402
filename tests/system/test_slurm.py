"""The scripts in slurm/, submitted to a Slurm of four nodes: what their jobs compute, and where."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.hosts.virtual_hosts import ROOT
from tests.slurm.private_slurm import PrivateSlurm, copy_tree, starts_again
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


@starts_again
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


@starts_again
def test_mpirun_in_a_job_takes_its_nodes(
    slurm: PrivateSlurm, data: Path, losses_alone: Array, tmp_path: Path
) -> None:
    folder = copy_tree(tmp_path)
    command = f"mpirun python examples/train.py --data {data} --epochs {EPOCHS} --checkpoint-dir checkpoints"
    job = slurm.wait(slurm.submit_command(command, folder=folder, options=["--nodes=2", "--ntasks=3"]))
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    assert "MultiWorkerMirroredStrategy: 3 replica(s)" in job.output
    np.testing.assert_allclose(losses(folder / "checkpoints"), losses_alone, rtol=2e-5)


@starts_again
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
    # All begin alike; then the largest rate goes too far, and the smallest one learns less.
    assert found[0][0] == found[1][0] == found[2][0]
    assert found[0][1] > found[1][1] + 0.1
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


@starts_again
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


@starts_again
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


@starts_again
def test_parallel_tests_of_the_library(slurm: PrivateSlurm, tmp_path: Path) -> None:
    folder = copy_tree(tmp_path)
    job = slurm.wait(slurm.submit("slurm/tests.sbatch", folder=folder))
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    assert re.search(r"size: 3\b", job.output), job.output
    assert re.search(r"\b[1-9]\d* passed", job.output), job.output
    assert "failed" not in job.output


# In Apptainer's place: it takes the script's arguments and variables as Apptainer does, and like it leaves /dev/shm and
# processes shared. Mounts are its own, and of its environment only what Apptainer would give to the command is new.
STAND_IN = """#!/bin/bash
set -eu
[ "$1" = exec ] && [ -e "$2" ] || { echo "apptainer exec IMAGE COMMAND, got: $*" >&2; exit 64; }
image=$2
shift 2
IFS=, read -ra folders <<< "$APPTAINER_BIND"
for folder in "${folders[@]}"; do [ -d "$folder" ] || { echo "no folder $folder" >&2; exit 65; }; done
for name in "${!APPTAINERENV_@}"; do export "${name#APPTAINERENV_}=${!name}"; done
echo "contained $image $APPTAINER_BIND $MPI4PY_LIBMPI $*" >&2
exec unshare --mount "$@"
"""


@starts_again
def test_each_rank_trains_in_a_container(
    slurm: PrivateSlurm, data: Path, losses_alone: Array, tmp_path: Path
) -> None:
    """Apptainer itself is not run: a program of its name stands in for it."""
    folder = copy_tree(tmp_path)
    place = folder / "bin"
    place.mkdir()
    (place / "apptainer").write_text(STAND_IN)
    (place / "apptainer").chmod(0o755)
    (folder / "image.sif").touch()
    mpi, other = folder / "mpi", folder / "other"
    (mpi / "lib").mkdir(parents=True)
    libraries = sorted((Path(sys.prefix) / "lib").iterdir())
    for one in libraries:
        (mpi / "lib" / one.name).symlink_to(one)
    # In Python's packages that name is a text for linkers; at a site it is the library.
    numbered = [one for one in libraries if one.name.startswith("libmpi.so.")]
    if not numbered:
        pytest.skip(f"no libmpi.so in {sys.prefix}/lib: MPI is not that of Python's packages")
    (mpi / "lib" / "libmpi.so").unlink(missing_ok=True)
    (mpi / "lib" / "libmpi.so").symlink_to(numbered[0])
    other.mkdir()
    number = slurm.submit(
        "slurm/container.sbatch", "--data", data, "--epochs", EPOCHS, folder=folder,
        PATH=f"{place}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        IMAGE="image.sif", MPI_DIR=str(mpi), BIND=str(other),
    )
    job = slurm.wait(number)
    assert (job.state, job.code) == ("COMPLETED", 0), job.output
    line = f"contained image.sif {mpi},{other} {mpi}/lib/libmpi.so python examples/train.py "
    assert job.output.count(line) == 4, job.output
    assert "MultiWorkerMirroredStrategy: 4 replica(s)" in job.output
    np.testing.assert_allclose(losses(folder / f"checkpoints-{number}"), losses_alone, rtol=2e-5)
