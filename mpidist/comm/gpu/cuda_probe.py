"""The probe: a program that gives MPI pointers to GPU memory. `cuda_awareness` starts it as a child process.

It prints each success, as a JSON object in a line, before it tries the next call, since that may end the process.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

# Elements of the arrays: enough that no library sends them with its first message, by another protocol.
_COUNT = 1 << 17


def main(memory: str) -> int:
    """Local. Try messages and sums of arrays.

    Args:
        memory: The module that makes the arrays: "cupy", or "numpy" for host memory.

    Returns:
        The exit code: 0, also if no arrays could be made, which is printed as the reason.
    """
    try:
        xp = importlib.import_module(memory)
        sent: Any = xp.arange(_COUNT, dtype="float32")
        got: Any = xp.zeros_like(sent)
        if memory == "cupy":
            xp.cuda.get_current_stream().synchronize()
    except Exception as error:
        # A package that is missing stays so; a GPU that is busy, or full, does not.
        _tell(reason=f"{type(error).__name__}: {error}", is_final=isinstance(error, ImportError))
        return 0
    # The GPU's context is created before MPI starts, as in a program that binds its GPU.
    module = importlib.import_module("mpidist.comm.group.mpi_communicator")
    library = importlib.import_module("mpidist.comm.group.mpi_library").loaded_library()
    _tell(library=str(library))
    ranks = module.MPI.COMM_SELF
    ranks.Sendrecv(sent, 0, 0, got, 0, 0)
    _tell(messages=bool((got == sent).all()))
    got[...] = 0
    if memory == "cupy":
        xp.cuda.get_current_stream().synchronize()
    ranks.Allreduce(sent, got)
    _tell(sums=bool((got == sent).all()))
    return 0


def _tell(**known: object) -> None:
    sys.stdout.write(json.dumps(known) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
