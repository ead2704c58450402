"""Deliberate faults of who watches waiting ranks."""

from __future__ import annotations

from tests.faults.fault import Fault

_WATCHDOG, _TIME = "unit/failures/test_watchdog.py", "unit/failures/test_watchdog_time.py"
_TURNS, _HOSTS = "unit/failures/test_watchdog_turns.py", "unit/failures/test_watchdog_hosts.py"
_VAIN, _LOOKS = "unit/failures/test_in_vain.py", "unit/failures/test_looks.py"
_PAGE, _DIRECTORY = "unit/recorder/test_page.py", "unit/failures/test_job_directory.py"

FAULTS = (
    Fault(
        "ranks count their calls differently after an error of all", "comm/group/mpi_communicator.py",
        "if met.first < met.last:", "if False:",
        "parallel/comm/test_object_exchange.py::test_after_an_error_of_all_ranks_calls_are_counted_alike", 2,
    ),
    Fault(
        "ranks count inner calls differently after an error of all", "recorder/calls.py",
        "        # All ranks count inner calls from 0.\n        self._outer = -1\n", "",
        "parallel/comm/test_object_exchange.py::test_inner_calls_are_counted_alike_too", 2,
    ),
    Fault(
        "who waits in MPI is taken for one that raises the same error", "comm/calls/signature_page.py",
        "self.write(number, _WAITS, text)", "self.write(number, number, text)",
        "unit/comm/test_call_page.py::test_what_is_written_for_a_waiting_rank_does_not_count_as_its_own",
    ),
    Fault(
        "the limit of a call ends nothing", "failures/waits.py",
        "for one in (limit_seconds(), own) if one)", "for one in (limit_seconds(),) if one)",
        f"{_TIME}::test_a_wait_has_the_limit_of_the_job_and_of_the_call",
    ),
    Fault(
        "the limit of the job replaces that of a call", "failures/waits.py",
        "    return min((one for one in (limit_seconds(), own) if one), default=math.inf)",
        "    return limit_seconds() or own or math.inf",
        f"{_TIME}::test_a_wait_has_the_limit_of_the_job_and_of_the_call",
    ),
    Fault(
        "a call that watches the time itself is ended by its limit, too", "failures/waits.py",
        "None if calls.is_timed else calls.limit_seconds", "calls.limit_seconds",
        f"{_TIME}::test_a_wait_has_the_limit_of_the_job_and_of_the_call",
    ),
    Fault(
        "the limit of a call holds for the next ones", "recorder/calls.py",
        "        calls.leave()\n        if not calls.depth:\n            calls.limit_seconds = None\n",
        "        calls.leave()\n",
        f"{_TIME}::test_the_limit_of_a_call_is_not_that_of_the_next_one",
    ),
    Fault(
        "a wait of just its limit is over", "failures/watchdog.py",
        "ends = now - since > limit", "ends = now - since >= limit",
        f"{_TIME}::test_a_wait_has_the_limit_of_the_job_and_of_the_call",
    ),
    Fault(
        "the limit of the call that a look has listed second does not hold", "failures/watchdog.py",
        "if not ends and (now < warn_at or calls is not waiting[0]):",
        "if (not ends and now < warn_at) or calls is not waiting[0]:",
        f"{_TIME}::test_the_limit_of_a_call_holds_while_it_waits_in_another_one",
    ),
    Fault(
        "a limit is told of at each look where nothing ends the job", "failures/watchdog.py",
        "limit_of(calls) if may_end else math.inf", "limit_of(calls)",
        f"{_TIME}::test_a_limit_says_nothing_where_nothing_ends_the_job",
    ),
    Fault(
        "a wait is told of again as soon as the first time", "failures/waits.py",
        "now + 2 * (now - since))", "now + (now - since))",
        f"{_TIME}::test_a_rank_in_no_call_is_waited_for_and_told_of_ever_more_rarely",
    ),
    Fault(
        "the next wait goes on where the last one ended", "failures/waits.py",
        "if known is not None and known.state == state:", "if known is not None:",
        f"{_TIME}::test_a_rank_that_goes_from_call_to_call_waits_in_none",
    ),
    Fault(
        "what a rank waited for stays in its page", "failures/watchdog.py",
        "            self._writes = self._waited = False\n            page.write({})\n",
        "            self._writes = self._waited = False\n",
        f"{_TIME}::test_a_rank_that_comes_at_last_ends_the_wait",
    ),
    Fault(
        "a suspended job has no time left when it goes on", "failures/waits.py",
        "Wait(state, since + gap, warn_at + gap)", "Wait(state, since, warn_at)",
        f"{_TIME}::test_a_job_that_stood_still_goes_on_with_the_time_it_had",
    ),
    Fault(
        "a suspended job reports a wait when it goes on", "failures/waits.py",
        "Wait(state, since + gap, warn_at + gap)", "Wait(state, since + gap, warn_at)",
        f"{_TIME}::test_a_job_that_stood_still_goes_on_with_the_time_it_had",
    ),
    Fault(
        "a rank that gets a core seldom never comes to its limit", "failures/waits.py",
        "if gap > STALE_SECONDS:", "if gap > STALE_SECONDS / 2:",
        f"{_TIME}::test_a_slow_look_is_no_standstill",
    ),
    Fault(
        "a rank that comes while it is asked is blamed", "failures/watchdog.py",
        "or (not late and not had_come):", "or False:",
        f"{_TIME}::test_a_rank_that_comes_while_it_is_asked_is_not_told_of",
    ),
    Fault(
        "who is told to end does not", "failures/watchdog.py",
        "            # Who has set it has printed why.\n            self._leave(1)\n", "            pass\n",
        f"{_WATCHDOG}::test_who_is_told_to_end_does",
    ),
    Fault(
        "what one look alone has seen ends the job", "failures/deadlocks.py",
        "_LOOKS, _NAMESAKE_LOOKS, _MANY_LOOKS, _ERROR_LOOKS = 2, 4, 5, 8",
        "_LOOKS, _NAMESAKE_LOOKS, _MANY_LOOKS, _ERROR_LOOKS = 1, 4, 5, 8",
        f"{_WATCHDOG}::test_what_is_seen_in_one_look_alone_does_not_count",
    ),
    Fault(
        "a reason counts the looks of the one before", "failures/search.py",
        "self._seen_times + 1 if seen == self._seen else 1", "self._seen_times + 1 if seen else 0",
        f"{_WATCHDOG}::test_a_reason_that_changes_counts_anew",
    ),
    Fault(
        "a second reason is not told after a first", "failures/search.py",
        "seen.looks or seen == self._told:", "seen.looks or self._told is not None:",
        f"{_WATCHDOG}::test_a_second_reason_is_told_after_a_first",
    ),
    Fault(
        "a dead rank has told of its death", "failures/peers.py",
        "return waits if waits == ends else ends if", "return True if",
        f"{_WATCHDOG}::test_a_death_is_told_where_nothing_ends_the_job",
    ),
    Fault(
        "who asks a second time gets no answer", "failures/watchdog.py",
        "                self._answered = now\n", "                self._answered = 1 << 62\n",
        f"{_WATCHDOG}::test_a_rank_answers_who_asks_and_forgets_that",
    ),
    Fault(
        "a look that is gone takes the others with it", "failures/watchdog.py",
        "            if method := look():\n                method(now / 1e9)\n",
        "            if not (method := look()):\n                break\n            method(now / 1e9)\n",
        f"{_WATCHDOG}::test_what_else_is_looked_at_is_called_at_each_look_as_long_as_it_is_there",
    ),
    Fault(
        "all waiting ranks tell of the same", "failures/watchdog.py",
        "        if not ends or self.end is None:\n            return is_first\n",
        "        if not ends or self.end is None:\n            return True\n",
        f"{_TURNS}::test_the_first_of_the_waiting_ranks_tells_for_all",
    ),
    Fault(
        "a stopped rank is left to tell of all", "failures/peers.py",
        'bool(self.details().get("calls")) and not', 'bool(self.page and self.page.read().get("calls")) and not',
        f"{_TURNS}::test_another_one_tells_where_the_first_one_is_stopped",
    ),
    Fault(
        "a rank speaks at the limit before it is its turn", "failures/watchdog.py",
        "        if not is_first:\n            self._wait_for_turn()\n", "",
        f"{_TURNS}::test_another_rank_ends_the_job_where_the_first_one_does_not",
    ),
    Fault(
        "a rank ends the job though all have come while it waited for its turn", "failures/watchdog.py",
        "if not speaks or not self._waits.is_same(calls) or (", "if not speaks or (",
        f"{_TURNS}::test_a_call_that_ends_while_a_rank_waits_for_its_turn_ends_no_job",
    ),
    Fault(
        "the ninth late rank is not counted", "failures/peers.py",
        "if len(peers) > LISTED else told", "if len(peers) > LISTED + 1 else told",
        f"{_TURNS}::test_a_report_lists_eight_ranks_and_counts_the_others",
    ),
    Fault(
        "an old file of another host counts as what is seen here", "failures/deadlocks.py",
        "reason._replace(looks=max(reason.looks, _MANY_LOOKS)) if many else reason", "reason",
        f"{_HOSTS}::test_a_far_rank_in_another_call_ends_the_job_after_many_looks",
    ),
    Fault(
        "an end is not told to other hosts", "failures/watchdog.py",
        "            self.page.ended = True\n            self._tell_hosts({}, after=0.0)\n",
        "            self.page.ended = True\n",
        f"{_HOSTS}::test_an_end_is_told_to_other_hosts_at_once",
    ),
    Fault(
        "other hosts see a wait that is over", "failures/watchdog.py",
        "after=0.0 if self._waited else IDLE_SECONDS)", "after=IDLE_SECONDS)",
        f"{_HOSTS}::test_a_rank_that_waits_writes_each_second_and_another_one_seldom",
    ),
    Fault(
        "the second death that others tell of is not heard", "failures/job_directory.py",
        "        self._length += len(lines)\n", "        self._length = self._path.stat().st_size * 2\n",
        f"{_HOSTS}::test_deaths_that_others_tell_of_are_heard_in_a_large_job",
    ),
    Fault(
        "in a job of 66 hosts a rank reads all files", "failures/job_directory.py",
        "if len(places) - len(mine) <= _ALL_SEEN:", "if len(places) - len(mine) <= _ALL_SEEN + 1:",
        f"{_DIRECTORY}::test_in_a_large_job_each_rank_sees_few_and_is_seen",
    ),
    Fault(
        "in a job of 65 hosts a rank reads a few files", "failures/job_directory.py",
        "if len(places) - len(mine) <= _ALL_SEEN:", "if len(places) - len(mine) < _ALL_SEEN:",
        f"{_DIRECTORY}::test_in_a_small_job_all_ranks_of_other_hosts_are_seen",
    ),
    Fault(
        "half a file hides what comes after it", "failures/job_directory.py",
        "            self._read = now\n", "            self._read, self._content = now, {}\n",
        f"{_DIRECTORY}::test_half_a_text_is_none",
    ),
    Fault(
        "messages of a large array are lost before they could come", "failures/deadlocks.py",
        "warn_seconds() + byte_count(calls.innermost) / _SLOWEST", "warn_seconds()",
        f"{_VAIN}::test_a_large_array_has_its_time_to_come",
    ),
    Fault(
        "messages are lost though a third rank may send them", "failures/peers.py",
        "return bool(gone_on) and all(me in", "return bool(gone_on) and any(me in",
        f"{_VAIN}::test_messages_are_not_lost_while_a_third_rank_may_still_send_them",
    ),
    Fault(
        "a wait for one that could come is a circle", "failures/peers.py",
        "            if key == me:\n                return path\n", "            return path\n",
        f"{_VAIN}::test_a_rank_that_waits_for_one_that_could_come_is_in_no_circle",
    ),
    Fault(
        "who was in the node's barrier once waits there for ever", "failures/deadlocks.py",
        "if now - calls.in_barrier < _IN_BARRIER_SECONDS:", "if calls.in_barrier > 0:",
        f"{_VAIN}::test_who_has_left_the_barrier_of_the_node_is_not_held_for_waiting_there",
    ),
    Fault(
        "an error is not waited for", "failures/deadlocks.py",
        "_ERROR_LOOKS if has_failed else few", "few",
        f"{_VAIN}::test_a_rank_that_an_error_has_led_out_may_print_it_first",
    ),
    Fault(
        "a long text of a rank is none", "recorder/rank_page.py",
        "        while len(text) > TEXT_BYTES:\n", "        while False:\n",
        f"{_PAGE}::test_a_rank_that_waits_for_many_still_says_in_which_call",
    ),
    Fault(
        "the last communicator of a page is seen by nobody", "recorder/rank_page.py",
        "range(0, len(self.places), PLACE_WORDS)", "range(0, len(self.places) - PLACE_WORDS, PLACE_WORDS)",
        f"{_PAGE}::test_as_many_communicators_are_seen_as_have_a_place",
    ),
    Fault(
        "pytest keeps the report that ends the job", "testing/plugin.py",
        "        output.say_also_to(output.Beside(self.watchdog.stderr, self.watchdog.heading))\n", "",
        "parallel/testing/test_plugin.py::test_a_report_that_ends_the_run_is_not_captured_and_names_the_test",
    ),
    Fault(
        "failures are lost in a buffer where another rank ends the job", "testing/plugin.py",
        "        output.flush()\n", "",
        "parallel/testing/test_plugin.py::test_failures_are_told_where_another_rank_ends_the_job_at_the_exit",
    ),
    Fault(
        "calls of one name are always taken for the same", "failures/deadlocks.py",
        "    if not have_all_come:\n        # Calls", "    if True:\n        # Calls",
        _VAIN + "::test_calls_of_one_name_that_differ_end_the_job_when_the_last_rank_has_come",
    ),
    Fault(
        "calls of one name end the job before the ranks can say it themselves", "failures/deadlocks.py",
        "    if not have_all_come:\n        # Calls", "    if False:\n        # Calls",
        _VAIN + "::test_calls_of_one_name_that_differ_end_the_job_when_the_last_rank_has_come",
    ),
    Fault(
        "ranks in calls of one name have no time to say themselves that they differ", "failures/deadlocks.py",
        "looks = _LOOKS if others_named else _NAMESAKE_LOOKS", "looks = _LOOKS",
        _VAIN + "::test_calls_of_one_name_that_differ_end_the_job_when_the_last_rank_has_come",
    ),
    Fault(
        "inside a call only names are compared", "failures/deadlocks.py",
        "if have_all_come and not different:", "if False:",
        _VAIN + "::test_calls_of_one_name_that_differ_end_the_job_when_the_last_rank_has_come",
    ),
    Fault(
        "a state is that of the call's name alone", "recorder/calls.py",
        "return CODES[name] ^ (sign & WHICH) or 1", "return CODES[name]",
        "unit/recorder/test_recorder.py::test_another_call_of_one_name_has_another_state",
    ),
    Fault(
        "what a rank waits in does not say of which strategy it is", "recorder/calls.py",
        "state + (code or CODES[name] ^ owner * SPREAD & WHICH or 1)", "state + (code or CODES[name])",
        _VAIN + "::test_the_same_call_of_another_strategy_ends_the_job",
    ),
    Fault(
        "a report does not say of which strategy a call is", "recorder/details.py",
        'f" of strategy number {calls.owner}" if calls.owner > 1 else ""', '""',
        _VAIN + "::test_the_same_call_of_another_strategy_ends_the_job",
    ),
    Fault(
        "all ranks of a host look at all others", "failures/leaders.py", "if len(peers) < FEW:", "if True:",
        f"{_LOOKS}::test_the_looks_of_a_host_grow_with_its_ranks_and_not_with_their_square",
    ),
    Fault(
        "nobody looks where the leader is stopped", "failures/leaders.py",
        "return peer.is_fresh() and peer.state(", "return peer.state(",
        f"{_LOOKS}::test_a_rank_that_never_comes_is_seen_whoever_looks",
    ),
    Fault(
        "who leads never asks again whether a lower one has come", "failures/leaders.py",
        "search.leads, search.place = True, 0", "search.leads = True",
        f"{_LOOKS}::test_ranks_that_come_in_any_order_are_led_by_the_lowest_one",
    ),
    Fault(
        "nobody knows for whom a rank waits that is led", "failures/peers.py",
        'in details.get("leaders", ()):', "in ():",
        f"{_LOOKS}::test_a_rank_waits_for_those_that_its_leader_waits_for",
    ),
    Fault(
        "an old text says that a rank waits for one that has come", "failures/peers.py",
        "if not calls or self._is_missing(key, calls)]", "]",
        "unit/recorder/test_page.py::test_an_old_text_counts_only_as_far_as_it_is_true",
    ),
    Fault(
        "a look is repeated at once, whatever it costs", "failures/looks.py", "_PAUSES = 100", "_PAUSES = 0",
        f"{_LOOKS}::test_a_look_is_not_repeated_before_a_hundred_times_its_time_has_passed",
    ),
    Fault(
        "each rank looks for itself at the start", "failures/startup/looker.py",
        "if found := self._ask(name, pause):", "if found := None:",
        "system/failures/test_start_looks.py::"
        "test_the_files_that_a_host_opens_grow_with_its_ranks_and_not_with_their_square",
    ),
    Fault(
        "each of many ranks reports a death", "failures/startup/names.py",
        "if self._size <= FEW or self._name is not None or page is None:", "if self._size:",
        "system/failures/test_deaths.py::test_one_rank_of_many_reports_a_death",
    ),
)
