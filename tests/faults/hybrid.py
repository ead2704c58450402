"""Deliberate faults of groups that do not wait for each other."""

from __future__ import annotations

from tests.faults.fault import Fault

_TRAINING = "parallel/strategy/hybrid/test_training.py::"
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
        "mine[...] = next((one for one in everyone.values() if one is not None), mine)", "del everyone",
        _TRAINING + "test_all_dtypes_and_two_optimizers", 2,
    ),
    Fault(
        "differences are not divided by the number of groups", "strategy/hybrid/part.py",
        "            np.divide(value, group_count, out=value)\n", "",
        _TRAINING + "test_all_groups_come_to_the_sum_of_all_increments", 2,
    ),
    Fault(
        "increments from before a restore count after it", "strategy/hybrid/home.py",
        "            self.exchange.discard(part.number)\n", "",
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
        "all groups see the same data", "strategy/hybrid/input.py",
        "groups.count, groups.index)", "groups.count, 0)",
        _TRAINING + "test_groups_see_different_data_and_all_of_it", 2,
    ),
    Fault(
        "groups shuffle in orders of their own", "strategy/hybrid/input.py",
        "        take_seeds(drawn, values)\n", "        del values\n",
        _TRAINING + "test_shuffles_without_a_seed_are_the_same_in_all_groups", 2,
    ),
    Fault(
        "an outer optimizer need not be linear", "strategy/hybrid/outer.py",
        "    if given:\n", "    if not given:\n",
        "unit/strategy/test_hybrid.py::test_what_is_no_outer_optimizer",
    ),
    Fault(
        "a leader leaves a meeting before its word has left", "strategy/hybrid/exchange.py",
        "if group not in words or group not in self._heard_by]", "if group not in words]",
        "system/strategy/test_hybrid_groups.py::test_a_group_that_is_stopped_delays_no_other",
    ),
    Fault(
        "a death in a group ends others", "strategy/hybrid/strategy.py",
        "        if self._survives:\n            _survive(division)\n", "",
        "system/strategy/test_hybrid_groups.py::test_a_death_ends_its_group_and_no_other",
    ),
)
