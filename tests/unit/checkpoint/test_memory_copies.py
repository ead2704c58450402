"""Copies in memory, in one process: their layout, when they are made, which one is taken, and what is left of them."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.checkpoint import transfer
from mpidist.checkpoint.background import save
from mpidist.checkpoint.checkpoint import Checkpoint
from mpidist.checkpoint.file.layout import Record
from mpidist.checkpoint.manager import CheckpointManager
from mpidist.checkpoint.memory import buffers
from mpidist.checkpoint.memory.buffer import MARK, CopyBuffer, data_begin, look_into, require_room
from mpidist.checkpoint.memory.interval import SHARE, CopyInterval
from mpidist.checkpoint.memory.layout import CopyLayout, Move, blocks, joined, sum_of
from mpidist.cli.run import sweep
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.failures.restart.notes import VARIABLE
from mpidist.parameter_server.options import ServerOptions
from mpidist.strategy.parameter_server.strategy import ParameterServerStrategy
from mpidist.variables.making.creation import create_variable
from mpidist.variables.variable import BaseVariable
from tests.helpers.started import enter_start
from tests.helpers.strategies import make_arena

ARENA = make_arena(SoloCommunicator())


def variable(value: Any) -> BaseVariable:
    return create_variable(ARENA, np.asarray(value))


# Four ranks on three nodes: one array that all read, one with a component for each rank, one cut over three ranks.
RECORDS = [
    Record("whole", (3000,), np.dtype("f4")), Record("own", (4, 3), np.dtype("u1"), replicas=4),
    Record("cut", (5,), np.dtype("f8")),
]
PARTS = [None, ((0, 3, 6, 9, 12), None), ((0, 16, 24, 40), (0, 2, 3))]
LAYOUT = CopyLayout.of(RECORDS, PARTS, (0, 0, 1, 2), {"alias": "whole"})


def test_a_layout_is_its_text() -> None:
    assert CopyLayout.decode(LAYOUT.encode()) == LAYOUT


def test_each_part_is_on_two_nodes() -> None:
    count = {node: LAYOUT.ranges(node) for node in range(3)}
    whole = (0, 12000)
    own, cut = LAYOUT.offsets[1], LAYOUT.offsets[2]
    parts = {
        0: [(own, own + 3), (cut, cut + 16), (own + 3, own + 6)], 1: [(own + 6, own + 9), (cut + 16, cut + 24)],
        2: [(own + 9, own + 12), (cut + 24, cut + 40)],
    }
    for node in range(3):
        assert count[node] == sorted([whole, *parts[node], *parts[(node - 1) % 3]])
    sent = {(move.source, move.target) for move in LAYOUT.moves_on()}
    assert sent == {(0, 2), (1, 2), (2, 3), (3, 0)}


@pytest.mark.parametrize(
    ("holders", "is_covered"),
    [({}, False), ({0: 0, 1: 1, 2: 2}, True), ({5: 0, 6: 1}, True), ({0: 1, 1: 0}, True), ({0: 0}, False)],
)
def test_two_of_three_nodes_have_everything(holders: dict[int, int], is_covered: bool) -> None:
    assert LAYOUT.is_covered(holders) is is_covered


@pytest.mark.parametrize("holders", [{0: 0, 1: 1, 2: 2}, {0: 2, 2: 1}, {1: 0, 0: 1}, {2: 2, 1: 0}])
def test_every_node_gets_what_it_lacks_from_one_that_has_it(holders: dict[int, int]) -> None:
    nodes = (0, 1, 2, 2)
    files = [np.zeros(LAYOUT.byte_count, np.uint8) for _ in range(3)]
    content = np.random.default_rng(0).integers(1, 256, LAYOUT.byte_count, np.uint8)
    for node, wrote in holders.items():
        for begin, end in LAYOUT.ranges(wrote):
            files[node][begin:end] = content[begin:end]
    for source, target, begin, end in LAYOUT.lacking(holders, nodes):
        piece = files[nodes[source]][begin:end]
        assert piece.all(), "a node sends what it does not have"
        files[nodes[target]][begin:end] = piece
    for offset, record in zip(LAYOUT.offsets, RECORDS, strict=True):
        for file in files:
            place = slice(offset, offset + record.nbytes)
            np.testing.assert_array_equal(file[place], content[place])


def test_one_node_sends_nothing() -> None:
    alone = CopyLayout.of(RECORDS, PARTS, (0, 0, 0, 0), {})
    assert alone.moves_on() == []
    assert alone.lacking({0: 0}, (0, 0)) == []
    assert LAYOUT.lacking({0: 0, 1: 1}, (0, 1))[0] == Move(1, 0, LAYOUT.offsets[1] + 6, LAYOUT.offsets[1] + 9)


def test_sums_of_pieces_add_up_wherever_they_are_cut() -> None:
    data = np.random.default_rng(1).integers(0, 256, 1003, np.uint8)
    expected = sum_of(data, 5)
    for cut in (0, 1, 3, 4, 8, 500, 1002, 1003):
        assert joined([sum_of(data[:cut], 5), sum_of(data[cut:], 5 + cut)]) == expected
    other = data.copy()
    other[77] ^= 1
    assert sum_of(other, 5) != expected


def test_ranks_share_blocks_without_gap() -> None:
    ranges = [(3, 5), (10, 3_000_000)]
    found = sorted(block for rank in range(3) for block in blocks(ranges, rank, 3))
    assert found[0] == (3, 5)
    assert found[1][0] == 10
    assert found[-1][1] == 3_000_000
    assert all(a[1] == b[0] for a, b in itertools.pairwise(found[1:]))


def test_copies_cost_a_hundredth_of_the_time() -> None:
    interval, now, copies, spent = CopyInterval(None), 0.0, 0, 0.0
    for step in range(20_000):
        now += 0.01
        if interval.is_due(step, now):
            cost = 0.05 if copies % 2 else 0.03
            interval.begin(step, now + cost, interval.choose(step, now, cost))
            now, copies, spent = now + cost, copies + 1, spent + cost
    assert copies > 30
    assert spent / now < 1.1 * SHARE
    given = CopyInterval(3)
    due = []
    for step in range(1, 12):
        if given.is_due(step, 0.0):
            due.append(step)
            given.begin(step, 0.0, given.choose(step, 0.0, 1.0))
    assert due == [4, 7, 10]


def test_a_buffer_is_whole_or_empty_whatever_was_written_of_it(tmp_path: Path) -> None:
    layout, path = LAYOUT.encode(), tmp_path / "0"
    buffer = CopyBuffer(path)
    buffer.make(layout, LAYOUT.byte_count)
    assert look_into(path, 0) is None
    buffer.open(layout, LAYOUT.ranges(0), 0, 1)
    buffer.commit({"step": 7})
    seen = look_into(path, 0)
    assert seen is not None
    assert (seen.facts, seen.layout) == ({"step": 7}, layout)
    whole = path.read_bytes()
    # A kill in the middle of a commit: the mark, which comes last, is not there.
    for end in (len(MARK), len(MARK) + 8, 64, 80, data_begin(layout)):
        (tmp_path / "torn").write_bytes(bytes(len(MARK)) + whole[len(MARK) : end] + bytes(len(whole) - end))
        assert look_into(tmp_path / "torn", 0) is None
    for place in (9, 20, 66, 4096 + 5):
        (tmp_path / "torn").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert look_into(tmp_path / "torn", 0) is None
    buffer.invalidate()
    assert look_into(path, 0) is None
    assert look_into(tmp_path / "nothing", 0) is None


class Job:
    """A program that `mpidist run` has started, with a manager."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, patch
        self._starts = -1
        self.start()

    def start(self, **options: Any) -> Job:
        """Start the program, perhaps again; with further options of the manager."""
        self._starts += 1
        started = enter_start(self._patch, self.folder, "memory", self._starts)
        started.mkdir(exist_ok=True)
        self.run = started.parent
        self.value, self.step = variable(np.zeros(5)), variable(np.int64(0))
        self.generator = np.random.default_rng(7)
        self.checkpoint = Checkpoint(value=self.value, step=self.step, generator=self.generator)
        self.manager = CheckpointManager(
            self.checkpoint, self.folder / "disk", 2, step_counter=self.step, checkpoint_interval=10, memory=2,
            **options,
        )
        return self

    def train(self, steps: int) -> None:
        """Make steps, each followed by a save."""
        for _ in range(steps):
            self.value.assign_add(self.generator.normal(size=5))
            self.step.assign_add(1)
            self.manager.save()

    def copies(self) -> list[Path]:
        """The buffers."""
        return sorted((self.folder / "memory").glob("mpidist-copies-here-0123456789ab/*/*/[01]"))


