-- A module file for Lmod, for an installation in an environment of its own: installation.md says how it is made.
help([[mpidist: the programming model of tf.distribute on MPI. `mpidist doctor` checks a job.]])
whatis("Name: mpidist")
whatis("Description: Distributed training of NumPy, PyTorch, JAX and Keras models on MPI")
depends_on("openmpi")
local root = "/apps/mpidist/0.1.0"
prepend_path("PATH", pathJoin(root, "bin"))
setenv("VIRTUAL_ENV", root)
-- On each host the ranks share one copy of the variables in this directory.
setenv("MPIDIST_SHARED_MEMORY", "/dev/shm")
