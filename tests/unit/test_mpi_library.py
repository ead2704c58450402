"""What MPI libraries call themselves, and what each cannot do."""

from __future__ import annotations

import pytest

from mpidist.comm.mpi_library import Library, device_limit, read_library


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