@pytest.fixture(name="job")
def make_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


def test_a_restart_continues_from_the_newest_copy(job: Job) -> None:
    job.train(18)
    assert [Path(one).name for one in job.manager.checkpoints] == ["ckpt-1.h5", "ckpt-2.h5"]
    assert len(job.copies()) == 2
    expected, at, draws = job.value.numpy(), int(job.step.numpy()), job.generator.normal(size=3)
    job.manager.close()
    path = job.start().manager.restore_or_initialize()
    assert path == str(job.copies()[0].parent.parent)
    # The last copy is of step 17.
    assert int(job.step.numpy()) == at - 1
    job.value.assign_add(job.generator.normal(size=5))
    np.testing.assert_array_equal(job.value.numpy(), expected)
    np.testing.assert_array_equal(job.generator.normal(size=3), draws)
    # The disk's interval counts from the disk's last save, as without a restart.
    job.step.assign(18)
    job.train(3)
    assert [Path(one).name for one in job.manager.checkpoints] == ["ckpt-2.h5", "ckpt-3.h5"]
    assert job.checkpoint.save_counter == 3
    job.manager.close()


def test_again_and_again(job: Job) -> None:
    """What was restored is never written to: objects may take the rest of it later."""
    expected = None
    for _ in range(4):
        job.train(5)
        held = job.value.numpy(), int(job.step.numpy())
        job.manager.close()
        job.start().manager.restore_or_initialize()
        assert 0 <= held[1] - int(job.step.numpy()) <= 2
        expected = held
    assert expected is not None
    job.manager.close()


