"""A Slurm of its own on one machine, for tests of jobs.

    with PrivateSlurm() as slurm:
        job = slurm.submit("slurm/train.sbatch", "--epochs", 2)
        assert slurm.wait(job).state == "COMPLETED"

The nodes are the virtual hosts of `tests/hosts`, with names, addresses, processes and node memory of their own. On the
first one run munged, which proves who is who, and slurmctld; a slurmd runs on each. They are Debian's programs with a
configuration of their own: no port, file or process of the machine is touched, and nothing has to be removed by hand,
even after a test run was killed.
"""
