"""Deliberate faults of the adapter of Keras."""

from __future__ import annotations

from tests.faults.fault import Fault

_LOSSES = "parallel/keras/test_losses.py::"
_FIT = "parallel/keras/test_fit.py::"
_CALLBACKS = "parallel/keras/test_callbacks.py::"
_REFUSALS = "parallel/keras/test_refusals.py::"
_GRADIENTS = "parallel/keras/test_gradients.py::test_a_gradient_is_copied_when_it_is_computed"
_SERVED = "unit/keras/test_served.py::"
_LOOP = "parallel/keras/test_custom_loop.py::test_losses_weights_and_metrics_are_those_of_one_rank"

FAULTS = (
    Fault(
        "an optimizer takes the state of other weights", "keras/checkpoints.py",
        "    if its != own:\n", "    if False:\n",
        "parallel/keras/test_checkpoints.py::test_models_are_shown_verified_and_restored_in_part_and_on_other_ranks", 2,
    ),
    Fault(
        "the gradient that a program keeps is overwritten", "keras/backends/torch_backend.py",
        "        if sys.getrefcount(self._given) > self._alone:\n", "        if sys.getrefcount(self._given) < 0:\n",
        _GRADIENTS, 2,
    ),
    Fault(
        "the first rank's values are not sent", "keras/parts/values.py",
        "if most[0, number] != -most[1, number]]", "if not most.size]",
        _FIT + "test_ranks_begin_with_the_first_ones_weights_and_draw_their_own_dropout", 2,
    ),
    Fault(
        "rows that have changed places are not seen", "keras/parts/values.py",
        "_LANES = 1021", "_LANES = 1024",
        "unit/keras/test_values.py",
    ),
    Fault(
        "gradients count alike, whatever the rows", "keras/binding.py",
        "return float(self.size * rows / head[0]) if head[0] else 0.0", "return float(rows > 0)",
        _FIT + "test_one_batch_is_global", 3,
    ),
    Fault(
        "masks are not in the divisor of a loss", "keras/parts/loss.py",
        "return None if mask is None else ops.sum(mask)", "return None",
        _LOSSES + "test_the_mask_of_a_loss_counts", 2,
    ),
    Fault(
        "the mask of a loss itself is forgotten", "keras/parts/loss.py",
        "        if out_mask is not None:\n", "        if out_mask is not None and mask is not None:\n",
        _LOSSES + "test_the_mask_of_a_loss_counts", 2,
    ),
    Fault(
        "a row that counts nothing is multiplied by zero", "keras/backends/torch_backend.py",
        "        flat.zero_()\n", "        flat.mul_(0.0)\n",
        _LOSSES + "test_a_row_that_counts_nothing_may_be_infinite", 2,
    ),
    Fault(
        "a rank without rows counts in metrics", "keras/training/model.py",
        "            if rows:\n", "            if rows >= 0:\n",
        _FIT + "test_one_batch_is_global", 3,
    ),
    Fault(
        "only the compiled optimizer takes part", "keras/parts/taking.py",
        "    for optimizer in _outermost(found):\n", "    for optimizer in filter(None, [model.optimizer]):\n",
        _CALLBACKS + "test_every_optimizer_takes_part", 2,
    ),
    Fault(
        "a rank stops alone", "keras/training/callbacks.py",
        "        self._trained.stop_training = self._binding.stops\n", "",
        _CALLBACKS + "test_all_ranks_stop_after_the_same_step", 2,
    ),
    Fault(
        "what the first rank has restored stays there", "keras/training/callbacks.py",
        "        share_values(binding, variables_of(model), \"the variables of the model\")\n", "",
        _CALLBACKS + "test_a_training_that_was_broken_off_goes_on_everywhere", 2,
    ),
    Fault(
        "the epoch that the first rank has restored stays there", "keras/training/callbacks.py",
        "        set_initial_epoch(model, epoch)\n", "",
        _CALLBACKS + "test_a_training_that_was_broken_off_goes_on_everywhere", 2,
    ),
    Fault(
        "an epoch without a reduction passes", "keras/training/callbacks.py",
        "        if binding.reductions == self._reductions:\n", "        if binding.reductions < self._reductions:\n",
        _CALLBACKS + "test_an_epoch_without_a_reduction_is_an_error", 2,
    ),
    Fault(
        "variables that differ pass", "keras/training/callbacks.py",
        "        require_same(binding, model, epoch)\n", "",
        _CALLBACKS + "test_variables_that_differ_are_named", 2,
    ),
    Fault(
        "all replicas draw the same numbers", "keras/parts/seeds.py",
        "if binding is None or binding.rank == 0:", "if binding is None or binding.rank >= 0:",
        _FIT + "test_ranks_begin_with_the_first_ones_weights_and_draw_their_own_dropout", 2,
    ),
    Fault(
        "statistics of batch normalization stay apart", "keras/parts/taking.py",
        "        variable.assign(mean)\n", "        del variable, mean\n",
        _FIT + "test_statistics_of_batch_normalization_are_averaged_before_they_are_used", 2,
    ),
    Fault(
        "every rank writes the model", "keras/training/saving.py",
        "        if binding.rank:\n            return None\n", "",
        _FIT + "test_a_saved_model_loads_as_plain_keras_and_only_the_first_rank_writes", 2,
    ),
    Fault(
        "targets are not compared", "keras/input/rows.py",
        "    if told is not batch:\n", "    if told is None:\n",
        _REFUSALS + "test_inputs_that_differ_between_ranks", 2,
    ),
    Fault(
        "a replica's own result of a metric is given out as that of all", "keras/parts/metric.py",
        "with summed_states(binding, self.variables):", "if binding:",
        _LOOP, 2,
    ),
    Fault(
        "gradients in `run` are averaged", "keras/backends/torch_backend.py",
        "op = ReduceOp.SUM if weight is None or is_weighed else ReduceOp.MEAN", "op = ReduceOp.MEAN",
        _LOOP, 2,
    ),
    Fault(
        "rows of a table keep the gradients of earlier steps", "keras/backends/torch_backend.py",
        "        variable.value.grad = None\n", "        del variable\n",
        _SERVED + "test_values_and_history_are_those_of_plain_keras", 1,
    ),
    Fault(
        "epsilon is added where ours have it", "keras/served/optimizer.py",
        "forms = {field: True for field", "forms = {field: False for field",
        _SERVED + "test_our_optimizer_of_the_same_name_makes_the_same_steps", 1,
    ),
    Fault(
        "what callbacks load stays on the chief", "keras/served/model.py",
        "        self._mpidist_files(\"load_weights\", args, kwargs)\n        if binding_of(self) is not None:\n",
        "        self._mpidist_files(\"load_weights\", args, kwargs)\n        if binding_of(self) is None:\n",
        _SERVED + "test_a_training_that_was_broken_off_goes_on", 1,
    ),
    Fault(
        "a state that is not trained stays on a worker", "keras/served/worker.py",
        "        self._check(dense)\n", "",
        _SERVED + "test_what_is_refused_says_what_and_the_way_out", 1,
    ),
    Fault(
        "metrics are those of the last step", "keras/served/steps.py",
        "totals = self._totals or [0] * len(added)", "totals = [0] * len(added)",
        _SERVED + "test_values_and_history_are_those_of_plain_keras", 1,
    ),
    Fault(
        "the rate that a callback sets stays on the chief", "keras/served/optimizer.py",
        "rate = self._optimizer.learning_rate if schedule is None else schedule(step)",
        "rate = 0.1 if schedule is None else schedule(step)",
        _SERVED + "test_callbacks_see_executions_and_set_the_rate", 1,
    ),
)
