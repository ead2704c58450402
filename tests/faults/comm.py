"""Deliberate faults of collectives and node memory."""

from __future__ import annotations

from tests.faults.fault import Fault

CONTRACT = "parallel/comm/test_collective.py::TestBackends::test_"
NCCL = "parallel/comm/gpu/test_nccl.py::test_"
CHOICE = "parallel/comm/choice/test_selection.py::test_"

FAULTS = (
    Fault(
        "barrier lets one step ahead", "comm/memory/node_barrier.py",
        "if seen >= least:", "if seen >= least - NUMBER:",
        "parallel/comm/backends/test_node.py::test_the_barrier_keeps_everyone_until_the_last", 2,
    ),
    Fault(
        "signed calls are counted differently after an exchange met one", "comm/calls/text.py",
        "    go_on_at(max(signed_numbers), max(numbers))\n", "    calls.go_on_at(max(numbers))\n",
        "parallel/comm/test_call_order.py::test_ranks_continue_together_after_an_exchange_met_a_signed_call", 2,
    ),
    Fault(
        "a rank shows the text of a call before its checksum is gone", "comm/calls/comparison.py",
        "        self.restart()\n        page.write(place, self.number, text)\n",
        "        page.write(place, self.number, text)\n        self.restart()\n",
        "parallel/comm/test_call_order.py::test_a_rank_shows_the_text_of_its_call_when_its_checksum_is_gone", 2,
    ),
    Fault(
        "who gathers combines its own array last", "comm/backends/gather_to_one.py",
        "combine([received[rank] for rank in self._ranks], total[piece], op)",
        "combine([*received.values()], total[piece], op)",
        "parallel/comm/backends/test_gather_to_one.py", 3,
    ),
    Fault(
        "an allocated array is combined twice behind a block", "comm/backends/node.py",
        "one[begin : min(begin + length, mine.stop)] for one", "one[begin : begin + length] for one",
        "parallel/comm/backends/test_node.py", 3,
    ),
    Fault(
        "the last elements of a copy past the cache are missing", "comm/arithmetic/stores.py",
        "    np.copyto(target.reshape(-1)[rest:], source.reshape(-1)[rest:])\n", "    del rest\n",
        "unit/comm/test_stores.py",
    ),
    Fault(
        "copies past the cache have no fence", "comm/arithmetic/stores.py",
        "end=[\"  fence seq_cst\"]", "end=[]", "unit/comm/test_stores.py",
    ),
    Fault(
        "the mean of an allocated array is its sum", "comm/backends/node.py",
        "                if divisor != 1:\n", "                if divisor < 1:\n",
        "parallel/comm/backends/test_node.py::test_the_mean_of_an_allocated_array_is_its_sum_divided", 2,
    ),
    Fault(
        "each chunk of a tree is the first one", "comm/backends/tree.py",
        "mine = self._combined_slices(source[chunk], counts, op)",
        "mine = self._combined_slices(source[: chunk.stop - chunk.start], counts, op)",
        "parallel/comm/backends/test_tree.py", 2,
    ),
    Fault(
        "the third rank writes over a source that it has yet to read", "comm/backends/direct_copies.py",
        "if self._rank > 1 and total is source", "if self._rank > 2 and total is source",
        "parallel/comm/backends/test_direct_copies.py", 3,
    ),
    Fault(
        "rows that some ranks have packed are taken for those of all", "comm/front/sparse.py",
        "if len(values_of_all) == len(checksums):", "if values_of_all:", "parallel/comm/front/test_sparse.py", 2,
    ),
    Fault(
        "a second pack takes more than there is room for", "comm/front/packing.py",
        "        if byte_count > room.get(key, limit):", "        if byte_count > limit:",
        "parallel/comm/front/test_packing.py", 2,
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
        "a circulant exchange forgets the blocks around the end", "comm/backends/circulant.py",
        "runs = [(begin, end), (0, count - (end - begin))]", "runs = [(begin, end)]",
        "parallel/comm/backends/test_between_nodes.py::test_any_number_of_ranks_sends_the_same_in_few_rounds", 4,
    ),
    Fault(
        "a circulant exchange sends half of an odd number rounded down", "comm/backends/circulant.py",
        "low = (high + 1) // 2", "low = high // 2",
        "unit/comm/test_circulant.py",
    ),
    Fault(
        "tree pairs in any order", "comm/arithmetic/tree_order.py",
        "for number, position in sorted(present.items()):", "for number, position in present.items():",
        "unit/comm/test_tree_order.py",
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
        "no rank tells that its 64-bit integers are too large", "comm/front/integer_sums.py",
        "exact.fits(source, op, self._size) ^ (op is _SUM)", "op is not _SUM",
        CONTRACT + "integers_do_not_wrap", 2,
    ),
    Fault(
        "many integers are safe whatever they are", "comm/front/integer_sums.py",
        "all_reduce_max(int(not exact.fits(source, op, self._size)))", "all_reduce_max(0)",
        CONTRACT + "integers_do_not_wrap", 2,
    ),
    Fault(
        "sums of rows of integers wrap", "comm/front/sparse.py",
        "is_wide = (merge or densify) and is_checked(dtype, op)", "is_wide = False",
        "parallel/comm/front/test_sparse.py::test_sums_of_integers_do_not_wrap", 2,
    ),
    Fault(
        "a wide sum is cut off", "comm/arithmetic/exact.py", "wrong = result != wide", "wrong = wide != wide",
        "unit/comm/test_exact_integers.py",
    ),
    Fault(
        "no carry from lower to upper halves", "comm/arithmetic/exact.py",
        "made[0] = sums[0] + (sums[1] >> _HALF_BITS)", "made[0] = sums[0]", "unit/comm/test_exact_integers.py",
    ),
    Fault(
        "products of 64 bits wrap", "comm/arithmetic/exact.py", ">= _APART", "> np.inf",
        "unit/comm/test_exact_integers.py",
    ),
    Fault(
        "sums of small integers along an axis wrap", "comm/arithmetic/exact.py",
        "return [arrays.as_array(array.sum(axes, dtype=_WHOLE))]",
        "return [arrays.as_array(array.sum(axes, dtype=own)).astype(_WHOLE)]", "unit/comm/test_exact_integers.py",
    ),
    Fault(
        "sums that do not fit end all others in the background", "comm/cross_device/asynchronous.py",
        "                    return None, error\n", "                    pass\n",
        "parallel/strategy/test_integers.py::test_in_the_background", 2,
    ),
    Fault(
        "a rank without rows keeps its order of bytes", "strategy/values.py",
        'dtype=array.dtype.newbyteorder("="), shape=left', "shape=left",
        "parallel/strategy/test_integers.py::test_a_replica_without_rows_in_another_order_of_bytes", 2,
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
        "frequent rows count once", "comm/arithmetic/rows.py",
        "np.add.at(wide, np.repeat(late, counts[late] - VECTOR_ROUNDS), values[order[positions]].astype(wide.dtype))",
        "wide[np.repeat(late, counts[late] - VECTOR_ROUNDS)] += values[order[positions]].astype(wide.dtype)",
        "unit/comm/test_variables_merging.py::test_rows_of_any_frequency",
    ),
    Fault(
        "rows in any order", "comm/arithmetic/rows.py",
        'np.argsort(indices, kind="stable")', "np.argsort(indices)", "unit/comm/test_variables_merging.py",
    ),
    Fault(
        "an error of one rank is its own", "comm/group/agreement.py",
        "if communicator.all_reduce_max(int(error is not None)) == 0:",
        "if communicator.all_reduce_max(int(error is not None)) * int(error is not None) == 0:",
        "parallel/comm/test_agreement.py::test_a_failure_is_everybodys", 2,
    ),
    Fault(
        "the last rank is not compared", "comm/group/agreement.py",
        "if values.count(values[0]) == len(values):", "if values[:-1].count(values[0]) == len(values) - 1:",
        "parallel/comm/test_agreement.py::test_a_different_value_is_named_with_its_ranks", 2,
    ),
    Fault(
        "no comparison after call 16", "comm/memory/node_barrier.py",
        "differs = differs or bool((seen ^ word) & HASH)", "differs = False",
        "parallel/comm/test_call_order.py::test_a_late_call_that_differs_is_an_error_on_every_rank", 2,
    ),
    Fault(
        "a reduction does not say whose it is", "comm/front/front.py",
        'log.begin_owned("all_reduce", op, array, log.owner)', 'log.begin_owned("all_reduce", op, array, 0)',
        "parallel/strategy/test_two_strategies.py", 2,
    ),
    Fault(
        "a gathering does not say whose it is", "comm/front/call_log.py",
        "return self.begin_owned(name, detail, array, self.owner,", "return self.begin_owned(name, detail, array, 0,",
        "parallel/strategy/test_two_strategies.py", 2,
    ),
    Fault(
        "an exchange does not say whose it is", "recorder/calls.py",
        "calls.enter(name, call, code, owner or self._owner)", "calls.enter(name, call, code, owner)",
        "parallel/strategy/test_two_strategies.py", 2,
    ),
    Fault(
        "a collective for other options does not say whose it is", "comm/cross_device/chosen_collective.py",
        "selection.choose(collective.communicator, options, collective.log.owner)",
        "selection.choose(collective.communicator, options)",
        "parallel/strategy/test_two_strategies.py", 2,
    ),
    Fault(
        "a reduction in the background does not say whose it is", "comm/cross_device/asynchronous.py",
        "selection.choose(sibling, options or CommunicationOptions(), collective.log.owner)",
        "selection.choose(sibling, options or CommunicationOptions())",
        "parallel/strategy/test_two_strategies.py::test_reductions_in_the_background", 2,
    ),
    Fault(
        "a closed reduction in the background keeps its error", "comm/cross_device/asynchronous.py",
        "        self._error = None\n\n    def _finish", "\n    def _finish",
        "parallel/strategy/test_two_strategies.py::test_reductions_in_the_background", 2,
    ),
    Fault(
        "the same call of another strategy keeps its signature", "comm/calls/order.py",
        "elif key == self.key and owner == self.owner and", "elif key == self.key and",
        "parallel/strategy/test_two_strategies.py", 2,
    ),
    Fault(
        "no comparison between nodes", "comm/calls/order.py",
        "if number % _EVERY == 0 or self._signs.has_new:", "if self._signs.has_new:",
        "parallel/comm/test_call_order.py::test_ranks_of_different_nodes_compare_now_and_then", 2,
    ),
    Fault(
        "a new call is not compared between nodes before it sends", "comm/calls/order.py",
        "            if is_new:\n                self._complete()\n", "",
        "parallel/comm/test_call_order.py::test_a_new_call_is_compared_between_nodes_before_it_sends", 2,
    ),
    Fault(
        "who refuses a call waits for a comparison", "comm/calls/order.py",
        "self._signs.has_new and not self._is_compared, False", "self._signs.has_new, False",
        "parallel/comm/test_call_order.py::test_who_refuses_a_call_waits_for_no_comparison", 2,
    ),
    Fault(
        "after an error of all ranks they disagree about which calls are new", "comm/calls/order.py",
        "        self._signs.clear()\n        self.key = _PastCall(self.key)\n", "",
        "parallel/comm/test_call_order.py::test_a_new_call_is_compared_between_nodes_before_it_sends", 2,
    ),
    Fault(
        "an interrupt comes twice between nodes", "comm/calls/comparison.py",
        "is_asked=self.is_asked and not self._is_interrupted", "is_asked=self.is_asked",
        "parallel/comm/test_interrupts.py::test_between_nodes_it_comes_on_all_ranks_while_calls_come_slowly", 2,
    ),
    Fault(
        "a rank that looks closely takes what was signed since for another call", "comm/calls/comparison.py",
        "page.differs(before, page.shown(before))", "page.differs(before, self._mark_before)",
        "parallel/comm/test_interrupts.py::test_reductions_in_the_background_do_not_raise_it", 2,
    ),
    Fault(
        "a rank that waits outside of calls takes what was signed since for another call", "comm/calls/comparison.py",
        "self.mark if self._depth else page.shown(number)", "self.mark",
        "parallel/comm/test_asynchronous.py::test_a_rank_that_waits_outside_of_calls_does_not_take_it_for_another_call",
        2,
    ),
    Fault(
        "an interrupt waits for no slow calls", "failures/interrupts.py",
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
        "what was left in the middle goes on", "comm/calls/order.py",
        'self.broken = f"{self.key[0]} was left in the middle by {what}"', 'self.broken = ""',
        "parallel/comm/test_call_order.py::test_a_call_left_in_the_middle_is_refused_from_then_on", 2,
    ),
    Fault(
        "a check is made in the first calls only", "comm/front/call_log.py",
        "self._first = schedule_of(check=options.check).first", "self._first = schedule_of(check=False).first",
        "parallel/comm/test_collective.py::test_check_looks_at_every_call", 2,
    ),
    Fault(
        "rounding is lost in TopK", "comm/compression/top_k.py",
        "rest[chosen] -= sent.astype(rest.dtype)", "rest[chosen] = 0",
        "unit/comm/test_compression.py::test_what_rounding_leaves_out_is_sent_later",
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
        "a communicator forgets what it owns", "comm/group/resource.py", "in (*owned, *handles):", "in handles:",
        NCCL + "it_ends_with_its_communicator", 2,
    ),
    Fault(
        "asynchronous calls go on after a failure", "comm/cross_device/asynchronous.py", "if self._error is None:",
        "if True:",
        "parallel/comm/test_asynchronous.py::test_an_error_reaches_its_handle_and_all_later_ones", 2,
    ),
    Fault(
        "a failure in the background is lost", "comm/cross_device/asynchronous.py",
        "                self._error = error\n", "                pass\n",
        "parallel/comm/test_asynchronous.py::test_an_error_reaches_its_handle_and_all_later_ones", 2,
    ),
    Fault(
        "others wait for a rank that refuses a reduction in the background", "comm/cross_device/asynchronous.py",
        "        self._put(handle)\n", "",
        "parallel/comm/test_asynchronous.py::test_a_wrong_argument_on_one_rank_is_told_to_the_others", 2,
    ),
    Fault(
        "others wait for a rank without descriptors", "comm/choice/selection.py",
        "error = OSError(errno.EMFILE, why) if why else None",
        "error = None\n    if why:\n        raise OSError(errno.EMFILE, why)",
        "parallel/comm/test_descriptors.py::test_a_strategy_is_made_on_no_rank", 2,
    ),
    Fault(
        "a message of MPI that is too long names no other rank", "comm/calls/order.py",
        "is_other = is_of_other_size(error)", "is_other = False",
        "parallel/comm/test_call_order.py::test_a_message_that_is_too_long_names_the_calls_of_all_ranks", 2,
    ),
    Fault(
        "a rank that has refused a reduction makes other calls from then on", "comm/cross_device/asynchronous.py",
        "            self.communicator.order.mark = 0\n", "            pass\n",
        "parallel/comm/test_asynchronous.py::test_a_wrong_argument_on_one_rank_is_told_to_the_others", 2,
    ),
    Fault(
        "who refuses a call is a barrier behind the others", "comm/front/call_log.py",
        "            self._meet()\n        except", "            pass\n        except",
        "parallel/comm/test_asynchronous.py::test_a_wrong_argument_on_one_rank_is_told_to_the_others", 2,
    ),
    Fault(
        "ranks are in MPI before they hear that another one refuses the call", "comm/cross_device/asynchronous.py",
        '                self._collective.log.meet("all_reduce", op, lent)\n', "",
        "parallel/comm/test_asynchronous.py::test_a_wrong_argument_on_one_rank_is_told_to_the_others", 2,
    ),
    Fault(
        "after a refusal of one rank the others reduce nothing more in the background",
        "comm/cross_device/asynchronous.py",
        "(isinstance(error, OverflowError) or is_refusal(error))", "isinstance(error, OverflowError)",
        "parallel/comm/test_asynchronous.py::test_a_wrong_argument_on_one_rank_is_told_to_the_others", 2,
    ),
    Fault(
        "the call behind a batch keeps the signature of the one before it", "comm/calls/order.py",
        " and not self._taken:", ":", "unit/comm/test_signed_batches.py",
    ),
    Fault(
        "a batch that another thread takes is signed", "comm/calls/order.py",
        "        if self._calls.thread == get_ident():\n            self._batch",
        "        if True:\n            self._batch",
        "unit/comm/test_signed_batches.py",
    ),
    Fault(
        "a batch is signed with the call of another thread", "comm/calls/order.py",
        "return sign + taken * (self._calls.thread == get_ident())", "return sign + taken",
        "unit/comm/test_signed_batches.py",
    ),
    Fault(
        "who finds that a sum does not fit shows other calls to those that compare it", "comm/calls/order.py",
        "                if not isinstance(error, OverflowError):\n                    self.restart(",
        "                self.restart(",
        "unit/comm/test_shared_errors.py",
    ),
    Fault(
        "who finds arguments wrong shows other calls to those that compare the last one", "comm/calls/order.py",
        "keeps_call=not isinstance(error, MpidistError)", "", "unit/comm/test_shared_errors.py",
    ),
    Fault(
        "a part of the tree hides that its marks differ", "comm/memory/tree_barrier.py",
        "(word | flag) ^ (_UNLIKE if differs else 0)", "word | flag", "unit/comm/test_tree_barrier.py",
    ),
    Fault(
        "a rank sleeps on though its word has changed", "comm/memory/tree_barrier.py",
        "        order_stores()\n        for one", "        for one", "unit/comm/test_tree_barrier.py",
    ),
    Fault(
        "a rank far away does not see that calls differ", "comm/calls/wide_page.py",
        "        if self._sees(number, word):", "        if False:", "unit/comm/test_tree_barrier.py",
    ),
    Fault(
        "a rank far away is not interrupted", "comm/calls/wide_page.py",
        "            words[self._flagged[parity]] = word\n", "            pass\n", "unit/comm/test_tree_barrier.py",
    ),
    Fault(
        "each of many ranks gets a few bytes", "comm/arithmetic/slices.py",
        "return min(rank_count, max(1, byte_count // LEAST_SLICE_BYTES))", "return rank_count",
        "unit/comm/test_slices.py",
    ),
    Fault(
        "ranks without a slice take that of others", "comm/arithmetic/slices.py",
        "    if rank >= used:\n        return slice(0, 0)\n", "", "unit/comm/test_slices.py",
    ),
    Fault(
        "ranks open collectives of several strategies together", "comm/choice/selection.py",
        "    if owner:\n", "    if False:\n",
        "parallel/strategy/test_two_strategies.py::test_on_one_node_an_error_comes_before_any_number", 3,
    ),
)
