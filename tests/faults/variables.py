"""Deliberate faults of variables, the arena and the synchronous step."""

from __future__ import annotations

from tests.faults.fault import Fault

OPTIONS = "parallel/optimizers/test_options.py::test_"

FAULTS = (
    Fault(
        "replicas write to central storage without an aggregation", "variables/kinds/aggregating.py",
        "if self.aggregation is VariableAggregation.NONE and context.in_replica():", "if False:",
        "parallel/strategy/test_central_storage.py::test_a_write_of_replicas_needs_an_aggregation", 2,
    ),
    Fault(
        "a variable of integers wraps", "variables/kinds/mirrored.py",
        "changed(self.name, self._view, delta, method)", "np.add(self._view, delta)",
        "parallel/variables/test_integers.py::test_sums_and_differences_of_a_variable", 2,
    ),
    Fault(
        "each rank looks whether its own integer fits", "variables/kinds/mirrored.py",
        "prepare(self.arena.collective.broadcast(array))", "prepare(self.arena.first_value(array, self.address.slab))",
        "parallel/variables/test_integers.py::test_the_first_replicas_number_counts", 2,
    ),
    Fault(
        "rows of integers wrap", "indexed_slices.py",
        "if bound <= limits.max and is_positive:", "if bound or is_positive:",
        "parallel/variables/test_integers.py::test_rows_that_are_scattered", 2,
    ),
    Fault(
        "dense rows of integers wrap", "indexed_slices.py",
        "self.values, self.indices) if self.dtype.kind in \"iu\" else None",
        "self.values, self.indices) if self.dtype.kind in \"\" else None",
        "unit/variables/test_variable.py",
    ),
    Fault(
        "components of integers wrap", "variables/kinds/sync_on_read.py",
        "changed(self.name, self._component, delta, method)\n        else", "self._component + delta\n        else",
        "parallel/variables/test_integers.py::test_a_sum_on_read_holds_more_than_its_components", 2,
    ),
    Fault(
        "shares of a restored sum wrap", "variables/kinds/sync_on_read.py",
        "fitting(self.name, one, self.dtype) for one in", "one for one in",
        "parallel/variables/test_integers.py::test_a_counter_never_stops_a_save", 2,
    ),
    Fault(
        "integers that are assigned wrap", "variables/coercion.py",
        'return fitting(name, array, dtype) if dtype.kind in "iu" else', "return",
        "parallel/variables/test_integers.py::test_what_is_assigned_does_not_wrap", 2,
    ),
    Fault(
        "other variables at the same step", "variables/step/step.py",
        "sign=hash((selection.checksum, numbers))", "sign=hash(numbers)",
        "parallel/variables/step/test_plan.py::test_differences_are_found_late_on_one_node", 2,
    ),
    Fault(
        "another learning rate on one rank", "variables/step/step.py",
        "sign=hash((selection.checksum, numbers))", "sign=selection.checksum",
        "parallel/comm/test_call_order.py::test_numbers_of_a_step_that_differ", 2,
    ),
    Fault(
        "sums on one rank alone", "variables/step/step.py",
        "sign=hash((selection.checksum, numbers))", "sign=hash((*selection.names, *numbers[:3]))",
        "parallel/optimizers/test_optimizers.py::test_sums_on_one_rank_alone_are_a_mismatch", 2,
    ),
    Fault(
        "sums are accumulated on every rank", "variables/step/accumulator.py",
        "return arena.communicator.rank == 0 if is_summed else arena.gives_gradients", "return True",
        "parallel/strategy/test_logical_replicas.py::test_skipped_aggregation_with_accumulation_and_loss_scaling", 2,
    ),
    Fault(
        "accumulated gradients stay scaled", "variables/step/accumulator.py",
        "own if factor == 1 else np.multiply(own, factor, dtype=dtype)", "own",
        OPTIONS + "scaled_gradients_are_unscaled " + OPTIONS + "a_skipped_update_forgets_its_calls", 2,
    ),
    Fault(
        "a variable that has had a gradient has one in each update", "variables/step/accumulator.py",
        "        self.numbers = set()\n        self.calls", "        self.calls",
        "unit/optimizers/test_optimizers_options.py::test_a_variable_without_gradients_in_a_later_update_stays_as_it_is",
    ),
    Fault(
        "accumulated sums are not cleared", "variables/step/accumulator.py",
        "        for total in self.sums:\n            total.clear()\n", "",
        OPTIONS + "accumulated_calls_are_one_of_their_mean", 2,
    ),
    Fault(
        "clipping before unscaling", "variables/step/measured.py",
        "self._clipping(norms * factor)", "self._clipping(norms)",
        OPTIONS + "scaled_gradients_are_unscaled", 2,
    ),
    Fault(
        "the global norm is that of each variable", "variables/step/measured.py",
        "np.asarray(np.sqrt(np.dot(norms, norms)))", "norms",
        "parallel/optimizers/test_families.py::test_global_norm_is_over_all_variables_and_dtypes", 2,
    ),
    Fault(
        "steps that are not finite are made", "variables/step/measured.py",
        "if self._must_be_finite and not np.isfinite(norms).all():", "if False:",
        OPTIONS + "one_ranks_overflow_skips_the_step_on_all", 2,
    ),
    Fault(
        "every rank updates all rows", "variables/step/table.py",
        "(node.rank, node.size) if self.is_shared else (0, 1)", "(0, 1)",
        "parallel/optimizers/test_tables.py::test_is_one_rank_with_all_rows", 2,
    ),
    Fault(
        "rows are measured on every rank", "variables/step/table.py",
        "if (communicator.rank if one_measures else communicator.node_index) != 0:", "if False:",
        "parallel/optimizers/test_tables.py::test_is_one_rank_with_all_rows", 2,
    ),
    Fault(
        "halves of a step in half precision", "variables/step/sums.py",
        "    if is_half(dtype):", "    if False:",
        "parallel/optimizers/test_optimizers.py::test_half_gradients_of_a_node_are_added_in_single_precision", 3,
    ),
    Fault(
        "no average where a gradient is None", "variables/step/arena_plan.py",
        "            if was_applied and self._average is not None:\n",
        "            if was_applied and self._average is not None and len(numbers) == len(self.variables):\n",
        OPTIONS + "average_of_the_weights", 2,
    ),
    Fault(
        "products and sums are contracted", "variables/update/llvm_text.py",
        '"add": "fadd {T} {0}, {1}",\n    "subtract": "fsub {T} {0}, {1}",\n    "multiply": "fmul {T} {0}, {1}",',
        '"add": "fadd contract {T} {0}, {1}",\n    "subtract": "fsub contract {T} {0}, {1}",\n'
        '    "multiply": "fmul contract {T} {0}, {1}",',
        "unit/optimizers/test_optimizers_compiled.py::test_any_sequence_of_operations_has_numpys_bits "
        "unit/optimizers/test_optimizers_compiled.py::test_each_family_has_numpys_bits",
    ),
    Fault(
        "a number of a wider dtype is rounded before it is used", "variables/update/llvm_text.py",
        "if program.widens:", "if False:",
        "unit/optimizers/test_optimizers_compiled.py::test_numbers_of_a_wider_dtype_stay_in_numpy",
    ),
    Fault(
        "a server's compiled update changes the version that is read", "variables/update/llvm_text.py",
        '**({"p": aside} if loop.is_aside else {})', "**{}",
        "unit/optimizers/test_optimizers_compiled.py::test_an_update_aside_leaves_the_parameter",
    ),
    Fault(
        "blocks that do not touch are one run", "variables/update/compiled.py",
        "begin + before * itemsize == here", "begin <= here",
        "unit/optimizers/test_optimizers_compiled.py::test_blocks_that_touch_are_one_run_and_others_are_not",
    ),
    Fault(
        "compiled sums forget the order of the tree", "variables/step/sums.py",
        "    return Add(partial(_add_compiled, CompiledSum(pairs_of, count), by_numpy), pairs)",
        "    return Add(partial(_add_compiled, CompiledSum(pairs_of, count), by_numpy), in_order(count))",
        "unit/optimizers/test_optimizers_compiled.py::test_gradients_are_added_in_the_order_of_numpys_sums",
    ),
    Fault(
        "sums before the norms are compiled in another order", "variables/step/sums.py",
        "CompiledSum(pairs_of, count)", "CompiledSum(lambda n: tuple((0, i) for i in range(n - 1, 0, -1)), count)",
        "parallel/optimizers/test_compiled.py::test_sums_before_the_norms_have_numpys_bits", 3,
    ),
    Fault(
        "a node's compiled sums forget the order of the tree", "comm/arithmetic/combination.py",
        "CompiledSum(pairs_of_leaves if in_tree else in_order, rank_count)", "CompiledSum(in_order, rank_count)",
        "parallel/comm/backends/test_compiled_node.py::test_sums_have_numpys_bits", 4,
    ),
    Fault(
        "a compiled sum takes the largest number's place", "comm/arithmetic/combination.py",
        "if op not in _SUMS or not self._sum.add", "if not self._sum.add",
        "parallel/comm/backends/test_compiled_node.py::test_sums_have_numpys_bits", 3,
    ),
    Fault(
        "compiled sums go over sources that are yet to be read", "comm/arithmetic/compiled_sums.py",
        "if not _is_plain(out, sources[0]) or len(shared) > 1 or any(places[number] != at for number in shared):",
        "if not _is_plain(out, sources[0]):",
        "unit/comm/test_compiled_sums.py::test_arrays_that_overlap_are_left_to_numpy",
    ),
    Fault(
        "merged rows begin at zero", "comm/arithmetic/compiled_sums.py",
        "width), -0.0, values.dtype", "width), 0.0, values.dtype",
        "unit/comm/test_compiled_sums.py::test_rows_are_merged_with_numpys_bits",
    ),
    Fault(
        "keys of rows overflow", "comm/arithmetic/rows.py", "limit = 1 << (63 - bits)", "limit = 1 << 63",
        "unit/comm/test_variables_merging.py::test_indices_of_any_size_are_sorted_with_their_places",
    ),
    Fault(
        "compiled rows take the places of the gradient", "variables/update/llvm_text.py",
        'begin = "%here" if name.startswith("g") else "%there"', 'begin = "%here"',
        "unit/optimizers/test_optimizers_compiled.py::test_rows_of_a_table_have_numpys_bits",
    ),
    Fault(
        "compiled rows change the version that is read", "variables/update/llvm_text.py",
        'aside = "g0" if loop.is_of_rows else "q"', 'aside = "p" if loop.is_of_rows else "q"',
        "unit/optimizers/test_optimizers_compiled.py::test_rows_of_a_table_have_numpys_bits",
    ),
    Fault(
        "squares lose what is left of the lanes", "comm/arithmetic/compiled_sums.py",
        "sums.sum() + np.dot(rest, rest)", "sums.sum()", "unit/comm/test_compiled_sums.py::test_squares",
    ),
    Fault(
        "norms are compiled where their bits are promised", "variables/step/measured.py",
        "    if in_order:", "    if in_order and not compiles:",
        "parallel/optimizers/test_compiled.py::test_norms_are_compiled_unless_their_bits_are_promised", 2,
    ),
    Fault(
        "ranks without cores load the compiler", "comm/arithmetic/compiler.py",
        "(is_loaded() or not _are_too_many(rank_count)) and ", "",
        "unit/comm/test_compiled_sums.py::test_ranks_that_would_wait_for_one_another_load_nothing",
    ),
    Fault(
        "the average begins at zero", "variables/update/arithmetic.py", "if is_first:", "if False:",
        "unit/variables/test_update_arithmetic.py::test_the_average_is_the_last_slot_and_no_kernel_sees_it",
    ),
    Fault(
        "variables become their average once", "variables/step/average.py",
        "step % self._frequency == 0", "step == self._frequency",
        OPTIONS + "variables_become_their_average_every_so_often", 2,
    ),
    Fault(
        "clipping by value before unscaling", "variables/update/arithmetic.py",
        "np.clip(parts, -clipvalue, clipvalue, out=parts)",
        "np.clip(parts, -clipvalue * factor, clipvalue * factor, out=parts)",
        "unit/variables/test_update_arithmetic.py::test_a_block_is_unscaled_then_clipped_then_decayed",
    ),
    Fault(
        "a gradient is written over before it is read", "variables/step/arena_plan.py",
        "if copies else", "if False else",
        "parallel/optimizers/test_aliases.py::test_a_gradient_is_read_before_it_is_written_over", 2,
    ),
    Fault(
        "a gradient is written over by a mean before it is read", "variables/step/arena_plan.py",
        "accumulator.hand_over(self._apart(gradients),", "accumulator.hand_over(gradients,",
        "parallel/optimizers/test_aliases.py::test_so_it_is_in_the_call_that_updates_by_a_mean", 2,
    ),
    Fault(
        "norms are measured on every node", "variables/step/variable_pass.py",
        "(communicator.rank, communicator.size) if shards is None", "(node.rank, node.size) if shards is None",
        "parallel/variables/step/test_plan.py::test_a_pass_measures_and_changes_variables_one_by_one", 3,
    ),
    Fault(
        "a second drift of a variable is told as the first one", "variables/drift.py",
        "            else:\n                self._first_seen.pop(number, None)\n", "",
        "parallel/variables/test_drift.py::test_the_culprit_is_named", 2,
    ),
    Fault(
        "memory of a variable is used again when one rank has released it", "variables/memory/arena_memory.py",
        "if self._releases[number] == self.communicator.size:", "if self._releases[number] == 1:",
        "parallel/variables/test_arena.py", 2,
    ),
    Fault(
        "ranges of a slab that touch stay apart", "variables/memory/slab.py",
        "if merged and merged[-1][1] == low:", "if False:", "unit/variables/test_arena.py",
    ),
    Fault(
        "each rank assigns its own value", "variables/memory/arena_memory.py",
        "        return self.collective.broadcast(array)\n", "        return array\n",
        "parallel/variables/test_variables.py::test_on_write_table", 2,
    ),
    Fault(
        "rows that are named twice count once", "variables/scatter.py", '"add": np.add.at,',
        '"add": lambda target, indices, values: target.__setitem__(indices, target[indices] + values),',
        "unit/variables/test_variable_scatter.py::test_rows_are_applied_one_after_another",
    ),
    Fault(
        "an integer sum loses its rest", "variables/kinds/sync_on_read.py",
        "np.where(replicas.rank < rest, largest, least)", "least",
        "parallel/variables/test_variables.py::test_an_integer_sum_on_read_loses_nothing", 2,
    ),
    Fault(
        "a step does not say of which strategy it is", "variables/step/step.py",
        '"apply_gradients", meeting, self._owner,', '"apply_gradients", meeting, 0,',
        "parallel/strategy/test_two_strategies.py", 2,
    ),
    Fault(
        "a flush does not say of which strategy it is", "variables/step/arena_plan.py",
        'order.enter("flush", self._plan.number, None, self._owner)',
        'order.enter("flush", self._plan.number, None)',
        "parallel/strategy/test_two_strategies.py", 2,
    ),
    Fault(
        "a write does not say of which strategy it is", "variables/memory/arena_memory.py",
        "order.enter(name, detail, None, self.strategy_number, meets", "order.enter(name, detail, None, meets",
        "parallel/strategy/test_two_strategies.py", 2,
    ),
    Fault(
        "a metric does not say of which strategy it is", "variables/kinds/sync_on_read.py",
        'self._number, None, self.arena.strategy_number, meets=False,\n            sign',
        'self._number, None, meets=False,\n            sign',
        "parallel/strategy/test_two_strategies.py", 2,
    ),
    Fault(
        "a component's write does not say to which variable", "variables/kinds/sync_on_read.py",
        'order.enter(f"{method} to variable number", self._number, None,',
        'order.enter(f"{method} to variable number", 0, None,',
        "parallel/comm/test_call_order.py::test_writes_to_other_variables_and_other_metrics_are_errors", 2,
    ),
    Fault(
        "shapes of new variables are not compared", "variables/making/creation.py",
        "require_same([what for *_, what in theirs], ", "require_same([None for _ in theirs], ",
        "parallel/variables/test_arena.py::test_another_shape_or_dtype_is_a_mismatch_on_all", 2,
    ),
    Fault(
        "memory is lost where a variable cannot be made", "variables/making/creation.py",
        "        arena.give_back_released(released)\n", "",
        "parallel/variables/test_arena.py::test_memory_is_used_again_after_a_creation_has_failed", 2,
    ),
    Fault(
        "names of variables are not compared", "variables/making/creation.py",
        "[given for given, *_ in theirs], ", "[name for _ in theirs], ",
        "parallel/variables/test_variables.py::test_variables_of_one_shape_that_a_rank_makes_in_another_order", 2,
    ),
    Fault(
        "a copy of another thread has half of a step", "variables/step/arena_plan.py",
        "        with self._plan.arena.guard:\n            if alarm",
        "        if True:\n            if alarm",
        "parallel/variables/test_copies.py", 2,
    ),
    Fault(
        "a copy of another thread has some averaged weights", "variables/step/arena_plan.py",
        "        with self._plan.arena.guard:\n            self._average",
        "        if True:\n            self._average",
        "parallel/variables/test_copies.py", 2,
    ),
    Fault(
        "a copy of another thread has half of a write in node memory", "variables/memory/arena_memory.py",
        "            with self.guard:\n                self.barrier()",
        "            if True:\n                self.barrier()",
        "parallel/variables/test_copies.py", 2,
    ),
    Fault(
        "a copy of another thread has half of a private write", "variables/memory/arena_memory.py",
        "                with self.guard:\n                    function()",
        "                if True:\n                    function()",
        "parallel/variables/test_copies.py", 2,
    ),
    Fault(
        "a copy of another thread has half of a restore", "variables/kinds/mirrored.py",
        "        with self.arena.guard:\n            self.arena.barrier()",
        "        if True:\n            self.arena.barrier()",
        "parallel/variables/test_copies.py", 2,
    ),
    Fault(
        "numpy() does not wait for a step", "variables/kinds/mirrored.py",
        "        with self.arena.guard:\n            return super().numpy()", "        return super().numpy()",
        "parallel/variables/test_copies.py::test_a_copy_in_another_thread_is_of_whole_writes", 2,
    ),
    Fault(
        "np.asarray of a variable does not wait for a step", "variables/kinds/mirrored.py",
        "        with self.arena.guard:\n            return super().__array__(dtype, copy)",
        "        return super().__array__(dtype, copy)", "parallel/variables/test_copies.py", 2,
    ),
    Fault(
        "rows that are read do not wait for a step", "variables/kinds/mirrored.py",
        "        with self.arena.guard:\n            return super().read_rows(rows)",
        "        return super().read_rows(rows)", "parallel/variables/test_copies.py", 2,
    ),
    Fault(
        "gradients of all logical devices count", "variables/logical_arena.py",
        "self.gives_gradients = devices.device == 0", "self.gives_gradients = True",
        "parallel/strategy/tpu/test_replicated.py", 4,
    ),
    Fault(
        "on a node without device 0 another device's gradient counts", "variables/step/plan.py",
        "                    self.gradients[number][...] = 0", "                    pass",
        "parallel/strategy/tpu/test_replicated.py", 4,
    ),
    Fault(
        "the values of all logical devices are combined", "variables/logical_arena.py",
        "return self.devices.first(self.replicas.collective.all_reduce(array, op))",
        "return self.collective.all_reduce(array, op)", "parallel/strategy/tpu/test_tpu_strategy.py", 4,
    ),
    Fault(
        "each logical device has the value of its own", "variables/logical_devices.py",
        "return array if self.count == 1 else self.collective.broadcast(array)", "return array",
        "parallel/strategy/tpu/test_tpu_strategy.py", 4,
    ),
    Fault(
        "norms are those of this logical device's tiles", "variables/step/variable_pass.py",
        "            return self._arena.collective.all_reduce(sums)",
        "            return self._arena.replicas.collective.all_reduce(sums)",
        "parallel/strategy/tpu/test_replicated.py", 4,
    ),
    Fault(
        "what one logical device hears of an overflow, others do not", "variables/step/alarm.py",
        "group.all_reduce_max(int(overflow.counts.tobytes() != overflow.seen)) > 0",
        "overflow.counts.tobytes() != overflow.seen",
        "parallel/strategy/tpu/test_replicated.py::test_state_that_overflows_is_an_error_everywhere", 4,
    ),
    Fault(
        "tiles are counted down the columns", "variables/tiles.py",
        "np.unravel_index(self.device, self.dimensions)", "np.unravel_index(self.device, self.dimensions, order='F')",
        "unit/variables/test_tiles.py",
    ),
    Fault(
        "a checkpoint has the rows of another device", "variables/kinds/split.py",
        "            rows, tiling = self._rows_of(device, begin, end), self.tiling.of(device)",
        "            rows, tiling = self._rows_of(device, begin, end), self.tiling",
        "parallel/strategy/tpu/test_split.py", 4,
    ),
    Fault(
        "tiles are of arrays that each logical device draws", "variables/making/splitting.py",
        "made.tiling.take(devices.first(array))", "made.tiling.take(array)",
        "parallel/strategy/tpu/test_split.py", 4,
    ),
)
