"""A recipe for Spack: `spack repo add docs/recipes/spack`, then `spack install py-mpidist ^openmpi`."""

from spack.package import depends_on, license, variant, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMpidist(PythonPackage):
    """The programming model of tf.distribute on MPI: strategies, variables, datasets and checkpoints."""

    homepage = "https://github.com/mpidist/mpidist"
    git = "https://github.com/mpidist/mpidist.git"

    license("Apache-2.0")

    version("main", branch="main")
    version("0.1.0", tag="v0.1.0")

    variant("fast", default=True, description="Compile the updates of variables on CPUs")
    variant("torch", default=False, description="Models of PyTorch")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-numpy@2.0:", type=("build", "run"))
    # With the MPI of the site, which knows its network; h5py need not be built with MPI.
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-h5py@3.11:~mpi", type=("build", "run"))
    depends_on("py-optree@0.13:", type=("build", "run"))
    depends_on("py-click@8.1:", type=("build", "run"))
    depends_on("py-array-api-compat@1.9:", type=("build", "run"))
    depends_on("py-cloudpickle@3.0:", type=("build", "run"))
    depends_on("py-threadpoolctl@3.7:", type=("build", "run"))
    depends_on("py-tqdm@4.66:", type=("build", "run"))
    depends_on("py-typing-extensions@4.6:", type=("build", "run"))
    depends_on("py-tomli@2.0.1:", type=("build", "run"), when="^python@:3.10")
    depends_on("py-llvmlite@0.45:", type=("build", "run"), when="+fast")
    depends_on("py-torch@2.4:", type=("build", "run"), when="+torch")