def test_what_was_restored_stays_whole_while_the_next_copy_is_made(job: Job) -> None:
    job.train(9)
    job.manager.close()
    job.start().manager.restore_or_initialize()
    at = int(job.step.numpy())
    # Step 11 is saved on the disk.
    job.train(5)
    # The first copy after it is in the other buffer.
    found = [look_into(one, slot) for slot, one in enumerate(job.copies())]
    assert sorted(one.facts["step"] for one in found if one is not None) == [at, at + 5]
    job.manager.close()


def test_values_that_wait_come_from_a_copy_that_later_ones_do_not_overwrite(job: Job) -> None:
    job.checkpoint.late = variable(np.arange(3.0))
    job.train(9)
    job.manager.close()
    job.start().manager.restore_or_initialize()
    status = job.checkpoint.pending
    assert status is not None
    status.end_waiting()
    job.train(6)
    job.checkpoint.late = variable(np.zeros(3))
    status.restore_new()
    np.testing.assert_array_equal(job.checkpoint.late.numpy(), np.arange(3.0))
    job.manager.close()


def test_a_newer_checkpoint_on_the_disk_counts(job: Job) -> None:
    job.train(4)
    path = job.manager.save(check_interval=False)
    job.manager.close()
    assert job.start().manager.restore_or_initialize() == path


