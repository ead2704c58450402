"""Deliberate faults, and the tests that must notice each: the list of `tests/mutation.py`."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of one place of the package after which some program gets wrong numbers, loses something, or hangs.

    Attributes:
        name: A name for people.
        file: Below mpidist/.
        old: A text that occurs once in the file.
        new: The text in its place.
        tests: Below one folder of tests/, as pytest takes them, with spaces between.
        ranks: The number of ranks that parallel tests need; 1 is without a launcher.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    ranks: int = 1

    def put_into(self, text: str) -> str:
        """The text of the file with the fault.

        Raises:
            ValueError: The old text does not occur just once.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"fault {self.name!r}: expected the old text once in mpidist/{self.file}, got it {count} times. "
                f"Correct tests/faults.py: {self.old!r}"
            )
        return text.replace(self.old, self.new)

    @property
    def folder(self) -> str:
        """The folder of the tests."""
        return self.tests.split("/")[0]


CONTRACT = "parallel/comm/test_collective.py::TestBackends::test_"
NCCL = "parallel/comm/gpu/test_nccl.py::test_"
CHOICE = "parallel/comm/choice/test_selection.py::test_"
TOGETHER = "parallel/checkpoint/test_together.py::test_"
FAMILIES = "parallel/optimizers/test_families.py::test_agrees_with_the_formula"
FORMULAS = "unit/test_optimizers.py::test_formulas"
OPTIONS = "parallel/optimizers/test_options.py::test_"
METRICS = "unit/test_metrics.py::test_"
POSITIVES = "unit/test_metrics_positives.py::test_"
DATA = "parallel/data/test_data.py::test_"

COMM = (
    Fault(
        "barrier lets one step ahead", "comm/memory/node_barrier.py",
        "if seen >= least:", "if seen >= least - NUMBER:",
        "parallel/comm/backends/test_node.py::test_the_barrier_keeps_everyone_until_the_last", 2,
    ),
    Fault(
        "blocks of the shorter array only", "comm/backends/shared_blocks.py",
        "range(0, max(counts), self.block_bytes)", "range(0, len(mine), self.block_bytes)",
        CONTRACT + "all_gather_of_uneven_sizes", 2,
    ),
    Fault(
        "allocated arrays at other places", "comm/backends/node.py",
        "int(place < 0 or bool((places != place).any()))", "int(place < 0)",
        "parallel/comm/backends/test_node.py::test_ranks_with_different_arrays_agree_on_the_way", 2,
    ),
    Fault(
        "ring receives into a buffer in use", "comm/backends/ring.py",
        "buffer = buffers[number % len(buffers)]", "buffer = buffers[0]",
        CONTRACT + "large_arrays", 2,
    ),
    Fault(
        "ring gathers the slice before", "comm/backends/ring.py",
        "self._gather_around(total, slices, first=self._rank + 1)",
        "self._gather_around(total, slices, first=self._rank)",
        CONTRACT + "large_arrays", 3,
    ),
    Fault(
        "tree pairs in any order", "comm/arithmetic/tree_order.py",
        "for number, position in sorted(present.items()):", "for number, position in present.items():",
        "unit/test_tree_order.py",
    ),
    Fault(
        "tree rounds halves at every node", "comm/backends/tree.py",
        "wide = rows.astype(np.float32) if is_half(rows.dtype) else rows", "wide = rows",
        "parallel/comm/backends/test_tree.py::test_the_bits_are_those_of_the_tree_on_any_backend_and_nodes", 3,
    ),
    Fault(
        "sums of halves in half precision", "comm/arithmetic/combine.py",
        "_IN_FLOAT32 = (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD)", "_IN_FLOAT32 = (ReduceOp.MEAN,)",
        "parallel/comm/backends/test_node.py::test_a_sum_of_halves_is_rounded_once", 3,
    ),
    Fault(
        "reproducible sums of halves in half precision", "comm/arithmetic/tree_order.py",
        "rows = [source.astype(np.float32) for source in sources] if is_half(out.dtype) else sources", "rows = sources",
        "parallel/comm/backends/test_node.py::test_a_sum_of_halves_is_rounded_once", 3,
    ),
    Fault(
        "means of integers in single precision", "comm/arithmetic/combine.py",
        "return np.dtype(np.float64)", "return np.dtype(np.float32)",
        CONTRACT + "all_reduce_of_every_dtype", 2,
    ),
    Fault(
        "MIN drops a NaN", "comm/arithmetic/combine.py", "ReduceOp.MIN: np.minimum,", "ReduceOp.MIN: np.fmin,",
        CONTRACT + "a_nan_of_any_rank_is_one_on_every_rank", 2,
    ),
    Fault(
        "NaN as MPI has it", "comm/backends/mpi.py",
        'if (op is _MIN or op is _MAX) and source.dtype.kind == "f":', "if False:",
        CONTRACT + "a_nan_of_any_rank_is_one_on_every_rank", 3,
    ),
    Fault(
        "halves on the wire are added in half precision", "comm/front/halves.py",
        "mine = add_halves(got.reshape(size, counts[rank]))", "mine = got.reshape(size, counts[rank]).sum(0)",
        "parallel/comm/front/test_wire_dtype.py::test_two_roundings_and_no_more", 3,
    ),
    Fault(
        "a rank keeps more digits than the others", "comm/front/halves.py",
        "    total[...] = gathered",
        "    total[...] = gathered\n    total[sum(counts[:rank]) : sum(counts[: rank + 1])] = mine",
        "parallel/comm/front/test_wire_dtype.py::test_two_roundings_and_no_more", 2,
    ),
    Fault(
        "neighbours are not agreed on", "comm/front/packing.py",
        "apart = collective.all_reduce(apart, ReduceOp.MAX)", "pass",
        "parallel/comm/front/test_packing.py::test_neighbours_differ_between_ranks", 2,
    ),
    Fault(
        "neighbours of two allocations", "comm/front/packing.py",
        "first[1] is not second[1] or not _is_next(first[0], second[0])", "not _is_next(first[0], second[0])",
        "parallel/comm/front/test_packing.py::test_arrays_of_two_allocations_are_no_neighbours", 2,
    ),
    Fault(
        "rows of other shapes on other ranks", "comm/front/sparse.py",
        "if any(checksum != header[1] for checksum in checksums):", "if False:",
        "parallel/comm/front/test_sparse.py::test_a_difference_is_a_mismatch_on_every_rank", 2,
    ),
    Fault(
        "means of rows wrap", "comm/front/sparse.py", "        values = values.astype(np.float64)\n", "        pass\n",
        "parallel/comm/front/test_sparse.py::test_means_of_small_integers_do_not_wrap", 3,
    ),
    Fault(
        "frequent rows count once", "comm/arithmetic/merging.py",
        "np.add.at(wide, np.repeat(late, counts[late] - VECTOR_ROUNDS), values[order[positions]].astype(wide.dtype))",
        "wide[np.repeat(late, counts[late] - VECTOR_ROUNDS)] += values[order[positions]].astype(wide.dtype)",
        "unit/test_variables_merging.py::test_rows_of_any_frequency",
    ),
    Fault(
        "rows in any order", "comm/arithmetic/merging.py",
        'np.argsort(indices, kind="stable")', "np.argsort(indices)", "unit/test_variables_merging.py",
    ),
    Fault(
        "an error of one rank is its own", "comm/agreement.py",
        "if communicator.all_reduce_max(int(error is not None)) == 0:",
        "if communicator.all_reduce_max(int(error is not None)) * int(error is not None) == 0:",
        "parallel/comm/test_agreement.py::test_a_failure_is_everybodys", 2,
    ),
    Fault(
        "the last rank is not compared", "comm/agreement.py",
        "if values.count(values[0]) == len(values):", "if values[:-1].count(values[0]) == len(values) - 1:",
        "parallel/comm/test_agreement.py::test_a_different_value_is_named_with_its_ranks", 2,
    ),
    Fault(
        "no comparison after call 16", "comm/memory/node_barrier.py",
        "differs = differs or bool((seen ^ word) & HASH)", "differs = False",
        "parallel/comm/test_call_order.py::test_a_late_call_that_differs_is_an_error_on_every_rank", 2,
    ),
    Fault(
        "no comparison between nodes", "comm/call_order.py",
        "if number % COMPARED_EVERY == 0:", "if False:",
        "parallel/comm/test_call_order.py::test_ranks_of_different_nodes_compare_now_and_then", 2,
    ),
    Fault(
        "an interrupt comes twice between nodes", "comm/call_comparison.py",
        "is_asked=self.is_asked and not self._is_interrupted", "is_asked=self.is_asked",
        "parallel/comm/test_interrupts.py::test_between_nodes_it_comes_on_all_ranks_while_calls_come_slowly", 2,
    ),
    Fault(
        "a rank that looks closely takes what was signed since for another call", "comm/call_comparison.py",
        "page.differs(before, page.shown(before))", "page.differs(before, self._mark_before)",
        "parallel/comm/test_interrupts.py::test_reductions_in_the_background_do_not_raise_it", 2,
    ),
    Fault(
        "a rank that waits outside of calls takes what was signed since for another call", "comm/call_comparison.py",
        "self.mark if self._depth else page.shown(number)", "self.mark",
        "parallel/comm/test_asynchronous.py::test_a_rank_that_waits_outside_of_calls_does_not_take_it_for_another_call",
        2,
    ),
    Fault(
        "an interrupt waits for no slow calls", "comm/interrupts.py",
        "if inside is None and self._count_across() == count:", "if inside is None:",
        "parallel/comm/test_interrupts.py::test_between_nodes_it_comes_on_all_ranks_while_calls_come_slowly", 2,
    ),
    Fault(
        "a small call does not end its turn", "comm/backends/node.py",
        "            memory.turn = 1 - turn\n", "",
        "parallel/comm/backends/test_node.py::test_many_calls_of_all_kinds_in_a_row", 3,
    ),
    Fault(
        "a small call is taken for another one", "comm/front/front.py",
        "if order.key is self._small_key and not in_place:", "if self._small_key and not in_place:",
        "parallel/comm/front/test_small.py", 2,
    ),
    Fault(
        "what was left in the middle goes on", "comm/call_order.py",
        'self.broken = f"{self.key[0]} was left in the middle by {what}"', 'self.broken = ""',
        "parallel/comm/test_call_order.py::test_a_call_left_in_the_middle_is_refused_from_then_on", 2,
    ),
    Fault(
        "a check is made in the first calls only", "comm/front/call_log.py",
        "if self._checks or self._count <= CHECKED_CALLS:", "if self._count <= CHECKED_CALLS:",
        "parallel/comm/test_collective.py::test_check_looks_at_every_call", 2,
    ),
    Fault(
        "rounding is lost in TopK", "comm/compression/top_k.py",
        "rest[chosen] -= sent.astype(rest.dtype)", "rest[chosen] = 0",
        "unit/test_compression.py::test_what_rounding_leaves_out_is_sent_later",
    ),
    Fault(
        "TopK keeps what is not finite", "comm/compression/top_k.py",
        "if np.isfinite(gradient).all():", "if True:",
        "parallel/comm/compression/test_compression.py::test_what_is_not_finite_is_seen_everywhere_and_forgotten", 2,
    ),
    Fault(
        "AUTO gathers by a rank's own size", "comm/backends/automatic.py",
        "self.backend(gathered, gathered.nbytes).all_gather", "self.backend(mine, mine.nbytes).all_gather",
        CHOICE + "all_ranks_choose_alike_where_their_sizes_differ", 2,
    ),
    Fault(
        "AUTO exchanges by a rank's own size", "comm/backends/automatic.py",
        "self.backend(sent, 0).all_to_all", "self.backend(sent, sent.nbytes).all_to_all",
        CHOICE + "all_ranks_choose_alike_where_their_sizes_differ", 2,
    ),
    Fault(
        "options of one rank", "comm/choice/selection.py",
        "return replace(options, check=any(check for _, check in everyones))", "return options",
        CHOICE + "a_check_that_one_rank_asks_for_is_made_by_all", 2,
    ),
    Fault(
        "one user's end destroys NCCL's communicator for all", "comm/gpu/nccl_ranks.py",
        "if self.user_count == 0:", "if self.user_count >= 0:", NCCL + "backends_over_one_communicator_share_one", 2,
    ),
    Fault(
        "NCCL stays open on the ranks where it has started, when another fails", "comm/gpu/nccl_ranks.py",
        "        start.give_up()\n", "", NCCL + "where_one_rank_fails_the_others_abort_what_has_started", 2,
    ),
    Fault(
        "NCCL that starts too late stays open", "comm/gpu/nccl_ranks.py",
        "if is_late:", "if False:", NCCL + "a_rank_that_fails_at_the_start_does_not_keep_the_others", 2,
    ),
    Fault(
        "NCCL's communicator of another GPU is shared", "comm/gpu/nccl_ranks.py",
        " or self.device != cuda.current_device()", "", NCCL + "each_gpu_has_one_and_another_gpu_is_refused", 2,
    ),
    Fault(
        "NCCL is called on another GPU than it was started on", "comm/gpu/nccl.py",
        "if current != self._shared.device:", "if False:", NCCL + "each_gpu_has_one_and_another_gpu_is_refused", 2,
    ),
    Fault(
        "NCCL that has failed is shared", "comm/gpu/nccl_ranks.py",
        "        except Exception:\n            return False\n", "        except Exception:\n            return True\n",
        NCCL + "one_that_has_failed_on_a_rank_is_not_shared", 2,
    ),
    Fault(
        "a communicator forgets what it owns", "comm/handles.py", "in (*owned, *handles):", "in handles:",
        NCCL + "it_ends_with_its_communicator", 2,
    ),
    Fault(
        "asynchronous calls go on after a failure", "comm/asynchronous.py", "if self._error is None:", "if True:",
        "parallel/comm/test_asynchronous.py::test_an_error_reaches_its_handle_and_all_later_ones", 2,
    ),
    Fault(
        "a failure in the background is lost", "comm/asynchronous.py",
        "                self._error = error\n", "                pass\n",
        "parallel/comm/test_asynchronous.py::test_an_error_reaches_its_handle_and_all_later_ones", 2,
    ),
)

