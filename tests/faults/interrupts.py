"""Deliberate faults of interrupts: heard late, twice, and between calls."""

from __future__ import annotations

from tests.faults.fault import Fault

_INTERRUPTS = "unit/failures/test_interrupts.py::test_"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a second call that hears late ends the job", "failures/interrupts.py",
        "            self._is_stuck = False\n        if is_handled():", "        if is_handled():",
        f"{_INTERRUPTS}two_calls_that_are_handled_late_are_no_two_signals_in_one",
    ),
    Fault(
        "two interrupts in a call of MPI are one", "failures/interrupts.py",
        "            if self._is_stuck:\n", "            if False:\n",
        f"{_INTERRUPTS}a_second_signal_in_a_call_that_runs_no_handler_ends_the_job_at_once",
    ),
    Fault(
        "signals from before there were ranks count", "failures/interrupts.py",
        "            self._end_job = end\n            self._handlings = 0\n", "            self._end_job = end\n",
        f"{_INTERRUPTS}signals_from_before_there_were_ranks_do_not_count",
    ),
    Fault(
        "all interrupts after that of another rank are lost", "failures/interrupts.py",
        "            self._expects_until = -math.inf\n            return\n", "            return\n",
        f"{_INTERRUPTS}one_interrupt_of_all_ranks_is_raised_once",
    ),
    Fault(
        "the next interrupt of the rank that was interrupted is lost", "failures/interrupts.py",
        "if not self.is_asked and not is_own:", "if not is_own:",
        f"{_INTERRUPTS}an_interrupt_that_nobody_expects_counts",
    ),
    Fault(
        "what is forgotten is expected", "failures/interrupts.py",
        '        self._expects_until = -math.inf\n        self._ask(asked=False)\n\n    def _ask',
        "        self._ask(asked=False)\n\n    def _ask",
        f"{_INTERRUPTS}an_interrupt_that_nobody_expects_counts",
    ),
    Fault(
        "the time of an interrupt is that of the one before", "failures/interrupts.py",
        "            self._timer.cancel()\n", "            pass\n",
        f"{_INTERRUPTS}each_interrupt_has_its_own_time",
    ),
    Fault(
        "the next call is the one that does not end", "failures/interrupts.py",
        "elif inside is not None and inside is order and inside.number == number and not self._patient:",
        "elif inside is not None and inside is order and not self._patient:",
        f"{_INTERRUPTS}calls_that_come_and_go_after_an_interrupt_end_nothing",
    ),
    Fault(
        "calls between nodes take no interrupt with them", "failures/interrupts.py",
        "if inside is None and self._count_across() == count:", "if inside is None:",
        f"{_INTERRUPTS}calls_between_nodes_take_the_interrupt_with_them",
    ),
    Fault(
        "a child waits for its parent's call", "failures/interrupts.py",
        "        if os.getpid() != self._process:\n", "        if False:\n",
        f"{_INTERRUPTS}a_child_raises_it_in_the_middle_of_its_parents_call",
    ),
    Fault(
        "others wait for ever for who has left an earlier call", "failures/interrupts.py",
        "(number == order.number and WATCHDOG", "(WATCHDOG",
        f"{_INTERRUPTS}others_wait_for_who_has_left_its_last_call",
    ),
    Fault(
        "a second interrupt between calls waits as the first", "failures/interrupts.py",
        "if inside is None and (self._raises_now or self.is_asked or not self._has_ranks):",
        "if inside is None and (self._raises_now or not self._has_ranks):",
        f"{_INTERRUPTS}a_second_interrupt_between_calls_is_raised_at_once",
    ),
    Fault(
        "a key that is held down leaves a message in the middle", "failures/interrupts.py",
        "elif self._handled - self._noted > _ONE_PRESS_SECONDS:", "else:",
        "unit/coordinator/test_one_process_coordinator.py::test_signals_of_one_key_press_are_one_interrupt",
    ),
    Fault(
        "a coordinator goes on without a message", "parameter_server/protocol/thread_guard.py",
        "        self._is_torn = self._is_torn or isinstance(error, KeyboardInterrupt)\n", "",
        "unit/coordinator/test_one_process_coordinator.py::test_a_second_interrupt_in_a_message_ends_the_coordinator",
    ),
)
