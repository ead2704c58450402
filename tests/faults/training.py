"""Deliberate faults of trainers."""

from __future__ import annotations

from tests.faults.fault import Fault

_TRAINER = "unit/training/test_trainer.py::"
_CALLBACKS = "unit/training/test_callbacks.py::"
_RANKS = "parallel/training/test_trainer.py::"

FAULTS = (
    Fault(
        "who leaves the loop leaves alone", "training/results.py",
        "*(float(wish == flag) for flag in _FLAGS)]", "*(0.0 for flag in _FLAGS)]",
        _RANKS + "test_who_leaves_does_not_leave_alone", 2,
    ),
    Fault(
        "a logical device that wishes the end is not heard", "training/results.py",
        "asked = everyone.all_reduce_max(max(asked, wish))", "asked = everyone.all_reduce_max(asked)",
        _RANKS + "test_a_logical_device_that_wishes_the_end", 2,
    ),
    Fault(
        "sums of different names are added up", "training/results.py",
        "if count * int(total[1]) != int(total[0]) ** 2:", "if count < 0:",
        _RANKS + "test_ranks_whose_steps_return_other_values", 2,
    ),
    Fault(
        "an array counts by its ranks and not by its rows", "training/results.py",
        "array.size], np.float64)", "1], np.float64)",
        _TRAINER + "test_an_epoch_has_the_means_of_its_examples_and_the_metrics",
    ),
    Fault(
        "a metric keeps what was counted", "training/results.py",
        "            value.reset_state()\n", "",
        _TRAINER + "test_an_epoch_has_the_means_of_its_examples_and_the_metrics",
    ),
    Fault(
        "the sums of an epoch are not restored", "training/position.py",
        '        self.totals.load_state(saved.get("totals", {}))\n', "",
        _TRAINER + "test_a_resumed_fit_continues_in_the_epoch_to_the_same_bits",
    ),
    Fault(
        "a resumed epoch begins with another pass", "training/loop.py",
        "if position.epoch != position.begun and plan", "if position.epoch and plan",
        _TRAINER + "test_a_resumed_fit_continues_in_the_epoch_to_the_same_bits",
    ),
    Fault(
        "a pass that has begun begins again after a save before its first step", "training/loop.py",
        "if position.epoch != position.begun and plan", "if position.step == 0 and position.epoch and plan",
        "unit/training/test_callbacks.py::test_a_preempted_fit_continues_to_the_same_bits",
    ),
    Fault(
        "a fit that was complete is made again", "training/trainer.py",
        "if self.position.fit > number or self.position.is_ended:", "if self.position.is_ended:",
        _TRAINER + "test_several_fits_of_a_program_that_is_started_again",
    ),
    Fault(
        "the patience of a resumed training begins again", "training/position.py",
        "name: {key: value.numpy() for key, value in state.items()}", "name: {}",
        _CALLBACKS + "test_a_training_that_was_stopped_early_stays_so",
    ),
    Fault(
        "a step under way counts twice", "training/scheduled.py",
        "        self._waiting[place] = StepOutcome(sums, 0)\n", "",
        _TRAINER + "test_a_process_with_parameter_servers_trains_by_the_same_program",
    ),
    Fault(
        "a pause brings the best weights back", "training/callbacks/early_stopping.py",
        "if self.restore_best_weights and self._weights and is_complete:",
        "if self.restore_best_weights and self._weights:",
        "unit/training/test_callbacks.py::test_the_best_weights_come_back_at_the_end",
    ),
)