CLUSTER = (
    Fault(
        "an evaluator trains with the workers", "cluster/placement.py",
        'group=EVALUATOR_GROUP if task.job == "evaluator" else TRAINING_GROUP,', "group=TRAINING_GROUP,",
        "parallel/cluster/test_cluster.py::test_an_evaluator_does_not_train", 3,
    ),
    Fault(
        "a resolver fails on one rank", "cluster/placement.py",
        "(claim.checksum, claim.task), error)", "(claim.checksum, claim.task))",
        "parallel/cluster/test_cluster.py::test_a_resolver_that_fails_on_one_rank_is_the_same_error_on_all", 2,
    ),
    Fault(
        "replicas in the order of the ranks", "cluster/placement.py",
        "replica_key=keys[task],", "replica_key=0,",
        "parallel/cluster/test_cluster.py::test_told_tasks_order_the_replicas", 3,
    ),
    Fault(
        "a wrong task on one rank of a cluster with servers", "cluster/server_roles.py",
        'together(communicator, "reading the cluster", lambda: _read(found, communicator.size))',
        "_read(found, communicator.size)",
        "parallel/cluster/test_server_roles.py::test_what_one_rank_is_told_wrong_is_one_error", 3,
    ),
    Fault(
        "servers before the workers", "cluster/server_roles.py",
        'first_server = 1 + jobs.count("worker")', 'first_server = 1 + jobs.count("ps")',
        "parallel/cluster/test_server_roles.py::test_roles_of_tf_config_in_any_order", 4,
    ),
    Fault(
        "an evaluator is not told of the end", "cluster/groups.py",
        "        atexit.register(_tell_end, channel, evaluators, os.getpid())\n", "        pass\n",
        "system/test_evaluator.py::test_an_evaluator_follows_and_ends_with_the_job",
    ),
    Fault(
        "an evaluator dies of the signals that the chief takes", "cluster/groups.py",
        "                self._listen(said)\n", "                pass\n",
        "system/test_evaluator.py::test_an_evaluator_lives_on_at_signals_until_the_chief_has_saved",
    ),
    Fault(
        "an evaluator waits at its end for the dead", "cluster/groups.py",
        "mpi.isend((_END, dead), rank, tag)", "mpi.isend((_END, []), rank, tag)",
        "parallel/cluster/test_groups.py::test_an_evaluator_hears_of_the_end_and_of_the_dead", 2,
    ),
    Fault(
        "TF_CONFIG on some ranks only", "cluster/detect.py",
        "flags = zip(*applies, strict=True)", "flags = ((flag,) for flag in applies[communicator.rank])",
        "parallel/cluster/test_cluster.py::test_tf_config_on_some_ranks_only_is_one_error", 2,
    ),
    Fault(
        "ranks in an order of the user's get the tasks of a Slurm step", "cluster/detect.py",
        'return place == (os.environ["SLURM_PROCID"], os.environ["SLURM_STEP_NUM_TASKS"])', "return bool(place)",
        "parallel/cluster/test_cluster.py::test_ranks_in_an_order_of_the_users_do_not_get_the_tasks_of_a_step", 2,
    ),
    Fault(
        "hosts of a Slurm step by the alphabet", "cluster/slurm_step.py",
        "return dict(zip(hosts, counts, strict=True))", "return dict(sorted(zip(hosts, counts, strict=True)))",
        "unit/test_slurm.py::test_hosts_stand_in_slurms_order_not_by_the_alphabet",
    ),
    Fault(
        "of two addresses of one index of a cluster one is lost", "cluster/spec.py",
        "            if index in addresses:\n", "            if False:\n",
        "unit/test_cluster_spec.py::test_spec_refuses_other_indices",
    ),
    Fault(
        "a Slurm step with other numbers of tasks than it says", "cluster/slurm_step.py",
        "and int(told) != size:", "and int(told) > size + 99:",
        "unit/test_slurm.py::test_variables_that_contradict_one_another",
    ),
    Fault(
        "the ranks of a heterogeneous Slurm job in the order of its list of nodes", "cluster/slurm_step.py",
        "    return parts\n", "    return [hosts]\n",
        "unit/test_slurm.py::test_a_component_of_a_heterogeneous_job_is_a_job_of_the_cluster",
    ),
)

