"""Deliberate faults of servers: boundaries of what they hold, and second events."""

from __future__ import annotations

from tests.faults.fault import Fault

READING = "unit/parameter_server/test_serving_reading.py::test_"
ROUNDS = "unit/parameter_server/test_serving_rounds.py::test_"
HOLDER = "unit/parameter_server/test_serving_holder.py::test_"
CUT = "unit/parameter_server/test_serving_cut.py::test_"
HEAP = "unit/parameter_server/test_serving_heap.py::test_"
INTEGERS = "parallel/serving/test_integers.py::test_"
SIGNALS = "unit/parameter_server/test_serving_signals.py::test_"
AWAITED = "unit/parameter_server/test_serving_awaited.py::test_"
PAGE = "unit/checkpoint/test_checkpoint_cut.py::test_a_variable_about_as_large_as_a_page_comes_back"
NAME = "unit/checkpoint/test_checkpoint_cut.py::test_a_name_that_changes_while_the_file_is_made_is_saved_as_it_is_then"
BEHIND = "unit/checkpoint/test_checkpoint_cut.py::test_the_program_continues_while_the_servers_save"

FAULTS = (
    Fault(
        "a torn value is taken for a version of it", "parameter_server/heap/versioned_read.py",
        "(1 if place.block_rows else 2)", "(1 if place.block_rows else 3)",
        READING + "a_buffer_that_is_written_again_while_it_is_read_is_read_anew",
    ),
    Fault(
        "a table is read while it is restored", "parameter_server/heap/versioned_read.py",
        "(1 if place.block_rows else 2)", "(2 if place.block_rows else 2)",
        READING + "a_table_that_changes_while_it_is_read_is_read_anew",
    ),
    Fault(
        "a reader does not see the version that is begun in its buffer", "parameter_server/heap/versioned_read.py",
        "if int(words[1]) < version", "if int(words[0]) < version",
        READING + "a_buffer_that_is_written_again_while_it_is_read_is_read_anew",
    ),
    Fault(
        "a mixture of two versions is read again as one of them", "parameter_server/heap/versioned_read.py",
        "return Value(None, value)\n", "return Value(version, value)\n", READING + "a_relaxed_value_is_of_no_version",
    ),
    Fault(
        "a row in the middle of a change is whole", "parameter_server/heap/rows.py",
        " & (before % 2 == 0)", "", READING + "rows_in_the_middle_of_a_change_are_not_whole",
    ),
    Fault(
        "the second try takes rows that change", "parameter_server/heap/rows.py",
        "left = left[~is_whole]", "left = left[:0]", READING + "rows_that_change_at_each_try_are_given_by_the_server",
    ),
    Fault(
        "a mean over those that give a gradient", "parameter_server/server/mean_of_round.py",
        "        np.add(total, other, out=total)\n    return _times(total, 1 / count)",
        "        np.add(total, other, out=total)\n    return _times(total, 1 / len(gradients))",
        ROUNDS + "who_gives_no_gradient_counts_as_zeros",
    ),
    Fault(
        "a mean of rows over those that give some", "parameter_server/server/mean_of_round.py",
        "IndexedSlices(_times(total, 1 / count)", "IndexedSlices(_times(total, 1 / len(gradients))",
        ROUNDS + "who_gives_no_row_counts_as_zeros",
    ),
    Fault(
        "a variable begins with what lay there before", "parameter_server/heap/pages.py",
        "        if missing and self._is_shared",
        "        if not missing:\n            return\n        if missing and self._is_shared",
        HOLDER + "a_variable_in_the_memory_of_a_dropped_one_begins_anew",
    ),
    Fault(
        "a large variable is zero in its first gigabyte only", "parameter_server/heap/pages.py",
        "begin, byte_count = begin + count, byte_count - count", "begin, byte_count = begin + count, 0",
        HOLDER + "memory_is_zero_however_many_calls_of_the_kernel_it_takes",
    ),
    Fault(
        "a slot that grows wipes the next one", "parameter_server/heap/push_slot.py",
        "min(max(byte_count, 2 * have), self._slot_bytes)", "max(byte_count, 2 * have)",
        HOLDER + "a_slot_that_grows_leaves_the_next_one_alone",
    ),
    Fault(
        "a slot that grows loses what is in it", "parameter_server/heap/push_slot.py",
        "\"reserve\", self._offset + have,", "\"reserve\", self._offset,",
        HOLDER + "a_push_that_needs_more_memory_twice_keeps_what_it_has_written",
    ),
    Fault(
        "the table of a push runs into the next slot", "parameter_server/heap/push_slot.py",
        "        self._require(end)\n        if self._gathered", "        if self._gathered",
        HOLDER + "a_push_may_fill_its_slot_and_not_more",
    ),
    Fault(
        "a worker waits for the first of its two updates", "parameter_server/worker/running_closure.py",
        "                unapplied -= {offset for",
        "                if [offset for offset in unapplied if is_free(self._station.window, server, offset)]:\n"
        "                    unapplied.clear()\n"
        "                unapplied -= {offset for",
        HOLDER + "a_worker_waits_for_each_of_its_updates",
    ),
    Fault(
        "a round frees the slot of its first worker", "parameter_server/server/server.py",
        "for part, slot in zip(action.round.parts, action.slots, strict=True):\n                self",
        "for part, slot in [*zip(action.round.parts, action.slots, strict=True)][:1]:\n"
        "                self",
        HOLDER + "a_round_of_two_workers_frees_the_slots_of_both_and_counts_who_gives_nothing",
    ),
    Fault(
        "a round keeps what its second worker has staged", "parameter_server/server/staging.py",
        "        for part in message.parts:\n", "        for part in message.parts[:1]:\n",
        HOLDER + "a_round_of_two_workers_frees_the_slots_of_both_and_counts_who_gives_nothing",
    ),
    Fault(
        "an update is lost when a cut ends while the server looks", "parameter_server/server/server.py",
        "        done = saver.done\n"
        "        while (action := saver.next(self._changed_by)) is not None:\n"
        "            self._do(action)\n",
        "        while (action := saver.next(self._changed_by)) is not None:\n"
        "            self._do(action)\n"
        "        done = saver.done\n",
        HOLDER + "an_update_that_waits_is_not_lost_when_the_cut_ends_while_the_server_looks",
    ),
    Fault(
        "a cut that fails leaves no room for copies", "parameter_server/server/snapshot.py",
        "        self.live.clear()\n        self.copied.clear()\n", "        self.live.clear()\n",
        CUT + "a_cut_that_fails_with_copies_leaves_room_for_the_next_one",
    ),
    Fault(
        "a variable of exactly a page is nobody's", "checkpoint/server_snapshot.py",
        "return self.record.nbytes < PAGE_BYTES", "return self.record.nbytes <= PAGE_BYTES", PAGE,
    ),
    Fault(
        "the chief takes a variable of exactly a page for a small one", "checkpoint/server_snapshot.py",
        "            if record.nbytes < PAGE_BYTES:\n", "            if record.nbytes <= PAGE_BYTES:\n", PAGE,
    ),
    Fault(
        "shards of exactly a page are not joined", "checkpoint/server_snapshot.py",
        "if not bounds or record.nbytes < PAGE_BYTES:", "if not bounds or record.nbytes <= PAGE_BYTES:", PAGE,
    ),
    Fault(
        "the chief's values change while servers save in the background", "checkpoint/background/served.py",
        "        snapshot.copy()\n", "", BEHIND,
    ),
    Fault(
        "a save in the background is lost with the strategy of its servers", "strategy/parameter_server/strategy.py",
        "        chief.wait_for_snapshot()\n", "", BEHIND,
    ),
    Fault(
        "a save that is left out looks at no message of the servers", "checkpoint/background/save.py",
        "            self._main_thread.look()\n", "            pass\n", BEHIND,
    ),
    Fault(
        "functions wait while servers write another checkpoint", "checkpoint/background/served.py",
        "            home.wait_for_snapshot()\n            with home.pause", "            with home.pause",
        "unit/checkpoint/test_checkpoint_cut.py::test_two_managers_save_in_the_background_side_by_side",
    ),
    Fault(
        "a name that changed while the file was made is saved as it was", "checkpoint/background/served.py",
        "(now.records, now.shared) != (plan.records, plan.shared)", "now.records != plan.records", NAME,
    ),
    Fault(
        "the versions of a table lie in the next variable", "parameter_server/heap/layout.py",
        "versions = -(-shape[0] // block_rows) * 8", "versions = shape[0] // block_rows * 8",
        HEAP + "tables_of_any_number_of_rows_lie_beside_each_other",
    ),
    Fault(
        "the versions of dropped tables are never free again", "parameter_server/heap/layout.py",
        "np.dtype(place.dtype), buffers, place.block_rows)", "np.dtype(place.dtype), buffers)",
        HEAP + "all_of_a_variable_is_given_back",
    ),
    Fault(
        "dropped variables count for the place of the next one", "parameter_server/heap/layout.py",
        "        self._taken[place.server] -= taken\n", "",
        HEAP + "what_was_dropped_does_not_count_for_the_next_variable",
    ),
    Fault(
        "the time of functions that nobody saw counts", "parameter_server/protocol/signal_relay.py",
        "max(1, scheduled - left - ended)", "max(1, scheduled - left)",
        SIGNALS + "functions_that_had_ended_before_the_first_look_count_for_nothing",
    ),
    Fault(
        "a signal is told again and again", "parameter_server/protocol/signal_relay.py",
        "reason = self._notice.take()", "reason = self._notice.reason",
        SIGNALS + "each_signal_is_told_once_and_a_second_one_too",
    ),
    Fault(
        "a second long wait is not reported", "parameter_server/protocol/awaited_ranks.py",
        "again if told is wait else", "again if told else",
        AWAITED + "a_wait_is_reported_ever_more_rarely_and_the_next_one_anew",
    ),
    Fault(
        "a wait that has ended is reported", "parameter_server/protocol/awaited_ranks.py",
        "if self.wait is not wait or not wait.ranks:", "if self.wait is not wait:",
        AWAITED + "a_wait_whose_last_rank_has_answered_is_not_reported",
    ),
    Fault(
        "sums of integers on servers wrap", "parameter_server/server/server.py",
        "changed(variable.name, variable.current, array, METHODS[change.kind])", "variable.current + array",
        INTEGERS + "functions", 3,
    ),
    Fault(
        "rows of integers on servers wrap", "parameter_server/heap/table.py",
        'if values.dtype.kind in "iu":', 'if values.dtype.kind in "":', INTEGERS + "functions", 3,
    ),
    Fault(
        "nobody hears that an integer on a server did not fit", "parameter_server/server/server.py",
        "error=self._refused.pop(message[:2], b\"\")", "error=b\"\"", INTEGERS + "the_coordinators_own_writes", 3,
    ),
    Fault(
        "the coordinator does not wait for a server's word on its integers", "parameter_server/chief/chief.py",
        'if kind != "assign" and np.dtype(place.dtype).kind in "iu":', 'if kind == "wait":',
        INTEGERS + "the_coordinators_own_writes", 3,
    ),
    Fault(
        "what is subtracted on a server is added with the other sign", "variables/kinds/served.py",
        'kind = "sub" if method == SUBTRACT and self.dtype.kind in "iu" else "add"', 'kind = "add"',
        INTEGERS + "the_coordinators_own_writes", 3,
    ),
    Fault(
        "a function reads a sum of integers that has wrapped", "parameter_server/worker/worker.py",
        'is_whole = delta.dtype.kind in "iu"', "is_whole = False", INTEGERS + "functions", 3,
    ),
    Fault(
        "a function reads rows of integers that have wrapped", "parameter_server/heap/rows.py",
        'if target.dtype.kind in "iu":', 'if target.dtype.kind in "":', INTEGERS + "functions", 3,
    ),
    Fault(
        "a function whose integers did not fit has a result", "parameter_server/queue/closures.py",
        '            closure.refusal = message.error, ""\n', "            pass\n",
        "unit/coordinator/test_coordinator_closures.py::test_a_server_could_not_change_a_variable",
    ),
    Fault(
        "a counter on a server keeps a small dtype", "parameter_server/chief/shards.py",
        'aggregation is VariableAggregation.SUM and kind.kind in "iu"', 'aggregation is None',
        INTEGERS + "a_sum_on_read_is_int64", 3,
    ),
)
