"""Deliberate faults of resolvers, devices and scripts."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = (
    Fault(
        "an evaluator trains with the workers", "cluster/roles/placement.py",
        'group=EVALUATOR_GROUP if task.job == "evaluator" else TRAINING_GROUP,', "group=TRAINING_GROUP,",
        "parallel/cluster/test_cluster.py::test_an_evaluator_does_not_train", 3,
    ),
    Fault(
        "a resolver fails on one rank", "cluster/roles/placement.py",
        '"asking the cluster resolver", own, error)', '"asking the cluster resolver", own)',
        "parallel/cluster/test_cluster.py::test_a_resolver_that_fails_on_one_rank_is_the_same_error_on_all", 2,
    ),
    Fault(
        "replicas in the order of the ranks", "cluster/roles/placement.py",
        "replica_key=keys[task],", "replica_key=0,",
        "parallel/cluster/test_cluster.py::test_told_tasks_order_the_replicas", 3,
    ),
    Fault(
        "a wrong task on one rank of a cluster with servers", "cluster/roles/server_roles.py",
        'together(communicator, "reading the cluster", lambda: _read(found, communicator.size))',
        "_read(found, communicator.size)",
        "parallel/cluster/test_server_roles.py::test_what_one_rank_is_told_wrong_is_one_error", 3,
    ),
    Fault(
        "servers before the workers", "cluster/roles/server_roles.py",
        'first_server = 1 + jobs.count("worker")', 'first_server = 1 + jobs.count("ps")',
        "parallel/cluster/test_server_roles.py::test_roles_of_tf_config_in_any_order", 4,
    ),
    Fault(
        "an evaluator is not told of the end", "cluster/roles/groups.py",
        "        atexit.register(_tell_end, channel, evaluators, os.getpid())\n", "        pass\n",
        "system/checkpoint/test_evaluator.py::test_an_evaluator_follows_and_ends_with_the_job",
    ),
    Fault(
        "an evaluator dies of the signals that the chief takes", "cluster/roles/groups.py",
        "                self._listen(said)\n", "                pass\n",
        "system/checkpoint/test_evaluator.py::test_an_evaluator_lives_on_at_signals_until_the_chief_has_saved",
    ),
    Fault(
        "an evaluator waits at its end for the dead", "cluster/roles/groups.py",
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
        "hosts of a Slurm step by the alphabet", "cluster/slurm/step.py",
        "return dict(zip(hosts, counts, strict=True))", "return dict(sorted(zip(hosts, counts, strict=True)))",
        "unit/cluster/test_slurm.py::test_hosts_stand_in_slurms_order_not_by_the_alphabet",
    ),
    Fault(
        "of two addresses of one index of a cluster one is lost", "cluster/spec.py",
        "            if index in addresses:\n", "            if False:\n",
        "unit/cluster/test_cluster_spec.py::test_spec_refuses_other_indices",
    ),
    Fault(
        "a key of TF_CONFIG that misses a letter is left out", "cluster/resolvers/tf_config.py",
        "if near and near[0] not in given:", "if near and not given:",
        "unit/cluster/test_cluster_placement.py::test_a_key_of_tf_config_that_misses_a_letter_is_named",
    ),
    Fault(
        "a Slurm step with fewer tasks than the job has on each node says nothing", "cluster/slurm/idle_tasks.py",
        "if max(counts) >= wanted:", "if max(counts) >= 1:",
        "unit/cluster/test_slurm.py::test_a_step_with_fewer_tasks_than_the_job_has_on_each_node_is_told_so",
    ),
    Fault(
        "a Slurm step with other numbers of tasks than it says", "cluster/slurm/step.py",
        "and int(told) != size:", "and int(told) > size + 99:",
        "unit/cluster/test_slurm.py::test_variables_that_contradict_one_another",
    ),
    Fault(
        "the ranks of a heterogeneous Slurm job in the order of its list of nodes", "cluster/slurm/step.py",
        "    return parts\n", "    return [hosts]\n",
        "unit/cluster/test_slurm.py::test_a_component_of_a_heterogeneous_job_is_a_job_of_the_cluster",
    ),
    Fault(
        "of two options of a job script the first one counts", "cli/slurm/script.py",
        "for option in reversed(self.options) if option.name == name",
        "for option in self.options if option.name == name",
        "unit/cli/test_lint.py::test_what_is_right_is_not_found",
    ),
)
