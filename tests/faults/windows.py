"""Deliberate faults of windows."""

from __future__ import annotations

from tests.faults.fault import Fault

WINDOW = "parallel/comm/test_windows.py::test_"
HANDSHAKE = "unit/comm/test_handshake.py::test_"
LOSSES = "unit/comm/test_window_losses.py::test_"
NONSENSE = "parallel/comm/test_window_strangers.py::test_a_rank_that_sends_nonsense_is_left_out"

FAULTS = (
    Fault(
        "a message overtakes a larger one", "comm/windows/rma/window.py", "            waiting.add(one.source)\n", "",
        WINDOW + "messages_of_a_rank_keep_their_order", 2,
    ),
    Fault(
        "nobody keeps the array of a put", "comm/windows/rma/window.py",
        "                self._win.Put([view[at : at + _PIECE_BYTES], MPI.BYTE], rank, offset + at)\n"
        "            self._moving[rank].append(view)\n",
        "                self._win.Put([view[at : at + _PIECE_BYTES], MPI.BYTE], rank, offset + at)\n",
        WINDOW + "an_array_that_nobody_else_has_is_kept_until_the_flush", 2,
    ),
    Fault(
        "heaps may be larger than shared memory", "comm/windows/rma/heap_space.py", "if wanted > free:",
        "if free > wanted < 0:",
        WINDOW + "heaps_that_do_not_fit_are_everybodys_error", 2,
    ),
    Fault(
        "a put may go beyond the heap", "comm/windows/window.py",
        "if not 0 <= first <= end <=", "if not 0 <= first <= end <= 8 +", WINDOW + "wrong_arguments_are_refused", 2,
    ),
    Fault(
        "a rank reads rows beyond the heap", "comm/windows/row_requests.py",
        "<= int(numbers.max()) < most", "<= int(numbers.max()) <= most", NONSENSE, 2,
    ),
    Fault(
        "rows on another node come in any order", "comm/windows/rma/window.py",
        "self._asked[one.source].popleft()", "self._asked[one.source].pop()",
        WINDOW + "rows_are_read_by_their_numbers", 2,
    ),
    Fault(
        "a rank writes beyond the heap by its socket", "comm/windows/sockets/window.py",
        "at + size <= self.memory.size", "size <= self.memory.size", NONSENSE, 2,
    ),
    Fault(
        "a message has any size", "comm/windows/sockets/window.py",
        "kind is Kind.MESSAGE and size <= MAX_MESSAGE_BYTES",
        "kind is Kind.MESSAGE", NONSENSE, 2,
    ),
    Fault(
        "a zombie writes into the heap", "comm/windows/sockets/window.py",
        "if connection.rank in self._losses.forgotten and kind in", "if connection.rank == self.rank and kind in",
        WINDOW + "nothing_is_sent_to_a_forgotten_rank_or_taken_from_it", 2,
    ),
    Fault(
        "who joins reads again what was read in its place", "parameter_server/queue/data_positions.py",
        "parts = None if not old or old[-1].refusal else _left(old[-1])", "parts = None",
        "unit/parameter_server/test_positions.py::test_who_joins_takes_what_the_one_before_has_left",
    ),
    Fault(
        "the late put of a lost worker goes into the slot of one that has joined", "comm/windows/sockets/connection.py",
        "self._into = memoryview(bytearray(self._into.nbytes))", "pass",
        HANDSHAKE + "the_rest_of_a_put_of_a_rank_that_is_given_up_goes_nowhere",
    ),
    Fault(
        "the file of another user's making is believed", "comm/windows/sockets/join_file.py",
        "or found.st_mode & 0o077:", "or found.st_mode & 0:",
        "unit/comm/test_join_file.py::test_a_file_that_others_may_read_or_write_is_not_believed",
    ),
    Fault(
        "a joiner that dies before it has joined keeps its place", "strategy/parameter_server/invitation.py",
        "            del self._given[rank]\n            self._strategy", "            self._strategy",
        "system/strategy/test_joining.py::test_a_killed_worker_is_replaced_though_joiners_die_at_each_step",
    ),
    Fault(
        "a joiner that leaves before it has joined keeps its place", "comm/windows/sockets/joined_window.py",
        "if not self.has_joined:", "if self.has_joined:",
        "system/strategy/test_joining_hosts.py::test_workers_join_from_another_host",
    ),
    Fault(
        "a joiner that stops while it joins keeps its place", "strategy/parameter_server/invitation.py",
        "or now > end]", "]",
        "system/strategy/test_joining_attacks.py::test_a_joiner_that_stops_while_it_joins_loses_its_place",
    ),
    Fault(
        "a joiner that does not reach a server gets work", "strategy/parameter_server/joined_worker.py",
        "    if not unreached:\n", "    if window:\n",
        "system/strategy/test_joining_hosts.py::test_workers_join_from_another_host",
    ),
    Fault(
        "a joiner that others do not reach gets work", "comm/windows/sockets/newcomers.py", "or reason:", "or None:",
        "system/strategy/test_joining_hosts.py::test_workers_join_from_another_host",
    ),
    Fault(
        "a module that a joiner lacks is an error of the program", "strategy/parameter_server/joined_worker.py",
        "self._lack = error", "pass",
        "system/strategy/test_joining_hosts.py::test_workers_join_from_another_host",
    ),
    Fault(
        "an interrupt of a joiner is an error of the function that it runs",
        "strategy/parameter_server/joined_worker.py",
        "for number in (signal.SIGINT, signal.SIGTERM):", "for number in (signal.SIGTERM,):",
        "system/strategy/test_joining_attacks.py::test_joiners_that_race_and_joiners_that_are_interrupted",
    ),
    Fault(
        "a job waits in silence for a worker that joins", "coordinator/waits.py",
        "absent = [self._absent] if self._absent else []", "absent = []",
        "system/strategy/test_joining_alone.py::test_a_limit_of_time_ends_a_job_that_waits_for_workers",
    ),
    Fault(
        "a silent host is not noticed", "comm/windows/sockets/addresses.py", "socket.SO_KEEPALIVE, 1",
        "socket.SO_KEEPALIVE, 0",
        "system/comm/test_window_deaths.py::test_a_host_that_says_nothing_is_lost_and_a_busy_rank_is_not",
    ),
    Fault(
        "a silent host to which something is sent is not noticed", "comm/windows/sockets/window.py",
        "        for rank in self._held:\n", "        for rank in ():\n",
        "system/comm/test_window_deaths.py::test_a_host_that_says_nothing_is_lost_and_a_busy_rank_is_not",
    ),
    Fault(
        "a server does not look at what is free", "parameter_server/heap/pages.py", "missing > _free_bytes()",
        "missing < 0",
        "system/comm/test_full_memory.py::test_memory_that_is_full_is_an_error_and_nothing_is_lost",
    ),
    Fault(
        "a function reads what it has not written yet", "parameter_server/worker/worker.py",
        "            closure.pushed[place.server].write()\n", "",
        "unit/parameter_server/test_serving_push.py::test_a_function_reads_what_it_has_added_itself",
    ),
    Fault(
        "a push is written where there is no memory", "parameter_server/heap/push_slot.py",
        "        if byte_count > have:\n",
        "        if byte_count > have < 0:\n",
        "system/comm/test_full_memory.py::test_memory_that_is_full_is_an_error_and_nothing_is_lost",
    ),
    Fault(
        "a stranger is admitted", "comm/windows/sockets/handshake.py", "    if not hmac.compare_digest(receive(",
        "    if rank < 0 and not hmac.compare_digest(receive(",
        HANDSHAKE + "a_caller_that_goes_on_without_the_secret_is_refused",
    ),
    Fault(
        "a proof can be sent back", "comm/windows/sockets/handshake.py", "text = side + struct", "text = struct",
        HANDSHAKE + "what_was_sent_cannot_be_sent_back",
    ),
    Fault(
        "another user is admitted", "comm/windows/sockets/handshake.py", "        if user != os.geteuid():",
        "        if user < 0:", HANDSHAKE + "another_users_process_is_refused",
    ),
    Fault(
        "a second death is not seen", "comm/windows/lost_ranks.py",
        "if known != self._known:", "if known and self._known <= 0:",
        LOSSES + "each_death_is_seen_and_not_the_first_one_alone",
    ),
    Fault(
        "a worker that joins after a later one is gone", "comm/windows/lost_ranks.py",
        "| {*range(first, rank)}) - {rank}", "| {*range(first, rank)})",
        LOSSES + "ranks_that_join_in_any_order_are_there",
    ),
    Fault(
        "the death of a joiner is that of another one", "comm/windows/lost_ranks.py",
        "[_UNKNOWN] * (rank + 1 - first)", "[process] * (rank + 1 - first)",
        LOSSES + "the_death_of_a_joiner_is_that_of_no_other",
    ),
    Fault(
        "a joiner that is dead when others hear of it lives for ever", "comm/windows/lost_ranks.py",
        "            self._known = -1\n", "", LOSSES + "a_joiner_that_is_dead_before_it_is_known_is_dead",
    ),
    Fault(
        "each message of a handshake has a limit of its own", "comm/windows/sockets/handshake.py",
        "receive(link, _PROOF_BYTES, end)", "receive(link, _PROOF_BYTES, time.monotonic() + seconds)",
        HANDSHAKE + "the_second_message_has_what_is_left_of_the_time",
    ),
    Fault(
        "each drop of a handshake has a limit of its own", "comm/windows/sockets/handshake.py",
        "    data = b\"\"\n    while len(data) < count:\n        try:\n",
        "    data, left = b\"\", None if end is None else end - time.monotonic()\n"
        "    while len(data) < count:\n"
        "        end = None if left is None else time.monotonic() + left\n"
        "        try:\n",
        HANDSHAKE + "a_drop_at_a_time_does_not_last_longer",
    ),
    Fault(
        "more waits for a connection than the kernel takes at a time", "comm/windows/sockets/connection.py",
        "min(len(queue), _PARTS)", "len(queue)", HANDSHAKE + "all_that_waits_for_a_connection_is_sent_when_it_is_there",
    ),
    Fault(
        "a rank that sends all the time keeps the turn", "comm/windows/sockets/connection.py",
        " and taken < _TURN_BYTES:", ":", HANDSHAKE + "a_rank_that_sends_all_the_time_lets_others_have_their_turn",
    ),
)
