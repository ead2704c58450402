"""Deliberate faults of signals that tell of the end: what they do to children, and exceptions that come after one."""

from __future__ import annotations

from tests.faults.fault import Fault

_CHILDREN = "unit/cluster/test_children.py::test_"
_EARLY = "unit/cluster/test_early_signals.py::test_"
_LOSES_NOTHING = "parallel/checkpoint/test_preemption.py::test_a_rank_that_fails_loses_nothing"
_RESCUE = "system/checkpoint/test_rescue.py::test_all_ranks_save_the_last_complete_step"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a worker dies of the signal that tells of the end", "cluster/children.py",
        "            signal.signal(number, signal.SIG_IGN)\n", "            pass\n",
        f"{_CHILDREN}the_signal_itself_leaves_them_too",
    ),
    Fault(
        "a signal to the group ends the workers of a rank", "cluster/children.py",
        "            os.setpgid(0, 0)\n", "            pass\n",
        f"{_CHILDREN}a_signal_to_the_group_leaves_the_workers_of_a_pool",
    ),
    Fault(
        "a child ends with the thread that has forked it", "cluster/children.py",
        "threading.get_ident() != self._main_thread or ", "",
        f"{_CHILDREN}a_child_ends_with_the_program_and_not_before",
    ),
    Fault(
        "a child outlives its rank", "cluster/children.py",
        "_PR_SET_PDEATHSIG, signal.SIGKILL, 0", "_PR_SET_PDEATHSIG, 0, 0",
        f"{_CHILDREN}a_child_ends_with_the_program_and_not_before",
    ),
    Fault(
        "an interrupt does not reach children", "cluster/children.py",
        "        WATCH.hear(signal.SIGINT, self.interrupt)\n", "",
        f"{_CHILDREN}an_interrupt_reaches_children_whoever_handles_it",
    ),
    Fault(
        "a child's interrupt is its parent's, again and again", "failures/deaths.py",
        "                os.register_at_fork(after_in_child=self._be_deaf)\n", "",
        f"{_CHILDREN}an_interrupt_of_a_child_is_its_own",
    ),
    Fault(
        "an exception after a notice loses the checkpoint", "checkpoint/preemption/rescue.py",
        "                self._meet(handler)\n", "                pass\n", _RESCUE,
    ),
    Fault(
        "ranks meet in the rescues of different handlers", "checkpoint/preemption/rescue.py",
        "        if self._group.size > 1 and self._others():\n", "        if False:\n",
        "system/checkpoint/test_rescue.py::test_handlers_that_take_turns_do_not_meet_each_other",
    ),
    Fault(
        "steps of another thread cannot end", "cluster/signals.py",
        "        if threading.current_thread() is not threading.main_thread():\n            return\n", "",
        "unit/checkpoint/test_preemption.py::test_steps_of_another_thread_than_the_main_one_end_it_alone",
    ),
    Fault(
        "a handler cannot be closed in another thread", "cluster/signals.py",
        "        if is_ours and threading.current_thread() is not threading.main_thread():\n", "        if False:\n",
        "unit/checkpoint/test_preemption.py::test_steps_of_another_thread_than_the_main_one_end_it_alone",
    ),
    Fault(
        "what the failed step has read is skipped", "checkpoint/preemption/rescue.py",
        "        self._states.go_back(steps)\n", "        pass\n", _RESCUE,
    ),
    Fault(
        "ranks go on one call apart after a failed step", "checkpoint/preemption/calling_out.py",
        "            order.go_on_at(max(one.calls for one in counts), max(one.noted for one in counts))\n", "", _RESCUE,
    ),
    Fault(
        "a program that is stuck after a notice is never saved", "checkpoint/preemption/rescue.py",
        "            elif time.monotonic() > begin + seconds:\n", "            elif False:\n", _RESCUE,
    ),
    Fault(
        "a signal that came before the handler is forgotten", "cluster/signals.py",
        "            if EARLY.hand_over(number_):\n", "            if EARLY.hand_over(number_) and False:\n",
        "system/checkpoint/test_early_signals.py::test_a_handler_hears_of_what_came_before_it",
    ),
    Fault(
        "a signal that nobody handles is swallowed", "cluster/early_signals.py",
        "            signal.raise_signal(number)\n", "            pass\n",
        "system/checkpoint/test_early_signals.py::test_without_a_handler_the_signal_ends_the_job_at_the_first_call",
    ),
    Fault(
        "the doctor removes the memory of a job that runs", "cli/doctor/leftovers.py",
        "\"in use\" if path.name in mapped\n", "\"in use\" if False\n",
        "unit/cli/test_doctor_leftovers.py::test_what_nobody_uses_is_listed_and_removed_when_asked",
    ),
    Fault(
        "the doctor removes what processes use that it cannot see", "cli/doctor/leftovers.py",
        "_namespace(processes) == _FIRST_NAMESPACE", "True",
        "unit/cli/test_doctor_leftovers.py::test_in_a_namespace_of_its_own_nothing_is_removed",
    ),
    Fault(
        "after the last save an exit function keeps the job for ever", "checkpoint/preemption/handler.py",
        "            leave_later(EXIT_SECONDS, number_of(error.code))\n", "            pass\n",
        "system/checkpoint/test_rescue.py::test_an_exit_function_that_never_returns_keeps_no_job",
    ),
    Fault(
        "between nodes a rank that fails between steps loses the checkpoint", "checkpoint/preemption/exchange.py",
        "return has_failed > 0 and -least > 0", "return False",
        _LOSES_NOTHING, 3,
    ),
    Fault(
        "between nodes a rank that waits for a failed one never comes out", "comm/group/mpi_communicator.py",
        "                    if looks % _LOOKS == 0:\n", "                    if False:\n",
        _LOSES_NOTHING, 3,
    ),
    Fault(
        "who waits for logical devices does not hear of a failed one", "checkpoint/preemption/calling_out.py",
        "        for page in self._pages():\n            page.call_out()\n",
        "        if self._page is not None:\n            self._page.call_out()\n",
        "parallel/strategy/tpu/test_preempted.py::test_a_logical_device_that_fails_loses_nothing", 4,
    ),
    Fault(
        "who waits for others to come out keeps their messages waiting", "checkpoint/preemption/calling_out.py",
        "        self._progress()\n", "",
        "parallel/comm/test_calling_out.py::test_a_rank_that_waits_for_others_to_come_out_lets_their_messages_go_on",
    ),
    Fault(
        "between nodes ranks go on one comparison apart after a failed step", "checkpoint/preemption/calling_out.py",
        "            order.catch_up(max(one.comparisons for one in counts))\n", "            pass\n",
        _LOSES_NOTHING, 3,
    ),
    Fault(
        "a signal that came early stays noted where no handler comes", "cluster/early_signals.py",
        "            self.release()\n        return not self._previous\n", "            pass\n        return True\n",
        f"{_EARLY}a_handler_of_the_program_gets_it_once_at_the_first_call",
    ),
    Fault(
        "a signal that came early reaches the program's handler twice", "cluster/early_signals.py",
        "                self._came.remove(number)\n", "                pass\n",
        f"{_EARLY}nobody_waits_for_a_handler_in_vain",
    ),
    Fault(
        "a job that is not queued again waits for a handler", "cluster/early_signals.py",
        "can_be_requeued = job.can_be_requeued()", "job.can_be_requeued()",
        f"{_EARLY}nobody_waits_for_a_handler_in_vain",
    ),
    Fault(
        "a handler that the program has set before the import is replaced", "cluster/early_signals.py",
        "            if signal.getsignal(number) == signal.SIG_DFL:\n", "            if True:\n",
        f"{_EARLY}what_the_program_handles_already_is_not_touched",
    ),
    Fault(
        "programs that are no ranks handle signals at the import", "cluster/early_signals.py",
        "launch.read() is None or ", "",
        f"{_EARLY}only_ranks_that_want_it_handle_signals_at_the_import",
    ),
    Fault(
        "on servers an exception after a notice loses the checkpoint", "checkpoint/preemption/handler.py",
        "        self._rescue.begin(", "        if self._others is None: self._rescue.begin(",
        "unit/checkpoint/test_preemption.py::test_an_error_on_servers_after_a_signal_loses_no_checkpoint",
    ),
    Fault(
        "a rank gives up a step that is complete, as another one fails behind it", "comm/memory/node_barrier.py",
        "        return all(self._words[other] >= self._least for other in self._others)\n", "        return False\n",
        "unit/comm/test_node_barrier.py::test_who_waits_for_nobody_any_more_goes_on",
    ),
    Fault(
        "who looks for a failed rank waits for it for ever", "checkpoint/preemption/exchange.py",
        "pending is None else pending(look)", "pending is None else pending()",
        _LOSES_NOTHING, 3,
    ),
    Fault(
        "a step that others have ended is saved under the number before", "checkpoint/preemption/rescue.py",
        "handler.look_again(int(self.is_inside))", "handler.look_again(0)",
        _LOSES_NOTHING, 3,
    ),
)