VARIABLES = (
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
        "for number, gradient in dense.items() if counts else ():", "for number, gradient in dense.items():",
        "parallel/strategy/test_logical_replicas.py::test_skipped_aggregation_with_accumulation_and_loss_scaling", 2,
    ),
    Fault(
        "accumulated gradients stay scaled", "variables/step/accumulator.py",
        "own if factor == 1 else np.multiply(own, factor, dtype=total.dtype)", "own",
        OPTIONS + "scaled_gradients_are_unscaled " + OPTIONS + "a_skipped_update_forgets_its_calls", 2,
    ),
    Fault(
        "accumulated sums are not cleared", "variables/step/accumulator.py",
        "        for total in self.sums:\n            total.clear()\n", "",
        OPTIONS + "accumulated_calls_are_one_of_their_mean", 2,
    ),
    Fault(
        "clipping before unscaling", "variables/step/limits.py",
        "self._clipping(norms * factor)", "self._clipping(norms)",
        OPTIONS + "scaled_gradients_are_unscaled", 2,
    ),
    Fault(
        "the global norm is that of each variable", "variables/step/limits.py",
        "np.asarray(np.sqrt(np.dot(norms, norms)))", "norms",
        "parallel/optimizers/test_families.py::test_global_norm_is_over_all_variables_and_dtypes", 2,
    ),
    Fault(
        "steps that are not finite are made", "variables/step/limits.py",
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
        "        if self._average is not None:\n            self._average.follow(settings.step)",
        "        if self._average is not None and len(numbers) == len(self.variables):\n"
        "            self._average.follow(settings.step)",
        OPTIONS + "average_of_the_weights", 2,
    ),
    Fault(
        "products and sums are contracted", "variables/update/llvm_text.py",
        '"add": "fadd {T} {0}, {1}",\n    "subtract": "fsub {T} {0}, {1}",\n    "multiply": "fmul {T} {0}, {1}",',
        '"add": "fadd contract {T} {0}, {1}",\n    "subtract": "fsub contract {T} {0}, {1}",\n'
        '    "multiply": "fmul contract {T} {0}, {1}",',
        "unit/test_optimizers_compiled.py::test_any_sequence_of_operations_has_numpys_bits "
        "unit/test_optimizers_compiled.py::test_each_family_has_numpys_bits",
    ),
    Fault(
        "a number of a wider dtype is rounded before it is used", "variables/update/llvm_text.py",
        "if program.widens:", "if False:",
        "unit/test_optimizers_compiled.py::test_numbers_of_a_wider_dtype_stay_in_numpy",
    ),
    Fault(
        "a server's compiled update changes the version that is read", "variables/update/llvm_text.py",
        '**({"p": aside} if loop.is_aside else {})', "**{}",
        "unit/test_optimizers_compiled.py::test_an_update_aside_leaves_the_parameter",
    ),
    Fault(
        "blocks that do not touch are one run", "variables/update/compiled.py",
        "begin + before * itemsize == here", "begin <= here",
        "unit/test_optimizers_compiled.py::test_blocks_that_touch_are_one_run_and_others_are_not",
    ),
    Fault(
        "compiled sums forget the order of the tree", "variables/step/sums.py",
        "    return Add(partial(_add_compiled, CompiledSum(pairs_of, count), by_numpy), pairs)",
        "    return Add(partial(_add_compiled, CompiledSum(pairs_of, count), by_numpy), in_order(count))",
        "unit/test_optimizers_compiled.py::test_gradients_are_added_in_the_order_of_numpys_sums",
    ),
    Fault(
        "sums before the norms are compiled in another order", "variables/step/sums.py",
        "CompiledSum(pairs_of, count)", "CompiledSum(lambda n: tuple((0, i) for i in range(n - 1, 0, -1)), count)",
        "parallel/optimizers/test_compiled.py::test_sums_before_the_norms_have_numpys_bits", 3,
    ),
    Fault(
        "a node's compiled sums forget the order of the tree", "comm/backends/node.py",
        "CompiledSum(pairs_of_leaves if in_tree else in_order, self._size)", "CompiledSum(in_order, self._size)",
        "parallel/comm/backends/test_compiled_node.py::test_sums_have_numpys_bits", 4,
    ),
    Fault(
        "a compiled sum takes the largest number's place", "comm/backends/node.py",
        "if op not in _SUMS or not self._sum.add", "if not self._sum.add",
        "parallel/comm/backends/test_compiled_node.py::test_sums_have_numpys_bits", 3,
    ),
    Fault(
        "compiled sums go over sources that are yet to be read", "comm/arithmetic/compiled_sums.py",
        "if not _is_plain(out, sources[0]) or len(shared) > 1 or any(places[number] != at for number in shared):",
        "if not _is_plain(out, sources[0]):",
        "unit/test_compiled_sums.py::test_arrays_that_overlap_are_left_to_numpy",
    ),
    Fault(
        "merged rows begin at zero", "comm/arithmetic/compiled_sums.py",
        "width), -0.0, values.dtype", "width), 0.0, values.dtype",
        "unit/test_compiled_sums.py::test_rows_are_merged_with_numpys_bits",
    ),
    Fault(
        "keys of rows overflow", "comm/arithmetic/merging.py", "limit = 1 << (63 - bits)", "limit = 1 << 63",
        "unit/test_variables_merging.py::test_indices_of_any_size_are_sorted_with_their_places",
    ),
    Fault(
        "compiled rows take the places of the gradient", "variables/update/llvm_text.py",
        'begin = "%here" if name.startswith("g") else "%there"', 'begin = "%here"',
        "unit/test_optimizers_compiled.py::test_rows_of_a_table_have_numpys_bits",
    ),
    Fault(
        "compiled rows change the version that is read", "variables/update/llvm_text.py",
        'aside = "g0" if loop.is_of_rows else "q"', 'aside = "p" if loop.is_of_rows else "q"',
        "unit/test_optimizers_compiled.py::test_rows_of_a_table_have_numpys_bits",
    ),
    Fault(
        "squares lose what is left of the lanes", "comm/arithmetic/compiled_sums.py",
        "sums.sum() + np.dot(rest, rest)", "sums.sum()", "unit/test_compiled_sums.py::test_squares",
    ),
    Fault(
        "norms are compiled where their bits are promised", "variables/step/limits.py",
        "    if in_order:", "    if in_order and not compiles:",
        "parallel/optimizers/test_compiled.py::test_norms_are_compiled_unless_their_bits_are_promised", 2,
    ),
    Fault(
        "ranks without cores load the compiler", "comm/arithmetic/compiler.py",
        "(is_loaded() or not _are_too_many(rank_count)) and ", "",
        "unit/test_compiled_sums.py::test_ranks_that_would_wait_for_one_another_load_nothing",
    ),
    Fault(
        "the average begins at zero", "variables/update/arithmetic.py", "if is_first:", "if False:",
        "unit/test_update_arithmetic.py::test_the_average_is_the_last_slot_and_no_kernel_sees_it",
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
        "unit/test_update_arithmetic.py::test_a_block_is_unscaled_then_clipped_then_decayed",
    ),
    Fault(
        "a gradient is written over before it is read", "variables/step/arena_plan.py", "if aliases:", "if False:",
        "parallel/optimizers/test_aliases.py::test_a_gradient_is_read_before_it_is_written_over", 2,
    ),
    Fault(
        "norms are measured on every node", "variables/step/variable_pass.py",
        "bundle.variable_blocks(chosen, communicator.rank, communicator.size)",
        "bundle.variable_blocks(chosen, node.rank, node.size)",
        "parallel/variables/step/test_plan.py::test_a_pass_measures_and_changes_variables_one_by_one", 3,
    ),
    Fault(
        "each rank assigns its own value", "variables/arena_memory.py",
        "        return self.collective.broadcast(array)\n", "        return array\n",
        "parallel/variables/test_variables.py::test_on_write_table", 2,
    ),
    Fault(
        "rows that are named twice count once", "variables/scatter.py", '"add": np.add.at,',
        '"add": lambda target, indices, values: target.__setitem__(indices, target[indices] + values),',
        "unit/test_variable_scatter.py::test_rows_are_applied_one_after_another",
    ),
    Fault(
        "an integer sum loses its rest", "variables/sync_on_read.py",
        "share + (self.group.rank < rest)", "share",
        "parallel/variables/test_variables.py::test_an_integer_sum_on_read_loses_nothing", 2,
    ),
)

OPTIMIZERS = (
    Fault(
        "bias correction of another step", "optimizers/adam.py",
        "(1 - self.beta_2**step))", "(1 - self.beta_2**(step + 1)))",
        "unit/test_optimizers.py::test_adams_first_step_is_the_rate",
    ),
    Fault(
        "epsilon as in Keras", "optimizers/adam.py", "epsilon = self.epsilon / root", "epsilon = self.epsilon",
        FORMULAS,
    ),
    Fault(
        "decay without the rate", "optimizers/adam.py",
        "keep = 1 - learning_rate * self.weight_decay", "keep = 1 - self.weight_decay",
        FORMULAS,
    ),
    Fault(
        "amsgrad forgets the largest", "optimizers/adam.py",
        "np.maximum(slots[2], squares, out=slots[2])", "np.copyto(slots[2], squares)",
        FORMULAS,
    ),
    Fault(
        "nesterov as plain momentum", "optimizers/sgd.py",
        "np.add(gradient, scratch[0], out=gradient)", "np.copyto(gradient, velocity)",
        FORMULAS,
    ),
    Fault(
        "Adagrad forgets", "optimizers/adagrad.py",
        "np.add(total, root, out=total)", "np.maximum(total, root, out=total)", FORMULAS,
    ),
    Fault(
        "Adadelta counts its steps with the rate", "optimizers/adadelta.py",
        "            np.multiply(steps, self.rho, out=steps)\n",
        "            np.multiply(gradient, learning_rate, out=gradient)\n"
        "            np.multiply(steps, self.rho, out=steps)\n", FORMULAS,
    ),
    Fault(
        "Ftrl leaves beta out", "optimizers/ftrl.py",
        "2 * self.l2_regularization_strength + self.beta / learning_rate", "2 * self.l2_regularization_strength",
        FAMILIES, 2,
    ),
    Fault(
        "LAMB does not correct its velocity", "optimizers/lamb.py",
        "root_correction = 1 / math.sqrt(1 - self.beta_2**step)", "root_correction = 1.0", FAMILIES, 2,
    ),
    Fault(
        "LARS leaves the decay out of the norm", "optimizers/lars.py",
        "(direction_norm + decay * parameter_norm)", "direction_norm", FAMILIES, 2,
    ),
    Fault(
        "Lion decays its momentum as its direction", "optimizers/lion.py",
        "np.multiply(momentum, self.beta_2, out=momentum)", "np.multiply(momentum, self.beta_1, out=momentum)",
        FAMILIES, 2,
    ),
    Fault(
        "RMSprop does not subtract the mean", "optimizers/rmsprop.py",
        "np.subtract(square, root, out=root)", "np.copyto(root, square)", FORMULAS,
    ),
    Fault(
        "RMSprop adds epsilon under the root", "optimizers/rmsprop.py",
        "                np.sqrt(root, out=root)\n",
        "                np.sqrt(root + self.epsilon, out=root)\n", FORMULAS,
    ),
    Fault(
        "warming up begins at zero", "optimizers/schedules.py",
        "(step + 1) / self.warmup_steps", "step / self.warmup_steps", "unit/test_schedules.py::test_linear_warmup",
    ),
    Fault(
        "the scale grows one step late", "optimizers/loss_scale.py",
        "if self._good_steps >= self.dynamic_growth_steps:", "if self._good_steps > self.dynamic_growth_steps:",
        "unit/test_optimizers_options.py::test_the_scale_doubles_after_steps_in_a_row_and_is_halved_by_one_that_is_skipped",
    ),
)

