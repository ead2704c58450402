"""Deliberate faults of calls from XLA, and of training with JAX."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "calls of a program have no order", "xla/order.py",
        "                token = operation.results[0]\n            elif", "                pass\n            elif",
        "unit/xla/test_call.py::test_calls_that_do_not_depend_on_each_other_run_in_their_order",
    ),
    Fault(
        "calls do not wait for a loop or a branch", "xla/order.py",
        "                token = self._after(operation, token)", "                pass",
        "unit/xla/test_call.py::test_the_order_goes_through_loops_branches_and_functions",
    ),
    Fault(
        "calls do not wait for those in a function", "xla/order.py",
        "token = self._after(self._enter_function(operation, token), token)", "self._enter_function(operation, token)",
        "unit/xla/test_call.py::test_the_order_goes_through_loops_branches_and_functions",
    ),
    Fault(
        "calls in a loop are not connected", "xla/order.py",
        "                        self._through(inner, token)\n", "                        pass\n",
        "unit/xla/test_call.py::test_the_order_goes_through_loops_branches_and_functions",
    ),
    Fault(
        "programs that nobody has connected run", "xla/order.py",
        "    if number == UNCONNECTED:", "    if False:",
        "unit/xla/test_call.py::test_programs_that_cannot_be_are_refused",
    ),
    Fault(
        "a program of several devices is one of a rank", "xla/order.py",
        "            if count > 1:", "            if False:",
        "unit/xla/test_call.py::test_programs_that_cannot_be_are_refused",
    ),
    Fault(
        "a header of another version is taken", "xla/structs.py",
        "        if found[: len(expected)] != expected:", "        if False:",
        "unit/xla/test_call.py::test_the_header_of_another_version_is_refused",
    ),
    Fault(
        "errors of calls are lost", "xla/target.py",
        "            return _error(call.api.contents, error)", "            return null",
        "unit/xla/test_call.py::test_the_interface_of_the_installed_jaxlib_is_known",
    ),
    Fault(
        "lines of calls are not compared", "jax/calls.py",
        "self._opened.extended.all_reduce(op, nest, in_place=True, name=place)",
        "self._opened.extended.all_reduce(op, nest, in_place=True)",
        "parallel/jax/test_collectives.py::test_programs_that_differ_raise_on_all_ranks", 2,
    ),
    Fault(
        "calls without a name are not compared", "jax/calls.py",
        "        if len(set(places)) > 1:", "        if False:",
        "parallel/jax/test_collectives.py::test_programs_that_differ_raise_on_all_ranks", 2,
    ),
    Fault(
        "calls of the main thread do not wait for started programs", "jax/calls.py",
        "        strategy.extended.before_calls(xla.wait)\n", "",
        "parallel/jax/test_collectives.py::test_calls_of_the_main_thread_wait_for_started_programs", 2,
    ),
    Fault(
        "other ranks keep the derivative of a broadcast", "jax/calls.py",
        "            if self._rank:\n", "            if False:\n",
        "parallel/jax/test_collectives.py::test_derivatives_and_batches", 2,
    ),
    Fault(
        "ranks count the same, whatever their rows", "jax/calls.py",
        "return rows * self._size / float(total) if total else 0.0", "return 1.0",
        "parallel/jax/test_training.py::test_training_is_that_of_one_rank", 2,
    ),
    Fault(
        "a rank without rows counts", "jax/optimizer.py",
        "return jnp.where(weight > 0, exact * weight.astype(jnp.finfo(exact.dtype).dtype), 0).astype(array.dtype)",
        "return (exact * weight.astype(jnp.finfo(exact.dtype).dtype)).astype(array.dtype)",
        "parallel/jax/test_training.py::test_halves_are_weighted_exactly", 2,
    ),
    Fault(
        "parameters differ between ranks in silence", "jax/optimizer.py",
        "            if everyone[0].get(name) != other.get(name):", "            if False:",
        "parallel/jax/test_training.py::test_what_differs_between_ranks_raises_on_all", 2,
    ),
    Fault(
        "gradients are averaged twice", "jax/optimizer.py",
        "    _distributed[update] = strategy\n", "",
        "parallel/jax/test_training.py::test_distribute_twice_by_others_and_of_what_is_none", 2,
    ),
)
