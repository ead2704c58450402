"""The first process of a virtual host: makes its namespaces into a host, then runs the commands that it is sent.

    unshare ... python host.py FOLDER NAME

A command comes over the socket FOLDER/NAME.socket together with the open files that become its standard input, output
and error, so that no byte of them has to be passed on. The answer is the exit code. When a sender goes away its command
is killed, but not what the command left running in other sessions (Open MPI's daemon, for one).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import NoReturn

MESSAGE_BYTES = 1 << 20


def main(folder: Path, name: str) -> NoReturn:
    """Set the host up, then serve until the rack ends."""
    socket.sethostname(name)
    boot = folder / f"{name}.boot_id"
    boot.write_text(f"{uuid.uuid4()}\n")
    # MPI libraries look for processes in `/proc` and for interfaces in `/sys`. Without new mounts they would see those
    # of the machine.
    mount("-t", "proc", "proc", "/proc")
    mount("-t", "sysfs", "sysfs", "/sys")
    mount("-t", "tmpfs", "tmpfs", "/dev/shm")
    mount("--bind", str(folder / "hosts"), "/etc/hosts")
    mount("--bind", str(boot), "/proc/sys/kernel/random/boot_id")
    temporary = folder / name
    temporary.mkdir()
    # Messages, not a stream: a command arrives whole or not at all.
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = folder / f"{name}.socket"
    listener.bind(f"{path}.new")
    listener.listen(64)
    # Only now: whoever sees this name may connect.
    os.rename(f"{path}.new", path)
    Server(listener, temporary).serve()


def mount(*arguments: str) -> None:
    """Run `mount`, which must succeed."""
    result = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"`mount {' '.join(arguments)}` failed: {result.stderr.strip()}")


class Server:
    """Runs the commands of all senders.

    Args:
        listener: A listening socket.
        temporary: The host's own folder for temporary files.
    """

    def __init__(self, listener: socket.socket, temporary: Path) -> None:
        self.listener = listener
        self.temporary = temporary
        self.senders: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, None)
        # The end of a child wakes the loop.
        self.wake, self.wakes = socket.socketpair()
        self.wake.setblocking(False)
        self.wakes.setblocking(False)
        signal.set_wakeup_fd(self.wakes.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.wake, selectors.EVENT_READ, None)

    def serve(self) -> NoReturn:
        """Start commands and answer when they end. Also collect orphans, as the first process of a system must."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    self.accept()
                elif key.fileobj is self.wake:
                    self.wake.recv(4096)
                elif key.data in self.senders:
                    self.dismiss(key.data)
            self.collect()

    def accept(self) -> None:
        """Start the command of the next sender."""
        sender, _ = self.listener.accept()
        text, files, _, _ = socket.recv_fds(sender, MESSAGE_BYTES, 3)
        process = os.fork()
        if process == 0:
            self.become(json.loads(text), files)
        for file in files:
            os.close(file)
        self.senders[process] = sender
        # Senders send nothing more, so a socket that becomes readable was closed.
        self.selector.register(sender, selectors.EVENT_READ, process)

    def become(self, command: list[str], files: list[int]) -> NoReturn:
        """Make this child the command, in a session of its own and with the environment of a fresh login."""
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            for target, file in enumerate(files):
                os.dup2(file, target)
            environment = {
                "HOME": os.environ.get("HOME", "/"), "USER": "root", "SHELL": "/bin/sh",
                "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "TMPDIR": str(self.temporary),
            }
            os.chdir("/")
            os.execve(command[0], command, environment)
        except OSError as error:
            os.write(2, f"{command[0]}: {error}\n".encode())
        finally:
            os._exit(127)

    def dismiss(self, process: int) -> None:
        """Kill the command of a sender that is gone."""
        self.forget(process)
        os.killpg(process, signal.SIGKILL)

    def collect(self) -> None:
        """Collect the processes that have ended, and send their exit codes."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            if process in self.senders:
                code = os.waitstatus_to_exitcode(status)
                # Shells, too, add 128 to the number of a signal.
                answer = code if code >= 0 else 128 - code
                sender = self.senders[process]
                with contextlib.suppress(OSError):
                    sender.sendall(bytes([answer]))
                self.forget(process)

    def forget(self, process: int) -> None:
        """Close the connection of a command."""
        sender = self.senders.pop(process)
        self.selector.unregister(sender)
        sender.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
