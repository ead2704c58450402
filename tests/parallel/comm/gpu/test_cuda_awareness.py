"""The question whether MPI takes GPU memory, asked by all ranks of a running job."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpidist.comm.gpu import cuda_awareness
from mpidist.comm.gpu.cuda_awareness import Probe
from mpidist.comm.group import mpi_library
from mpidist.comm.group.communicator import Communicator

pytestmark = pytest.mark.mpi(min_size=2)


def test_all_ranks_get_one_answer(
    communicator: Communicator, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(mpi_tmp_path))
    answer = cuda_awareness.find_out(communicator)
    assert len(set(communicator.all_gather_object(answer))) == 1
    assert answer.is_aware is not None
    if cuda_awareness.query() is False:
        assert answer.is_aware is False
        assert str(mpi_library.loaded_library()) in answer.why


def test_the_loaded_library_is_known(communicator: Communicator) -> None:
    library = mpi_library.loaded_library()
    assert library.name in ("MPICH", "Open MPI", "Intel MPI")
    assert library.version


def test_a_child_beside_running_ranks_starts_mpi_alone(communicator: Communicator, mpi_tmp_path: Path) -> None:
    # Each rank's own child; with the launcher's variables it would end the job.
    answer = Probe("numpy", mpi_tmp_path / str(communicator.rank)).answer(str(mpi_library.loaded_library()))
    assert answer.is_aware is True, answer
    communicator.barrier()
