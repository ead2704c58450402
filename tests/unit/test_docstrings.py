"""Examples in docstrings run and give what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import mpidist

# These import MPI, which would start it here.
NEEDS_MPI = {
    "mpidist.comm.group.mpi_communicator", "mpidist.comm.group.duplicates", "mpidist.comm.backends.mpi",
    "mpidist.comm.windows.rma.window",
}
# And this one imports CuPy, which is there only where a GPU is.
NEEDS_CUPY = {"mpidist.comm.gpu.cuda"}
# This one imports what an extra brings.
OF_EXTRAS = {"mpidist.comm.arithmetic.machine_code": "llvmlite"}
MODULES = sorted({m.name for m in pkgutil.walk_packages(mpidist.__path__, "mpidist.")} - NEEDS_MPI - NEEDS_CUPY)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    if name in OF_EXTRAS:
        pytest.importorskip(OF_EXTRAS[name], reason=f"{OF_EXTRAS[name]} is not installed")
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0
