"""What MPI libraries call themselves, and what each cannot do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.comm.group.mpi_library import Library, check_process_manager, device_limit, read_library
from mpidist.errors import LauncherError
from tests.helpers.launch_environments import ranks_of
from tests.helpers.launching import find_mpirun, is_open_mpi, launch_environment


@pytest.mark.parametrize(
    ("text", "library"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: x\nMPICH ABI: 17", Library("MPICH", (5, 0, 2))),
        ("Open MPI v5.0.11, package: Open MPI root@x Distribution, ident: 5.0.11\0", Library("Open MPI", (5, 0, 11))),
        ("Intel(R) MPI Library 2021.18 for Linux* OS\n", Library("Intel MPI", (2021, 18))),
        ("MVAPICH2 Version      :       2.3.7\nMVAPICH2 Release date : x", Library("MVAPICH", (2, 3, 7))),
        ("MVAPICH Version:\t4.0\nMVAPICH Release date", Library("MVAPICH", (4, 0))),
        (
            "MPI VERSION    : CRAY MPICH version 8.1.25.17 (ANL base 3.4a2)\nMPI BUILD INFO",
            Library("Cray MPICH", (8, 1, 25, 17)),
        ),
        ("something new", Library("unknown MPI", ())),
    ],
)
def test_a_library_is_known_by_its_version_text(text: str, library: Library) -> None:
    assert read_library(text) == library


@pytest.mark.parametrize(
    ("library", "limit"),
    [
        (Library("Open MPI", (4, 1, 5)), "Open MPI 4.1.5: Allreduce on GPU memory"),
        (Library("Open MPI", (4, 1, 4)), None),
        (Library("Open MPI", (4, 1, 6)), None),
        (Library("MPICH", (3, 3, 2)), "before version 3.4"),
        (Library("MPICH", (5, 0, 2)), None),
        (Library("unknown MPI", ()), None),
    ],
)
def test_limits_hold_for_their_versions(library: Library, limit: str | None) -> None:
    found = device_limit(library)
    assert (found is None) is (limit is None), found
    assert limit is None or (found is not None and limit in found)


@pytest.mark.parametrize(
    ("run", "version", "is_refused"),
    [
        ("srun pmix", "MPICH Version:      5.0.2\nMPICH configure:    --with-device=ch4:ucx,ofi", True),
        ("srun pmix", "MPICH Version:      4.2.0\nMPICH configure:    --with-pmix=/usr", False),
        ("srun pmix", "Open MPI v5.0.11, package", False),
        ("srun pmi2", "MPICH Version:      5.0.2\nMPICH configure:    --with-device=ch4:ucx,ofi", False),
        ("Open MPI in sbatch", "MPICH Version:      5.0.2\nMPICH configure:    --with-device=ch4:ucx,ofi", False),
    ],
)
def test_mpich_without_pmix_is_refused_under_srun_pmix(
    run: str, version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", ranks_of(run)[0])
    if not is_refused:
        check_process_manager(version)
        return
    with pytest.raises(
        LauncherError, match=r"srun --mpi=pmix started 5 ranks, and MPICH 5.0.2 is built without PMIx.*srun --mpi=pmi2"
    ):
        check_process_manager(version)


@pytest.mark.parametrize(
    ("version", "more", "is_refused"),
    [
        ("MPICH Version:      5.0.2", {"PMIX_NAMESPACE": "slurm.pmix.1.0"}, True),
        ("MPICH Version:      5.0.2", {}, False),
        ("MPICH Version:      5.0.2", {"PMIX_NAMESPACE": "slurm.pmix.1.0", "MPIR_CVAR_PMI_VERSION": "1"}, False),
        ("MPICH Version:      4.0.3", {"PMIX_NAMESPACE": "slurm.pmix.1.0"}, False),
    ],
)
def test_mpich_whose_daemons_have_pmix_is_refused(
    version: str, more: dict[str, str], is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**ranks_of("Hydra in sbatch")[0], **more})
    if not is_refused:
        check_process_manager(version)
        return
    with pytest.raises(LauncherError, match=r"PMIX_NAMESPACE=slurm.pmix.1.0.*export SLURM_MPI_TYPE=none"):
        check_process_manager(version)


@pytest.mark.parametrize("rank", [0, 4])
def test_mpich_under_srun_pmix_ends_with_one_line_that_says_so(rank: int, tmp_path: Path) -> None:
    """The real library: it would abort in its start."""
    if is_open_mpi(find_mpirun()):
        pytest.skip("Open MPI speaks PMIx")
    program = tmp_path / "program.py"
    program.write_text("import mpidist\nmpidist.MultiWorkerMirroredStrategy()\nprint('built')\n")
    environment = {**launch_environment(), **ranks_of("srun pmix")[rank], "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout) == (1, "")
    expected = "mpidist: launcher and MPI library do not match: srun --mpi=pmix started 5 ranks, and MPICH "
    assert result.stderr.startswith(expected) if rank == 0 else result.stderr == "", "the first rank speaks for all"
