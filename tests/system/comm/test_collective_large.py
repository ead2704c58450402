"""More elements than an MPI count holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import run_program

pytestmark = pytest.mark.timeout_seconds(240)

PROGRAM = """
import sys
import numpy as np
from mpidist.comm.choice import selection
from mpidist.comm.group.opening import open_communicator
from mpidist.options import CommunicationOptions

COUNT = 2**31 + 5
world = open_communicator()
collective = selection.choose(world, CommunicationOptions(implementation=sys.argv[1]))
array = np.empty(COUNT, np.int8)
# A period that no chunk and no half of the array is a multiple of.
pattern = (np.arange(100_003) % 50).astype(np.int8)
for begin in range(0, COUNT, pattern.size):
    piece = array[begin : begin + pattern.size]
    piece[...] = pattern[: piece.size]
array += world.rank
collective.all_reduce(array, in_place=True)
wanted = pattern * 2 + 1
for begin in range(0, COUNT, pattern.size):
    piece = array[begin : begin + pattern.size]
    if not np.array_equal(piece, wanted[: piece.size]):
        raise SystemExit(f"wrong values from element {begin} on")
world.barrier()
if world.rank == 0:
    print("RIGHT")
"""
BYTES = 2 * (2**31 + 5)


def available_bytes() -> int:
    """Memory that can be had now, on Linux."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


# MPI sums bytes far more slowly: on few cores it takes minutes.
@pytest.mark.parametrize("implementation", ["NODE", "RING", pytest.param("MPI", marks=pytest.mark.long)])
def test_more_than_two_to_the_31_elements(tmp_path: Path, implementation: str) -> None:
    if available_bytes() < 1.5 * BYTES:
        pytest.skip(f"needs {1.5 * BYTES / 2**30:.0f} GiB of memory, {available_bytes() / 2**30:.0f} GiB are left")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = run_program(2, program, implementation, timeout_seconds=200 if implementation != "MPI" else 1500)
    assert result.stdout.strip() == "RIGHT", result.stdout + result.stderr
    assert result.returncode == 0
