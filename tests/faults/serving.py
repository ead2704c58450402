"""Deliberate faults of servers and workers."""

from __future__ import annotations

from tests.faults.fault import Fault

HOLDS = "unit/parameter_server/test_protocol.py::test_rules_hold_in_every_state"

FAULTS = (
    Fault(
        "norms of complex gradients miss a part of them", "variables/update/arithmetic.py",
        'if array.dtype.kind == "c" else', 'if array.dtype.kind == "C" else',
        "parallel/serving/test_optimizers_of_servers.py::test_other_dtypes_have_the_bits_of_one_process", 3,
    ),
    Fault(
        "a server takes bfloat16 for bytes", "parameter_server/heap/push_slot.py",
        "array.dtype.name if array.dtype.isbuiltin == 2 else ", "",
        "parallel/serving/test_optimizers_of_servers.py::test_other_dtypes_have_the_bits_of_one_process", 3,
    ),
    Fault(
        "in one process the coordinator does not hear of an update that it drops", "parameter_server/server/staging.py",
        "sender == message.worker != self.coordinator", "sender == message.worker",
        "unit/coordinator/test_one_process_coordinator.py::test_a_step_without_a_learning_rate_ends",
    ),
    Fault(
        "in one process what a class names is changed at once", "parameter_server/chief/chief.py",
        "entry.home is not self._worker else self._worker", "entry.home is not self._worker else self",
        "unit/coordinator/test_one_process_coordinator.py::test_what_a_class_names_is_changed_with_the_function",
    ),
    Fault(
        "a function does not notice a name that came later", "coordinator/captured.py",
        "        yield Use(space, name, space.get(name, _NOT_YET))\n",
        "        if name in space:\n            yield Use(space, name, space[name])\n",
        "parallel/serving/test_captured.py::test_names_that_come_later_are_noticed", 3,
    ),
    Fault(
        "a function does not notice a new attribute", "coordinator/captured.py",
        "            if space.keys() != known:", "            if not known and space:",
        "parallel/serving/test_captured.py::test_names_that_come_later_are_noticed", 3,
    ),
    Fault(
        "an update changes what a cut has not saved", "parameter_server/server/snapshot.py",
        "if isinstance(action, Apply | ApplyRound) and self.live:",
        "if isinstance(action, Apply | ApplyRound) and not self.live:", HOLDS,
    ),
    Fault(
        "copies have no limit", "parameter_server/server/snapshot.py",
        "                return None\n            self.copied",
        "                pass\n            self.copied",
        "unit/parameter_server/test_serving_cut.py::test_an_update_waits_for_room_and_all_behind_it_too",
    ),
    Fault(
        "an update waits for ever behind a cut that is saved", "parameter_server/server/server.py",
        "self._station.go_on_with(lambda: self._go_on(saver))", "pass",
        "unit/parameter_server/test_serving_holder.py::test_an_update_that_waits_for_a_cut_is_applied_without_a_further_message",
    ),
    Fault(
        "a cut without the state of optimizers", "parameter_server/server/server.py",
        "numbers += self._updates[step.optimizer].state_of(change.variable)", "pass",
        "parallel/serving/test_cut.py::test_updates_between_cut_and_end", 3,
    ),
    Fault(
        "a worker's place in its data counts a closure that does not count", "parameter_server/queue/closures.py",
        "        worker.finished.append(number)\n        return self._decide_in_turn(worker)\n",
        "        worker.finished.append(number)\n        return self._decide(number)\n",
        "unit/coordinator/test_coordinator_closures.py::test_what_a_worker_has_finished_is_decided_in_its_order",
    ),
    Fault(
        "a checkpoint holds the places of functions under way", "parameter_server/queue/closures.py",
        "        worker.finished.append(number)\n",
        "        worker.finished.append(number)\n        self.resources.positions.note(rank, message.read)\n",
        "unit/coordinator/test_coordinator_closures.py::test_place_in_the_data_of_a_lost_worker_stays",
    ),
    Fault(
        "functions that have captured an iterator read on where it was before a restore",
        "parameter_server/worker/worker.py",
        "            own.take_over(made)\n", "            own = self._own[build.resource] = made\n",
        "parallel/serving/test_positions.py::test_functions_that_have_captured_the_iterator_go_on_there", 3,
    ),
    Fault(
        "more workers read what is left several times", "parameter_server/worker/dataset_iterator.py",
        "start=self.start + number * self.stride, stride", "start=self.start, stride",
        "unit/parameter_server/test_positions.py::test_each_element_is_read_once_on_any_numbers_of_workers",
    ),
    Fault(
        "an update counts before its servers have it", "parameter_server/queue/work.py",
        "if finished is None or self.worker is None or not self.prepared.issuperset(finished.servers):",
        "if finished is None or self.worker is None:", HOLDS,
    ),
    Fault(
        "a server's word on a void attempt counts", "parameter_server/queue/closures.py",
        "if closure is None or closure.worker is None or closure.attempt != message.attempt:",
        "if closure is None or closure.worker is None:", HOLDS,
    ),
    Fault(
        "a lost worker's decided closure runs again", "parameter_server/queue/closures.py",
        "            if closure.is_decided:\n                continue\n",
        "            if closure.worker is None:\n                continue\n", HOLDS,
    ),
    Fault(
        "a closure lost after a cancellation runs again", "parameter_server/queue/closures.py",
        "        if self._is_cancelling:\n            return [*self._end(number, End.CANCELLED)]\n", "",
        "unit/coordinator/test_coordinator_closures.py::test_first_error_is_raised_once_after_all_that_runs_has_ended",
    ),
    Fault(
        "a closure waits for ever for a result that there will not be", "parameter_server/queue/closures.py",
        "ends += self._awaiting.give_up(one)", "pass",
        "unit/coordinator/test_coordinator_closures.py::test_a_closure_ends_as_its_input_that_has_no_result",
    ),
    Fault(
        "an update counts though another one would then be too old", "parameter_server/queue/staleness.py",
        "<= self.staleness for place", "<= self.staleness + 1 for place",
        "unit/parameter_server/test_versions.py::test_no_update_counts_later_than_the_bound_says_and_all_come_to_their_end",
    ),
    Fault(
        "more functions run than the bound has places for", "parameter_server/queue/staleness.py",
        "self._readable <= self.staleness", "self._readable <= self.staleness + 1",
        "unit/parameter_server/test_versions.py::test_no_update_counts_later_than_the_bound_says_and_all_come_to_their_end",
    ),
    Fault(
        "a version counts as readable before its servers have applied it", "parameter_server/queue/staleness.py",
        "self._begun[closure] = self._readable", "self._begun[closure] = self.number",
        "unit/parameter_server/test_versions.py::test_no_update_counts_later_than_the_bound_says_and_all_come_to_their_end",
    ),
    Fault(
        "what waited for a slower worker waits for ever", "parameter_server/queue/closures.py",
        "actions = self._decide_held()", "actions: list[Action] = []",
        "unit/parameter_server/test_versions.py::test_others_wait_for_one_that_stands_still_and_go_on_when_it_is_lost",
    ),
    Fault(
        "gradients count that are too late", "parameter_server/queue/synchronous.py",
        "return attempt._replace(optimizers=()) if self._is_late(attempt) else attempt", "return attempt",
        "unit/parameter_server/test_rounds.py::test_a_worker_that_stood_still_is_late_and_changes_no_version",
    ),
    Fault(
        "a round counts while others of its version still run", "parameter_server/queue/synchronous.py",
        "if len(self._open) == in_flight else []", "if self._open else []",
        "unit/parameter_server/test_rounds.py::test_a_round_waits_for_one_that_stands_still_and_goes_on_without_it_when_it_is_lost",
    ),
    Fault(
        "a worker is in a round twice", "parameter_server/queue/synchronous.py",
        "return not (is_owing or self._unapplied)", "return not self._unapplied",
        "unit/parameter_server/test_rounds.py::test_functions_for_one_worker_count_one_by_one_when_the_program_waits",
    ),
    Fault(
        "a round is a sum and no mean", "parameter_server/server/server.py",
        "gradients[step, number], counts[step])", "gradients[step, number], 1)",
        "parallel/serving/test_synchronous.py::test_a_round_is_the_step_of_all_its_workers_together", 4,
    ),
    Fault(
        "a slot is used again before its update is applied", "parameter_server/queue/closures.py",
        "        self._workers.returned(worker, now)\n",
        "        self._workers.returned(worker, now)\n        worker.slots = [None] * len(worker.slots)\n",
        HOLDS,
    ),
    Fault(
        "a row is read while it changes", "parameter_server/heap/rows.py",
        "return found, (before == after) & (before % 2 == 0)", "return found, before == before",
        "parallel/serving/test_tables.py::test_a_row_is_read_whole_while_others_change_it", 3,
    ),
    Fault(
        "a server copies a whole shard to save a part of it", "parameter_server/server/snapshot.py",
        "copy = np.array(self._live[block.variable][block.low : block.high])",
        "copy = np.array(self._live[block.variable])[block.low : block.high]",
        "system/parameter_server/test_table_memory.py::test_no_rank_ever_holds_more_than_its_part_of_a_table",
    ),
    Fault(
        "a cut misses the last rows of its blocks", "parameter_server/server/snapshot.py",
        "bisect_right(self.starts, block.low - self.width)", "bisect_right(self.starts, block.high - self.width)",
        "unit/parameter_server/test_serving_cut.py::test_rows_touch_the_blocks_in_which_they_have_elements",
    ),
    Fault(
        "a step without rows is not counted", "parameter_server/worker/optimizer.py",
        "if len(parts) == 1 or not len(merged.indices):", "if len(parts) == 1:",
        "unit/variables/test_sharded.py::test_rows_are_updated_as_in_one_process",
    ),
    Fault(
        "a function does not read the rows that it has written", "parameter_server/worker/worker.py",
        "                change.overlay(rows, found)\n", "                pass\n",
        "unit/variables/test_sharded.py::test_writes_of_rows_in_any_order",
    ),
    Fault(
        "a function does not read the rows that it has written since it read some", "parameter_server/heap/rows.py",
        "in range(self._known, len(self._changes)):", "in range(len(self._changes) - self._known):",
        "unit/variables/test_sharded.py::test_writes_of_rows_in_any_order",
    ),
    Fault(
        "a step is counted that is not made", "parameter_server/queue/commits.py",
        "iterations: dict[int, int] = {}", "iterations = self.iterations",
        "unit/coordinator/test_coordinator_closures.py::test_update_without_a_learning_rate_is_dropped_and_fails",
    ),
    Fault(
        "a fence lets late pushes through", "parameter_server/server/staging.py",
        "        self.fenced.add(message.worker)\n", "", HOLDS,
    ),
    Fault(
        "a fence keeps what is staged", "parameter_server/server/staging.py",
        "        self.staged.pop(message.worker, None)\n        return []\n", "        return []\n",
        HOLDS,
    ),
    Fault(
        "half an update is committed", "parameter_server/server/staging.py",
        "told = push.last and push.attempt != OWN_WRITE",
        "told = push.attempt != OWN_WRITE",
        "unit/parameter_server/test_serving_staging.py::test_whole_update_is_prepared_then_applied_then_forgotten",
    ),
    Fault(
        "a function misses what the one before has assigned", "parameter_server/worker/prefetch.py",
        "            self._changed.add(number)\n            self._drop(number)\n", "            pass\n",
        "parallel/serving/test_ahead.py::test_a_function_sees_what_the_one_before_has_written_after_it_was_pulled", 3,
    ),
    Fault(
        "shards of one variable are pulled ahead at two moments", "parameter_server/worker/prefetch.py",
        "if len(self._groups[one]) > 1", "if len(self._groups[one]) > 9", "unit/parameter_server/test_ahead.py",
    ),
    Fault(
        "what was pulled for another closure is taken", "parameter_server/worker/prefetch.py",
        "pulls if pulls is not None and pulls.name == do[:2] else None", "pulls", "unit/parameter_server/test_ahead.py",
    ),
    Fault(
        "threads of a function write into one place of a server", "parameter_server/protocol/thread_guard.py",
        "        with self.lock:\n            if not", "        if True:\n            if not",
        "parallel/serving/test_what_users_write.py::test_threads_of_a_function_take_turns", 3,
    ),
    Fault(
        "a forked child speaks in its parent's name", "parameter_server/protocol/thread_guard.py",
        "        if self._process is not None and self._process != os.getpid():\n", "        if False:\n",
        "system/failures/test_forked_children.py::test_they_take_part_in_nothing",
    ),
    Fault(
        "functions lose the names of their files", "parameter_server/protocol/references.py",
        ".replace(co_filename=file)", "",
        "unit/parameter_server/test_serving_handles.py::test_functions_sent_by_their_code_know_their_lines",
    ),
    Fault(
        "arguments are sent with what they name", "parameter_server/protocol/references.py",
        "all(_is_plain(one, depth - 1) for one in inner)", "True",
        "unit/parameter_server/test_serving_handles.py::test_what_is_named_comes_back_as_itself",
    ),
    Fault(
        "an exit of a function ends the program well", "parameter_server/protocol/sent_errors.py",
        "    if isinstance(error, SystemExit):\n", "    if False:\n",
        "parallel/serving/test_what_users_write.py::"
        "test_whatever_a_function_raises_is_an_error_of_the_coordinator", 3,
    ),
    Fault(
        "a worker waits for an update that was given up", "parameter_server/worker/running_closure.py",
        "            unapplied.discard(slot)\n", "            pass\n",
        "parallel/serving/test_dropped_updates.py::test_update_that_fits_one_server_only_is_not_waited_for", 4,
    ),
    Fault(
        "an exit whose code nobody sees counts as a success", "failures/ending.py",
        "return code_of_program() if self.code is None else number_of(self.code)", "return self.code or 0",
        "system/strategy/test_parameter_server.py::test_the_code_of_the_chief_is_in_a_file_after_a_death",
    ),
    Fault(
        "an interrupt tears a message of the chief apart", "strategy/parameter_server/strategy.py",
        "Whole(replicas.communicator.order) if rank == roles.chief else ", "",
        "unit/coordinator/test_one_process_coordinator.py::test_an_interrupt_comes_between_functions",
    ),
    Fault(
        "who has come to the end of its data takes the functions of those who have not",
        "parameter_server/queue/worker_table.py",
        "return worker.ended.isdisjoint(data) or not", "return True or not",
        "unit/coordinator/test_coordinator_closures.py::test_closure_at_the_end_of_its_data_goes_to_who_has_some_left",
    ),
    Fault(
        "a function is taken for another one that is gone", "coordinator/functions.py",
        "        self.parts = parts\n", "",
        "parallel/serving/test_captured.py::test_the_value_of_the_moment_counts", 3,
    ),
    Fault(
        "a data set travels with every call", "coordinator/functions.py",
        "found is None and type(given) is Dataset", "False",
        "parallel/serving/test_data_sets_as_arguments.py::test_a_data_set_travels_once", 3,
    ),
    Fault(
        "the end of one worker's data is the end of all", "parameter_server/queue/closures.py",
        "not is_bound and self._workers.have_left(data)", "False",
        "unit/coordinator/test_coordinator_closures.py::test_closure_at_the_end_of_its_data_goes_to_who_has_some_left",
    ),
    Fault(
        "a lost worker's bound closures wait for ever", "parameter_server/queue/worker_table.py",
        "        self.waiting.unbind(rank)\n", "",
        "unit/coordinator/test_coordinator_closures.py::test_bound_closure_waits_for_its_worker_while_that_lives",
    ),
    Fault(
        "what a function has assigned is read again with others", "parameter_server/worker/running_closure.py",
        "any(number in numbers for numbers in had)", "False",
        "parallel/serving/test_reads.py::test_what_the_function_has_changed_stays", 3,
    ),
    Fault(
        "a function reads small variables one after another", "parameter_server/worker/running_closure.py",
        "if others else {}", "if False else {}",
        "parallel/serving/test_reads.py::test_what_it_read_last_time_comes_in_one_answer", 3,
    ),
    Fault(
        "a copy of memory waits for the server", "parameter_server/worker/running_closure.py",
        " or self._station.window.is_near(place.server)", "",
        "parallel/serving/test_reads.py::test_of_memory_of_the_node_nothing_is_asked", 3,
    ),
    Fault(
        "what has not changed is taken from the answer", "parameter_server/worker/running_closure.py",
        "if value is not None and version == before:", "if False:",
        "parallel/serving/test_reads.py::test_they_are_of_one_moment", 3,
    ),
    Fault(
        "a function may use a variable that no server has made", "parameter_server/chief/decisions.py",
        "        if self._maker.unfinished:\n            self._maker.finish()\n", "",
        "parallel/serving/test_making.py::test_many_small_ones_take_few_messages", 3,
    ),
    Fault(
        "a server is to forget what it has not heard of", "parameter_server/chief/dropped_objects.py",
        "            self._finish()\n", "            pass\n",
        "parallel/serving/test_making.py::test_small_and_large_ones_and_those_in_the_memory_of_dropped_ones", 3,
    ),
    Fault(
        "an interrupt forgets what servers are making", "parameter_server/chief/making.py",
        "if not self._station.is_awaiting(number):", "if True:",
        "parallel/serving/test_making.py::test_an_interrupt_while_servers_make_them_loses_none", 3,
    ),
    Fault(
        "memory for others is asked for where variables are", "parameter_server/chief/making.py",
        "self._memory[place.server] = max(", "max(",
        "parallel/serving/test_making.py::test_small_and_large_ones_and_those_in_the_memory_of_dropped_ones", 3,
    ),
    Fault(
        "a server draws a shard as the first one", "parameter_server/chief/shards.py",
        "Drawn(initial.placed, *info, dtype)", "Drawn(initial.placed, info[0], infos[0][1], dtype)",
        "parallel/serving/test_making.py::test_a_server_draws_the_values_of_one_process", 3,
    ),
    Fault(
        "the chief converts a whole shard", "parameter_server/chief/making.py",
        "rows = max(1, _PIECE_BYTES // max(1, place.bytes // place.shape[0]))", "rows = place.shape[0]",
        "parallel/serving/test_making.py::test_the_chief_holds_no_more_than_a_function_gives_at_a_time", 3,
    ),
)
