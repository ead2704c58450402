"""Deliberate faults in the adapter of PyTorch: wrong numbers, or numbers that differ between ranks."""

from __future__ import annotations

from tests.faults.fault import Fault

TRAINING = "parallel/torch/test_training.py::test_"
LOADER = "parallel/torch/test_loader.py::test_"
ERRORS = "parallel/torch/test_errors.py::test_"
ONE_RANK = TRAINING + "parameters_are_those_of_one_rank"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "an optimizer takes the state of other parameters", "torch/saving.py",
        "    if its != own:\n", "    if False:\n",
        "parallel/torch/test_saving.py::test_models_are_shown_verified_and_restored_in_part", 2,
    ),
    Fault(
        "gradients are not weighted by rows", "torch/reduction.py",
        "return None if weight == 1 else gradient * weight", "return None", ONE_RANK, 2,
    ),
    Fault(
        "rows are weighted twice where one model is behind another", "torch/reduction.py",
        "return gradient / weight if weight else gradient", "return gradient",
        TRAINING + "two_models_one_behind_the_other", 2,
    ),
    Fault(
        "a parameter that another rank has used gets no gradient", "torch/memory.py",
        "if flag and place.parameter.grad is None:", "if flag and False:", ONE_RANK, 2,
    ),
    Fault(
        "a parameter that no rank has used gets a gradient", "torch/memory.py",
        "if flag and place.parameter.grad is None:", "if place.parameter.grad is None:", ONE_RANK, 2,
    ),
    Fault(
        "the last gradient of an unused parameter counts again", "torch/memory.py",
        "            self.memory.zero_()\n", "            pass\n", ONE_RANK, 2,
    ),
    Fault(
        "ranks keep their own statistics of BatchNorm", "torch/memory.py", "if norm.training:",
        "if not norm.training:", TRAINING + "statistics_of_batch_norm_are_averaged", 2,
    ),
    Fault(
        "parameters that are trained later are left out", "torch/reduction.py",
        "if model is None or self._memory.fits(", "if model is not None or self._memory.fits(",
        TRAINING + "parameters_that_are_trained_later_are_taken_in", 2,
    ),
    Fault(
        "a gradient that the program keeps is overwritten", "torch/memory.py",
        "if sys.getrefcount(self._given) > self._alone or", "if",
        TRAINING + "gradients_that_the_program_keeps_stay", 2,
    ),
    Fault(
        "after a pass that failed gradients are no longer combined", "torch/backward_end.py",
        "call = None if self._pending is None else self._pending()",
        "call = None if self._pending is None else (self._pending() or _Call(self))",
        ERRORS + "an_exception_in_the_pass_does_not_end_later_reductions", 2,
    ),
    Fault(
        "each rank shuffles a loader by its own seed", "torch/batches.py",
        "seed = seed_of(self.seed, epoch + 1)", "seed = seed_of(torch.initial_seed(), epoch + 1)",
        LOADER + "ranks_share_out_each_batch_and_continue_in_the_middle", 2,
    ),
    Fault(
        "a loader skips a batch when it continues", "torch/loader.py", "self._done += 1", "self._done += 2",
        LOADER + "ranks_share_out_each_batch_and_continue_in_the_middle", 2,
    ),
    Fault(
        "orders of rows may differ between ranks", "torch/reduction.py", "if not self._memory.is_agreed():",
        "if False:", LOADER + "orders_that_differ_are_an_error_of_all", 2,
    ),
    Fault(
        "a gradient loses its graph", "torch/reduction.py", "if gradient.requires_grad:", "if False:",
        ERRORS + "gradients_that_cannot_be_combined", 2,
    ),
    Fault(
        "a copy of a model needs mpidist", "torch/reduction.py", 'return getattr, (nullcontext(), "__exit__")',
        "return _ModelHook, (self._reduction(), self._way)", LOADER + "copies_of_a_model_do_nothing", 2,
    ),
    Fault(
        "dropout is the same on all ranks", "torch/starting.py", "torch.manual_seed(seed_of(base, rank))", "pass",
        LOADER + "generators_of_ranks_differ", 2,
    ),
    Fault(
        "a resumed job draws other random numbers", "torch/saving.py",
        'torch.set_rng_state(torch.from_numpy(np.array(saved["random"].value, np.uint8)))', "pass",
        "parallel/torch/test_saving.py::test_a_resumed_job_ends_with_the_same_bits", 2,
    ),
    Fault(
        "SyncBatchNorm counts the row of a rank without rows", "torch/batch_norm.py",
        "counts = share is None or share.rows > 0", "counts = True",
        TRAINING + "sync_batch_norm_is_that_of_one_rank", 2,
    ),
    Fault(
        "a part of a model is trained with wrong weights", "torch/reduction.py", "if is_new and not has_entered:",
        "if False:", ERRORS + "rows_that_would_count_wrongly", 2,
    ),
)
