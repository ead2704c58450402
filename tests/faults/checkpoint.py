"""Deliberate faults of checkpoints."""

from __future__ import annotations

from tests.faults.fault import Fault

BOUNDARIES = "unit/checkpoint/test_checkpoint_boundaries.py::test_"
CHECKED = "unit/checkpoint/test_checkpoint_checked.py::test_"
DIRECTORY = "unit/checkpoint/test_checkpoint_directory.py::test_"
LOCK = "unit/checkpoint/test_checkpoint_lock.py::test_"
TOGETHER = "parallel/checkpoint/test_together.py::test_"

FAULTS = (
    Fault(
        "a component in the middle of a page", "checkpoint/transfer.py",
        "heads[self.part + 1 :]", "heads[self.part + 1 : self.part + 2]",
        TOGETHER + "components_of_any_size_are_written", 3,
    ),
    Fault(
        "a cancelled job is queued again", "cluster/slurm/job.py",
        'if seen.get("JobState") in ("COMPLETING", "CANCELLED")', 'if seen.get("JobState") in ("CANCELLED",)',
        "unit/checkpoint/test_preemption.py::test_a_job_that_was_cancelled_is_not_queued_again",
    ),
    Fault(
        "a job whose name looks like a restart is not queued again", "cluster/slurm/job.py",
        ".splitlines() if _LINES.match(line)]", ".splitlines()]",
        "unit/checkpoint/test_preemption.py::test_a_job_is_queued_again_whatever_slurm_shows_of_it",
    ),
    Fault(
        "a signal ends the command that queues a job again", "cluster/slurm/job.py",
        "[signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]", "[]",
        "unit/checkpoint/test_preemption.py::test_a_job_is_queued_again",
    ),
    Fault(
        "functions that were scheduled before the last save are lost", "checkpoint/preemption/handler.py",
        "            try:\n                self._others.join()\n", "            try:\n                pass\n",
        "unit/checkpoint/test_preemption.py::test_functions_that_were_scheduled_are_in_the_checkpoint",
    ),
    Fault(
        "a server dies of a signal while the chief saves", "parameter_server/protocol/signal_relay.py",
        "SIGNALS.tell(self._notice, wanted)", "pass",
        "system/checkpoint/test_preempted_servers.py::test_whoever_gets_a_signal_every_update_counts_once",
    ),
    Fault(
        "a server ends the job with the chief's code before others have left", "failures/ending.py",
        "if not self.is_agreed and self.code and", "if self.code and",
        "system/checkpoint/test_preempted_servers.py::test_whoever_gets_a_signal_every_update_counts_once",
    ),
    Fault(
        "the launcher's word of a death ends a job", "cluster/signals.py",
        "self._take_doubtful if is_doubtful else self.take", "self.take",
        "system/checkpoint/test_preempted_servers.py::test_the_launchers_signal_after_a_death_ends_nothing",
    ),
    Fault(
        "the last checkpoint is not evaluated", "checkpoint/following.py",
        "(has_ended or now >= not_before)", "now >= not_before",
        "unit/checkpoint/test_checkpoints_iterator.py::test_it_ends_with_the_training_after_the_last_checkpoint",
    ),
    Fault(
        "a file that one rank cannot open", "checkpoint/opening.py",
        'return together(communicator, f"opening checkpoint {name!r}", lambda: open_contents(contents, name, choice))',
        "return open_contents(contents, name, choice)",
        TOGETHER + "a_rank_that_cannot_open_the_file_makes_all_raise", 2,
    ),
    Fault(
        "ranks restore from other paths", "checkpoint/opening.py", "if contents.path != name:", "if False:",
        TOGETHER + "paths_to_restore_must_be_the_same", 2,
    ),
    Fault(
        "an object that one rank cannot load", "checkpoint/restoring.py",
        """together(communicator, f"restoring {path!r}", load, may_agree=True)""", "load()",
        TOGETHER + "an_object_that_takes_no_state_on_one_rank_makes_all_raise", 2,
    ),
    Fault(
        "a checkpoint that no state file names", "checkpoint/transfer.py", "if not was_there:", "if False:",
        TOGETHER + "without_a_state_file_the_new_checkpoint_goes_too",
    ),
    Fault(
        "a rank goes by its own state file", "checkpoint/manager.py",
        "is_due, number, self._files.state = decide_together(", "is_due, number, _ = decide_together(",
        TOGETHER + "a_rank_that_reads_an_old_state_file_goes_on_with_the_others", 2,
    ),
    Fault(
        "a rank goes by its own clock", "checkpoint/writing.py",
        "else write_checkpoint(communicator, path, arrays, found.shared, order.work)\n",
        "else [write_checkpoint(communicator, path, arrays, found.shared, order.work), __import__('time').time()][1]\n",
        TOGETHER + "clocks_may_differ", 2,
    ),
    Fault(
        "a new name is not synced", "checkpoint/transfer.py",
        "        sync_directory(os.path.dirname(path))\n", "",
        TOGETHER + "names_are_on_the_disk_before_others_name_them",
    ),
    Fault(
        "the name of the state file is not synced", "checkpoint/directory/state.py", "    sync_directory(directory)\n",
        "",
        TOGETHER + "names_are_on_the_disk_before_others_name_them",
    ),
    Fault(
        "the mark of a whole file is not synced", "checkpoint/file/hdf5.py",
        "        write_at(descriptor, mark, blank.complete_offset)\n        os.fsync(descriptor)\n",
        "        write_at(descriptor, mark, blank.complete_offset)\n",
        TOGETHER + "names_are_on_the_disk_before_others_name_them",
    ),
    Fault(
        "an array of one page begins within a page", "checkpoint/file/datasets.py",
        "alignment_threshold=PAGE_BYTES,", "alignment_threshold=PAGE_BYTES + 1,",
        BOUNDARIES + "no_page_of_an_array_that_any_rank_writes_holds_another_array",
    ),
    Fault(
        "the second part of a write goes where the first is", "checkpoint/file/positional.py",
        "view, offset = view[count:], offset + count", "view = view[count:]",
        BOUNDARIES + "bytes_are_moved_whole_in_any_number_of_calls",
    ),
    Fault(
        "the second part of a read is the first again", "checkpoint/file/positional.py",
        "view, offset = view[got:], offset + got", "view = view[got:]",
        BOUNDARIES + "bytes_are_moved_whole_in_any_number_of_calls",
    ),
    Fault(
        "the first release of several gives the directory back", "checkpoint/directory/lock.py",
        "        if _holding[held] > 0:\n            return\n", "",
        BOUNDARIES + "two_locks_of_a_process_hold_a_directory_until_both_are_released",
    ),
    Fault(
        "of checkpoints of one time number 9 is later than number 10", "checkpoint/directory/state.py",
        "(_written_at(path), _parts_of(path))", "(_written_at(path), path)",
        BOUNDARIES + "of_checkpoints_of_one_time_the_largest_number_is_the_latest",
    ),
    Fault(
        "bytes in the page of an earlier rank are lost where a part has two pieces", "checkpoint/transfer.py",
        "        self.head += data[:foreign]\n", "        self.head = bytes(data[:foreign])\n",
        BOUNDARIES + "parts_that_end_within_pages_and_pieces_make_one_file",
    ),
    Fault(
        "the parts of a piece are checked in the wrong order", "checkpoint/transfer.py",
        "joined_checksum(before, checksum, count)", "joined_checksum(checksum, before, count)",
        BOUNDARIES + "parts_that_end_within_pages_and_pieces_make_one_file",
    ),
    Fault(
        "a process number counts in another container", "checkpoint/directory/lock.py",
        "(holder.host, holder.boot, holder.namespace) != (\n        me.host, me.boot, me.namespace\n    )",
        "(holder.host, holder.boot) != (me.host, me.boot)",
        LOCK + "a_number_says_nothing_of_a_process_of_another_host_or_container",
    ),
    Fault(
        "a process number counts on another host of the same name", "checkpoint/directory/lock.py",
        "(holder.host, holder.boot, holder.namespace) != (\n        me.host, me.boot, me.namespace\n    )",
        "(holder.host, holder.namespace) != (me.host, me.namespace)",
        LOCK + "a_number_says_nothing_of_a_process_of_another_host_or_container",
    ),
    Fault(
        "a process that the system hides is taken for dead", "checkpoint/directory/lock.py",
        "return start != holder.started if start and holder.started else None", "return start != holder.started",
        LOCK + "a_process_of_which_the_system_shows_nothing_may_be_alive",
    ),
    Fault(
        "the process table of the host is taken for that of the container", "checkpoint/directory/lock.py",
        'if os.readlink("/proc/self") != str(process):', "if False:",
        LOCK + "a_process_table_of_another_namespace_tells_nothing",
    ),
    Fault(
        "what another job saves meanwhile is written over", "checkpoint/directory/managed.py",
        "if self.lock.acquire() and self", "if self.lock.acquire() and False and self",
        LOCK + "a_manager_writes_over_nothing_that_came_while_it_waited",
    ),
    Fault(
        "nothing is saved where there are no hard links", "checkpoint/directory/lock.py",
        "            return _create_without_link(path, me)\n", "            raise\n",
        LOCK + "without_hard_links_one_job_saves_at_a_time",
    ),
    Fault(
        "a file system that only seems to create exclusively is believed", "checkpoint/directory/lock.py",
        "    return _read(path) == me\n", "    return True\n",
        LOCK + "a_file_system_that_only_seems_to_create_exclusively",
    ),
    Fault(
        "a directory that another job has is no error at the start", "checkpoint/directory/lock.py",
        "    lock.acquire()\n    lock.release()\n", "",
        "unit/checkpoint/test_preemption.py::test_a_directory_to_which_another_job_saves_is_an_error_at_the_start",
    ),
    Fault(
        "a job whose state file is lost begins anew", "checkpoint/directory/managed.py",
        "            raise unnamed(self.directory, own)\n", "            return []\n",
        DIRECTORY + "a_damaged_state_file_is_an_error_that_names_the_fallback",
    ),
    Fault(
        "who asks for the latest checkpoint is told that there is none", "checkpoint/directory/latest.py",
        "            raise unnamed(directory, lost)\n", "            return None\n",
        DIRECTORY + "a_damaged_state_file_is_an_error_that_names_the_fallback",
    ),
    Fault(
        "a state file of nonsense is believed", "checkpoint/directory/state.py",
        "if type(seconds) not in (int, float) or not math.isfinite(seconds):", "if False:",
        DIRECTORY + "a_damaged_state_file_is_an_error_that_names_the_fallback",
    ),
    Fault(
        "a preempted job does not go on where its state file is lost", "checkpoint/preemption/handler.py",
        "restore_or_initialize(fallback=True)", "restore_or_initialize()",
        "unit/checkpoint/test_preemption.py::test_a_job_goes_on_where_its_state_file_is_lost",
    ),
    Fault(
        "a checkpoint that is gone ends the evaluator", "checkpoint/following.py",
        'lambda: _mark(path)) == mark:', "lambda: _mark(path)) != 0:",
        "unit/checkpoint/test_checkpoints_iterator.py::test_a_checkpoint_that_is_gone_is_passed_over",
    ),
    Fault(
        "the death of an evaluator ends the training", "failures/deaths.py",
        "is_spared = process in self.spared", "is_spared = False",
        "unit/failures/test_second_deaths.py::test_the_death_of_one_that_is_spared_ends_nothing",
    ),
    Fault(
        "ranks that train die of an evaluator", "cluster/roles/groups.py",
        "        WATCH.spared.update(", "        dict[object, object]().update(",
        "system/checkpoint/test_evaluator.py::test_the_death_of_an_evaluator_does_not_end_the_training",
    ),
    Fault(
        "a farewell waits for an evaluator that is dead", "failures/farewell.py",
        "if one.can_be_kept() and not request.Test()", "if not request.Test()",
        "unit/failures/test_farewell.py::test_nobody_waits_for_one_without_whom_all_go_on",
    ),
    Fault(
        "state that begins anew is not named", "checkpoint/walk/matching.py",
        "lacking += [leaf_path for leaf_path, saved_as in its if saved_as not in entries]", "pass",
        "parallel/checkpoint/test_optimizer_state.py::test_a_layer_more_begins_anew_and_the_others_go_on",
    ),
    Fault(
        "state of other variables counts as restored", "checkpoint/restoring.py",
        "self._left.update(others)", "pass",
        "parallel/checkpoint/test_optimizer_state.py::test_a_layer_less_is_left_and_the_others_go_on",
    ),
    Fault(
        "bfloat16 is saved as integers", "checkpoint/file/layout.py",
        "dtype = record.dtype.name if record.dtype.isbuiltin == OF_ML_DTYPES else record.dtype.str",
        "dtype = stored_dtype(record.dtype).str",
        "unit/checkpoint/test_checkpoint_objects.py::test_bfloat16_comes_back_bit_for_bit",
    ),
    Fault(
        "an average begins in the middle", "optimizers/saving.py",
        " and name != AVERAGE:", ":",
        "parallel/checkpoint/test_optimizer_state.py::test_an_average_of_a_variable_does_not_begin_in_the_middle",
    ),
    Fault(
        "a restore takes the state of variables that come late for that of others", "optimizers/saving.py",
        "is_whole = all(v.saved_as for v in variables)", "is_whole = True",
        "parallel/checkpoint/test_optimizer_state.py::test_state_of_other_variables_is_an_error_and_changes_nothing",
    ),
    Fault(
        "an evaluator's error ends the training", "failures/ending.py",
        "if self.stands_apart and not is_interrupt", "if False and not is_interrupt",
        "system/checkpoint/test_evaluator.py::test_an_error_of_an_evaluator_does_not_end_the_training",
    ),
    Fault(
        "an evaluator's exit code ends the training", "failures/ending.py",
        "if self.code and not self.is_agreed and not self.stands_apart:", "if self.code and not self.is_agreed:",
        "system/checkpoint/test_evaluator.py::test_an_error_of_an_evaluator_does_not_end_the_training",
    ),
    Fault(
        "a public array is taken for a cache", "checkpoint/walk/objects.py",
        'hidden if not is_container and str(name).startswith("_") else place', "hidden",
        "unit/checkpoint/test_checkpoint_walk.py::test_an_array_in_a_hidden_attribute_of_a_module_is_a_cache",
    ),
    Fault(
        "what comes to a checkpoint in a checkpoint gets no values", "checkpoint/checkpoint.py",
        "            watcher.attribute_set(value)\n", "            pass\n",
        "unit/checkpoint/test_checkpoint_walk.py::test_a_checkpoint_in_a_checkpoint_is_an_object_like_others",
    ),
    Fault(
        "a lock is touched once", "checkpoint/directory/lock.py",
        "    while not stop.wait(BEAT_SECONDS):", "    if not stop.wait(BEAT_SECONDS):",
        BOUNDARIES + "a_lock_is_touched_again_and_again",
    ),
    Fault(
        "who follows checkpoints waits for the first timeout only", "checkpoint/following.py",
        "                return\n            waiting_since = None\n", "                return\n",
        BOUNDARIES + "each_timeout_of_those_who_follow_is_as_long_as_the_first",
    ),
    Fault(
        "damage is not seen", "checkpoint/file/checked.py",
        "if crc32(data) != self.contents.checksums[self._first[number] + piece]:", "if False:",
        "unit/checkpoint/test_checkpoint_file.py::test_one_flipped_bit_is_an_error_that_names_the_array",
    ),
    Fault(
        "small arrays are not looked at before others change", "checkpoint/restoring.py",
        "            file.hold({*names, METADATA, SAVE_COUNTER} if self._with_counter else {*names, METADATA})\n", "",
        CHECKED + "what_is_small_is_checked_before_anything_changes",
    ),
    Fault(
        "after a damaged block a checkpoint is saved", "checkpoint/restoring.py",
        "        self.is_torn = self.is_torn or bool(loads)\n", "",
        CHECKED + "a_damaged_block_of_a_large_file_never_takes_its_place",
    ),
    Fault(
        "what was held stays in memory", "checkpoint/file/checked.py",
        "self._held, self._last = bytearray(), None", "self._last = None",
        CHECKED + "a_file_of_many_blocks_takes_the_memory_of_a_few",
    ),
    Fault(
        "a part of a piece is taken from another piece", "checkpoint/file/checked.py",
        "if self._last is None or self._last[0] != place:", "if self._last is None:",
        CHECKED + "any_range_of_any_array_is_what_was_written",
    ),
    Fault(
        "places are believed of a file that was changed", "checkpoint/file/places.py",
        "return offsets if _structure_checksum(descriptor, size, [*extents, *own]) == checksum else None",
        "return offsets",
        CHECKED + "places_count_only_while_the_structure_is_as_it_was_written",
    ),
    Fault(
        "two ranks load one block, and another one nobody", "variables/reading.py",
        "for edge in (part, part + 1))", "for edge in (part, part))",
        CHECKED + "ranks_have_whole_blocks_and_together_everything",
    ),
    Fault(
        "ranks meet for each variable that is restored", "variables/reading.py",
        "if isinstance(variable, LoadedInBlocks) and variable.is_loaded_beside_others:", "if False:",
        "parallel/checkpoint/test_calls.py::test_the_ranks_meet_as_often_for_many_variables_as_for_few", 2,
    ),
    Fault(
        "a failed write is lost", "checkpoint/transfer.py",
        'exchange(communicator, f"writing checkpoint {path!r}", None, error)',
        'exchange(communicator, f"writing checkpoint {path!r}", None)',
        "parallel/checkpoint/test_checkpoint.py::test_a_failure_of_one_rank_is_one_of_all_and_loses_nothing", 2,
    ),
    Fault(
        "a failed write leaves its file", "checkpoint/transfer.py", "os.unlink(blank.path)", "pass",
        "parallel/checkpoint/test_checkpoint.py::test_a_failure_of_one_rank_is_one_of_all_and_loses_nothing", 2,
    ),
    Fault(
        "old checkpoints go before the new one is named", "checkpoint/directory/managed.py",
        "        self._write(state)\n        kept, gone = self.rules.retire(state)",
        "        kept, gone = self.rules.retire(state)",
        "unit/checkpoint/test_checkpoint_file.py::test_a_kill_leaves_the_previous_checkpoint",
    ),
    Fault(
        "arrays of other libraries are left out", "attributes.py", 'hasattr(type(value), "__dlpack__")',
        'type(value).__module__ == "numpy"',
        "unit/checkpoint/test_checkpoint_walk.py::test_an_array_of_another_library_would_be_lost",
    ),
    Fault(
        "modules and checkpoints overlook slots", "attributes.py",
        "    for name in slots_of(type(value)):", "    for name in ():",
        "unit/variables/test_module.py::test_a_module_finds_what_a_checkpoint_finds",
    ),
    Fault(
        "a counter is left out in silence", "checkpoint/writing.py",
        "saves.warn(found, path)\n", "pass\n",
        "unit/checkpoint/test_checkpoint_walk.py::test_plain_numbers_that_have_changed_are_one_warning_each",
    ),
    Fault(
        "the lock of another job is deleted", "checkpoint/directory/lock.py",
        "if _read(held[1]) == this_process():", "if True:",
        "unit/checkpoint/test_checkpoint_manager.py::test_a_requeued_job_takes_over_and_the_old_one_notices",
    ),
    Fault(
        "fewer replicas get other components", "checkpoint/file/saved.py",
        "variable.group.rank % self.replicas * variable.size", "0",
        "parallel/checkpoint/test_replicas.py::test_saved_by_n_restored_by_m", 2,
    ),
    Fault(
        "an optimizer is set back by what comes later", "checkpoint/walk/matching.py",
        "if saved is not None and is_whole and done.isdisjoint(found.names_of(path)):",
        "if saved is not None and is_whole:",
        "parallel/checkpoint/test_late.py::test_an_optimizer_that_has_gone_on_is_not_set_back",
    ),
    Fault(
        "an object takes its state again under another name", "checkpoint/walk/matching.py",
        "if saved is not None and is_whole and done.isdisjoint(found.names_of(path)):",
        "if saved is not None and is_whole and path not in done:",
        "unit/checkpoint/test_checkpoint_objects.py::test_what_has_taken_its_state_is_not_set_back_when_others_come",
    ),
    Fault(
        "the last save begins by the shortest step", "checkpoint/preemption/deadline.py",
        "max(self._gaps, default=0.0)", "min(self._gaps, default=0.0)",
        "unit/checkpoint/test_preemption.py::test_the_longest_step_may_come_again_before_the_time_limit",
    ),
    Fault(
        "the grace period begins when rank 0 hears of the signal", "checkpoint/preemption/handler.py",
        "sent_at - milliseconds / 1e3, self._config", "sent_at, self._config",
        "unit/checkpoint/test_preemption.py::test_the_grace_period_begins_with_the_signal",
    ),
    Fault(
        "a second signal begins the grace period again", "checkpoint/preemption/handler.py",
        "(self._deadline.in_grace and reason < TIME_IS_UP)", "False",
        "unit/checkpoint/test_preemption.py::test_a_second_signal_does_not_make_the_grace_period_longer",
    ),
    Fault(
        "other ranks' clocks end the job", "checkpoint/preemption/handler.py",
        "if self._group.rank == 0:\n            now = self._clock()", "if True:\n            now = self._clock()",
        "parallel/checkpoint/test_preemption.py::test_rank_0s_clock_decides", 2,
    ),
    Fault(
        "no time is left for the functions in the queue", "checkpoint/preemption/handler.py",
        "(self._save_seconds() + join)", "self._save_seconds()",
        "unit/checkpoint/test_preemption.py::test_there_is_time_for_the_functions_in_the_queue",
    ),
    Fault(
        "the work with a checkpoint counts as waiting for the next one", "checkpoint/following.py",
        "            yield path\n            waiting_since = None\n", "            yield path\n",
        "unit/checkpoint/test_checkpoints_iterator.py::test_a_timeout_ends_it",
    ),
    Fault(
        "parts of a piece are joined in the order of their ranks", "checkpoint/transfer.py",
        "in sorted(itertools.chain.from_iterable(map(dict.items, everyone))):",
        "in itertools.chain.from_iterable(map(dict.items, everyone)):",
        "unit/checkpoint/test_checkpoint_boundaries.py::test_ranks_have_parts_in_any_order_and_several_of_them",
    ),
)