METRIC = (
    Fault(
        "a metric merges itself while it changes", "metrics/metric.py",
        "in [other.sums.component.copy() for other in others]:", "in [other.sums.component for other in others]:",
        METRICS + "merging_and_resetting",
    ),
    Fault(
        "ties in any order", "metrics/precision_recall.py", ', axis=-1, kind="stable")', ", axis=-1)",
        POSITIVES + "of_equal_predictions_the_first_ones_are_higher",
    ),
    Fault(
        "k + 1 scores are the highest k", "metrics/top_k.py", ".sum(-1) < k)", ".sum(-1) <= k)",
        METRICS + "top_k_is_that_of_a_sorted_row",
    ),
    Fault(
        "area of rectangles", "metrics/auc.py", "heights = (y[:-1] + y[1:]) / 2", "heights = y[1:]",
        POSITIVES + "area_under_roc_is_that_of_scikit_learn",
    ),
    Fault(
        "precision grows linearly", "metrics/auc.py",
        "slope * (gained + intercept * np.log(growth))", "slope * gained", POSITIVES + "area_of_keras",
    ),
    Fault(
        "weights do not divide", "metrics/mean.py", "float(weight.sum())", "array.size", METRICS + "weighted_mean",
    ),
    Fault(
        "small integers wrap in errors", "metrics/regression.py",
        "predictions.astype(np.float64) - truth", "predictions - truth",
        METRICS + "values_of_keras",
    ),
    Fault(
        "a confusion matrix on its side", "metrics/confusion_matrix.py",
        "rows * count + columns", "columns * count + rows", METRICS + "confusion_matrix",
    ),
)

COUPLED = "system/test_coupled.py::test_"

INPUT = (
    Fault(
        "a StopIteration of a user's function ends the data", "data/reading/element.py",
        '        raise stopped(f"the function', '        raise error or stopped(f"the function',
        "unit/test_data_transformations.py::test_a_stop_of_a_users_function_is_no_end_of_the_data",
    ),
    Fault(
        "a finite repetition ends at an empty pass", "data/items/stream.py",
        "if is_empty and (self.count is None or length == 0):", "if is_empty:",
        "unit/test_data_transformations.py::test_a_finite_repetition_goes_on_behind_an_empty_pass",
    ),
    Fault(
        "parts of other dtypes become a batch", "data/reading/element.py",
        "        _require_alike({(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves})\n", "",
        "unit/test_data_transformations.py::test_parts_of_different_dtypes_make_no_batch",
    ),
    Fault(
        "a sample of another size is taken", "comm/incoming.py", "if size in (expected, 0):", "if size >= 0:",
        COUPLED + "messages_that_are_no_samples_are_errors",
    ),
    Fault(
        "a sender waits for ever for a program that has ended", "comm/incoming.py",
        "        incoming.drain()\n", "        incoming.ranks\n",
        COUPLED + "samples_come_in_turns_and_the_sender_is_held_back",
    ),
    Fault(
        "a fast sender is not held back", "comm/incoming.py", "len(self._ahead) < self._depth:", "True:",
        COUPLED + "samples_come_in_turns_and_the_sender_is_held_back",
    ),
    Fault(
        "each pass in the same order", "data/items/shuffle.py",
        "path = () if is_same else epoch.path", "path = ()",
        "unit/test_data_dataset.py::test_shuffle_is_a_permutation_that_depends_on_seed_and_iteration_only",
    ),
    Fault(
        "each rank shuffles by its own seed", "data/distribution/share.py",
        "    _adopt_seeds(pipeline, facts)\n    others", "    others",
        DATA + "all_ranks_shuffle_alike_and_anew_in_each_pass", 2,
    ),
    Fault(
        "all ranks see OFF in one order", "data/items/shuffle.py",
        "[value, epoch.salt] if self.drawn and epoch.salt else [value]", "[value]",
        DATA + "off_shuffles_differently_on_each_rank_without_a_seed", 2,
    ),
    Fault(
        "rows between slices are lost", "data/items/sharding.py",
        "begin = least * reader + min(reader, more)", "begin = least * reader + more",
        "unit/test_data_sharding.py::test_even_slices_are_contiguous_and_cover_everything",
    ),
    Fault(
        "batch sizes are not rotated", "data/items/sharding.py",
        "return (*sizes[reader:], *sizes[:reader])", "return tuple(sizes)",
        "unit/test_data_sharding.py::test_rotated_sizes_make_global_steps_of_the_batch_size",
    ),
    Fault(
        "a pass goes on at another batch", "data/items/batching.py",
        "return rounds * sum(self.sizes) + sum(self.sizes[:turn])", "return group * self.sizes[0]",
        "unit/test_data_sharding.py::test_batches_of_sizes_in_turn_are_the_same_from_any_start",
    ),
    Fault(
        "padding takes the first dtype", "data/reading/padding.py",
        "dtype = np.result_type(*(leaf.dtype for leaf in column))", "dtype = column[0].dtype",
        "unit/test_data_transformations.py::test_padded_batch",
    ),
    Fault(
        "padding wraps", "data/reading/padding.py", "batch[...] = _value_as(value, dtype)",
        "batch[...] = np.asarray(value).astype(dtype)", "unit/test_data_arguments.py",
    ),
    Fault(
        "an error of reading looks like the end", "data/reading/prefetch.py",
        "channel.end(error)", "channel.end(None)",
        "unit/test_data_prefetch.py::test_an_error_comes_after_the_elements_before_it",
    ),
    Fault(
        "a forgotten prefetcher stays", "data/reading/prefetch.py",
        "weakref.finalize(self, channel.close)", "channel.close",
        "unit/test_data_prefetch.py::test_a_forgotten_prefetcher_ends_its_thread",
    ),
    Fault(
        "a position in an exhausted iterator", "data/distribution/distributed_iterator.py",
        "self._is_ended = self._steps_alone = False", "self._steps_alone = False",
        DATA + "a_position_is_loaded_into_an_exhausted_iterator", 2,
    ),
    Fault(
        "a position of no readers", "data/items/position.py",
        "(name in (_READERS, _BATCH_SIZE))", "(name == _BATCH_SIZE)",
        "parallel/data/test_policies.py::test_a_position_of_no_readers_is_refused", 2,
    ),
    Fault(
        "a position without its seeds", "data/items/position.py",
        "seed.value = int(state.get(name, seed.value))", "pass",
        DATA + "another_number_of_ranks_resumes_without_loss_or_repetition", 2,
    ),
    Fault(
        "the end of one rank is its own", "data/distribution/distributed_iterator.py",
        "decision = self._communicator.all_reduce_max(state)", "decision = state",
        DATA + "a_read_that_fails_on_one_rank_fails_on_all_where_a_flag_is_exchanged", 2,
    ),
    Fault(
        "elements are views of the data", "data/reading/source.py",
        "return np.array(leaf[begin:end]) if isinstance(leaf, np.ndarray) else _opened(leaf)[begin:end]",
        "return leaf[begin:end]",
        "unit/test_data_dataset.py::test_what_the_user_does_to_an_element_does_not_reach_the_data",
    ),
    Fault(
        "lazy rows are sorted", "data/reading/source.py",
        "return _opened(leaf)[increasing][positions]", "return _opened(leaf)[increasing]",
        "unit/test_data_dataset.py::test_hdf5_datasets "
        "unit/test_data_dataset.py::test_lazy_arrays_are_read_in_increasing_order_once_a_batch",
    ),
)

