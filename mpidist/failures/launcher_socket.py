"""The socket between this process and MPICH's launcher, which must close while all ranks are alive.

With `-disable-auto-cleanup` Hydra treats every end of a rank as a death, also after MPI_Finalize. When the socket
closes, Hydra signals the ranks of all other proxies, and dies of SIGPIPE if one of these has just ended; the remaining
ranks end with it. MPICH 5.0.2 did so in 45 of 140 programs of 4 ranks that only start and finalize MPI, and in none of
120 that closed the socket 0.1 s or more before they ended. Without that option the launcher would end all ranks.
"""

from __future__ import annotations

import os
import socket
import stat
import time

from mpidist import launch

# Time for the launcher to handle the closed socket.
_SECONDS = 0.2
# The launcher's answer to the last message of a process.
_LEAVE_TAKEN = b"cmd=finalize_ack\n"


class LauncherSocket:
    """The socket. Under other launchers than Hydra there is none, and `close` does nothing."""

    def __init__(self) -> None:
        place, number = launch.read(os.environ), os.environ.get("PMI_FD", "")
        is_hydra = place is not None and place.size > 1 and place.launcher == "MPICH mpirun (Hydra)"
        self._number = int(number) if is_hydra and number.isdecimal() else -1
        self._identity = _identity(self._number)

    def close(self, *, lets_live: bool) -> None:
        """Local. Close the socket after MPI_Finalize, or instead of it, and wait until the launcher has handled that.

        Args:
            lets_live: Whether the launcher is known not to end the other ranks; on its own host this can be detected.
        """
        identity, self._identity = self._identity, None
        if identity is None or identity != _identity(self._number):
            return
        if lets_live or launch.hydra_lets_live():
            # When the process ends, MPICH still writes to this descriptor, and would print an error.
            mine, other = socket.socketpair()
            other.send(_LEAVE_TAKEN)
            other.detach()
            with mine:
                os.dup2(mine.fileno(), self._number)
            time.sleep(_SECONDS)


def _identity(number: int) -> tuple[int, int] | None:
    """The identity of a descriptor's socket; None without one. When MPI has closed it, the number may be reused."""
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISSOCK(found.st_mode) else None
