"""NUMA domains, as the files of the system describe them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpidist.comm.memory.numa import domain_count, pages_by_domain


@pytest.mark.parametrize(("text", "count"), [("0", 1), ("0-1", 2), ("0,2-3", 3), ("", 1)])
def test_domains_are_counted(tmp_path: Path, text: str, count: int) -> None:
    file = tmp_path / "sys/devices/system/node/has_memory"
    file.parent.mkdir(parents=True)
    file.write_text(text + "\n")
    assert domain_count(tmp_path) == count
    assert domain_count(tmp_path / "elsewhere") == 1


def test_pages_are_those_of_the_mapping(tmp_path: Path) -> None:
    file = tmp_path / "proc/self/numa_maps"
    file.parent.mkdir(parents=True)
    file.write_text(
        "7f0000000000 default file=/dev/shm/#9\\040(deleted) dirty=300 mapmax=2 N0=256 N1=44 kernelpagesize_kB=4\n"
        "7f0000200000 bind:1 file=/lib/N2=5 mapped=3 N1=3 kernelpagesize_kB=4\n7f0000300000 default\n"
    )
    assert pages_by_domain(0x7F0000000000, tmp_path) == {0: 256, 1: 44}
    assert pages_by_domain(0x7F0000200000, tmp_path) == {1: 3}
    assert pages_by_domain(0x7F0000300000, tmp_path) == {}
    assert pages_by_domain(0x7F0000400000, tmp_path) == {}
    assert pages_by_domain(0, tmp_path / "elsewhere") == {}