CHECKPOINT = (
    Fault(
        "a component in the middle of a page", "checkpoint/transfer.py",
        "heads[self._rank + 1 :]", "heads[self._rank + 1 : self._rank + 2]",
        TOGETHER + "components_of_any_size_are_written", 3,
    ),
    Fault(
        "a cancelled job is queued again", "cluster/slurm_job.py",
        'if seen.get("JobState") in ("COMPLETING", "CANCELLED")', 'if seen.get("JobState") in ("CANCELLED",)',
        "unit/test_preemption.py::test_a_job_that_was_cancelled_is_not_queued_again",
    ),
    Fault(
        "a job whose name looks like a restart is not queued again", "cluster/slurm_job.py",
        ".splitlines() if _LINES.match(line)]", ".splitlines()]",
        "unit/test_preemption.py::test_a_job_is_queued_again_whatever_slurm_shows_of_it",
    ),
    Fault(
        "a signal ends the command that queues a job again", "cluster/slurm_job.py",
        "[signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]", "[]",
        "unit/test_preemption.py::test_a_job_is_queued_again",
    ),
    Fault(
        "functions that were scheduled before the last save are lost", "checkpoint/preemption.py",
        "            self._others.join()\n", "            pass\n",
        "unit/test_preemption.py::test_functions_that_were_scheduled_are_in_the_checkpoint",
    ),
    Fault(
        "a server dies of a signal while the chief saves", "serving/signals.py",
        "SIGNALS.tell(self._notice, wanted)", "pass",
        "system/test_preempted_servers.py::test_whoever_gets_a_signal_every_update_counts_once",
    ),
    Fault(
        "a server ends the job with the chief's code before others have left", "comm/ending.py",
        "if not self.is_agreed and self.code and", "if self.code and",
        "system/test_preempted_servers.py::test_whoever_gets_a_signal_every_update_counts_once",
    ),
    Fault(
        "the launcher's word of a death ends a job", "cluster/signals.py",
        "self._take_doubtful if is_doubtful else self.take", "self.take",
        "system/test_preempted_servers.py::test_the_launchers_signal_after_a_death_ends_nothing",
    ),
    Fault(
        "the last checkpoint is not evaluated", "checkpoint/following.py",
        "(has_ended or now >= not_before)", "now >= not_before",
        "unit/test_checkpoints_iterator.py::test_it_ends_with_the_training_after_the_last_checkpoint",
    ),
    Fault(
        "a file that one rank cannot open", "checkpoint/checkpoint.py",
        'file = together(communicator, f"opening checkpoint {name!r}", lambda: _open(contents, name))',
        "file = SavedFile(contents)",
        TOGETHER + "a_rank_that_cannot_open_the_file_makes_all_raise", 2,
    ),
    Fault(
        "ranks restore from other paths", "checkpoint/checkpoint.py", "if contents.path != name:", "if False:",
        TOGETHER + "paths_to_restore_must_be_the_same", 2,
    ),
    Fault(
        "an object that one rank cannot load", "checkpoint/restoring.py",
        """together(communicator, f"restoring {path!r}", partial(self._load, path, state, tree), may_agree=True)""",
        "self._load(path, state, tree)",
        TOGETHER + "an_object_that_takes_no_state_on_one_rank_makes_all_raise", 2,
    ),
    Fault(
        "a checkpoint that no state file names", "checkpoint/transfer.py", "if not was_there:", "if False:",
        TOGETHER + "without_a_state_file_the_new_checkpoint_goes_too",
    ),
    Fault(
        "a rank goes by its own state file", "checkpoint/manager.py",
        "is_due, number, self._state = self._agree(", "is_due, number, _ = self._agree(",
        TOGETHER + "a_rank_that_reads_an_old_state_file_goes_on_with_the_others", 2,
    ),
    Fault(
        "a rank goes by its own clock", "checkpoint/checkpoint.py",
        "saved_at = write_checkpoint(", "write_checkpoint(", TOGETHER + "clocks_may_differ", 2,
    ),
    Fault(
        "a new name is not synced", "checkpoint/transfer.py",
        "        sync_directory(os.path.dirname(path))\n", "",
        TOGETHER + "names_are_on_the_disk_before_others_name_them",
    ),
    Fault(
        "the name of the state file is not synced", "checkpoint/directory.py", "    sync_directory(directory)\n", "",
        TOGETHER + "names_are_on_the_disk_before_others_name_them",
    ),
    Fault(
        "the mark of a whole file is not synced", "checkpoint/hdf5.py",
        "        write_at(descriptor, mark, blank.complete_offset)\n        os.fsync(descriptor)\n",
        "        write_at(descriptor, mark, blank.complete_offset)\n",
        TOGETHER + "names_are_on_the_disk_before_others_name_them",
    ),
    Fault(
        "damage is not seen", "checkpoint/transfer.py",
        "if zlib.crc32(data) != contents.checksums[number]:", "if False:",
        "unit/test_checkpoint_file.py::test_one_flipped_bit_is_an_error_that_names_the_array",
    ),
    Fault(
        "a failed write is lost", "checkpoint/transfer.py",
        'exchange(communicator, f"writing checkpoint {path!r}", checksums, error)',
        'exchange(communicator, f"writing checkpoint {path!r}", checksums)',
        "parallel/checkpoint/test_checkpoint.py::test_a_failure_of_one_rank_is_one_of_all_and_loses_nothing", 2,
    ),
    Fault(
        "a failed write leaves its file", "checkpoint/transfer.py", "os.unlink(blank.path)", "pass",
        "parallel/checkpoint/test_checkpoint.py::test_a_failure_of_one_rank_is_one_of_all_and_loses_nothing", 2,
    ),
    Fault(
        "old checkpoints go before the new one is named", "checkpoint/manager.py",
        "        self._write(state)\n        kept, gone = self._retire(state)",
        "        kept, gone = self._retire(state)",
        "unit/test_checkpoint_file.py::test_a_kill_leaves_the_previous_checkpoint",
    ),
    Fault(
        "arrays of other libraries are left out", "attributes.py", 'hasattr(type(value), "__dlpack__")',
        'type(value).__module__ == "numpy"',
        "unit/test_checkpoint_walk.py::test_an_array_of_another_library_would_be_lost",
    ),
    Fault(
        "modules and checkpoints overlook slots", "attributes.py",
        "    for name in slots_of(type(value)):", "    for name in ():",
        "unit/test_module.py::test_a_module_finds_what_a_checkpoint_finds",
    ),
    Fault(
        "a counter is left out in silence", "checkpoint/checkpoint.py",
        "self._warn_of_counters(found, path)\n", "pass\n",
        "unit/test_checkpoint_walk.py::test_plain_numbers_that_have_changed_are_one_warning_each",
    ),
    Fault(
        "the lock of another job is deleted", "checkpoint/lock.py",
        "if _read(held[1]) == this_process():", "if True:",
        "unit/test_checkpoint_manager.py::test_a_requeued_job_takes_over_and_the_old_one_notices",
    ),
    Fault(
        "fewer replicas get other components", "checkpoint/saved.py",
        "variable.group.rank % self.replicas * variable.size", "0",
        "parallel/checkpoint/test_replicas.py::test_saved_by_n_restored_by_m", 2,
    ),
)

STRATEGY = (
    Fault(
        "sums of Python ints wrap", "strategy/values.py",
        'return array.astype(np.int64) if array.dtype == np.int32 and not hasattr(leaf, "dtype") else array',
        "return array",
        "parallel/strategy/test_values.py::test_python_ints_are_never_cut_off", 2,
    ),
    Fault(
        "others do not hear of a value that is refused", "comm/front/call_log.py",
        "self.begin(name, _Refusal(str(error)), None).fail(error)", "pass",
        "parallel/strategy/test_values.py::test_what_cannot_be_sent_is_refused_alike_and_harms_nothing", 2,
    ),
    Fault(
        "objects are sent", "comm/collective.py",
        "another process.\"\"\"\n    if array.dtype.hasobject:", "another process.\"\"\"\n    if False:",
        "parallel/strategy/test_values.py::test_what_cannot_be_sent_is_refused_alike_and_harms_nothing", 2,
    ),
    Fault(
        "a replica without booleans decides", "strategy/values.py",
        "identity = op is ReduceOp.MIN\n", "identity = op is ReduceOp.MAX\n",
        "parallel/strategy/test_values.py::test_a_replica_without_booleans_does_not_decide", 2,
    ),
    Fault(
        "a mean of means", "strategy/values.py",
        "elements = int(collective.all_reduce(np.array(count)))",
        "elements = count * collective.communicator.size",
        "parallel/strategy/test_values.py::test_any_axes_and_sizes", 2,
    ),
    Fault(
        "halves overflow along an axis", "strategy/values.py",
        "return _LOCAL[op](array, axis=axes, dtype=wide_dtype(array.dtype))", "return _LOCAL[op](array, axis=axes)",
        "parallel/strategy/test_values.py::test_sums_of_halves_along_an_axis_are_rounded_once", 2,
    ),
    Fault(
        "rows go to another micro-batch", "strategy/cut.py",
        "return cut_evenly(self.count, len(self.rows))", "return cut_evenly(self.logical_replicas, len(self.rows))",
        "unit/test_strategy_cut.py",
    ),
    Fault(
        "micro-batches are added rank by rank", "strategy/logical_replicas.py",
        "pairs = pairing([node for own in nodes for node in own])",
        "pairs = [(0, number) for number in range(1, sum(len(own) for own in nodes))]",
        "parallel/strategy/test_logical_replicas.py::test_the_sum_is_the_tree_over_micro_batches", 2,
    ),
)

