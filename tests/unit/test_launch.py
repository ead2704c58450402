"""What launchers say in the environment."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys

import pytest

import mpidist
from mpidist import launch
from tests.helpers.launch_environments import ranks_of
from tests.helpers.launching import launch_environment

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        (OPEN_MPI, ("Open MPI mpirun", 2, 4, 1)),
        (HYDRA, ("MPICH mpirun (Hydra)", 1, 3, 1)),
        (SRUN, ("srun", 5, 8, 1)),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"}, ("MVAPICH mpirun", 0, 2, None)),
        ({"PALS_RANKID": "3", "PMI_SIZE": "4"}, ("PALS mpiexec", 3, 4, None)),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"}, ("Flux", 0, 1, None)),
        ({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2"}, ("jsrun", 1, 2, None)),
        # `srun --mpi=pmi2` and Hydra set the same variables, and only Hydra the rank within the node.
        ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "9"}, ("srun --mpi=pmi2", 5, 8, 1)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8"}, ("a launcher over PMI", 5, 8, None)),
        # The batch step's own variables, inherited by ranks of an mpirun: the inner launcher counts.
        ({**OPEN_MPI, **SRUN, "SLURM_PROCID": "0"}, ("Open MPI mpirun", 2, 4, 1)),
        ({**HYDRA, **SRUN, "SLURM_PROCID": "0"}, ("MPICH mpirun (Hydra)", 1, 3, 1)),
        # `sbatch` and `salloc` alone start no ranks.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, None),
        ({"PMI_RANK": "", "PMI_SIZE": "x"}, None),
        ({"OMPI_COMM_WORLD_RANK": "-1", "OMPI_COMM_WORLD_SIZE": "2"}, None),
    ],
)
def test_innermost_launcher_counts(environment: dict[str, str], expected: tuple[object, ...] | None) -> None:
    place = launch.read(environment)
    assert place == (None if expected is None else launch.Launch(*expected))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "launcher", "node_ranks"),
    [
        ("Open MPI", "Open MPI mpirun", [0, 2, 1]),
        ("Hydra", "MPICH mpirun (Hydra)", [0, 1, 2]),
        ("Intel MPI", "Intel MPI mpirun (Hydra)", [0, 1]),
        ("srun pmi2", "srun --mpi=pmi2", [0, 1, 2, 0, 1]),
        ("srun pmix", "srun --mpi=pmix", [0, 1, 2, 0, 1]),
        ("srun none", "srun", [0, 1, 2, 0, 1]),
        ("srun cyclic", "srun", [0, 0, 1, 1, 2]),
        ("het", "srun --mpi=pmi2", [0, 1, 0, 1, 0]),
        # SLURM_LOCALID is 0 on all of these ranks: it is that of the script, or of mpirun's daemon.
        ("Hydra in sbatch", "MPICH mpirun (Hydra)", [0, 1, 2, 0, 1]),
        ("Open MPI in sbatch", "Open MPI mpirun", [0, 1, 2, 0, 1]),
        ("MVAPICH2", "MVAPICH mpirun", [0, 1]),
        ("MVAPICH 3", "MVAPICH mpirun", [0, 1]),
        ("PALS", "PALS mpiexec", [0, 0]),
        ("srun on a Cray", "PALS mpiexec", [0, 0]),
        ("Flux", "Flux", [0, 1]),
        ("jsrun", "jsrun", [0, 1]),
    ],
)
def test_each_rank_of_a_recorded_run_knows_its_place(name: str, launcher: str, node_ranks: list[int]) -> None:
    places = [launch.read(environment) for environment in ranks_of(name)]
    size = len(node_ranks)
    assert places == [launch.Launch(launcher, rank, size, node_rank) for rank, node_rank in enumerate(node_ranks)]


@pytest.mark.parametrize("name", ["sbatch script", "salloc", "het script"])
def test_a_job_without_a_step_has_no_ranks(name: str) -> None:
    assert [launch.read(environment) for environment in ranks_of(name)] == [None]


def test_world_is_this_process_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for launcher in launch.LAUNCHERS:
        monkeypatch.delenv(launcher.rank, raising=False)
    assert (launch.world_rank(), launch.world_size()) == (0, 1)
    for name, value in HYDRA.items():
        monkeypatch.setenv(name, value)
    assert (launch.world_rank(), launch.world_size()) == (1, 3)


@pytest.mark.parametrize("environment", [OPEN_MPI, HYDRA, SRUN])
def test_the_first_rank_is_rank_0_of_the_job(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for launcher in launch.LAUNCHERS:
        monkeypatch.delenv(launcher.rank, raising=False)
    assert mpidist.is_first_rank()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert not mpidist.is_first_rank()
    rank = next(launcher.rank for launcher in launch.LAUNCHERS if launcher.rank in environment)
    monkeypatch.setenv(rank, "0")
    assert mpidist.is_first_rank()


def test_launch_itself_is_not_public() -> None:
    """A fresh process: an import of the submodule elsewhere would make it an attribute of the package."""
    code = "import mpidist; print(hasattr(mpidist, 'launch'), 'launch' in dir(mpidist), mpidist.is_first_rank())"
    result = subprocess.run(
        [sys.executable, "-c", code], env={**launch_environment(), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=False, timeout=60,
    )
    assert result.stdout.split() == ["False", "False", "True"], result.stderr


def test_children_of_multiprocessing_know_it() -> None:
    assert not launch.is_multiprocessing_child()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(launch.is_multiprocessing_child)


def test_a_child_of_multiprocessing_must_not_start_mpi() -> None:
    """A data loader's worker that builds a strategy gets an error, instead of killing the job."""
    code = (
        "import multiprocessing, os\n"
        "def build():\n"
        "    import mpidist\n"
        "    try:\n        mpidist.MirroredStrategy()\n"
        "    except Exception as error:\n        return type(error).__name__ + ': ' + str(error)\n"
        "if __name__ == '__main__':\n"
        "    os.environ.update(PMI_RANK='0', PMI_SIZE='2')\n"
        "    with multiprocessing.get_context('fork').Pool(1) as pool:\n        print(pool.apply(build))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env={**launch_environment(), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=False, timeout=60,
    )
    assert "LauncherError: a child process of multiprocessing" in result.stdout, result.stderr


@pytest.mark.parametrize(("name", "size"), [
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "3"), ("MPI_LOCALNRANKS", "3"), ("SLURM_NTASKS_PER_NODE", "3"), ("PMI_SIZE", None),
])
def test_the_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch, name: str, size: str | None) -> None:
    for variable in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "3")
    assert launch.node_size() == (None if size is None else int(size))
