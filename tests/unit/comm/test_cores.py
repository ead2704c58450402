"""Cores: those that a process may use, by affinity and by the quota of its control groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.comm.cores import Cores, Quota, count_cores, own_cores

V2 = "38 31 0:41 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V1 = "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"


def machine(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """A folder with the files of /proc and /sys that a machine has."""
    for name, text in {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def quota_of(root: Path) -> float | None:
    quota = own_cores(root).quota
    return None if quota is None else quota.cores


@pytest.mark.parametrize(("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("broken", None)])
def test_the_quota_of_a_container(tmp_path: Path, text: str, cores: float | None) -> None:
    assert quota_of(machine(tmp_path, "0::/\n", V2, {"sys/fs/cgroup/cpu.max": text})) == cores


def test_the_tightest_quota_of_nested_groups_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/slurm/job_7"
    files = {f"{group}/step_0/cpu.max": "max 100000", f"{group}/cpu.max": "200000 100000"}
    root = machine(tmp_path, "0::/slurm/job_7/step_0\n", V2, {**files, "sys/fs/cgroup/slurm/cpu.max": "800000 100000"})
    status = (root / group).stat()
    assert own_cores(root).quota == Quota((status.st_dev, status.st_ino), 2.0)


@pytest.mark.parametrize("mounted", ["/", "/docker/abc"])
def test_the_quota_of_the_older_control_groups(tmp_path: Path, mounted: str) -> None:
    group = "sys/fs/cgroup/cpu,cpuacct" + ("/docker/abc" if mounted == "/" else "")
    files = {f"{group}/cpu.cfs_quota_us": "50000", f"{group}/cpu.cfs_period_us": "100000"}
    assert quota_of(machine(tmp_path, "4:cpu,cpuacct:/docker/abc\n", V1.format(root=mounted), files)) == 0.5
    (tmp_path / group / "cpu.cfs_quota_us").write_text("-1")
    assert quota_of(tmp_path) is None


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    assert own_cores(tmp_path) == Cores(frozenset(os.sched_getaffinity(0)), None)


def test_ranks_count_the_union_of_their_cores() -> None:
    here, there = Quota((1, 1), 1.5), Quota((1, 2), 2.0)
    four = frozenset(range(4))

    def count(*claims: tuple[set[int] | frozenset[int], Quota | None]) -> int:
        return count_cores([Cores(frozenset(numbers), quota) for numbers, quota in claims])

    assert count(({0}, None), ({0}, None)) == 1
    assert count(({0}, None), ({1}, None)) == 2
    assert count((four, here), (four, here)) == 1, "ranks of one container share its quota"
    assert count((four, here), (four, there)) == 3
    assert count((four, here), (four, None)) == 4
    assert count(({3}, there)) == 1
    assert count((four, Quota((1, 1), 0.25))) == 1, "a rank has some time of a core"


def test_a_bound_process_counts_its_own_cores() -> None:
    code = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n" \
        "from mpidist.comm.cores import count_cores, own_cores\n" \
        "print(count_cores([own_cores()]))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout == "1\n"