ENDINGS = (
    Fault(
        "an exit that somebody keeps has no code", "comm/ending.py",
        "        self._take_kept_code()\n", "        pass\n",
        "system/test_ending.py::test_a_lone_exit_with_a_code_ends_the_job",
    ),
    Fault(
        "the start of MPI holds the interpreter", "comm/mpi_start.py", "ctypes.CDLL", "ctypes.PyDLL",
        "system/test_start.py::test_a_time_limit_holds_for_the_start_of_mpi",
    ),
    Fault(
        "the launcher's socket closes early under any launcher", "comm/launcher_socket.py",
        "if lets_live or launch.hydra_lets_live():", "if True:",
        "system/test_ending.py::test_a_caught_exit_ends_nothing",
    ),
    Fault(
        "one host keeps TCP between its ranks", "cluster/launch_line.py", '"UCX_TLS", "^cma,tcp", "^cma"',
        '"UCX_TLS", "^cma", "^cma"', "unit/test_launch_line.py::test_lines",
    ),
    Fault(
        "the watchdog only looks", "observe/watchdog.py", "self._give_up(seen, waiting)", "pass",
        "system/test_watchdog.py::test_an_early_exit_ends_the_job",
    ),
    Fault(
        "a chief that was busy has waited", "coordinator/waits.py", "now - max(one.since, since)", "now - one.since",
        "unit/test_waits.py::test_only_a_wait_is_reported",
    ),
    Fault(
        "nobody tells of a server that owes an answer", "coordinator/waits.py", ", *self._closures.owing()]", "]",
        "system/test_stuck_servers.py::test_who_waits_for_a_stopped_server_names_it",
    ),
    Fault(
        "a time limit of waits for servers ends nothing", "serving/awaited.py",
        "            WATCHDOG.end()\n", "            pass\n",
        "system/test_stuck_servers.py::test_a_time_limit_ends_a_job_whose_server_is_stopped",
    ),
    Fault(
        "who leaves with an error says nothing", "strategy/parameter_server.py",
        "            station.leave(repr(error))\n", "",
        "system/test_stuck_servers.py::test_nobody_waits_for_a_server_that_has_left_with_an_error",
    ),
    Fault(
        "a time limit of closures ends nothing", "coordinator/waits.py",
        "            WATCHDOG.end()\n", "            pass\n",
        "unit/test_waits.py::test_a_time_limit_ends_the_job_where_that_is_not_switched_off",
    ),
    Fault(
        "all ranks that come to their turn end the job", "observe/turns.py",
        "    if any(0 < other.claim() <= mine for other in others):", "    if mine < 0:",
        "unit/test_page.py::test_one_rank_ends_the_job_where_several_come_to_their_turns_at_once",
    ),
    Fault(
        "a random value takes much memory beside it", "variables/initial.py",
        "if isinstance(self._function, Placed) and", "if not self.shape and",
        "unit/test_sharded.py::test_random_values_are_made_with_little_memory_beside_them",
    ),
    Fault(
        "who runs a closure again waits for the other worker", "observe/trace.py",
        ' and event["communicator"] != _NO_COMMUNICATOR', "",
        "system/test_trace.py::test_who_ran_a_closure_again_has_waited_for_nobody",
    ),
    Fault(
        "a call has not left", "observe/calls.py",
        '        self.depth = 0\n        self.words[STATE] = self.state\n', '        self.depth = 0\n',
        "unit/test_recorder.py::test_a_call_is_seen_while_it_lasts",
    ),
    Fault(
        "a signed call has not left", "comm/call_order.py",
        "            self._state[STATE] = calls.state\n", "",
        "unit/test_recorder.py::test_a_signed_call_is_noted_as_any_other",
    ),
    Fault(
        "another call of the same number", "observe/peers.py",
        "and other % NEXT not in (0, state % NEXT):", "and other % NEXT == 0:",
        "unit/test_page.py::test_who_is_in_another_call_is_elsewhere",
    ),
    Fault(
        "other calls inside the same one are not seen", "observe/inner_calls.py",
        "own.get(count, sign) != sign for", "own.get(count, sign) > sign < 0 for",
        "unit/test_page.py::test_other_calls_inside_the_same_one_are_seen",
    ),
    Fault(
        "inner calls of an earlier call are taken for those of this one", "observe/calls.py",
        "                self._inner_sign = 0\n", "",
        "unit/test_page.py::test_other_calls_inside_the_same_one_are_seen",
    ),
    Fault(
        "who has left a call could come to its inner ones", "observe/peers.py",
        "elif has_left(other, state) and", "elif not has_left(other, state) and",
        "unit/test_page.py::test_who_has_left_a_call_without_an_inner_one_never_comes_to_it",
    ),
    Fault(
        "a mismatch that one rank catches is not seen by the others", "observe/in_vain.py",
        "    ranks, why = view.differing(identity)\n", "    ranks, why = unknown(identity)\n",
        "system/test_nested_calls.py::test_a_mismatch_that_one_rank_alone_catches_ends_the_job",
    ),
    Fault(
        "an error that ranks share is agreed on again", "comm/agreement.py",
        "if may_agree and is_shared(caught):", "if False:",
        "parallel/checkpoint/test_together.py::test_an_object_that_fails_before_ranks_load_makes_all_raise", 2,
    ),
    Fault(
        "what was read too short is not seen", "variables/reading.py",
        "if data.size != stop - start or", "if",
        "parallel/checkpoint/test_together.py::test_a_read_that_fails_on_one_rank_is_an_error_of_all", 2,
    ),
    Fault(
        "a code at the exit is lost", "comm/ending.py",
        'self._end(self.code, "" if', 'self._end(0, "" if',
        "unit/test_ending.py::test_leaving_with_a_code_ends_the_job",
    ),
    Fault(
        "settings of optimizers are not compared", "arguments.py",
        "value != field.default", "not value == value",
        "parallel/optimizers/test_optimizers.py::test_other_optimizers_on_one_rank_are_a_mismatch", 2,
    ),
    Fault(
        "two optimizers alike are not told apart", "variables/step/plan.py", "plan_count += 1", "plan_count += 0",
        "parallel/optimizers/test_optimizers.py::test_two_optimizers_alike_are_told_apart", 2,
    ),
    Fault(
        "other axes are not told", "strategy/values.py", '"reduce along axes", axes,', '"reduce along axes", None,',
        "parallel/comm/test_call_order.py::test_other_axes_are_errors", 2,
    ),
    Fault(
        "ranks save parts of other variables", "checkpoint/listing.py",
        'line += f", variable number {value.number}"', "line += ''",
        "parallel/checkpoint/test_checkpoint.py::test_another_variable_at_the_same_path_is_an_error", 2,
    ),
    Fault(
        "a chief that fails ends alone", "comm/ending.py", "tolerates_deaths and not self.leads:", "tolerates_deaths:",
        "system/test_parameter_server.py::test_the_code_of_a_chief_that_fails_is_the_launchers",
    ),
    Fault(
        "a strategy of ranks that serve waits for them", "comm/duplicates.py",
        "not SERVED.isdisjoint(duplicates.by_purpose.values())", "False",
        "system/test_parameter_server.py::test_a_program_ends_in_good_order_on_all_ranks",
    ),
    Fault(
        "a lone failure leaves the others waiting", "comm/ending.py",
        "        if not self.is_finalized():\n            self.abort(code)\n", "",
        "unit/test_ending.py::test_a_failure_is_printed_whole_and_ends_the_job",
    ),
    Fault(
        "a dead rank in a new group", "comm/deaths.py", "        if lost:\n", "        if False:\n",
        "system/test_deaths.py::test_the_error_can_be_caught",
    ),
    Fault(
        "a late rank is waited for", "comm/arrival.py", "if waited > self._timeout:", "if False:",
        "system/test_collective_timeout.py::test_the_late_rank_is_named_everywhere",
    ),
)

HOLDS = "unit/test_protocol.py::test_rules_hold_in_every_state"

