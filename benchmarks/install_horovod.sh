#!/usr/bin/env bash
# Builds Horovod 0.28.1, which is older than PyTorch 2.1 and CMake 4, as a peer for collectives.py: PyTorch's binding,
# CPU operations over MPI, no gloo. It goes into the active virtual environment and is built against the MPI of its
# mpicxx, which has to be the one that mpi4py runs on. Wants a C++20 compiler, make and CMake 3.13 or later, and some
# minutes. In the repository's root:
#
#     python -m venv horovod && . horovod/bin/activate
#     pip install --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu -e '.[mpich,examples]'
#     benchmarks/install_horovod.sh
#     mpirun -n 2 python benchmarks/collectives.py --no-sweep
set -euo pipefail

if [[ ! -x "${VIRTUAL_ENV:-}/bin/python" ]]; then
    echo "install_horovod.sh: expected an active virtual environment, got none; see this file's head" >&2
    exit 2
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# Without isolation the build sees the PyTorch and the MPI that it is for, and has to be given its tools.
pip install setuptools wheel packaging cffi cloudpickle psutil pyyaml
pip download --no-deps --no-binary :all: --no-build-isolation --dest "$folder" horovod==0.28.1
tar -xzf "$folder"/horovod-0.28.1.tar.gz -C "$folder"
cd "$folder"/horovod-0.28.1

# PyTorch's headers are C++20 by now, Horovod sets C++14; Python 3.12 has no distutils.
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' CMakeLists.txt horovod/torch/CMakeLists.txt
sed -i "s/from distutils.sysconfig import get_python_inc/from sysconfig import get_path/
    s/get_python_inc()/get_path('include')/" horovod/torch/CMakeLists.txt
# A second init() crashes where cycle time or fusion threshold were set: it writes the default of a setting that is no
# longer there. The benchmark starts Horovod anew for each of its turns, and knows this build by its version.
sed -i '/::SetValue(BayesianVariable/,/^}/ s/} else {/} else if (fixed_values_.count(variable) == 0) {/' \
    horovod/common/parameter_manager.cc
export HOROVOD_LOCAL_VERSION=restarts

export CMAKE_POLICY_VERSION_MINIMUM=3.5 MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}"
export HOROVOD_WITH_MPI=1 HOROVOD_CPU_OPERATIONS=MPI HOROVOD_WITHOUT_GLOO=1
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
pip install --no-build-isolation --no-cache-dir --verbose .
cd /  # where no folder `horovod` hides what was installed
horovodrun --check-build
