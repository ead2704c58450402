"""The first process of the namespaces that hold all hosts: starts them and connects them by a bridge.

    unshare ... python rack.py FOLDER NAME...

Says `ready` on its standard output, then waits for the end of its standard input.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

HOST = Path(__file__).with_name("host.py")
BRIDGE = "bridge"
NETWORK = "10.213.0"
# Longer than the one who has started this waits.
START_SECONDS = 600


def main(folder: Path, names: list[str]) -> None:
    """Start the hosts and connect them. When this process ends, the kernel ends every process of its namespace."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "link", "set", BRIDGE, "up")
    addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    hosts = {name: start(folder, name) for name in names}
    for name, host in hosts.items():
        wait_for(folder / f"{name}.socket", name, host)
        connect(name, host.pid, addresses[name])
    print("ready", flush=True)
    sys.stdin.read()
    # The test run removes it as well, unless it was killed.
    shutil.rmtree(folder, ignore_errors=True)


def start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start a host in namespaces of its own.

    Returns:
        `unshare`, which has the host's namespaces except that of processes, and waits for the host's first process.
    """
    namespaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child"]
    # Not this process's standard input, whose end is the signal to stop.
    return subprocess.Popen(
        ["unshare", *namespaces, sys.executable, "-IS", str(HOST), str(folder), name], stdin=subprocess.DEVNULL
    )


def wait_for(path: Path, name: str, host: subprocess.Popen[bytes]) -> None:
    """Return when the host listens."""
    end = time.monotonic() + START_SECONDS
    while not path.exists():
        if host.poll() is not None:
            sys.exit(f"host {name} ended with {host.returncode} at its start")
        if time.monotonic() > end:
            sys.exit(f"host {name} did not start within {START_SECONDS} s")
        time.sleep(0.01)


def connect(name: str, process: int, address: str) -> None:
    """Lay a cable from the host's `eth0` to the bridge."""
    inside = ("nsenter", "--net", "--target", str(process), "ip")
    run("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(process))
    run("ip", "link", "set", f"to-{name}", "master", BRIDGE, "up")
    run(*inside, "address", "add", f"{address}/24", "dev", "eth0")
    run(*inside, "link", "set", "lo", "up")
    run(*inside, "link", "set", "eth0", "up")


def run(*command: str) -> None:
    """Run a command that must succeed."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"`{' '.join(command)}` failed: {result.stderr.strip()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
