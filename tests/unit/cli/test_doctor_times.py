"""What the doctor makes of times: a collective that is slower than MPI, and hosts that are slower than others."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpidist.cli.doctor.times import Sums, _free_memory, _shown, name_size


def test_sizes_have_names_for_people() -> None:
    assert [name_size(size) for size in (8, 1 << 10, 1 << 16, 1 << 20, 1 << 26)] == [
        "8 B", "1 KiB", "64 KiB", "1 MiB", "64 MiB"
    ]


def test_the_bandwidth_is_that_of_the_bus() -> None:
    """Each byte of an array goes out and comes in once, apart from a rank's own part."""
    found = _shown(Sums(1 << 20, [(1e-3, 2e-3)] * 5), 4)
    assert found.state == "ok"
    assert found.data["bus_GB_per_s"] == pytest.approx(1.5 * (1 << 20) / 1e6)
    assert (found.data["us"], found.data["mpi_us"], found.data["looks"]) == (1000.0, 2000.0, 5)
    assert "1000.0 us   1.573 GB/s, MPI alone    2000.0 us   0.786 GB/s (median of 5)" in found.text


@pytest.mark.parametrize(("looks", "is_slower"), [
    ([(2e-3, 1e-3)] * 5, True),
    ([(2e-3, 1e-3)] * 4, False),
    ([(1.4e-3, 1e-3)] * 9, False),
    # A disturbance of some looks.
    ([(2e-3, 1e-3)] * 7 + [(1e-3, 1e-3)] * 3, False),
    # The time of Python.
    ([(40e-6, 4e-6)] * 9, False),
], ids=["slower", "too few looks", "a little", "some looks", "small"])
def test_when_a_collective_is_slower(looks: list[tuple[float, float]], is_slower: bool) -> None:
    assert Sums(1 << 20, looks).is_slower() == is_slower


def test_a_slow_collective_has_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIDIST_COLLECTIVE", raising=False)
    slow = Sums(1 << 20, [(4e-3, 2e-3)] * 5)
    found = _shown(slow, 2)
    assert (found.state, "2.0 times as long as MPI alone" in found.text) == ("note", True)
    assert found.fix == "export MPIDIST_COLLECTIVE=MPI"
    monkeypatch.setenv("MPIDIST_COLLECTIVE", "RING")
    assert _shown(slow, 2).fix == "unset MPIDIST_COLLECTIVE"


def test_free_memory(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  100 kB\nMemAvailable:   7 kB\n")
    assert _free_memory(tmp_path) == 7 << 10
    assert _free_memory(tmp_path / "nothing") > 1 << 50