def test_copies_are_made_while_threads_write_and_are_newer_than_their_file(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, publish = threading.Event(), transfer.publish

    def publish_later(*arguments: Any) -> float:
        assert may_end.wait(60)
        return publish(*arguments)

    monkeypatch.setattr(save, "publish", publish_later)
    job.start(background=True, skip_while_saving=True).train(18)
    # The save of step 1 is still under way, and that of step 11 was left out.
    assert job.manager.checkpoints == []
    may_end.set()
    job.manager.close()
    assert [Path(one).name for one in job.manager.checkpoints] == ["ckpt-1.h5"]
    path = job.start().manager.restore_or_initialize()
    assert path == str(job.copies()[0].parent.parent)
    assert int(job.step.numpy()) == 18
    job.manager.close()


def test_copies_of_another_program_are_ignored(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.train(4)
    path = job.manager.latest_checkpoint
    job.manager.close()
    job._patch.setattr("sys.argv", ["train.py", "--other"])
    assert job.start().manager.restore_or_initialize() == path
    assert "other arguments. The checkpoint on the disk is restored instead" in caplog.text


def test_copies_of_other_objects_are_ignored(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.train(4)
    path = job.manager.latest_checkpoint
    job.manager.close()
    job.start()
    job.checkpoint.value = variable(np.zeros(6))
    assert path is not None
    with pytest.raises(Exception, match="has shape"):  # as it is on the disk
        job.manager.restore_or_initialize()
    assert "the copy in memory is not used" in caplog.text


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_copies_that_are_lost_leave_the_disk(job: Job, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    job.train(4)
    path = job.manager.latest_checkpoint
    job.manager.close()
    for one in job.copies():
        if harm == "gone":
            one.unlink()
        else:
            data = bytearray(one.read_bytes())
            layout = look_into(one, 0)
            if layout is not None:
                data[data_begin(layout.layout) + 3] ^= 1
                one.write_bytes(data)
    assert job.start().manager.restore_or_initialize() == path
    assert ("are gone" if harm == "gone" else "is not whole") in caplog.text


def test_a_damaged_copy_leaves_the_one_before_it(job: Job) -> None:
    job.train(9)
    job.manager.close()
    found = [look_into(one, number) for number, one in enumerate(job.copies())]
    newest = max((one for one in found if one is not None), key=lambda one: one.facts["number"])
    path = job.copies()[newest.slot]
    data = bytearray(path.read_bytes())
    data[data_begin(newest.layout) + 3] ^= 1
    path.write_bytes(data)
    job.start().manager.restore_or_initialize()
    assert int(job.step.numpy()) == newest.facts["step"] - 2


def test_where_memory_is_short_the_disk_alone_counts(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def short(folder: Path, byte_count: int) -> None:
        require_room(folder, byte_count + (1 << 62))

    monkeypatch.setattr(buffers, "require_room", short)
    job.train(12)
    assert job.copies() == []
    assert not job.manager.copies_memory
    assert caplog.text.count("only checkpoints on the disk are kept") == 1
    assert len(job.manager.checkpoints) == 2
    job.manager.close()


def test_without_mpidist_run_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("MPIDIST_SHARED_MEMORY", str(tmp_path))
    manager = CheckpointManager(Checkpoint(v=variable(1.0)), tmp_path / "disk", 1, memory=True)
    assert not manager.copies_memory
    for _ in range(9):
        assert manager.copy() is False
    assert list(tmp_path.iterdir()) == []
    assert manager.restore_or_initialize() is None


@pytest.mark.parametrize(("memory", "error"), [(0, ValueError), (-1, ValueError), ("yes", TypeError), (1.5, TypeError)])
def test_the_argument_is_checked(tmp_path: Path, memory: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`memory`"):
        CheckpointManager(Checkpoint(v=variable(1.0)), tmp_path, 1, memory=memory)


def test_parameter_servers_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    before = signal.getsignal(signal.SIGINT)
    try:
        with ParameterServerStrategy(options=ServerOptions(heap_bytes=1 << 22)) as strategy:
            with strategy.scope():
                checkpoint = Checkpoint(v=mpidist.Variable(np.ones(3)))
            with pytest.raises(NotImplementedError, match="under ParameterServerStrategy, whose servers hold"):
                CheckpointManager(checkpoint, tmp_path, 1, memory=True)
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_interval_is_shown_once(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    job.train(9)
    assert caplog.text.count("is copied into") == 1
    assert "every 2 steps" in caplog.text
    events = [json.loads(line) for line in (job.run / "0" / "events").read_text().splitlines()]
    assert [one["step"] for one in events if "mpidist-copies" in one["path"]] == [4]
    job.manager.close()


def test_copies_of_dead_runs_are_removed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_SHARED_MEMORY", str(tmp_path))
    namespace = os.readlink("/proc/self/ns/pid")
    alive = tmp_path / ".mpidist-run-elsewhere-1"
    alive.mkdir()
    for name, folder, where in (
        ("dead", tmp_path / "gone", namespace), ("alive", alive, namespace), ("foreign", tmp_path / "gone", "pid:[1]"),
    ):
        home = tmp_path / f"mpidist-copies-{name}"
        home.mkdir()
        note = {"folder": str(folder), "host": "x", "namespace": where}
        (home / "run").write_text(json.dumps(note))
        (home / "data").write_text("x")
    assert sweep.remove_stale_copies() == ["mpidist-copies-dead"]
    assert sorted(one.name for one in tmp_path.glob("mpidist-*")) == ["mpidist-copies-alive", "mpidist-copies-foreign"]
    sweep.remove_copies(tmp_path / ".mpidist-run-alive")
    assert not (tmp_path / "mpidist-copies-alive").exists()
