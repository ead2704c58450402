"""The sizes of the automatic collective: rules, the file that keeps measured ones, and where two ways cross."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path

import pytest

from mpidist.comm.choice.measuring import crossing
from mpidist.comm.choice.tuning import (
    NEVER,
    MachineProfile,
    Tuning,
    keep_tuning,
    processor_name,
    read_tuning,
    ring_begins,
    usual_tuning,
)

PLACE = MachineProfile("MPICH 5.0.2", 4, 2, 64, "a processor")


def test_the_key_names_what_counts_and_no_host() -> None:
    assert PLACE.key == "MPICH 5.0.2; 4 ranks a node, 2 nodes; 64 cores, a processor"
    assert socket.gethostname() not in MachineProfile("MPICH 5.0.2", 4, 1, 64, processor_name()).key
    assert processor_name()


def test_ranks_that_outnumber_cores_use_node_memory_for_small_arrays_on_one_node_only() -> None:
    enough = usual_tuning(PLACE)
    libraries = ("MPICH 5.0.2", "Open MPI 5.0.11")
    one, two = (
        [usual_tuning(MachineProfile(name, 4, nodes, 2, "a processor")) for name in libraries] for nodes in (1, 2)
    )
    assert one[0].node_from == 0 < one[1].node_from < enough.node_from < two[0].node_from < two[1].node_from < NEVER
    assert "more ranks than cores" in one[0].source


def test_a_ring_pays_where_the_number_of_nodes_is_no_power_of_two() -> None:
    assert [count for count in range(1, 20) if ring_begins(count) == NEVER] == [1, 2, 4, 8, 16]
    # Each rank sends messages of `bytes / nodes`, which must not become small.
    assert {ring_begins(count) // count for count in (3, 5, 12, 100)} == {1 << 16}
    for cores in (2, 64):
        sizes = {nodes: usual_tuning(MachineProfile("MPICH 5", 4, nodes, cores, "")).ring_from for nodes in (1, 2, 3)}
        assert sizes == {1: NEVER, 2: NEVER, 3: 3 << 16}


def test_two_ranks_always_use_node_memory() -> None:
    sizes = [usual_tuning(MachineProfile(f"{name} 5", ranks, 1, 64, "")).node_from for ranks in (2, 3) for name in
             ("MPICH", "Open MPI")]
    assert sizes[0] == sizes[1] == 0 < sizes[2] == sizes[3]


def test_sizes_are_kept_beside_others(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "tuning.json"
    assert read_tuning(path, PLACE.key) is None
    keep_tuning(path, "another", Tuning(1, 2, 3))
    keep_tuning(path, PLACE.key, Tuning(0, 1 << 18, NEVER, 1 << 19, "measured"))
    kept = read_tuning(path, PLACE.key)
    assert kept is not None
    assert (kept.node_from, kept.chunk_bytes, kept.ring_from, kept.direct_from) == (0, 1 << 18, NEVER, 1 << 19)
    assert str(path) in kept.source
    other = read_tuning(path, "another")
    assert other is not None
    assert other.node_from == 1
    assert [file.name for file in path.parent.iterdir()] == ["tuning.json"]


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[1]", json.dumps({PLACE.key: 5}), json.dumps({PLACE.key: {"node_from": 1}}),
        json.dumps({PLACE.key: {"node_from": -1, "chunk_bytes": 1, "ring_from": 1, "direct_from": 1}}),
        json.dumps({PLACE.key: {"node_from": "1", "chunk_bytes": 1, "ring_from": 1, "direct_from": 1}}),
        json.dumps({PLACE.key: {"node_from": 1, "chunk_bytes": 0, "ring_from": 1, "direct_from": 1}}),
    ],
)
def test_a_broken_file_is_a_warning_and_is_replaced(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text)
    with caplog.at_level(logging.WARNING, "mpidist"):
        assert read_tuning(path, PLACE.key) is None
    assert str(path) in caplog.text
    assert "MPIDIST_TUNE=1" in caplog.text
    keep_tuning(path, PLACE.key, Tuning())
    assert read_tuning(path, PLACE.key) is not None


def test_a_file_that_cannot_be_written_or_read_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "tuning.json"
    with caplog.at_level(logging.WARNING, "mpidist"):
        keep_tuning(path, PLACE.key, Tuning())
        assert read_tuning(path, PLACE.key) is None
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize(
    ("ratios", "begins"),
    [
        ([2.0, 1.5, 0.8, 0.5], 3),
        ([2.0, 2.0, 2.0, 2.0], NEVER),
        ([0.9, 0.9, 0.9, 0.9], 0),
        # One disturbed size does not decide.
        ([2.0, 0.5, 1.1, 0.5], 2),
        ([0.5, 0.5, 0.5, 1.1], 0),
    ],
)
def test_where_two_ways_cross(ratios: list[float], begins: int) -> None:
    assert crossing(list(enumerate(ratios, 1))) == begins
