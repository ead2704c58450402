"""Deliberate faults of jobs that start again."""

from __future__ import annotations

from tests.faults.fault import Fault

_KILLS = "system/cli/test_restart.py::test_deaths_at_random_moments_leave_no_trace"
_UNIT = "unit/cli/test_run.py"
_COPIES = "unit/checkpoint/test_memory_copies.py::test_"
_NODES = "parallel/checkpoint/test_memory_copies.py::test_"

FAULTS = (
    Fault(
        "a finished rank's word hides the failure of another", "failures/restart/notes.py",
        "if left is not None and (left.kind != FINISHED or word.kind == FINISHED):", "if left is not None:",
        f"{_UNIT}::test_the_first_word_counts_and_that_of_one_that_has_finished_gives_way",
    ),
    Fault(
        "a word finds no room on a full disk", "failures/restart/notes.py",
        "        os.pwrite(descriptor, bytes(_BYTES), 0)\n        os.fsync", "        os.fsync",
        f"{_UNIT}::test_a_word_needs_no_room_on_the_disk_and_is_cut_where_it_is_long",
    ),
    Fault(
        "half a word counts", "failures/restart/notes.py", "if mark != _MARK or zlib.crc32(body) != checksum:",
        "if mark != _MARK:", f"{_UNIT}::test_half_a_word_is_none",
    ),
    Fault(
        "a job that dies is taken for one that has failed", "cli/run/rules.py",
        "if outcome.kind == FAILED and not", "if outcome.kind in (FAILED, DIED) and not",
        f"{_UNIT}::test_who_saves_nothing_new_is_restarted_a_few_times",
    ),
    Fault(
        "a job that saves nothing new starts without end", "cli/run/rules.py", "        self.in_vain += 1\n",
        "", f"{_UNIT}::test_who_saves_nothing_new_is_restarted_a_few_times",
    ),
    Fault(
        "files that a process has mapped are removed", "cli/run/sweep.py",
        "            names -= {name", "            _ = {name", f"{_UNIT}::test_files_that_a_process_has_mapped_stay",
    ),
    Fault(
        "processes of other runs are ended", "cli/run/sweep.py",
        'if setting in (path / "environ").read_bytes().split(b"\\0") and',
        'if setting in (path / "environ").read_bytes() and',
        f"{_UNIT}::test_the_processes_of_a_start_are_ended_and_no_others",
    ),
    Fault(
        "an exception is restarted", "failures/restart/rank.py", "self._leave_word(kind, code, text)\n", "pass\n",
        "system/cli/test_restart.py::test_an_exception_is_restarted_where_that_is_asked_for",
    ),
    Fault(
        "a job that was told to end is started again", "cli/run/rules.py", " or outcome.was_told_to_end:", ":",
        f"{_UNIT}::test_who_saves_nothing_new_is_restarted_a_few_times",
    ),
    Fault(
        "nobody sees what a rank has saved", "checkpoint/writing.py",
        "if is_first and VARIABLE in os.environ:", "if False:", _KILLS,
    ),
    Fault(
        "a copy counts before it is whole", "checkpoint/memory/buffer.py",
        "            if mark != MARK or zlib.crc32(text) != checksum:", "            if zlib.crc32(text) != checksum:",
        f"{_COPIES}a_buffer_is_whole_or_empty_whatever_was_written_of_it",
    ),
    Fault(
        "a buffer counts while it is written again", "checkpoint/memory/buffer.py",
        "            self._map[: len(MARK)] = bytes(len(MARK))", "            pass",
        f"{_COPIES}a_buffer_is_whole_or_empty_whatever_was_written_of_it",
    ),
    Fault(
        "one buffer takes all copies", "checkpoint/memory/copies.py", "        self._buffers.turn()\n", "",
        f"{_COPIES}a_damaged_copy_leaves_the_one_before_it",
    ),
    Fault(
        "what was restored is overwritten by the next copy", "checkpoint/memory/buffers.py",
        "        self._slot, self._keeps_other = 1 - slot, True", "        self._slot, self._keeps_other = slot, True",
        f"{_COPIES}what_was_restored_stays_whole_while_the_next_copy_is_made",
    ),
    Fault(
        "a damaged copy is restored", "checkpoint/memory/finding.py",
        'if joined(sums[rank]) == there[rank].facts["sum"]}', "}",
        f"{_COPIES}a_damaged_copy_leaves_the_one_before_it",
    ),
    Fault(
        "an old copy replaces a newer checkpoint", "checkpoint/memory/finding.py",
        'if disk is not None and _is_newer(disk, first.facts):', "if False:",
        f"{_COPIES}a_newer_checkpoint_on_the_disk_counts",
    ),
    Fault(
        "a file that threads complete later replaces a newer copy", "checkpoint/memory/finding.py",
        " and disk.name != under_way", "",
        f"{_COPIES}copies_are_made_while_threads_write_and_are_newer_than_their_file",
    ),
    Fault(
        "copies of another program are restored", "checkpoint/memory/finding.py",
        'if any(one.facts["arguments"] != arguments() for one in there.values()):', "if False:",
        f"{_COPIES}copies_of_another_program_are_ignored",
    ),
    Fault(
        "the disk's interval counts from a restart", "checkpoint/manager.py",
        '            self._last_step = facts["last_step"]\n', "            self._last_step = self._step()\n",
        f"{_COPIES}a_restart_continues_from_the_newest_copy",
    ),
    Fault(
        "copies of living runs are removed", "cli/run/sweep.py",
        "    if not folder.exists():\n        return True\n", "    return True\n",
        f"{_COPIES}copies_of_dead_runs_are_removed_and_no_others",
    ),
    Fault(
        "copies are made although memory is short", "checkpoint/memory/buffers.py",
        "    require_room(place.home, size * len(buffers))\n", "",
        f"{_COPIES}where_memory_is_short_the_disk_alone_counts",
    ),
    Fault(
        "a node does not send its own values to the next one", "checkpoint/memory/copies.py",
        "            move(group, layout.moves_on(), buffer.data)\n", "",
        f"{_NODES}a_node_that_is_new_gets_its_values_from_the_next_one", ranks=2,
    ),
    Fault(
        "a new node gets no mirrored values", "checkpoint/memory/layout.py",
        "sources = {first: whole} if len(members) > len(holders) else {}",
        "sources: dict[int, list[tuple[int, int]]] = {}",
        f"{_NODES}a_node_that_is_new_gets_its_values_from_the_next_one", ranks=2,
    ),
    Fault(
        "a rank that is ended after a death has finished", "failures/restart/rank.py",
        "        if self._dead:\n", "        if False:\n",
        f"{_UNIT}::test_a_rank_that_is_ended_after_a_death_has_not_finished",
    ),
)
