"""Deliberate faults of groups that do not wait for each other."""

from __future__ import annotations

from tests.faults.fault import Fault

_TRAINING = "parallel/strategy/hybrid/test_training.py::"
_LIFETIMES = "parallel/strategy/hybrid/test_lifetimes.py::"
_MEETINGS = "parallel/strategy/hybrid/test_meetings.py::"
_CHECKPOINTS = "parallel/strategy/hybrid/test_checkpoints.py::"

FAULTS = (
    Fault(
        "what was sent to a group is sent again", "strategy/hybrid/exchange.py",
        "        array.fill(0)\n", "",
        _TRAINING + "test_a_group_that_takes_nothing_makes_no_other_wait_and_gets_all_once", 2,
    ),
    Fault(
        "a group gets the last increment, and not the sum of those that it missed", "strategy/hybrid/exchange.py",
        "np.add(total, increment, out=total)", "np.copyto(total, increment)",
        _TRAINING + "test_a_group_that_takes_nothing_makes_no_other_wait_and_gets_all_once", 2,
    ),
    Fault(
        "messages to a group that takes none pile up", "strategy/hybrid/exchange.py",
        "if outbox.is_under_way or not outbox.waiting:", "if not outbox.waiting:",
        _TRAINING + "test_a_group_that_takes_nothing_makes_no_other_wait_and_gets_all_once", 2,
    ),
    Fault(
        "a window that is not full does not count", "strategy/hybrid/home.py",
        "            if part.steps:\n", "            if part.steps > self._pace.every:\n",
        _TRAINING + "test_all_groups_come_to_the_sum_of_all_increments", 2,
    ),
    Fault(
        "finish does not wait for what is under way", "strategy/hybrid/home.py",
        "        exchange.deliver()\n", "",
        _TRAINING + "test_all_groups_come_to_the_sum_of_all_increments", 2,
    ),
    Fault(
        "groups begin with values of their own", "strategy/hybrid/home.py",
        "        target[...] = values\n", "        del target, values\n",
        _TRAINING + "test_all_dtypes_and_two_optimizers", 2,
    ),
    Fault(
        "differences are not divided by the number of groups", "strategy/hybrid/part.py",
        "            np.divide(value, group_count, out=value)\n", "",
        _TRAINING + "test_all_groups_come_to_the_sum_of_all_increments", 2,
    ),
    Fault(
        "increments from before a restore count after it", "strategy/hybrid/exchange.py",
        "            outbox.discard(number)\n\n    def forget", "            pass\n\n    def forget",
        _CHECKPOINTS + "test_nothing_is_lost_and_nothing_counted_twice", 2,
    ),
    Fault(
        "a checkpoint holds the momentum of one group", "strategy/hybrid/home.py",
        "mine[...] = np.sum([*everyone.values()], axis=0) / len(everyone)", "del everyone, mine",
        _CHECKPOINTS + "test_nothing_is_lost_and_nothing_counted_twice", 2,
    ),
    Fault(
        "each group takes the whole momentum of a checkpoint", "strategy/hybrid/home.py",
        "part.restored[number] / self.share_count", "part.restored[number]",
        _CHECKPOINTS + "test_nothing_is_lost_and_nothing_counted_twice", 2,
    ),
    Fault(
        "the schedule of the outer rate begins again after a restore", "strategy/hybrid/plan.py",
        "            part.continue_from(int(saved[OUTER_STEPS].numpy()))\n", "            del part\n",
        _CHECKPOINTS + "test_a_schedule_of_the_outer_rate_continues", 2,
    ),
    Fault(
        "what groups begin with is not written to their variables", "strategy/hybrid/home.py",
        "            if part.number in changed:\n", "            if not part:\n",
        _TRAINING + "test_all_dtypes_and_two_optimizers", 2,
    ),
    Fault(
        "what was dropped stays with the groups", "strategy/hybrid/parts.py",
        "            del self._begun[number]\n", "            pass\n",
        _LIFETIMES + "test_many_optimizers_that_are_dropped_leave_nothing", 2,
    ),
    Fault(
        "groups drop what another group still has", "strategy/hybrid/home.py",
        "common = _in_all([told for told, _, _ in heard.values()])",
        "common = [_in_all([told for told, _, _ in heard.values()])[0], mine[1]]",
        _LIFETIMES + "test_what_one_group_still_has_is_exchanged", 2,
    ),
    Fault(
        "the second optimizer of a variable exchanges nothing", "strategy/hybrid/home.py",
        "parts = [*{part.number: part for part, _ in places}.values()]",
        "parts = [*{part.number: part for part, _ in places if not part.is_begun}.values()]",
        _LIFETIMES + "test_the_second_optimizer_of_a_variable_is_exchanged_like_the_first", 2,
    ),
    Fault(
        "what came in a meeting is not acknowledged before a delivery", "strategy/hybrid/exchange.py",
        "        self.progress()\n        while late", "        while late",
        _TRAINING + "test_what_comes_in_a_meeting_is_taken_by_a_group_that_has_nothing_to_deliver", 3,
    ),
    Fault(
        "an exception that leaves a meeting is forgotten", "strategy/hybrid/home.py",
        "            order.commit(subject)\n", "",
        "system/strategy/test_hybrid_groups.py::test_an_exception_that_leaves_a_meeting_refuses_what_follows",
    ),
    Fault(
        "the end of one strategy ends the survival of others", "strategy/hybrid/strategy.py",
        "    if _MATES:\n", "    if not groups:\n",
        "system/strategy/test_hybrid_groups.py::test_a_death_ends_its_group_and_no_other",
    ),
    Fault(
        "a group expects of others what has come", "strategy/hybrid/part.py",
        "        self.lead.note_arrival(piece, windows)\n", "",
        "unit/strategy/test_hybrid.py::test_what_has_come_is_not_expected",
    ),
    Fault(
        "a group leaves with a child that was forked", "strategy/hybrid/strategy.py",
        "    if os.getpid() != process:\n", "    if not process:\n",
        "system/strategy/test_hybrid_groups.py::test_a_group_that_ends_first_keeps_no_other",
    ),
    Fault(
        "all groups see the same data", "strategy/hybrid/input.py",
        "Shard(pipeline.stream, groups.count, groups.index)", "Shard(pipeline.stream, groups.count, 0)",
        _TRAINING + "test_groups_see_different_data_and_all_of_it", 2,
    ),
    Fault(
        "groups shuffle in orders of their own", "strategy/hybrid/input.py",
        "        take_seeds(drawn, values)\n", "        del values\n",
        _TRAINING + "test_shuffles_without_a_seed_are_the_same_in_all_groups", 2,
    ),
    Fault(
        "another number of groups continues where one of them was", "data/items/groups.py",
        "return own[0], sum(batch for _, batch in places)", "return own",
        "unit/data/test_data_groups.py::test_no_example_is_lost_or_repeated_on_another_number_of_groups",
    ),
    Fault(
        "all groups continue where the one was that saved", "data/items/position.py",
        "place = places[group.index] if group.index < len(places) else own", "place = own",
        _CHECKPOINTS + "test_other_groups_continue_in_the_data_where_all_were", 2,
    ),
    Fault(
        "an epoch is continued by another number of groups with the steps of one", "training/synchronous.py",
        "    return next((behind for behind in found if behind is not None), step)\n",
        "    del found\n    return step\n",
        "parallel/training/test_trainer.py::test_a_resumed_fit_of_other_groups_continues_in_the_epoch", 3,
    ),
    Fault(
        "an outer optimizer need not be linear", "strategy/hybrid/outer.py",
        "    if given:\n", "    if not given:\n",
        "unit/strategy/test_hybrid.py::test_what_is_no_outer_optimizer",
    ),
    Fault(
        "a leader leaves a meeting before its word has left", "strategy/hybrid/exchange.py",
        "if group not in words or group not in self._heard_by]", "if group not in words]",
        _MEETINGS + "test_a_leader_stays_until_all_have_its_word", 2,
    ),
    Fault(
        "a group that has left a meeting meets the others in the next one", "strategy/hybrid/exchange.py",
        "        if self._missed:\n", "        if self._missed is None:\n",
        _MEETINGS + "test_a_group_that_does_not_come_is_named_and_none_meets_it_later", 2,
    ),
    Fault(
        "a death in a group ends others", "strategy/hybrid/strategy.py",
        "        if self._survives:\n            _survive(division)\n", "",
        "system/strategy/test_hybrid_groups.py::test_a_death_ends_its_group_and_no_other",
    ),
)
