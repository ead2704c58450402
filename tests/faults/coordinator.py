"""Deliberate faults of the coordinator."""

from __future__ import annotations

from tests.faults.fault import Fault

AGAIN = "unit/coordinator/test_coordinator_again.py::test_"
DATA = "unit/coordinator/test_coordinator_data_again.py::test_"
WAITS = "unit/parameter_server/test_waits.py::test_"
SUSPECTS = "unit/coordinator/test_suspects.py::test_"
SENT = "unit/parameter_server/test_sent_function.py::test_"
LATE = "parallel/serving/test_late_builds.py::test_"
DEADLINES = "unit/parameter_server/test_deadlines.py::test_"

FAULTS = (
    Fault(
        "a server that has answered is blamed", "parameter_server/queue/unfinished.py",
        "pushed - one.prepared", "pushed",
        AGAIN + "a_server_owes_until_it_has_answered_and_then_until_it_has_applied",
    ),
    Fault(
        "a server that does not apply is not named", "parameter_server/queue/unfinished.py",
        "one.unapplied if one.is_decided else pushed - one.prepared", "pushed - one.prepared",
        AGAIN + "a_server_owes_until_it_has_answered_and_then_until_it_has_applied",
    ),
    Fault(
        "a server owes since the last of two functions", "parameter_server/queue/unfinished.py",
        "found.setdefault(server, since)", "found[server] = since",
        AGAIN + "a_server_owes_since_the_first_of_two_functions",
    ),
    Fault(
        "a function that is tried again owes since its first attempt", "parameter_server/queue/closures.py",
        "        self._finished.pop(number, None)\n        self.versions.end(number)\n",
        "        self.versions.end(number)\n",
        AGAIN + "a_server_owes_nothing_for_an_attempt_that_is_void",
    ),
    Fault(
        "a worker runs a function while it makes a value", "parameter_server/queue/unfinished.py",
        "if worker.building:", "if worker.building and not worker.running:",
        AGAIN + "the_value_that_is_made_first_is_told_of_first",
    ),
    Fault(
        "functions that have ended meanwhile are reported", "coordinator/waits.py",
        "if self._since != since or not set(long) & set(self._busy):", "if self._since != since:",
        WAITS + "what_ends_while_the_report_is_made_is_not_reported",
    ),
    Fault(
        "a wait is reported in the next one", "coordinator/waits.py",
        "if self._since != since or not", "if not",
        WAITS + "what_ends_while_the_report_is_made_is_not_reported",
    ),
    Fault(
        "a second long function waits for the report of the first", "coordinator/waits.py",
        "if not ends and all(now <", "if not ends and any(now <",
        WAITS + "a_closure_that_becomes_long_later_is_reported_then",
    ),
    Fault(
        "the lack of workers begins at each look", "coordinator/waits.py",
        "self._absent or Absent(now)", "Absent(now)",
        WAITS + "the_lack_of_workers_is_reported_by_its_own_time_each_time",
    ),
    Fault(
        "a second lack of workers counts from the first one", "coordinator/waits.py",
        "None if self._closures.workers else self._absent or Absent(now)",
        "self._absent or (None if self._closures.workers else Absent(now))",
        WAITS + "the_lack_of_workers_is_reported_by_its_own_time_each_time",
    ),
    Fault(
        "one of two functions over the limit ends nothing", "coordinator/waits.py",
        "any(waited > limit", "all(waited > limit",
        WAITS + "one_of_two_that_runs_over_the_limit_ends_the_job",
    ),
    Fault(
        "what servers have prepared of a void attempt counts for the next one", "parameter_server/queue/closures.py",
        "        closure.prepared = frozenset()\n", "",
        AGAIN + "servers_prepare_each_attempt_anew " + AGAIN + "servers_prepare_an_attempt_after_a_failure_anew",
    ),
    Fault(
        "what a lost worker had finished is not run again", "parameter_server/queue/closures.py",
        "for number in sorted({number for number in worker.slots if number is not None}):",
        "for number in sorted(worker.running):",
        AGAIN + "what_a_lost_worker_had_finished_and_what_it_ran_are_run_again",
    ),
    Fault(
        "losses count as failures", "parameter_server/queue/closures.py",
        "        closure.failures += 1\n", "        closure.failures = closure.attempt\n",
        AGAIN + "losses_are_no_failures_of_a_function_that_is_tried_again",
    ),
    Fault(
        "the second failure of an input", "parameter_server/queue/waiting.py",
        "self.takers.pop(ended, ()) if closure in self.inputs]", "self.takers.pop(ended, ())]",
        AGAIN + "the_second_failure_of_an_input_ends_nothing_twice",
    ),
    Fault(
        "who joins gets slots whose update is not applied", "parameter_server/queue/unfinished.py",
        "any(closure.worker == rank for", "any(closure.worker == rank and not closure.is_decided for",
        AGAIN + "the_slots_of_a_lost_worker_are_in_use_until_its_update_is_applied",
    ),
    Fault(
        "what is bound to the last worker waits for it for ever", "parameter_server/queue/worker_table.py",
        "        self.waiting.unbind(rank)\n",
        "        if len(self.by_rank) > 1:\n            self.waiting.unbind(rank)\n",
        AGAIN + "what_was_bound_to_the_last_worker_goes_to_who_joins",
    ),
    Fault(
        "a function stays bound to a worker that is lost", "parameter_server/queue/closures.py",
        "closure.rules.worker in self.workers\n", "closure.rules.worker is not None\n",
        AGAIN + "what_was_bound_to_a_lost_worker_goes_on_where_data_is_left",
    ),
    Fault(
        "a function that was sent ahead runs since its worker began the one before",
        "parameter_server/queue/worker_table.py",
        "        worker.running.pop(0)\n        worker.since = now\n", "        worker.running.pop(0)\n",
        AGAIN + "the_time_of_a_function_that_was_sent_ahead_begins_with_it",
    ),
    Fault(
        "a function that is sent ahead makes the one before younger", "parameter_server/queue/worker_table.py",
        "        if not self.running:\n            self.since = now\n", "        self.since = now\n",
        AGAIN + "the_time_of_a_function_that_was_sent_ahead_begins_with_it",
    ),
    Fault(
        "who begins again waits before those that run", "parameter_server/queue/staleness.py",
        "for one, version in self._begun.items() if one != attempt.closure]",
        "for one, version in sorted(self._begun.items()) if one != attempt.closure]",
        AGAIN + "an_attempt_that_begins_again_is_behind_those_that_run",
    ),
    Fault(
        "an update without a step is one of the round", "parameter_server/queue/synchronous.py",
        "if not attempt.optimizers or self._is_late(attempt):", "if self._is_late(attempt):",
        "unit/parameter_server/test_rounds.py::test_what_makes_no_step_counts_beside_the_round",
    ),
    Fault(
        "who was at the end of its data gets none after a restore", "parameter_server/queue/resources.py",
        "            worker.ended.discard(number)\n", "            pass\n",
        DATA + "after_a_restore_who_was_at_the_end_reads_again",
    ),
    Fault(
        "the first of two iterators of a worker gives the place of the second", "parameter_server/queue/resources.py",
        "if message.resource not in worker.building:", "if True:",
        DATA + "values_that_are_made_again_before_they_were_made_once",
    ),
    Fault(
        "who joins after a restore makes what was there before it", "parameter_server/queue/resources.py",
        "        self._works[number] = work\n        for worker", "        for worker",
        DATA + "who_joins_after_a_restore_makes_what_the_restore_made",
    ),
    Fault(
        "a restore deals data to the dead", "coordinator/worker_datasets.py",
        "living = list(self._closures.workers)", "living = list(self._workers)",
        DATA + "a_restore_after_a_loss_deals_all_that_is_left_over_those_that_live",
    ),
    Fault(
        "data is set back under functions that read it", "coordinator/worker_datasets.py",
        "if self._closures.uses(number):", "if False:",
        DATA + "data_is_not_set_back_under_functions_that_read_it",
    ),
    Fault(
        "the second one that joins in a place begins where the first one began",
        "parameter_server/queue/data_positions.py",
        "[places.pop(one) for one in before if one in places]", "[places[one] for one in before[:1] if one in places]",
        DATA + "the_second_one_that_joins_in_a_place_goes_on_behind_the_first_one",
    ),
    Fault(
        "a part of the data keeps the pass of the one before", "parameter_server/queue/data_positions.py",
        "                if new:\n", "                if False:\n",
        DATA + "each_part_has_the_pass_to_which_it_belongs",
    ),
    Fault(
        "a function has one death more than it may", "parameter_server/queue/closures.py",
        "if len(closure.deaths) >= closure.rules.max_deaths:", "if len(closure.deaths) > closure.rules.max_deaths:",
        SUSPECTS + "a_closure_fails_when_so_many_workers_were_lost_with_it",
    ),
    Fault(
        "a function that was sent ahead is blamed for a death", "parameter_server/queue/closures.py",
        "is_suspect = number == worker.runs()", "is_suspect = True",
        SUSPECTS + "only_what_a_worker_runs_is_blamed_for_its_loss",
    ),
    Fault(
        "a function is tried again before the death is settled", "parameter_server/queue/closures.py",
        "lost_at=now if is_suspect else None", "lost_at=None",
        SUSPECTS + "a_closure_waits_until_the_loss_is_settled_and_others_do_not",
    ),
    Fault(
        "a suspect outlives the error that cancels all", "parameter_server/queue/closures.py",
        ", *self._suspects.clear()])", "])", SUSPECTS + "a_suspect_is_cancelled_as_others_are",
    ),
    Fault(
        "the time in which a server was stopped counts", "parameter_server/queue/deadlines.py",
        "min(now - before, _COUNTED * self._pause)", "now - before", DEADLINES + "a_stop_of_others_does_not_count",
    ),
    Fault(
        "an answer to an earlier question counts", "parameter_server/queue/deadlines.py",
        "if number != self._number:", "if number == 0:",
        DEADLINES + "an_answer_to_an_earlier_question_counts_for_nothing",
    ),
    Fault(
        "one server's answer stands for all", "parameter_server/queue/deadlines.py",
        "        self._missing.discard(server)\n", "        self._missing.clear()\n", DEADLINES + "random_stops",
    ),
    Fault(
        "large arguments arrive at once", "parameter_server/queue/deadlines.py",
        "_BYTES_PER_SECOND = 10e6", "_BYTES_PER_SECOND = 1e15",
        DEADLINES + "what_is_large_takes_its_time_to_arrive",
    ),
    Fault(
        "who makes a value of its own is late", "parameter_server/queue/worker_table.py",
        "if self.running and not self.building else None", "if self.running else None",
        DEADLINES + "who_makes_a_value_of_its_own_is_never_late",
    ),
    Fault(
        "the time of a function begins when it is sent", "parameter_server/queue/unfinished.py",
        "                self._time(sender, is_loading=not message.is_loaded)\n", "                pass\n",
        "unit/coordinator/test_coordinator_closures.py::test_a_function_has_its_time_from_when_it_has_begun",
    ),
    Fault(
        "options of a second coordinator are dropped", "coordinator/coordinator.py",
        "            options.require_same(self._options)\n", "",
        "unit/coordinator/test_one_process_coordinator.py::test_later_coordinators_have_the_options_of_the_first",
    ),
    Fault(
        "a function keeps what it has changed of a captured list", "parameter_server/worker/sent_function.py",
        "                _refill(container, content)\n", "                pass\n",
        SENT + "every_kind_is_compared",
    ),
    Fault(
        "a captured array can be written", "parameter_server/worker/sent_function.py",
        "value.setflags(write=False)", "value.setflags()", SENT + "arrays_cannot_be_written",
    ),
    Fault(
        "a global that a function binds anew stays so", "parameter_server/worker/sent_function.py",
        "if value is not one.value and not _is_own(value):", "if False:",
        SENT + "a_change_is_an_error_each_time_and_undone",
    ),
    Fault(
        "a model that a function loads is thrown away", "parameter_server/worker/sent_function.py",
        "if value is not one.value and not _is_own(value):", "if value is not one.value:",
        SENT + "an_object_of_a_class_is_the_workers_own",
    ),
    Fault(
        "a worker's own value may not change", "parameter_server/worker/sent_function.py",
        "{id(one): one for one in own}", "{}", SENT + "a_value_of_the_workers_own_may_change",
    ),
    Fault(
        "an error's constructor is called with its text", "parameter_server/protocol/sent_errors.py",
        "return [_Parts(error), error] if has_constructor else [error, _Parts(error)]",
        "return [error, _Parts(error)]", "unit/parameter_server/test_sent_errors.py::test_errors_arrive_as_they_are",
    ),
    Fault(
        "an error that was fetched is raised again", "coordinator/coordinator.py",
        "            if told is not end:\n", "            if True:\n",
        "unit/coordinator/test_one_process_coordinator.py::test_an_error_that_a_value_has_raised_is_not_raised_again",
    ),
    Fault(
        "ranks that do different things read each other's values", "comm/group/agreement.py",
        "    if steps.count(steps[0]) < len(steps):\n", "    if not steps:\n",
        "parallel/comm/test_agreement.py::test_different_steps_are_an_error_of_all_ranks", 2,
    ),
    Fault(
        "each worker has an optimizer of its own built", "coordinator/late_builds.py",
        "        if optimizer.plan is None:\n", "        optimizer._plan = None\n        if optimizer.plan is None:\n",
        LATE + "it_has_the_bits_of_one_that_was_built_before", 4,
    ),
    Fault(
        "an optimizer that a function makes has the plan of another one", "parameter_server/worker/optimizer.py",
        "            self._planned = None\n", "            pass\n",
        LATE + "errors_are_those_of_build_and_the_next_use_is_right", 3,
    ),
    Fault(
        "a worker takes its own variables for those of the plan", "parameter_server/worker/optimizer.py",
        "return number, load(of_plan, self._find)", "return number, list(variables)",
        LATE + "errors_are_those_of_build_and_the_next_use_is_right", 4,
    ),
    Fault(
        "the program and a worker build an optimizer twice", "optimizers/optimizer.py",
        "        if self.plan is not None:\n            return self._build(",
        "        if False:\n            return self._build(",
        LATE + "the_program_builds_one_while_a_worker_asks_for_it", 3,
    ),
)
