"""Deliberate faults of input."""

from __future__ import annotations

from tests.faults.fault import Fault

DATA = "parallel/data/test_data.py::test_"
BLOCKS = "unit/data/test_data_blocks.py::test_"
COUPLED = "system/data/test_coupled.py::test_"

FAULTS = (
    Fault(
        "a StopIteration of a user's function ends the data", "data/reading/element.py",
        '        raise stopped(f"the function', '        raise error or stopped(f"the function',
        "unit/data/test_data_transformations.py::test_a_stop_of_a_users_function_is_no_end_of_the_data",
    ),
    Fault(
        "a finite repetition ends at an empty pass", "data/items/stream.py",
        "if is_empty and (self.count is None or length == 0):", "if is_empty:",
        "unit/data/test_data_transformations.py::test_a_finite_repetition_goes_on_behind_an_empty_pass",
    ),
    Fault(
        "parts of other dtypes become a batch", "data/reading/element.py",
        "        _require_alike({(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves})\n", "",
        "unit/data/test_data_transformations.py::test_parts_of_different_dtypes_make_no_batch",
    ),
    Fault(
        "a sample of another size is taken", "data/reading/samples_of_ranks.py", "if size in (expected, 0):",
        "if size >= 0:",
        COUPLED + "messages_that_are_no_samples_are_errors",
    ),
    Fault(
        "a sender waits for ever for a program that has ended", "data/reading/samples_of_ranks.py",
        "        incoming.drain()\n", "        incoming.ranks\n",
        COUPLED + "samples_come_in_turns_and_the_sender_is_held_back",
    ),
    Fault(
        "a fast sender is not held back", "data/reading/samples_of_ranks.py", "len(self._ahead) < self._depth:",
        "True:",
        COUPLED + "samples_come_in_turns_and_the_sender_is_held_back",
    ),
    Fault(
        "each pass in the same order", "data/items/shuffle.py",
        "path = () if is_same else epoch.path", "path = ()",
        "unit/data/test_data_dataset.py::test_shuffle_is_a_permutation_that_depends_on_seed_and_iteration_only",
    ),
    Fault(
        "each rank shuffles by its own seed", "data/distribution/share.py",
        "    _adopt_seeds(pipeline, facts, communicator, everyone)\n    others", "    others",
        DATA + "all_ranks_shuffle_alike_and_anew_in_each_pass", 2,
    ),
    Fault(
        "the ranks of a replica shuffle by different seeds", "data/distribution/share.py",
        " if everyone is communicator else everyone.broadcast_object(facts[0].drawn_seeds)", "",
        "parallel/strategy/test_groups.py::test_the_ranks_of_a_replica_read_the_same_examples", 4,
    ),
    Fault(
        "all ranks see OFF in one order", "data/items/shuffle.py",
        "[value, epoch.salt] if self.drawn and epoch.salt else [value]", "[value]",
        DATA + "off_shuffles_differently_on_each_rank_without_a_seed", 2,
    ),
    Fault(
        "rows between slices are lost", "data/items/sharding.py",
        "begin = least * reader + min(reader, more)", "begin = least * reader + more",
        "unit/data/test_data_sharding.py::test_even_slices_are_contiguous_and_cover_everything",
    ),
    Fault(
        "batch sizes are not rotated", "data/items/sharding.py",
        "return (*sizes[reader:], *sizes[:reader])", "return tuple(sizes)",
        "unit/data/test_data_sharding.py::test_rotated_sizes_make_global_steps_of_the_batch_size",
    ),
    Fault(
        "a pass goes on at another batch", "data/items/batching.py",
        "return rounds * sum(self.sizes) + sum(self.sizes[:turn])", "return group * self.sizes[0]",
        "unit/data/test_data_sharding.py::test_batches_of_sizes_in_turn_are_the_same_from_any_start",
    ),
    Fault(
        "padding takes the first dtype", "data/reading/padding.py",
        "dtype = np.result_type(*(leaf.dtype for leaf in column))", "dtype = column[0].dtype",
        "unit/data/test_data_transformations.py::test_padded_batch",
    ),
    Fault(
        "padding wraps", "data/reading/padding.py", "batch[...] = _value_as(value, dtype)",
        "batch[...] = np.asarray(value).astype(dtype)", "unit/data/test_data_arguments.py",
    ),
    Fault(
        "an error of reading looks like the end", "data/reading/prefetch.py",
        "channel.end(error)", "channel.end(None)",
        "unit/data/test_data_prefetch.py::test_an_error_comes_after_the_elements_before_it",
    ),
    Fault(
        "a reader is not told of room", "data/reading/prefetch.py",
        "                return None\n            self._changed.notify_all()\n", "                return None\n",
        "unit/data/test_data_prefetch.py::test_elements_that_are_taken_when_they_are_ready_make_room_for_the_next",
    ),
    Fault(
        "ranks that have read before exchange no empty batch", "data/distribution/distributed_iterator.py",
        "what they have in common.\n        self._template = None\n", "what they have in common.\n",
        DATA + "uneven_lengths_resume_where_some_ranks_have_read_before", 2,
    ),
    Fault(
        "a forgotten prefetcher stays", "data/reading/prefetch.py",
        "weakref.finalize(self, channel.close)", "channel.close",
        "unit/data/test_data_prefetch.py::test_a_forgotten_prefetcher_ends_its_thread",
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
        "unit/data/test_data_dataset.py::test_what_the_user_does_to_an_element_does_not_reach_the_data",
    ),
    Fault(
        "lazy rows are sorted", "data/reading/source.py",
        "return _opened(leaf)[increasing][positions]", "return _opened(leaf)[increasing]",
        "unit/data/test_data_dataset.py::test_hdf5_datasets "
        "unit/data/test_data_dataset.py::test_lazy_arrays_are_read_in_increasing_order_once_a_batch",
    ),
    Fault(
        "windows far apart lose their place behind a block", "data/transformations/windows.py",
        "held.append(block[max(0, -count) :])", "held.append(block)",
        BLOCKS + "what_moves_items",
    ),
    Fault(
        "batches are lost where a block has many", "data/items/batching.py",
        "                begin = end\n                continue",
        "                begin += (len(block) - begin) // size * size\n                continue",
        BLOCKS + "what_moves_items",
    ),
    Fault(
        "a shuffle holds too much of its second block", "data/items/shuffle.py",
        "held.append(block[: self.buffer_size - count])", "held.append(block[: self.buffer_size])",
        BLOCKS + "what_moves_items",
    ),
    Fault(
        "a shard begins anew in each block", "data/items/stream.py",
        "first = (first - len(block)) % self.num_shards", "first = self.index",
        BLOCKS + "what_moves_items",
    ),
    Fault(
        "a position in samples counts a data set anew in each block", "data/transformations/sampled.py",
        "those if count == INFINITE else those[: count - begin]", "those if count == INFINITE else those[:count]",
        BLOCKS + "samples_are_sought_behind_several_blocks_of_choices",
    ),
    Fault(
        "a cache keeps one order for all ranks", "data/pipeline/caching.py", "key = (epoch.salt, *", "key = (0, *",
        "unit/data/test_data_transformations.py::test_a_cache_keeps_an_order_for_each_rank_that_shuffles_by_itself",
    ),
    Fault(
        "files are shared out though one list has too few", "data/pipeline/file_sharding.py",
        "return min((one for one", "return max((one for one",
        "parallel/data/test_policies.py::test_one_of_two_lists_of_files_may_be_too_short_to_be_shared_out", 2,
    ),
    Fault(
        "a position does not know of later passes", "data/items/position.py",
        "_PASSES: passes if passes > iteration + 1 else 0", "_PASSES: 0",
        "parallel/data/test_data.py::test_the_pass_after_two_that_are_resumed_is_the_third", 1,
    ),
    Fault(
        "of ranks that have taken the same batch last nothing is told", "comm/calls/text.py",
        "if len(set(texts.values())) == 1 and _TAKEN", "if len(set(texts.values())) == 0 and _TAKEN",
        "parallel/data/test_peek.py::test_a_rank_that_looks_at_a_pass_of_its_own_first", 2,
    ),
    Fault(
        "AUTO shares out files that an array stands beside", "data/distribution/share.py",
        " and is_all_of_files(pipeline, Zip)", "",
        "parallel/data/test_policies.py::test_auto_shares_out_no_files_that_other_rows_stand_beside", 2,
    ),
    Fault(
        "AUTO shares out two lists of files in step", "data/pipeline/file_sharding.py",
        "len(set(map(file_digests, node.pipelines))) > 1", "False",
        "parallel/data/test_policies.py::test_auto_shares_out_no_files_that_other_rows_stand_beside", 2,
    ),
    Fault(
        "options that a dataset gives take a policy that does nothing", "data/options.py",
        "            object.__setattr__(one, \"_is_copy\", True)\n", "            pass\n",
        "unit/test_settings.py::test_options_of_a_dataset_are_changed_by_with_options",
    ),
    Fault(
        "a batch that a rank takes alone is not seen", "data/distribution/distributed_iterator.py",
        "            self._note(self._dataset_number, self._iteration, taken)\n", "            pass\n",
        "parallel/data/test_peek.py::test_a_rank_that_looks_at_a_batch_alone", 2,
    ),
    Fault(
        "batches of datasets of the ranks' own are compared", "data/distribution/distributed_iterator.py",
        "None if self._is_own else self._note_end", "self._note_end",
        "parallel/data/test_peek.py::test_datasets_of_the_ranks_own", 2,
    ),
    Fault(
        "the end of a rank's own dataset is not compared", "data/distribution/distributed_iterator.py",
        "                self._note_end(self._dataset_number, self._iteration, -1)\n", "                pass\n",
        "parallel/data/test_peek.py::test_datasets_of_the_ranks_own", 2,
    ),
    Fault(
        "iterators have no numbers of their own", "data/distribution/distributed_dataset.py",
        'communicator.order.deal("dataset")', "1",
        "parallel/data/test_peek.py::test_two_iterators_in_another_order", 2,
    ),
    Fault(
        "every rank gets all of an unbatched generator's batch", "data/distribution/share.py",
        "if size > 1 or pipeline.is_assumed", "if size > 9",
        "parallel/data/test_data.py::test_elements_of_an_unbatched_generator_are_global_batches", 2,
    ),
    Fault(
        "zipped generators of examples are cut in part", "data/pipeline/pipeline.py",
        "self.is_loaded and not self.is_assumed and", "self.is_loaded and",
        "parallel/data/test_data.py::test_an_unbatched_generator_of_examples_wants_a_batch_on_any_number_of_ranks", 2,
    ),
    Fault(
        "a generator's batches beside others go to every rank whole", "data/transformations/zipped.py",
        "            else partial(_piece, pipeline, readers, reader) if pipeline.is_assumed\n", "",
        "parallel/data/test_data.py::test_batches_of_a_generator_beside_batches_are_cut_alike", 2,
    ),
    Fault(
        "examples of a generator are cut as if they were batches", "data/pipeline/pipeline.py",
        "            if self.is_assumed:\n", "            if False:\n",
        "parallel/data/test_data.py::test_an_unbatched_generator_of_examples_wants_a_batch_on_any_number_of_ranks", 2,
    ),
    Fault(
        "rows of arrays are rebatched whole", "data/transformations/rebatched.py",
        "    return pipeline.unbatch()", "    return pipeline.unbatch() if pipeline.is_batched else pipeline",
        "unit/data/test_data_transformations.py::test_elements_of_any_first_dimension_are_unbatched_and_rebatched",
    ),
    Fault(
        "a file of that very name is taken for a pattern", "data/reading/file_names.py",
        " and not os.path.lexists(one)", "",
        "unit/data/test_data_arguments.py::test_a_file_whose_name_looks_like_a_pattern_is_found",
    ),
)
