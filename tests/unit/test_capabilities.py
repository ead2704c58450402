"""What MPI libraries call themselves, and what each cannot do."""

from __future__ import annotations

import pytest

from mpidist.comm.capabilities import Library, Operation, limit_of, read_library


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
    ("library", "operation", "limit"),
    [
        (Library("Open MPI", (4, 1, 5)), Operation.DEVICE_COLLECTIVES, "Open MPI 4.1.5: Allreduce on GPU memory"),
        (Library("Open MPI", (4, 1, 4)), Operation.DEVICE_COLLECTIVES, None),
        (Library("Open MPI", (4, 1, 6)), Operation.DEVICE_COLLECTIVES, None),
        (Library("Open MPI", (5, 0, 11)), Operation.LARGE_COUNTS, "before version 6"),
        (Library("MPICH", (5, 0, 2)), Operation.LARGE_COUNTS, None),
        (Library("MPICH", (3, 4, 3)), Operation.LARGE_COUNTS, "before version 4"),
        (Library("MPICH", (3, 3, 2)), Operation.DEVICE_MESSAGES, "before version 3.4"),
        (Library("unknown MPI", ()), Operation.DEVICE_COLLECTIVES, None),
    ],
)
def test_limits_hold_for_their_versions(library: Library, operation: Operation, limit: str | None) -> None:
    found = limit_of(library, operation)
    assert (found is None) is (limit is None), found
    assert limit is None or (found is not None and limit in found)


@pytest.mark.parametrize("operation", [Operation.DEVICE_NONBLOCKING, Operation.DEVICE_WINDOWS, Operation.HALF_SUMS])
@pytest.mark.parametrize("name", ["Open MPI", "MPICH", "Cray MPICH", "unknown MPI"])
def test_what_no_library_promises_is_never_used(name: str, operation: Operation) -> None:
    assert limit_of(Library(name, (9,)), operation) is not None
