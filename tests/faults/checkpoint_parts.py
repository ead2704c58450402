"""Deliberate faults of what checkpoints hold, of restores in part, and of what managers keep."""

from __future__ import annotations

from tests.faults.fault import Fault

DTYPES = "unit/checkpoint/test_checkpoint_dtypes.py::test_"
KEEPING = "unit/checkpoint/test_checkpoint_keeping.py::test_"
PARTIAL = "unit/checkpoint/test_checkpoint_partial.py::test_"
READER = "unit/checkpoint/test_checkpoint_reader.py::test_"
BACKGROUND = "parallel/checkpoint/test_background.py::test_"
BEHIND = "unit/checkpoint/test_checkpoint_background.py::test_"

FAULTS = (
    Fault(
        "metadata is not compared with its checksum", "checkpoint/restoring.py",
        "if self._with_counter else {*names, METADATA})", "if self._with_counter else names)",
        DTYPES + "damaged_metadata_is_an_error",
    ),
    Fault(
        "a text loses the NUL at its end", "checkpoint/walk/objects.py",
        'if text.endswith(b"\\0") or (', "if (", DTYPES + "any_value_of_a_state_comes_back",
    ),
    Fault(
        "a kind is lost when a value is saved again", "checkpoint/walk/objects.py",
        "replicas, kind = value.replicas, value.kind", "replicas = value.replicas",
        DTYPES + "any_value_of_a_state_comes_back",
    ),
    Fault(
        "metadata stays that of an earlier checkpoint", "checkpoint/checkpoint.py",
        "self._saves.metadata = {} if order.metadata is None else",
        "self._saves.metadata = self.metadata if order.metadata is None else",
        DTYPES + "metadata_comes_back",
    ),
    Fault(
        "a checkpoint of a later format is read", "checkpoint/file/layout.py",
        'if content["format"] not in FORMATS:', "if False:", READER + "a_later_format_is_an_error_that_says_so",
    ),
    Fault(
        "a value read from outside is not compared with its checksums", "checkpoint/reader.py",
        "        verify_arrays(SoloCommunicator(), self._file, {found.name})\n", "",
        READER + "a_damaged_value_is_not_given",
    ),
    Fault(
        "checkpoints of other values count as equal", "cli/checkpoints/look.py",
        "elif sums[0][path] != sums[1][path]:", "elif False:", READER + "the_commands_compare",
    ),
    Fault(
        "a damaged checkpoint is converted", "cli/checkpoints/convert.py",
        "    reader.verify()\n", "", READER + "conversion_refuses_what_would_be_lost",
    ),
    Fault(
        "integers wrap when they are converted", "checkpoint/file/saved.py",
        "or int(part.max()) > limits.max:", "or False:", PARTIAL + "numbers_are_converted_or_refused",
    ),
    Fault(
        "floating numbers are converted to integers", "checkpoint/file/choice.py",
        "order.index(kinds[0]) <= order.index(kinds[1])", "bool(order)", PARTIAL + "numbers_are_converted_or_refused",
    ),
    Fault(
        "a restore in part restores no state of single variables", "checkpoint/restoring.py",
        "_in_part(tree) if file.choice.partial else tree", "tree",
        PARTIAL + "a_part_is_restored_with_the_state_of_its_variables",
    ),
    Fault(
        "what is left out in part counts as restored", "checkpoint/restoring.py",
        "        if self._refused:\n            raise AssertionError(",
        "        if False:\n            raise AssertionError(",
        PARTIAL + "a_part_is_restored_with_the_state_of_its_variables",
    ),
    Fault(
        "only changes what else the program has", "checkpoint/walk/matching.py",
        "        if not any(map(choice.takes, found.names_of(path))):\n            continue\n        saved",
        "        saved",
        PARTIAL + "only_a_part_is_touched",
    ),
    Fault(
        "two arrays are renamed to one path", "checkpoint/file/choice.py",
        "if place is not None and first.setdefault(place, path) != path:", "if False:",
        PARTIAL + "a_choice_that_makes_no_sense_is_an_error",
    ),
    Fault(
        "a foreign object takes what does not fit", "checkpoint/walk/registered.py",
        "return present if why_not(present, saved) is not None else saved", "return saved",
        "parallel/checkpoint/test_foreign.py", 2,
    ),
    Fault(
        "the best checkpoint is deleted", "checkpoint/directory/keeping.py",
        "spared | ({best.name} if best else set())", "spared",
        KEEPING + "the_best_one_is_kept_also_by_a_program_that_resumes",
    ),
    Fault(
        "a checkpoint waits without end for its value", "checkpoint/directory/keeping.py",
        "if entry.value is None and entry.waited <= self.max_to_keep}", "if entry.value is None}",
        KEEPING + "the_rules_keep_the_latest_the_best_and_what_may_be_the_best",
    ),
    Fault(
        "a checkpoint that is replaced keeps its value", "checkpoint/directory/managed.py",
        "        forget_metrics(self.path(entry.name))\n", "", KEEPING + "a_replaced_checkpoint_loses_its_value",
    ),
    Fault(
        "a vanished directory is made again", "checkpoint/directory/managed.py",
        "        require_directory(self.directory, self.state)\n", "",
        KEEPING + "a_vanished_directory_is_an_error_and_is_not_made_again",
    ),
    Fault(
        "ranks keep the best by values of their own", "checkpoint/deciding.py",
        "metrics = None if noted is None else repr(sorted(noted.items()))", "metrics = None",
        "parallel/checkpoint/test_keeping.py", 2,
    ),
    Fault(
        "a rank goes on before others have copied", "checkpoint/background/together.py",
        'everyone = exchange(communicator, f"copying checkpoint {path!r}", heads, error)', "everyone = [heads]",
        BACKGROUND + "the_file_is_that_of_the_foreground_whatever_comes_after", 3,
    ),
    Fault(
        "the first rank waits without end for a rank that has failed", "checkpoint/deciding.py",
        "        saving.give_up()\n", "        pass\n",
        BACKGROUND + "an_error_of_one_rank_is_raised_on_all_by_the_next_call", 2,
    ),
    Fault(
        "an error in the background is raised on one rank", "checkpoint/saves.py",
        "save.finish() if group.is_closed else finish_together(group, save)", "save.finish()",
        BACKGROUND + "an_error_of_one_rank_is_raised_on_all_by_the_next_call", 2,
    ),
    Fault(
        "a share that was never copied", "checkpoint/background/copying.py",
        "np.copyto(target[low - run.low : high - run.low], read)", "pass",
        BACKGROUND + "the_file_is_that_of_the_foreground_whatever_comes_after",
    ),
    Fault(
        "a file is complete before its ranks have written", "checkpoint/background/save.py",
        "marks = wait_for_marks(self._blank.path, ranks, self._wait) if ranks else {}",
        "marks = {rank: Mark(own) for rank in ranks}",
        BACKGROUND + "the_file_is_that_of_the_foreground_whatever_comes_after", 3,
    ),
    Fault(
        "a failed save in the background counts", "checkpoint/saves.py",
        "                self.count, self.metadata = self._before\n", "                pass\n",
        BEHIND + "the_next_call_raises_the_error_and_the_save_does_not_count",
    ),
    Fault(
        "a save in the background is lost at the end of the program", "checkpoint/background/save.py",
        "        atexit.register(_finish_all)\n", "", BEHIND + "the_end_of_the_program_completes_it",
    ),
    Fault(
        "an error of a rank ends the job before a save in the background is complete", "checkpoint/background/save.py",
        "            BEFORE_ABORT.append(_finish_soon)\n", "            pass\n",
        "system/checkpoint/test_background_end.py::test_a_rank_that_ends_the_job_waits_for_the_checkpoint",
    ),
    Fault(
        "an interrupt of the wait drops a save in the background", "checkpoint/saves.py",
        "            except Exception:\n                self._end(save, None)\n",
        "            except BaseException:\n                self._end(save, None)\n",
        BEHIND + "an_interrupt_of_the_wait_leaves_the_save_under_way",
    ),
    Fault(
        "a program that ends in the wait for a save loses it", "checkpoint/background/together.py",
        "        exchange(communicator, step, None, save.wait_until_written())\n    except Exception:\n",
        "        save.forget()\n"
        "        exchange(communicator, step, None, save.wait_until_written())\n    except Exception:\n",
        BEHIND + "the_end_of_the_program_completes_it",
    ),
    Fault(
        "a rank that can leave no mark is waited for without end", "checkpoint/background/marks.py",
        "            os.unlink(path)\n        raise\n", "            pass\n        raise\n",
        BEHIND + "a_first_rank_that_waits_in_vain_gives_up",
    ),
    Fault(
        "another checkpoint deletes what a thread writes", "checkpoint/background/save.py",
        "            save.join()\n\n\ndef _finish_all", "            pass\n\n\ndef _finish_all",
        BEHIND + "other_checkpoints_wait_where_they_use_the_directory",
    ),
    Fault(
        "a preempted program leaves a save in the background", "checkpoint/preemption/handler.py",
        "        self._manager.sync()\n", "", BEHIND + "a_handler_completes_it_before_the_program_ends",
    ),
    Fault(
        "a training ends before its checkpoint is complete", "training/callbacks/model_checkpoint.py",
        "        self._manager().sync()\n", "",
        "unit/training/test_callbacks.py::test_what_is_saved_in_the_background_is_there_after_fit",
    ),
    Fault(
        "copies that a host has no memory for", "checkpoint/background/together.py",
        "or missing > min(free, default=missing)", "",
        BACKGROUND + "memory_that_one_host_lacks_is_lacked_by_all", 2,
    ),
)
