"""Deliberate faults of how deaths are noticed and told."""

from __future__ import annotations

from tests.faults.fault import Fault

_DOUBTFUL = "unit/cluster/test_doubtful_signals.py::test_"
_LIVES = "unit/failures/test_lives.py::test_who_"
_LOSSES = "unit/comm/test_losses.py::test_"
_SECOND = "unit/failures/test_second_deaths.py::test_"
_SURVIVORS = "unit/failures/test_ending_of_survivors.py::test_"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "without descriptors the dead at the start live on", "failures/lives.py",
        "if not one[1] or self._life(one[0]) != one[1]]", "if self._life(one[0]) != one[1]]",
        f"{_LIVES}is_dead_at_the_first_look_is_told",
    ),
    Fault(
        "another process with the number of a dead one is it", "failures/lives.py",
        "if not one[1] or self._life(one[0]) != one[1]]", "if not one[1] or not self._life(one[0])]",
        f"{_LIVES}has_the_number_of_a_dead_process_is_another_one",
    ),
    Fault(
        "after the last death nobody looks at processes", "failures/lives.py",
        "self._has_thread = goes_on = bool(self._watched)", "goes_on = bool(self._watched)",
        f"{_LIVES}is_added_after_the_last_one_has_ended_is_looked_at",
    ),
    Fault(
        "the name of a process is its state", "failures/lives.py", 'rpartition(")")[2]', 'partition(")")[2]',
        "unit/failures/test_lives.py::test_the_sign_of_life_is_the_start_of_a_process_whatever_its_name",
    ),
    Fault(
        "a needed death that is not the first is not told", "failures/deaths.py",
        "is_told = not self.dead or process in self.needed", "is_told = not self.dead",
        f"{_SECOND}the_death_of_a_server_is_told_after_that_of_a_worker",
    ),
    Fault(
        "every death is told", "failures/deaths.py",
        "is_told = not self.dead or process in self.needed", "is_told = True",
        f"{_SECOND}the_death_of_a_server_is_told_after_that_of_a_worker",
    ),
    Fault(
        "a death that two have seen is told twice", "failures/deaths.py",
        "        if Process(*process) not in self.dead:\n", "        if True:\n",
        f"{_SECOND}a_death_that_two_have_seen_is_told_once",
    ),
    Fault(
        "the dead of another group are those of each", "failures/deaths.py",
        "dead.items() if process in chosen or isinstance(process, str)]", "dead.items()]",
        f"{_SECOND}a_group_without_the_dead_goes_on",
    ),
    Fault(
        "a death that comes while one is told breaks the list", "failures/deaths.py",
        "        dead = self.dead.copy()\n", "        dead = self.dead\n",
        "unit/failures/test_deaths.py::test_a_death_that_comes_while_one_is_told_harms_nothing",
    ),
    Fault(
        "whoever is given up takes the others along", "failures/deaths.py",
        "            if watched == process:\n", "            if watched.host == process.host:\n",
        f"{_SECOND}only_the_worker_that_was_given_up_is_ended",
    ),
    Fault(
        "a process of two groups is watched twice", "failures/deaths.py",
        "if process in self._known or process == here", "if process == here",
        f"{_SECOND}a_process_in_two_groups_is_watched_once",
    ),
    Fault(
        "numbers of processes that mean nothing are watched", "failures/deaths.py",
        " or not same_space or not here.namespace:", " or not same_space:",
        f"{_SECOND}nobody_is_watched_where_numbers_of_processes_mean_nothing",
    ),
    Fault(
        "after a death an error of MPI waits for no news", "failures/deaths.py",
        'if not self._wait_for_news("" if name == SOME_RANK else name):',
        "if not self._wait_for_news() or not self._knows(name):",
        f"{_SECOND}after_a_death_an_error_of_mpi_waits_for_the_news_of_another_one",
    ),
    Fault(
        "ranks whose names begin alike are one", "failures/deaths.py",
        'f"{name} ".startswith(f"{rank} ")', "name.startswith(rank)",
        f"{_SECOND}another_rank_whose_name_begins_alike_is_another_one",
    ),
    Fault(
        "of two signals one is heard", "failures/deaths.py",
        "for number in os.read(descriptor, 4096):", "for number in os.read(descriptor, 4096)[:1]:",
        f"{_SECOND}two_signals_that_come_together_are_both_heard",
    ),
    Fault(
        "the signal of a child is its parent's", "failures/deaths.py",
        "        if self._bell != -1:\n            signal.set_wakeup_fd(-1)\n", "        pass\n",
        f"{_SECOND}signals_of_a_child_are_not_its_parents",
    ),
    Fault(
        "a signal that the program handles is a death", "failures/deaths.py",
        "if signal.getsignal(signal.SIGUSR1) is not self._handler or self._wait_for_news():",
        "if self._wait_for_news():",
        f"{_SECOND}a_handler_that_the_program_sets_later_is_its_own",
    ),
    Fault(
        "who serves loses the program's handler", "failures/deaths.py",
        "if (at_end or signal.getsignal(signal.SIGUSR1) is self._handler) and", "if",
        f"{_SECOND}a_handler_that_the_program_sets_later_is_its_own",
    ),
    Fault(
        "ranks of a large job hear of no deaths", "failures/deaths.py",
        "            WATCHDOG.death_notes.add(process, name)\n", "            pass\n",
        f"{_SECOND}ranks_of_a_large_job_are_told_of_the_first_death_and_of_needed_ones",
    ),
    Fault(
        "a farewell waits for the dead for ever", "failures/farewell.py", "died = died or now", "died = now",
        "unit/failures/test_farewell.py::test_who_waits_for_a_dead_rank_does_not_wait_for_ever",
    ),
    Fault(
        "a farewell that is almost done is given up", "failures/farewell.py",
        "if now - died > DISCOVERY_SECONDS:", "if died:",
        "unit/failures/test_farewell.py::test_who_is_done_may_be_gone_before_this_rank_sees_it",
    ),
    Fault(
        "a farewell ends at once by an error of MPI", "failures/farewell.py",
        "        time.sleep(max(0.0, (died or time.monotonic()) + DISCOVERY_SECONDS - time.monotonic()))\n", "",
        "unit/failures/test_farewell.py::test_survivors_end_at_one_time_however_they_hear_of_a_death",
    ),
    Fault(
        "a survivor waits for the dead", "failures/farewell.py",
        "and not WATCH.may_have_ended(one.key)", "",
        "unit/failures/test_farewell.py::test_a_survivor_ends_when_the_others_have_spoken",
    ),
    Fault(
        "a survivor does not say that it has spoken", "failures/farewell.py", "page.said = True", "pass",
        "unit/failures/test_farewell.py::test_a_survivor_ends_when_the_others_have_spoken",
    ),
    Fault(
        "a farewell is that of the first group", "failures/farewell.py",
        "while waiting := [(one, request) for one, request in waiting if one.can_be_kept() and not request.Test()]:",
        "while not waiting[0][1].Test():",
        "unit/failures/test_farewell.py::test_all_groups_are_waited_for",
    ),
    Fault(
        "a program's file is taken for the launcher's socket", "failures/launcher_socket.py",
        "if identity is None or identity != _identity(self._number):", "if identity is None:",
        "unit/failures/test_launcher_socket.py::test_a_file_that_has_its_number_by_now_is_left_alone",
    ),
    Fault(
        "the launcher has no time to see the end of a rank", "failures/launcher_socket.py",
        "            time.sleep(_SECONDS)\n", "",
        "unit/failures/test_launcher_socket.py::test_the_launcher_has_time_to_see_the_end",
    ),
    Fault(
        "who serves ends with any worker", "failures/ending.py",
        "if not self.tolerates_deaths or one in WATCH.needed]", "]",
        f"{_SURVIVORS}who_serves_lives_on_until_somebody_dies_whom_it_needs",
    ),
    Fault(
        "who serves outlives its servers", "failures/ending.py",
        "if not self.tolerates_deaths or one in WATCH.needed]", "if not self.tolerates_deaths]",
        f"{_SURVIVORS}who_serves_lives_on_until_somebody_dies_whom_it_needs",
    ),
    Fault(
        "a second death runs exit functions again", "failures/ending.py",
        "if mourned and not self.ends_itself and not self.survivor_ends:", "if mourned and not self.ends_itself:",
        f"{_SURVIVORS}two_deaths_are_one_end",
    ),
    Fault(
        "a rank that ends itself is ended by a thread, too", "failures/ending.py",
        "if mourned and not self.ends_itself and not self.survivor_ends:", "if mourned and not self.survivor_ends:",
        f"{_SURVIVORS}a_rank_that_ends_itself_is_ended_by_nobody",
    ),
    Fault(
        "an error of a death may not be handled", "failures/ending.py",
        "            time.sleep(HANDLING_SECONDS)\n", "            pass\n",
        f"{_SURVIVORS}a_program_that_got_the_error_may_handle_it",
    ),
    Fault(
        "an error after a death is told again at the end", "failures/ending.py",
        "mourns = not self.ends_itself and not self.tolerates_deaths", "mourns = not self.tolerates_deaths",
        f"{_SURVIVORS}an_error_after_a_death_names_the_dead_once",
    ),
    Fault(
        "a rank's own code is lost in a death", "failures/ending.py",
        "describe(WATCH.dead.values())}\")\n        self.code = self.code or 1",
        "describe(WATCH.dead.values())}\")\n        self.code = 1",
        f"{_SURVIVORS}who_comes_to_its_end_after_a_death_has_failed",
    ),
    Fault(
        "who has failed after a death has the code 0", "failures/ending.py",
        "describe(WATCH.dead.values())}\")\n        self.code = self.code or 1",
        "describe(WATCH.dead.values())}\")",
        f"{_SURVIVORS}who_comes_to_its_end_after_a_death_has_failed",
    ),
    Fault(
        "who serves has failed when a worker has died", "failures/ending.py",
        "mourns = not self.ends_itself and not self.tolerates_deaths", "mourns = not self.ends_itself",
        f"{_SURVIVORS}who_serves_comes_to_its_end_after_a_death_in_good_order",
    ),
    Fault(
        "a code that all agree on ends the job", "failures/ending.py",
        "            if self.code and not self.is_agreed and not self.stands_apart:\n",
        "            if self.code and not self.stands_apart:\n",
        f"{_SURVIVORS}a_code_that_all_agree_on_ends_nobody_in_the_middle",
    ),
    Fault(
        "an exit with 256 is one with a code", "failures/ending.py",
        "self._on_exit_freed, number_of(code)))", "self._on_exit_freed, int(code if isinstance(code, int) else 1)))",
        f"{_SURVIVORS}the_last_exit_gives_the_code_as_the_parent_sees_it",
    ),
    Fault(
        "an exit that was caught ends the program", "failures/ending.py",
        "if frame is not None and frame.f_back is None:", "if frame is not None:",
        f"{_SURVIVORS}the_last_exit_gives_the_code_as_the_parent_sees_it",
    ),
    Fault(
        "an error of a child ends its parent's job", "failures/ending.py",
        "        if os.getpid() != self.process:\n            self.code = INTERRUPTED",
        "        if False:\n            self.code = INTERRUPTED",
        f"{_SURVIVORS}a_child_ends_by_itself",
    ),
    Fault(
        "all ranks that wait at their end speak at once", "failures/ending.py",
        "limit + (0 if WATCHDOG.is_first_to_end() else LATER_SECONDS):", "limit:",
        f"{_SURVIVORS}a_rank_that_is_not_the_first_to_wait_speaks_later",
    ),
    Fault(
        "who is awaited ends the job at once", "failures/ending.py",
        "if seconds > LEFT_SECONDS and (why", "if seconds and (why",
        f"{_SURVIVORS}who_is_awaited_by_others_has_some_seconds_for_its_end",
    ),
    Fault(
        "a death while MPI ends is an error at once", "failures/ending.py",
        "            if dead and not done.wait(DISCOVERY_SECONDS):\n", "            if dead:\n",
        f"{_SURVIVORS}a_death_while_mpi_ends_is_left_to_mpi_for_some_seconds",
    ),
    Fault(
        "threads of ours keep MPI from its end", "failures/ending.py",
        'if any(thread.daemon and not thread.name.startswith("mpidist") for', "if any(thread.daemon for",
        f"{_SURVIVORS}mpi_is_not_ended_under_a_thread_of_the_program",
    ),
    Fault(
        "a thread aborts where it may not call MPI", "failures/ending.py",
        "        if aborts:\n            self.abort(code)\n", "        self.abort(code)\n",
        f"{_SURVIVORS}a_thread_aborts_only_where_it_may_call_mpi",
    ),
    Fault(
        "a closed collective keeps its ways for small arrays", "comm/front/front.py",
        "        self._smalls.clear()\n        self._small_key, self._small = (), np.copy\n        end_all",
        "        end_all",
        "parallel/comm/backends/test_node.py::test_a_closed_collective_holds_no_memory", 2,
    ),
    Fault(
        "a closed collective keeps its blocks", "comm/backends/node.py", "        self._blocks.drop()\n", "",
        "parallel/comm/backends/test_node.py::test_a_closed_collective_holds_no_memory", 2,
    ),
    Fault(
        "a window sees one death", "comm/windows/lost_ranks.py", "        if known != self._known:\n",
        "        if known and not self._known:\n", f"{_LOSSES}each_death_is_seen",
    ),
    Fault(
        "a rank that joins after a later one is gone for ever", "comm/windows/lost_ranks.py",
        "            self._left = (self._left | {*range(first, rank)}) - {rank}\n",
        "            self._left |= {*range(first, rank)}\n", f"{_LOSSES}ranks_that_join_in_any_order",
    ),
    Fault(
        "a rank that has not joined yet is the one that joins", "comm/windows/lost_ranks.py",
        "            self._left = (self._left | {*range(first, rank)}) - {rank}\n",
        "            self._left -= {rank}\n", f"{_LOSSES}ranks_that_join_in_any_order",
    ),
    Fault(
        "a rank that has died before it joins lives", "comm/windows/lost_ranks.py",
        "            self._known = -1\n", "", f"{_LOSSES}a_rank_that_has_died_before_it_is_added_is_dead",
    ),
    Fault(
        "a rank that drops its window is dead", "comm/windows/lost_ranks.py",
        "        if WATCH.watches(self.processes[rank]):\n", "        if False:\n",
        f"{_LOSSES}a_rank_of_this_host_that_drops_its_window_lives",
    ),
    Fault(
        "after a death a notice of the end is one, too", "cluster/signals.py",
        "            self.note(number_)\n        self._deaths = deaths\n", "            self.note(number_)\n",
        f"{_DOUBTFUL}each_death_brings_a_signal_and_any_other_one_is_a_notice",
    ),
    Fault(
        "a death from before a handler was made hides a notice", "cluster/signals.py",
        "                self._deaths = len(WATCH.dead)\n", "",
        f"{_DOUBTFUL}a_death_from_before_counts_for_no_signal",
    ),
)
