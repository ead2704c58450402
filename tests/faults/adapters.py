"""Deliberate faults of what adapters of frameworks call."""

from __future__ import annotations

from tests.faults.fault import Fault

_CALLS = "parallel/strategy/test_adapter_methods.py::"

FAULTS = (
    Fault(
        "an array that is given twice is summed twice", "strategy/adapters/nests.py",
        "        if begin < end:\n", "        if False:\n",
        _CALLS + "test_what_cannot_be_reduced_is_refused_on_all_ranks", 2,
    ),
    Fault(
        "results do not reach parts of arrays", "strategy/adapters/nests.py",
        "            array[...] = one\n", "            pass\n",
        _CALLS + "test_in_place", 2,
    ),
    Fault(
        "graphs of PyTorch do not notice new values", "strategy/adapters/nests.py",
        "    if tensors:\n", "    if False:\n",
        _CALLS + "test_a_parameter_of_pytorch_counts_as_its_values", 2,
    ),
    Fault(
        "names of calls are not compared", "strategy/adapters/nests.py",
        "filter(None, (name and f\"name {name!r}\", _structure(spec)))", "filter(None, (_structure(spec),))",
        _CALLS + "test_differences_between_ranks_are_one_error", 2,
    ),
    Fault(
        "dictionaries of other keys are combined", "strategy/adapters/nests.py",
        "*tree.keys(spec), *_shape_of(spec)", "*_shape_of(spec)",
        _CALLS + "test_differences_between_ranks_are_one_error", 2,
    ),
    Fault(
        "rows are cut in another way than batches", "strategy/adapter_methods.py",
        "min(replicas.rank, rest)", "max(0, replicas.rank + rest - replicas.size)",
        _CALLS + "test_rows_are_those_of_a_distributed_dataset", 2,
    ),
    Fault(
        "a framework's thread cannot enter a step", "comm/calls/turns.py",
        "                calls.thread = me\n                return\n", "                pass\n",
        _CALLS + "test_calls_of_a_frameworks_thread", 2,
    ),
    Fault(
        "calls do not wait for what a framework has dispatched", "comm/calls/turns.py",
        "            for function in tuple(self._before):\n                function()\n", "            pass\n",
        _CALLS + "test_calls_of_a_frameworks_thread", 2,
    ),
    Fault(
        "a call comes between two that a framework has dispatched", "comm/calls/turns.py",
        "is_mine = self._order.is_inside and self._calls.thread == me", "is_mine = self._order.is_inside",
        _CALLS + "test_a_call_comes_after_all_that_a_framework_has_begun", 2,
    ),
    Fault(
        "a step that an exception leaves counts as done", "comm/calls/turns.py",
        "        order.is_under_way = True\n", "",
        _CALLS + "test_a_step_that_an_exception_leaves_is_torn", 2,
    ),
    Fault(
        "an interrupt in a framework's call is lost", "comm/calls/turns.py",
        "            INTERRUPTS.pass_on(self._is_main_outside)\n", "            pass\n",
        _CALLS + "test_an_interrupt_in_a_frameworks_call_is_raised_in_the_main_thread", 2,
    ),
    Fault(
        "each replica gets the first one's value back", "checkpoint/walk/registered.py",
        "self._read(rank % saved.replicas)", "self._read(0)",
        "parallel/checkpoint/test_registered.py::test_a_foreign_object_comes_back", 2,
    ),
    Fault(
        "the ranks of foreign objects are not asked for", "checkpoint/walk/registered.py",
        "    return found[0] if found else None\n", "    return None\n",
        "parallel/checkpoint/test_registered.py::test_what_differs_between_ranks_is_refused", 2,
    ),
)
