"""The memory of each rank while a table is saved and restored that no rank could hold."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from pathlib import Path

import pytest

from tests.helpers.amounts import amount
from tests.helpers.launching import finish, start_program

pytestmark = pytest.mark.timeout_seconds(amount(180, 900))

SERVERS = 4
# So much a rank may have, and 64 MB more. The table has four times as much, and each server an equal part.
ALLOWANCE = amount(32, 512) << 20
HEAP_BYTES = ALLOWANCE + ALLOWANCE // 256 + (1 << 20)
LIMIT = ALLOWANCE + (64 << 20)
PROGRAM = f"""
import os, sys
import numpy as np
import mpidist

resolver = mpidist.cluster_resolver.MPIClusterResolver(num_ps={SERVERS})
open(os.path.join(sys.argv[1], f"{{resolver.task_type}} {{resolver.task_id}} {{os.getpid()}}"), "w").close()
options = mpidist.ServerOptions(heap_bytes={HEAP_BYTES}, slot_bytes=1 << 16)
partitioner = mpidist.experimental.partitioners.FixedShardsPartitioner({SERVERS})
strategy = mpidist.ParameterServerStrategy(resolver, partitioner, options=options)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
initial = mpidist.initializers.RandomUniform(seed=1)
rows = {4 * ALLOWANCE} // 256
with strategy.scope():
    table = mpidist.Variable(initial, shape=(rows, 64), dtype="float32", sparse_gradient=True, name="table")
ids = np.linspace(0, rows - 1, 50).astype(int)
before = coordinator.schedule(lambda: table.sparse_read(ids)).fetch()
assert np.ptp(before) > 0.01
open(os.path.join(sys.argv[1], "saving 0"), "w").close()
path = mpidist.Checkpoint(table=table).save(os.path.join(sys.argv[1], "../table"))
table.scatter_update(mpidist.IndexedSlices(np.zeros((50, 64), "float32"), ids))
assert not table.sparse_read(ids).any()
os.rename(os.path.join(sys.argv[1], "saving 0"), os.path.join(sys.argv[1], "restoring 0"))
mpidist.Checkpoint(table=table).restore(path).assert_consumed()
assert np.array_equal(table.sparse_read(ids), before)
"""


def anonymous(pid: int) -> int:
    """The anonymous memory of a process, in bytes; 0 where it has ended."""
    with contextlib.suppress(OSError):
        found = re.search(r"^Anonymous: +(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return 0


class Peaks(threading.Thread):
    """The largest anonymous memory of each rank, by its role, in each phase of the program."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.found: dict[tuple[str, str], int] = {}
        self.has_ended = False

    def run(self) -> None:
        """Look all the time: what a rank has for a moment counts, too."""
        while not self.has_ended:
            names = [one.rpartition(" ") for one in os.listdir(self.folder)]
            phase = next((name for name, _, pid in names if pid == "0"), "beginning")
            for role, _, pid in names:
                if int(pid):
                    self.found[phase, role] = max(self.found.get((phase, role), 0), anonymous(int(pid)))
            time.sleep(0.001)


def test_no_rank_ever_holds_more_than_its_part_of_a_table(tmp_path: Path) -> None:
    program, folder = tmp_path / "program.py", tmp_path / "ranks"
    program.write_text(PROGRAM)
    folder.mkdir()
    peaks = Peaks(folder)
    peaks.start()
    result = finish(start_program(SERVERS + 2, program, folder), program.name, amount(120, 800))
    peaks.has_ended = True
    peaks.join()
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "table-1.h5").stat().st_size > 4 * ALLOWANCE
    roles = {"chief 0", "worker 0", *(f"ps {task}" for task in range(SERVERS))}
    for phase in ("saving", "restoring"):
        own = {role: anonymous for (when, role), anonymous in peaks.found.items() if when == phase}
        assert own.keys() == roles
        for role, anonymous in own.items():
            # Every rank has all heaps mapped. Only its own one is a server's memory, all of which counts here.
            total = anonymous + HEAP_BYTES * role.startswith("ps")
            assert (1 << 24) < anonymous < total + 1 <= LIMIT, f"{role} has {total >> 20} MB while {phase}"