SERVING = (
    Fault(
        "norms of complex gradients miss a part of them", "variables/update/arithmetic.py",
        'if array.dtype.kind == "c" else', 'if array.dtype.kind == "C" else',
        "parallel/serving/test_optimizers_of_servers.py::test_other_dtypes_have_the_bits_of_one_process", 3,
    ),
    Fault(
        "a server takes bfloat16 for bytes", "serving/push.py",
        "array.dtype.name if array.dtype.isbuiltin == 2 else ", "",
        "parallel/serving/test_optimizers_of_servers.py::test_other_dtypes_have_the_bits_of_one_process", 3,
    ),
    Fault(
        "in one process the coordinator does not hear of an update that it drops", "serving/staging.py",
        "sender == message.worker != self.coordinator", "sender == message.worker",
        "unit/test_one_process_coordinator.py::test_a_step_without_a_learning_rate_ends",
    ),
    Fault(
        "in one process what a class names is changed at once", "serving/chief.py",
        "entry.home is not self.worker else self.worker", "entry.home is not self.worker else self",
        "unit/test_one_process_coordinator.py::test_what_a_class_names_is_changed_with_the_function",
    ),
    Fault(
        "a function does not notice a name that came later", "coordinator/captured.py",
        "        yield Use(space, name, space.get(name, _NOT_YET))\n",
        "        if name in space:\n            yield Use(space, name, space[name])\n",
        "parallel/serving/test_captured.py::test_names_that_come_later_are_noticed", 3,
    ),
    Fault(
        "a function does not notice a new attribute", "coordinator/captured.py",
        "            if space.keys() != known:", "            if not known and space:",
        "parallel/serving/test_captured.py::test_names_that_come_later_are_noticed", 3,
    ),
    Fault(
        "an update changes what a cut has not saved", "serving/cut.py",
        "if isinstance(action, Apply | ApplyRound) and self.live:",
        "if isinstance(action, Apply | ApplyRound) and not self.live:", HOLDS,
    ),
    Fault(
        "copies have no limit", "serving/cut.py", "                return None\n            self.copied",
        "                pass\n            self.copied",
        "unit/test_serving_cut.py::test_an_update_waits_for_room_and_all_behind_it_too",
    ),
    Fault(
        "an update waits for ever behind a cut that is saved", "serving/holder.py",
        "self._station.background = lambda: self._go_on(saver)", "self._station.background = lambda: None",
        "parallel/serving/test_cut.py::test_updates_between_cut_and_end", 3,
    ),
    Fault(
        "a cut without the state of optimizers", "serving/holder.py",
        "numbers += self._updates[step.optimizer].state_of(change.variable)", "pass",
        "parallel/serving/test_cut.py::test_updates_between_cut_and_end", 3,
    ),
    Fault(
        "a worker's place in its data counts a closure that does not count", "coordinator/closures.py",
        "        worker.finished.append(number)\n        return self._decide_in_turn(worker)\n",
        "        worker.finished.append(number)\n        return self._decide(number)\n",
        "unit/test_coordinator_closures.py::test_what_a_worker_has_finished_is_decided_in_its_order",
    ),
    Fault(
        "a checkpoint holds the places of functions under way", "coordinator/closures.py",
        "        worker.finished.append(number)\n",
        "        worker.finished.append(number)\n        self.resources.positions.note(rank, message.read)\n",
        "unit/test_coordinator_closures.py::test_place_in_the_data_of_a_lost_worker_stays",
    ),
    Fault(
        "functions that have captured an iterator read on where it was before a restore", "serving/worker.py",
        "            own.take_over(made)\n", "            own = self._own[build.resource] = made\n",
        "parallel/serving/test_positions.py::test_functions_that_have_captured_the_iterator_go_on_there", 3,
    ),
    Fault(
        "more workers read what is left several times", "serving/own_data.py",
        "start=self.start + number * self.stride, stride", "start=self.start, stride",
        "unit/test_positions.py::test_each_element_is_read_once_on_any_numbers_of_workers",
    ),
    Fault(
        "an update counts before its servers have it", "coordinator/work.py",
        "if finished is None or self.worker is None or not self.prepared.issuperset(finished.servers):",
        "if finished is None or self.worker is None:", HOLDS,
    ),
    Fault(
        "a server's word on a void attempt counts", "coordinator/closures.py",
        "if closure is None or closure.worker is None or closure.attempt != message.attempt:",
        "if closure is None or closure.worker is None:", HOLDS,
    ),
    Fault(
        "a lost worker's decided closure runs again", "coordinator/closures.py",
        "            if not self._closures[number].is_decided:\n                actions",
        "            if self._closures[number].worker is not None:\n                actions", HOLDS,
    ),
    Fault(
        "a closure lost after a cancellation runs again", "coordinator/closures.py",
        "        if self._is_cancelling:\n            return [*self._end(number, End.CANCELLED)]\n", "",
        "unit/test_coordinator_closures.py::test_first_error_is_raised_once_after_all_that_runs_has_ended",
    ),
    Fault(
        "a closure waits for ever for a result that there will not be", "coordinator/closures.py",
        "ends += self._awaiting.give_up(one)", "pass",
        "unit/test_coordinator_closures.py::test_a_closure_ends_as_its_input_that_has_no_result",
    ),
    Fault(
        "an update counts though another one would then be too old", "coordinator/versions.py",
        "<= self.staleness for place", "<= self.staleness + 1 for place",
        "unit/test_versions.py::test_no_update_counts_later_than_the_bound_says_and_all_come_to_their_end",
    ),
    Fault(
        "more functions run than the bound has places for", "coordinator/versions.py",
        "self._readable <= self.staleness", "self._readable <= self.staleness + 1",
        "unit/test_versions.py::test_no_update_counts_later_than_the_bound_says_and_all_come_to_their_end",
    ),
    Fault(
        "a version counts as readable before its servers have applied it", "coordinator/versions.py",
        "self._begun[closure] = self._readable", "self._begun[closure] = self.number",
        "unit/test_versions.py::test_no_update_counts_later_than_the_bound_says_and_all_come_to_their_end",
    ),
    Fault(
        "what waited for a slower worker waits for ever", "coordinator/closures.py",
        "actions = self._decide_held()", "actions: list[Action] = []",
        "unit/test_versions.py::test_others_wait_for_one_that_stands_still_and_go_on_when_it_is_lost",
    ),
    Fault(
        "gradients count that are too late", "coordinator/rounds.py",
        "return attempt._replace(optimizers=()) if self._is_late(attempt) else attempt", "return attempt",
        "unit/test_rounds.py::test_a_worker_that_stood_still_is_late_and_changes_no_version",
    ),
    Fault(
        "a round counts while others of its version still run", "coordinator/rounds.py",
        "if len(self._open) == in_flight else []", "if self._open else []",
        "unit/test_rounds.py::test_a_round_waits_for_one_that_stands_still_and_goes_on_without_it_when_it_is_lost",
    ),
    Fault(
        "a worker is in a round twice", "coordinator/rounds.py",
        "return not (is_owing or self._unapplied)", "return not self._unapplied",
        "unit/test_rounds.py::test_functions_for_one_worker_count_one_by_one_when_the_program_waits",
    ),
    Fault(
        "a round is a sum and no mean", "serving/holder.py",
        "gradients[step, number], counts[step])", "gradients[step, number], 1)",
        "parallel/serving/test_synchronous.py::test_a_round_is_the_step_of_all_its_workers_together", 4,
    ),
    Fault(
        "a slot is used again before its update is applied", "coordinator/closures.py",
        "        self._workers.returned(worker, now)\n",
        "        self._workers.returned(worker, now)\n        worker.slots = [None] * len(worker.slots)\n",
        HOLDS,
    ),
    Fault(
        "a row is read while it changes", "serving/rows.py",
        "return found, (before == after) & (before % 2 == 0)", "return found, before == before",
        "parallel/serving/test_tables.py::test_a_row_is_read_whole_while_others_change_it", 3,
    ),
    Fault(
        "a server copies a whole shard to save a part of it", "serving/cut.py",
        "copy = np.array(self._live[block.variable][block.low : block.high])",
        "copy = np.array(self._live[block.variable])[block.low : block.high]",
        "system/test_table_memory.py::test_no_rank_ever_holds_more_than_its_part_of_a_table",
    ),
    Fault(
        "a cut misses the last rows of its blocks", "serving/cut.py",
        "bisect_right(self.starts, block.low - self.width)", "bisect_right(self.starts, block.high - self.width)",
        "unit/test_serving_cut.py::test_rows_touch_the_blocks_in_which_they_have_elements",
    ),
    Fault(
        "a step without rows is not counted", "serving/worker_plan.py",
        "if len(parts) == 1 or not len(merged.indices):", "if len(parts) == 1:",
        "unit/test_sharded.py::test_rows_are_updated_as_in_one_process",
    ),
    Fault(
        "a function does not read the rows that it has written", "serving/worker.py",
        "                change.overlay(rows, found)\n", "                pass\n",
        "unit/test_sharded.py::test_writes_of_rows_in_any_order",
    ),
    Fault(
        "a function does not read the rows that it has written since it read some", "serving/rows.py",
        "in range(self._known, len(self._changes)):", "in range(len(self._changes) - self._known):",
        "unit/test_sharded.py::test_writes_of_rows_in_any_order",
    ),
    Fault(
        "a step is counted that is not made", "serving/commits.py",
        "iterations: dict[int, int] = {}", "iterations = self.iterations",
        "unit/test_coordinator_closures.py::test_update_without_a_learning_rate_is_dropped_and_fails",
    ),
    Fault(
        "a fence lets late pushes through", "serving/staging.py",
        "        self.fenced.add(message.worker)\n", "", HOLDS,
    ),
    Fault(
        "a fence keeps what is staged", "serving/staging.py",
        "        self.staged.pop(message.worker, None)\n        return []\n", "        return []\n",
        HOLDS,
    ),
    Fault(
        "half an update is committed", "serving/staging.py", "told = push.last and push.attempt != OWN_WRITE",
        "told = push.attempt != OWN_WRITE",
        "unit/test_serving_staging.py::test_whole_update_is_prepared_then_applied_then_forgotten",
    ),
    Fault(
        "a function misses what the one before has assigned", "serving/ahead.py",
        "            self._changed.add(number)\n            self._drop(number)\n", "            pass\n",
        "parallel/serving/test_ahead.py::test_a_function_sees_what_the_one_before_has_written_after_it_was_pulled", 3,
    ),
    Fault(
        "shards of one variable are pulled ahead at two moments", "serving/ahead.py",
        "if len(self._groups[one]) > 1", "if len(self._groups[one]) > 9", "unit/test_ahead.py",
    ),
    Fault(
        "what was pulled for another closure is taken", "serving/ahead.py",
        "pulls if pulls is not None and pulls.name == do[:2] else None", "pulls", "unit/test_ahead.py",
    ),
    Fault(
        "threads of a function write into one place of a server", "serving/own_threads.py",
        "        with self.lock:\n            if not", "        if True:\n            if not",
        "parallel/serving/test_what_users_write.py::test_threads_of_a_function_take_turns", 3,
    ),
    Fault(
        "a forked child speaks in its parent's name", "serving/own_threads.py",
        "        if not self.is_ours():\n", "        if False:\n",
        "system/test_forked_children.py::test_they_take_part_in_nothing",
    ),
    Fault(
        "functions lose the names of their files", "serving/handles.py",
        ".replace(co_filename=file)", "",
        "unit/test_serving_handles.py::test_functions_sent_by_their_code_know_their_lines",
    ),
    Fault(
        "arguments are sent with what they name", "serving/handles.py",
        "all(_is_plain(one, depth - 1) for one in inner)", "True",
        "unit/test_serving_handles.py::test_what_is_named_comes_back_as_itself",
    ),
    Fault(
        "an exit of a function ends the program well", "serving/handles.py",
        "    if isinstance(error, SystemExit):\n", "    if False:\n",
        "parallel/serving/test_what_users_write.py::"
        "test_whatever_a_function_raises_is_an_error_of_the_coordinator", 3,
    ),
    Fault(
        "a worker waits for an update that was given up", "serving/own_updates.py",
        "            unapplied.discard(slot)\n", "            pass\n",
        "parallel/serving/test_dropped_updates.py::test_update_that_fits_one_server_only_is_not_waited_for", 4,
    ),
    Fault(
        "an exit whose code nobody sees counts as a success", "comm/ending.py",
        "return code_of_program() if self.code is None else number_of(self.code)", "return self.code or 0",
        "system/test_parameter_server.py::test_the_code_of_the_chief_is_in_a_file_after_a_death",
    ),
    Fault(
        "an interrupt tears a message of the chief apart", "strategy/parameter_server.py",
        "station.whole = Whole(self.communicator.order)", "pass",
        "unit/test_one_process_coordinator.py::test_an_interrupt_comes_between_functions",
    ),
    Fault(
        "who has come to the end of its data takes the functions of those who have not", "coordinator/workers.py",
        "return worker.ended.isdisjoint(data) or not", "return True or not",
        "unit/test_coordinator_closures.py::test_closure_at_the_end_of_its_data_goes_to_who_has_some_left",
    ),
    Fault(
        "a function is taken for another one that is gone", "coordinator/functions.py",
        "        self.parts = parts\n", "",
        "parallel/serving/test_captured.py::test_the_value_of_the_moment_counts", 3,
    ),
    Fault(
        "a data set travels with every call", "coordinator/functions.py",
        "found is None and type(given) is Dataset", "False",
        "parallel/serving/test_data_sets_as_arguments.py::test_a_data_set_travels_once", 3,
    ),
    Fault(
        "the end of one worker's data is the end of all", "coordinator/closures.py",
        "not is_bound and self._workers.have_left(data)", "False",
        "unit/test_coordinator_closures.py::test_closure_at_the_end_of_its_data_goes_to_who_has_some_left",
    ),
    Fault(
        "a lost worker's bound closures wait for ever", "coordinator/workers.py",
        "        self.waiting.unbind(rank)\n", "",
        "unit/test_coordinator_closures.py::test_bound_closure_waits_for_its_worker_while_that_lives",
    ),
)

