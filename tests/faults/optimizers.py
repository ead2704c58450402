"""Deliberate faults of optimizers."""

from __future__ import annotations

from tests.faults.fault import Fault

SHARDED = "parallel/optimizers/test_sharded.py"
SHARDED_STATE = "parallel/optimizers/test_sharded_state.py"
FAMILIES = "parallel/optimizers/test_families.py::test_agrees_with_the_formula"
OVERFLOW = "unit/optimizers/test_optimizers_overflow.py"
ACCUMULATION = "parallel/optimizers/test_accumulation.py"
HALVES = "unit/optimizers/test_optimizers_halves.py"
FORMULAS = "unit/optimizers/test_optimizers.py::test_formulas"

FAULTS = (
    Fault(
        "bias correction of another step", "optimizers/families/adam.py",
        "(1 - self.beta_2**step))", "(1 - self.beta_2**(step + 1)))",
        "unit/optimizers/test_optimizers.py::test_adams_first_step_is_the_rate",
    ),
    Fault(
        "epsilon as in Keras", "optimizers/families/adam.py",
        "epsilon = self.epsilon if self.has_epsilon_hat else self.epsilon / root", "epsilon = self.epsilon",
        FORMULAS,
    ),
    Fault(
        "decay without the rate", "optimizers/families/adam.py",
        "keep = 1 - learning_rate * self.weight_decay", "keep = 1 - self.weight_decay",
        FORMULAS,
    ),
    Fault(
        "amsgrad forgets the largest", "optimizers/families/adam.py",
        "np.maximum(slots[2], squares, out=slots[2])", "np.copyto(slots[2], squares)",
        FORMULAS,
    ),
    Fault(
        "nesterov as plain momentum", "optimizers/families/sgd.py",
        "np.add(gradient, scratch[0], out=gradient)", "np.copyto(gradient, velocity)",
        FORMULAS,
    ),
    Fault(
        "Adagrad forgets", "optimizers/families/adagrad.py",
        "np.add(total, root, out=total)", "np.maximum(total, root, out=total)", FORMULAS,
    ),
    Fault(
        "Adadelta counts its steps with the rate", "optimizers/families/adadelta.py",
        "            np.multiply(steps, self.rho, out=steps)\n",
        "            np.multiply(gradient, learning_rate, out=gradient)\n"
        "            np.multiply(steps, self.rho, out=steps)\n", FORMULAS,
    ),
    Fault(
        "Ftrl leaves beta out", "optimizers/families/ftrl.py",
        "2 * self.l2_regularization_strength + self.beta / learning_rate", "2 * self.l2_regularization_strength",
        FAMILIES, 2,
    ),
    Fault(
        "LAMB does not correct its velocity", "optimizers/families/lamb.py",
        "root_correction = 1 / math.sqrt(1 - self.beta_2**step)", "root_correction = 1.0", FAMILIES, 2,
    ),
    Fault(
        "LARS leaves the decay out of the norm", "optimizers/families/lars.py",
        "(direction_norm + decay * parameter_norm)", "direction_norm", FAMILIES, 2,
    ),
    Fault(
        "Lion decays its momentum as its direction", "optimizers/families/lion.py",
        "np.multiply(momentum, self.beta_2, out=momentum)", "np.multiply(momentum, self.beta_1, out=momentum)",
        FAMILIES, 2,
    ),
    Fault(
        "RMSprop does not subtract the mean", "optimizers/families/rmsprop.py",
        "np.subtract(square, root, out=root)", "np.copyto(root, square)", FORMULAS,
    ),
    Fault(
        "RMSprop adds epsilon under the root", "optimizers/families/rmsprop.py",
        "                np.sqrt(root, out=root)\n",
        "                np.sqrt(root + self.epsilon, out=root)\n", FORMULAS,
    ),
    Fault(
        "warming up begins at zero", "optimizers/schedules.py",
        "(step + 1) / self.warmup_steps", "step / self.warmup_steps",
        "unit/optimizers/test_schedules.py::test_linear_warmup",
    ),
    Fault(
        "the scale grows at each step after the first time", "optimizers/loss_scale.py",
        "(self.dynamic_scale * 2, LARGEST_SCALE)\n            self._good_steps = 0\n",
        "(self.dynamic_scale * 2, LARGEST_SCALE)\n",
        "unit/optimizers/test_optimizers_options.py::test_the_scale_doubles_after_steps_in_a_row_and_is_halved_by_one_that_is_skipped",
    ),
    Fault(
        "a cycle ends one step early", "optimizers/schedules.py",
        "max(1, math.ceil(step / self.decay_steps))", "math.floor(step / self.decay_steps) + 1",
        "unit/optimizers/test_schedules.py",
    ),
    Fault(
        "a restart comes one step late by rounding", "optimizers/schedules.py", "        done *= 1 + _ROUNDING\n", "",
        "unit/optimizers/test_schedules.py",
    ),
    Fault(
        "the scale grows one step late", "optimizers/loss_scale.py",
        "if self._good_steps >= self.dynamic_growth_steps:", "if self._good_steps > self.dynamic_growth_steps:",
        "unit/optimizers/test_optimizers_options.py::test_the_scale_doubles_after_steps_in_a_row_and_is_halved_by_one_that_is_skipped",
    ),
    Fault(
        "state of half precision is of half precision", "variables/update/halves.py",
        "return np.dtype(np.float32) if is_half(dtype) else dtype", "return dtype",
        f"{HALVES}::test_updates_are_those_of_float32_rounded_after_each_step",
    ),
    Fault(
        "a server's state is of the variable's dtype", "parameter_server/chief/chief.py",
        "state_dtype(one.dtype)", "one.dtype",
        "parallel/serving/test_optimizers_of_servers.py::test_other_dtypes_have_the_bits_of_one_process", 3,
    ),
    Fault(
        "a copy in float32 outlives an assignment", "variables/update/halves.py",
        "where=own.astype(parameter.dtype) != parameter", "where=(own == 0) & (parameter != 0)",
        f"{HALVES}::test_a_variable_that_is_assigned_is_copied_anew",
    ),
    Fault(
        "squares are taken before they are scaled", "optimizers/families/adam.py",
        "            np.multiply(gradient, scale, out=gradient)\n"
        "            np.multiply(gradient, gradient, out=gradient)\n",
        "            np.multiply(gradient, gradient, out=gradient)\n"
        "            np.multiply(gradient, scale * scale, out=gradient)\n",
        f"{OVERFLOW}::test_squares_overflow_where_their_mean_does",
    ),
    Fault(
        "a rank keeps an overflow to itself", "variables/step/alarm.py",
        "if arena.shares_memory:\n            try:", "if False:\n            try:",
        "parallel/optimizers/test_overflow.py", 3,
    ),
    Fault(
        "compiled loops are not watched", "variables/update/overflow.py",
        "        if self._look():\n            self.note()", "        self._look()",
        f"{OVERFLOW}::test_compiled_loops_are_watched_on_their_own",
    ),
    Fault(
        "NumPy's functions are not watched", "variables/step/arena_plan.py",
        'np.errstate(over="call", call=overflow.note)', 'np.errstate(over="ignore")',
        f"{OVERFLOW}::test_squares_overflow_where_their_mean_does",
    ),
    Fault(
        "a node acts on a sum that overflows on it alone", "variables/step/sums.py",
        'np.errstate(over="ignore")', "np.errstate()",
        "parallel/optimizers/test_overflow.py", 3,
    ),
    Fault(
        "an overflow that was caught is forgotten", "variables/step/arena_plan.py",
        "                if alarm.text:\n                    alarm.hear(self._overflowed, self._heard_by)\n", "",
        f"{OVERFLOW}::test_the_error_comes_again_until_state_is_restored",
    ),
    Fault(
        "Nadam looks ahead by the weight of this step", "optimizers/families/nadam.py",
        "of_momentum = following / ", "of_momentum = weight / ", FORMULAS,
    ),
    Fault(
        "Adamax forgets the largest at once", "optimizers/families/adamax.py",
        "np.maximum(norm, block, out=norm)", "np.copyto(norm, block)", FORMULAS,
    ),
    Fault(
        "the decay begins while the rate rises", "optimizers/schedules.py",
        "_cosine(min(step - self.warmup_steps, self.decay_steps)", "_cosine(min(step, self.decay_steps)",
        "unit/optimizers/test_schedules.py::test_cosine_decay_after_a_line_upwards",
    ),
    Fault(
        "the order of accumulated gradients is compared", "variables/step/accumulator.py",
        "self.calls = self.with_call(factor, is_summed=is_summed)",
        "self.calls = self.with_call(factor + sum(gradients) * 1e-9, is_summed=is_summed)",
        f"{ACCUMULATION}::test_ranks_may_use_variables_in_another_order", 2,
    ),
    Fault(
        "what a rank lacks is what its last step has left", "variables/step/arena_plan.py",
        "            self._plan.gradients[number][...] = 0\n", "            pass\n",
        f"{ACCUMULATION}::test_missing_gradients_count_as_zeros", 2,
    ),
    Fault(
        "rows of a refused step are in the next one", "variables/step/arena_plan.py",
        "                self._plan.tables[number].take()\n", "                pass\n",
        f"{ACCUMULATION}::test_rows_of_a_step_that_ranks_have_refused_are_in_no_later_one", 2,
    ),
    Fault(
        "a refused update loses accumulated gradients", "variables/step/arena_plan.py",
        "            accumulator.take_back(gradients, factor, views, is_summed=is_summed)\n",
        "            accumulator.clear()\n",
        f"{ACCUMULATION}::test_an_update_that_ranks_have_refused_loses_no_call", 2,
    ),
    Fault(
        "a refused update leaves the sums in the views", "variables/step/arena_plan.py",
        "            accumulator.take_back(gradients, factor, views, is_summed=is_summed)\n", "            pass\n",
        f"{ACCUMULATION}::test_an_update_that_ranks_have_refused_loses_no_call", 2,
    ),
    Fault(
        "all variables count as missing", "variables/step/arena_plan.py",
        "wanted = tuple(sorted({number for one in everyone for number in one}))",
        "wanted = tuple(range(len(self.variables)))",
        f"{ACCUMULATION}::test_a_variable_that_no_rank_uses_stays_as_it_is", 2,
    ),
    Fault(
        "flush divides by the calls of a whole window", "variables/step/arena_plan.py",
        "settings._replace(factor=1 / count,", "settings._replace(factor=1 / self._accumulated,",
        f"{ACCUMULATION}::test_flush_applies_the_mean_of_the_calls_that_were_made", 2,
    ),
    Fault(
        "flush does not count as an update", "optimizers/optimizer.py",
        "self.iterations = last + 1 if was_applied", "self.iterations = self.iterations if was_applied",
        f"{ACCUMULATION}::test_flush_applies_the_mean_of_the_calls_that_were_made", 2,
    ),
    Fault(
        "averages move with updates only", "variables/step/arena_plan.py",
        "moves = 0 if self._average is None or settings.step == 1 else count - 1", "moves = 0",
        f"{ACCUMULATION}::test_averages_move_in_each_call_as_those_of_keras", 2,
    ),
    Fault(
        "the average of a variable without gradients misses moves", "variables/step/average.py",
        "self._arithmetic.follow(step, 1 + moves) if moves", "self._arithmetic.follow(step) if moves",
        f"{ACCUMULATION}::test_averages_move_in_each_call_as_those_of_keras", 2,
    ),
    Fault(
        "directions are rounded", "variables/step/arena_plan.py",
        "has_directions=isinstance(kernel, LayerKernel)", "has_directions=False",
        f"{HALVES}::test_updates_are_those_of_float32_rounded_after_each_step",
    ),
    Fault(
        "directions are those of the step before", "variables/step/variable_pass.py",
        "            np.copyto(wide, narrow)\n", "            np.copyto(wide, narrow) if narrow.size < 9 else None\n",
        "parallel/optimizers/test_halves.py", 2,
    ),
    Fault(
        "older sums of squares are taken for means", "optimizers/saving.py",
        "np.asarray(wide * self._factor, wide.dtype)", "np.asarray(wide, wide.dtype)",
        f"{HALVES}::test_checkpoints_of_sums_of_squares_are_restored",
    ),
    Fault(
        "an overflow of earlier versions comes back", "optimizers/saving.py",
        "wide[np.isposinf(wide)] = np.finfo(np.float16).max", "pass",
        f"{HALVES}::test_checkpoints_of_sums_of_squares_are_restored",
    ),
    Fault(
        "a setting that does nothing is taken", "attributes.py",
        "            if name not in self._assignable and self._is_settled and", "            if False and",
        "unit/test_settings.py",
    ),
    Fault(
        "a setting that is fixed is taken by a subclass", "attributes.py",
        "        has_it = name in self._fixed or any(", "        has_it = any(",
        "unit/test_settings.py::test_subclasses_may_have_attributes_of_their_own",
    ),
    Fault(
        "a shard leaves out the sums of the last node", "variables/step/sharding/sharded_sums.py",
        "for other in others[1:]:", "for other in others[2:]:", SHARDED, 3,
    ),
    Fault(
        "shards add up half precision in half precision", "variables/step/sharding/sharded_sums.py",
        "add(first.astype(wide, copy=False), others[0].astype(wide, copy=False))", "add(first, others[0])",
        f"{SHARDED}::test_halves_are_rounded_once", 3,
    ),
    Fault(
        "new parameters stay where their state is", "variables/step/sharding/sharded_sums.py",
        'self._messages.exchange("all_gather", [own] * len(got), got)', "pass", SHARDED, 2,
    ),
    Fault(
        "one node hears of the overflow in its shard", "variables/step/arena_plan.py",
        "plan.is_sharded or given_arena is not None", "given_arena is not None",
        f"{SHARDED}::test_all_ranks_hear_of_an_overflow_on_one_node", 2,
    ),
    Fault(
        "norms of a shard count blocks of others", "variables/step/bundle.py",
        "floor = self._floor if self.arena.options.reproducible else int", "floor = int",
        f"{SHARDED}::test_norms_under_reproducible_have_the_bits_of_the_unsharded_run", 2,
    ),
    Fault(
        "a table's shard takes rows of others", "variables/step/table.py",
        "here = (indices >= self._own[0]) & (indices < self._own[1])", "here = indices < self._own[1]", SHARDED, 2,
    ),
    Fault(
        "rows are updated on their own node only", "variables/step/table.py",
        "        spread_rows(self._tables)\n", "", SHARDED, 2,
    ),
    Fault(
        "a slot is put together in the order of ranks", "variables/kinds/sharded_state.py",
        "in sorted(zip(self._ranks, self._edges, self._edges[1:], strict=False)):",
        "in zip(self._ranks, self._edges, self._edges[1:], strict=False):",
        f"{SHARDED_STATE}::test_a_slot_is_read_and_written_as_a_whole", 4,
    ),
    Fault(
        "two slots that look alike are read as one", "variables/kinds/sharded_state.py",
        '"value of variable number", self.number, None', '"value of variable number", 0, None',
        f"{SHARDED_STATE}::test_ranks_that_read_other_slots_are_told", 2,
    ),
    Fault(
        "under check, gradients of all logical devices are compared", "variables/step/logical_plan.py",
        "        self._compared_over = home.replicas.communicator\n", "",
        "parallel/strategy/tpu/test_replicated.py::test_copies_that_have_drifted_apart_are_found_under_check", 2,
    ),
)
