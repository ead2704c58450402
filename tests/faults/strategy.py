"""Deliberate faults of strategies."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "sums of Python ints wrap", "strategy/values.py",
        'return array.astype(np.int64) if array.dtype == np.int32 and not hasattr(leaf, "dtype") else array',
        "return array",
        "parallel/strategy/test_values.py::test_python_ints_are_never_cut_off", 2,
    ),
    Fault(
        "others do not hear of a value that is refused", "comm/front/call_log.py",
        "            order = self.begin(name, _Refusal(str(error)), None)\n", "            raise error\n",
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
        "rows go to another micro-batch", "strategy/reproducible/micro_batches.py",
        "return cut_evenly(self.count, len(self.rows))", "return cut_evenly(self.logical_replicas, len(self.rows))",
        "unit/strategy/test_strategy_cut.py",
    ),
    Fault(
        "integers of micro-batches wrap", "strategy/reproducible/micro_batch_sums.py",
        "narrowed(whole, dtype, ReduceOp.SUM)[()]", "whole.astype(dtype)[()]",
        "parallel/strategy/test_integers.py::test_sums_over_micro_batches", 2,
    ),
    Fault(
        "64-bit integers of micro-batches wrap", "strategy/reproducible/micro_batch_sums.py",
        'halves(np.ascontiguousarray(array, f"{array.dtype.kind}8"))', 'np.stack([array * 0, array]).astype("i8")',
        "parallel/strategy/test_integers.py::test_sums_over_micro_batches", 2,
    ),
    Fault(
        "micro-batches are added rank by rank", "strategy/reproducible/sums_of_ranks.py",
        "pairs = pairing([node for own in nodes for node in own])",
        "pairs = [(0, number) for number in range(1, sum(len(own) for own in nodes))]",
        "parallel/strategy/test_logical_replicas.py::test_the_sum_is_the_tree_over_micro_batches", 2,
    ),
    Fault(
        "a guessed batch size is taken without a word", "strategy/losses.py",
        "    if replicas > 1 and first is not None and first != rows:", "    if False:",
        "parallel/strategy/test_strategy.py::test_a_loss_of_a_guessed_batch_size_warns_once_where_rows_change", 2,
    ),
    Fault(
        "collectives outside run combine one replica in silence", "strategy/default.py",
        "    strategy = context.open_strategy()\n    if strategy is not None:\n", "    if False:\n",
        "parallel/strategy/test_strategy.py::test_collectives_outside_run_are_refused_while_a_strategy_is_open", 2,
    ),
    Fault(
        "a strategy that nobody has any more refuses collectives outside run", "context.py",
        "until a collection.\n    gc.collect()\n", "until a collection.\n",
        "parallel/strategy/test_strategy.py::test_collectives_outside_run_warn_once_without_a_strategy", 2,
    ),
)
