"""Deliberate faults of how jobs end."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "an exit that somebody keeps has no code", "failures/ending.py",
        "        self._take_kept_code()\n", "        pass\n",
        "system/failures/test_ending.py::test_a_lone_exit_with_a_code_ends_the_job",
    ),
    Fault(
        "the start of MPI holds the interpreter", "comm/group/mpi_start.py", "ctypes.CDLL", "ctypes.PyDLL",
        "system/failures/test_start.py::test_a_time_limit_holds_for_the_start_of_mpi",
    ),
    Fault(
        "the launcher's socket closes early under any launcher", "failures/launcher_socket.py",
        "if lets_live or launch.hydra_lets_live():", "if True:",
        "system/failures/test_ending.py::test_a_caught_exit_ends_nothing",
    ),
    Fault(
        "one host keeps TCP between its ranks", "cluster/launch_line.py", '"UCX_TLS", "^cma,tcp", "^cma"',
        '"UCX_TLS", "^cma", "^cma"', "unit/cluster/test_launch_line.py::test_lines",
    ),
    Fault(
        "the watchdog only looks", "failures/watchdog.py", "self._give_up(seen, waiting)", "pass",
        "system/failures/test_watchdog.py::test_an_early_exit_ends_the_job",
    ),
    Fault(
        "a chief that was busy has waited", "coordinator/waits.py", "now - max(one.since, since)", "now - one.since",
        "unit/parameter_server/test_waits.py::test_only_a_wait_is_reported",
    ),
    Fault(
        "nobody tells of a server that owes an answer", "coordinator/waits.py", ", *self._closures.owing()]", "]",
        "system/failures/test_stuck_servers.py::test_who_waits_for_a_stopped_server_names_it",
    ),
    Fault(
        "a time limit of waits for servers ends nothing", "parameter_server/protocol/awaited_ranks.py",
        "            WATCHDOG.end()\n", "            pass\n",
        "system/failures/test_stuck_servers.py::test_a_time_limit_ends_a_job_whose_server_is_stopped",
    ),
    Fault(
        "who leaves with an error says nothing", "strategy/parameter_server/strategy.py",
        "            station.leave(repr(error))\n", "",
        "system/failures/test_stuck_servers.py::test_nobody_waits_for_a_server_that_has_left_with_an_error",
    ),
    Fault(
        "a time limit of closures ends nothing", "coordinator/waits.py",
        "            WATCHDOG.end()\n", "            pass\n",
        "unit/parameter_server/test_waits.py::test_a_time_limit_ends_the_job_where_that_is_not_switched_off",
    ),
    Fault(
        "all ranks that come to their turn end the job", "failures/peers.py",
        "    if any(0 < other.claim() <= mine for other in others):", "    if mine < 0:",
        "unit/recorder/test_page.py::test_one_rank_ends_the_job_where_several_come_to_their_turns_at_once",
    ),
    Fault(
        "a random value takes much memory beside it", "variables/making/initial.py",
        "if isinstance(self._function, Placed) and", "if not self.shape and",
        "unit/variables/test_sharded.py::test_random_values_are_made_with_little_memory_beside_them",
    ),
    Fault(
        "who runs a closure again waits for the other worker", "observe/trace.py",
        ' and event["communicator"] != NO_COMMUNICATOR', "",
        "system/observe/test_trace.py::test_who_ran_a_closure_again_has_waited_for_nobody",
    ),
    Fault(
        "a rank that is late waits, too", "cli/trace/efficiency.py",
        "np.maximum(0, np.minimum(end, last[number]) - begin)", "np.maximum(0, end - begin)",
        "unit/cli/test_trace.py::test_the_time_of_a_rank_is_shared_out",
    ),
    Fault(
        "calls inside others count twice", "cli/trace/timeline.py",
        "np.concatenate([[True], begin[rows][1:] >= ended[:-1]])", "True",
        "unit/cli/test_trace.py::test_calls_inside_others_and_beside_the_program_take_no_time_of_it",
    ),
    Fault(
        "a large array is compared with the bandwidth of a small one", "cli/trace/report.py",
        "None if size > _NEAR * nearest else ", "",
        "unit/cli/test_trace.py::test_a_size_that_is_far_from_all_measured_ones_is_not_compared",
    ),
    Fault(
        "each call in a timeline asks the launcher for its rank", "observe/trace.py",
        "        if self._rank is None:\n            self._rank", "        if True:\n            self._rank",
        "unit/observe/test_trace_cost.py::test_a_call_runs_few_functions_more",
    ),
    Fault(
        "a call has not left", "recorder/calls.py",
        '        self.depth = 0\n        self.words[STATE] = self.state\n', '        self.depth = 0\n',
        "unit/recorder/test_recorder.py::test_a_call_is_seen_while_it_lasts",
    ),
    Fault(
        "a signed call has not left", "comm/calls/order.py",
        "            self._state[STATE] = calls.state\n", "",
        "unit/recorder/test_recorder.py::test_a_signed_call_is_noted_as_any_other",
    ),
    Fault(
        "another call of the same number", "failures/peers.py",
        "and other % NEXT not in (0, state % NEXT):", "and other % NEXT == 0:",
        "unit/recorder/test_page.py::test_who_is_in_another_call_is_elsewhere",
    ),
    Fault(
        "other calls inside the same one are not seen", "recorder/inner_calls.py",
        "any((own.get(count, sign) ^ sign) >> HALF_BITS for", "any(False for",
        "unit/recorder/test_page.py::test_other_calls_inside_the_same_one_are_seen",
    ),
    Fault(
        "inner calls of an earlier call are taken for those of this one", "recorder/calls.py",
        "            self._inner_sign = 0\n", "",
        "unit/recorder/test_page.py::test_other_calls_inside_the_same_one_are_seen",
    ),
    Fault(
        "who has left a call could come to its inner ones", "failures/peers.py",
        "elif has_left(other, state) and", "elif not has_left(other, state) and",
        "unit/recorder/test_page.py::test_who_has_left_a_call_without_an_inner_one_never_comes_to_it",
    ),
    Fault(
        "a mismatch that one rank catches is not seen by the others", "failures/deadlocks.py",
        "    ranks, why = view.differing(identity)\n", "    ranks, why = unknown(identity)\n",
        "system/comm/test_nested_calls.py::test_a_mismatch_that_one_rank_alone_catches_ends_the_job",
    ),
    Fault(
        "an error that ranks share is agreed on again", "comm/group/agreement.py",
        "if may_agree and is_shared(caught):", "if False:",
        "parallel/checkpoint/test_together.py::test_an_object_that_fails_before_ranks_load_makes_all_raise", 2,
    ),
    Fault(
        "what was read too short is not seen", "variables/reading.py",
        "if data.size != stop - start or", "if",
        "parallel/checkpoint/test_together.py::test_a_read_that_fails_on_one_rank_is_an_error_of_all", 2,
    ),
    Fault(
        "a code at the exit is lost", "failures/ending.py",
        'self._end(self.code, "" if', 'self._end(0, "" if',
        "unit/failures/test_ending.py::test_leaving_with_a_code_ends_the_job",
    ),
    Fault(
        "settings of optimizers are not compared", "arguments.py",
        "value != field.default", "not value == value",
        "parallel/optimizers/test_optimizers.py::test_other_optimizers_on_one_rank_are_a_mismatch", 2,
    ),
    Fault(
        "two optimizers alike are not told apart", "variables/step/plan.py", "plan_count += 1", "plan_count += 0",
        "parallel/optimizers/test_optimizers.py::test_two_optimizers_alike_are_told_apart", 2,
    ),
    Fault(
        "other axes are not told", "strategy/values.py", '"reduce along axes", axes,', '"reduce along axes", None,',
        "parallel/comm/test_call_order.py::test_other_axes_are_errors", 2,
    ),
    Fault(
        "ranks save parts of other variables", "checkpoint/walk/listing.py",
        'line += f", strategy number {value.home.strategy_number}, variable number {value.number}"', "line += ''",
        "parallel/checkpoint/test_checkpoint.py::test_another_variable_at_the_same_path_is_an_error", 2,
    ),
    Fault(
        "a chief that fails ends alone", "failures/ending.py",
        "tolerates_deaths and not self.leads and", "tolerates_deaths and",
        "system/strategy/test_parameter_server.py::test_the_code_of_a_chief_that_fails_is_the_launchers",
    ),
    Fault(
        "a strategy of ranks that serve waits for them", "comm/group/duplicates.py",
        "not SERVED.isdisjoint(duplicates.by_purpose.values())", "False",
        "system/strategy/test_parameter_server.py::test_a_program_ends_in_good_order_on_all_ranks",
    ),
    Fault(
        "a lone failure leaves the others waiting", "failures/ending.py",
        "        if not self.is_finalized():\n            self.abort(code)\n", "",
        "unit/failures/test_ending.py::test_a_failure_is_printed_whole_and_ends_the_job",
    ),
    Fault(
        "a dead rank in a new group", "failures/deaths.py", "        if lost:\n", "        if False:\n",
        "system/failures/test_deaths.py::test_the_error_can_be_caught",
    ),
    Fault(
        "a late rank is waited for", "comm/front/arrival.py", "if waited > self._timeout:", "if False:",
        "system/comm/test_collective_timeout.py::test_the_late_rank_is_named_everywhere",
    ),
)