WINDOW = "parallel/comm/test_windows.py::test_"
HANDSHAKE = "unit/test_handshake.py::test_"
NONSENSE = "parallel/comm/test_window_strangers.py::test_a_rank_that_sends_nonsense_is_left_out"

WINDOWS = (
    Fault(
        "a message overtakes a larger one", "comm/windows/rma.py", "            waiting.add(one.source)\n", "",
        WINDOW + "messages_of_a_rank_keep_their_order", 2,
    ),
    Fault(
        "nobody keeps the array of a put", "comm/windows/rma.py",
        "                self._win.Put([view[at : at + _PIECE_BYTES], MPI.BYTE], rank, offset + at)\n"
        "            self._moving[rank].append(view)\n",
        "                self._win.Put([view[at : at + _PIECE_BYTES], MPI.BYTE], rank, offset + at)\n",
        WINDOW + "an_array_that_nobody_else_has_is_kept_until_the_flush", 2,
    ),
    Fault(
        "heaps may be larger than shared memory", "comm/windows/room.py", "if wanted > free:", "if free > wanted < 0:",
        WINDOW + "heaps_that_do_not_fit_are_everybodys_error", 2,
    ),
    Fault(
        "a put may go beyond the heap", "comm/window.py",
        "if not 0 <= first <= end <=", "if not 0 <= first <= end <= 8 +", WINDOW + "wrong_arguments_are_refused", 2,
    ),
    Fault(
        "a rank reads rows beyond the heap", "comm/windows/questions.py",
        "<= int(numbers.max()) < most", "<= int(numbers.max()) <= most", NONSENSE, 2,
    ),
    Fault(
        "rows on another node come in any order", "comm/windows/rma.py",
        "self._asked[one.source].popleft()", "self._asked[one.source].pop()",
        WINDOW + "rows_are_read_by_their_numbers", 2,
    ),
    Fault(
        "a rank writes beyond the heap by its socket", "comm/windows/sockets.py",
        "at + size <= self.memory.size", "size <= self.memory.size", NONSENSE, 2,
    ),
    Fault(
        "a message has any size", "comm/windows/sockets.py", "kind is Kind.MESSAGE and size <= MAX_MESSAGE_BYTES",
        "kind is Kind.MESSAGE", NONSENSE, 2,
    ),
    Fault(
        "a zombie writes into the heap", "comm/windows/sockets.py",
        "if connection.rank in self._losses.forgotten and kind in", "if connection.rank == self.rank and kind in",
        WINDOW + "nothing_is_sent_to_a_forgotten_rank_or_taken_from_it", 2,
    ),
    Fault(
        "who joins reads again what was read in its place", "coordinator/positions.py",
        "parts = None if not old or old[-1].refusal else _left(old[-1])", "parts = None",
        "unit/test_positions.py::test_who_joins_takes_what_the_one_before_has_left",
    ),
    Fault(
        "the late put of a lost worker goes into the slot of one that has joined", "comm/windows/connection.py",
        "self._into = memoryview(bytearray(self._into.nbytes))", "pass",
        HANDSHAKE + "the_rest_of_a_put_of_a_rank_that_is_given_up_goes_nowhere",
    ),
    Fault(
        "the file of another user's making is believed", "comm/windows/join_file.py",
        "or found.st_mode & 0o077:", "or found.st_mode & 0:",
        "unit/test_join_file.py::test_a_file_that_others_may_read_or_write_is_not_believed",
    ),
    Fault(
        "a joiner that dies before it has joined keeps its place", "strategy/joining.py",
        "            del self._given[rank]\n            self._strategy", "            self._strategy",
        "system/test_joining.py::test_a_killed_worker_is_replaced_though_joiners_die_at_each_step",
    ),
    Fault(
        "a joiner that leaves before it has joined keeps its place", "comm/windows/joined.py",
        "if not self.has_joined:", "if self.has_joined:",
        "system/test_joining_hosts.py::test_workers_join_from_another_host",
    ),
    Fault(
        "a joiner that stops while it joins keeps its place", "strategy/joining.py", "or now > end]", "]",
        "system/test_joining_attacks.py::test_a_joiner_that_stops_while_it_joins_loses_its_place",
    ),
    Fault(
        "a joiner that does not reach a server gets work", "strategy/joined.py",
        "    if not unreached:\n", "    if window:\n",
        "system/test_joining_hosts.py::test_workers_join_from_another_host",
    ),
    Fault(
        "a joiner that others do not reach gets work", "comm/windows/desk.py", "or reason:", "or None:",
        "system/test_joining_hosts.py::test_workers_join_from_another_host",
    ),
    Fault(
        "a module that a joiner lacks is an error of the program", "strategy/joined.py", "self._lack = error", "pass",
        "system/test_joining_hosts.py::test_workers_join_from_another_host",
    ),
    Fault(
        "an interrupt of a joiner is an error of the function that it runs", "strategy/joined.py",
        "for number in (signal.SIGINT, signal.SIGTERM):", "for number in (signal.SIGTERM,):",
        "system/test_joining_attacks.py::test_joiners_that_race_and_joiners_that_are_interrupted",
    ),
    Fault(
        "a job waits in silence for a worker that joins", "coordinator/waits.py",
        "absent = [self._absent] if self._absent else []", "absent = []",
        "system/test_joining_alone.py::test_a_limit_of_time_ends_a_job_that_waits_for_workers",
    ),
    Fault(
        "a silent host is not noticed", "comm/windows/addresses.py", "socket.SO_KEEPALIVE, 1", "socket.SO_KEEPALIVE, 0",
        "system/test_window_deaths.py::test_a_host_that_says_nothing_is_lost_and_a_busy_rank_is_not",
    ),
    Fault(
        "a silent host to which something is sent is not noticed", "comm/windows/sockets.py",
        "        for rank in self._held:\n", "        for rank in ():\n",
        "system/test_window_deaths.py::test_a_host_that_says_nothing_is_lost_and_a_busy_rank_is_not",
    ),
    Fault(
        "a server does not look at what is free", "serving/memory.py", "missing > _free_bytes()", "missing < 0",
        "system/test_full_memory.py::test_memory_that_is_full_is_an_error_and_nothing_is_lost",
    ),
    Fault(
        "a function reads what it has not written yet", "serving/worker.py",
        "                closure.pushed[place.server].write()\n", "",
        "unit/test_serving_push.py::test_a_function_reads_what_it_has_added_itself",
    ),
    Fault(
        "a push is written where there is no memory", "serving/push.py", "        if byte_count > have:\n",
        "        if byte_count > have < 0:\n",
        "system/test_full_memory.py::test_memory_that_is_full_is_an_error_and_nothing_is_lost",
    ),
    Fault(
        "a stranger is admitted", "comm/windows/handshake.py", "    if not hmac.compare_digest(receive(",
        "    if rank < 0 and not hmac.compare_digest(receive(",
        HANDSHAKE + "a_caller_that_goes_on_without_the_secret_is_refused",
    ),
    Fault(
        "a proof can be sent back", "comm/windows/handshake.py", "text = side + struct", "text = struct",
        HANDSHAKE + "what_was_sent_cannot_be_sent_back",
    ),
    Fault(
        "another user is admitted", "comm/windows/handshake.py", "        if user != os.geteuid():",
        "        if user < 0:", HANDSHAKE + "another_users_process_is_refused",
    ),
)

FAULTS = (
    *COMM, *CLUSTER, *VARIABLES, *OPTIMIZERS, *METRIC, *INPUT, *CHECKPOINT, *STRATEGY, *ENDINGS, *SERVING,
    *WINDOWS,
)
