"""Addresses: where ranks listen for connections, and the route from one rank to another."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import math
import os
import secrets
import socket
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# man 7 netdevice.
_FLAGS, _ADDRESS, _MASK = 0x8913, 0x8915, 0x891B
_UP, _LOOPBACK = 1, 8


class Address(NamedTuple):
    """The places where a rank waits for connections.

    Attributes:
        place: The kernel and its network, within which a name is valid.
        name: The name of the Unix socket. It is in no file system (`man 7 unix`), so no file is left.
        interfaces: Addresses of the host with their networks, "10.1.0.5/16"; empty where no port is open.
        port: The port on all of these; 0 where none is open.
    """

    place: tuple[str, str]
    name: bytes
    interfaces: tuple[str, ...]
    port: int

    def to_json(self) -> list[Any]:
        """Local. The address as JSON, for `from_json`."""
        return [list(self.place), self.name.hex(), list(self.interfaces), self.port]

    @classmethod
    def from_json(cls, given: Any) -> Address:
        """Local. An address that was written as JSON.

        Raises:
            ValueError: `given` is no address.
        """
        try:
            (boot, network), name, found, port = given
            return cls((str(boot), str(network)), bytes.fromhex(name), tuple(map(str, found)), int(port))
        except TypeError as error:
            raise ValueError(f"expected an address, got {given!r}: {error}") from None


def place() -> tuple[str, str]:
    """Local. The identity of this kernel and its network."""
    # Other hosts may have the same name; containers on one host may have networks of their own.
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")


def interfaces() -> tuple[str, ...]:
    """Local. The IPv4 addresses of this host with their networks, without loopback."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        def ask(what: int, name: str) -> bytes:
            return fcntl.ioctl(asker, what, struct.pack("256s", name.encode()))

        for _, name in socket.if_nameindex():
            # Some interfaces have no address.
            with contextlib.suppress(OSError):
                (flags,) = struct.unpack_from("<H", ask(_FLAGS, name), 16)
                if flags & _UP and not flags & _LOOPBACK:
                    address, mask = (socket.inet_ntoa(ask(what, name)[20:24]) for what in (_ADDRESS, _MASK))
                    found.append(ipaddress.ip_interface(f"{address}/{mask}").with_prefixlen)
    return tuple(found)


def listen_by_name() -> tuple[socket.socket, bytes]:
    """Local. A Unix socket that waits for connections, and its name."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = b"\0mpidist-" + secrets.token_hex(16).encode()
    link.bind(name)
    link.listen(128)
    return link, name


def listen_by_port(ports: tuple[int, int] | None) -> tuple[socket.socket, int]:
    """Local. A TCP socket that waits for connections on all interfaces, and its port.

    Args:
        ports: The first and the last allowed port; None for any.

    Raises:
        OSError: None of them is free.
    """
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            link.bind(("", port))
            link.listen(128)
        except OSError as error:
            link.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return link, int(link.getsockname()[1])
    raise OSError(
        errno.EADDRINUSE,
        f"a rank needs a port from {first} to {last} to wait for ranks on other hosts, and all are in use on "
        f"{socket.gethostname()}. Give more ports than a host has ranks: WindowOptions(ports=(first, last))",
    )


def call(address: Address, here: Address, seconds: float, first: int = 0) -> socket.socket:
    """Local. Connect to a rank.

    Args:
        address: The address at which the rank waits.
        here: The address of this rank.
        seconds: The limit for each of its interfaces.
        first: The interface to begin with: at another machine's address another process may answer.

    Raises:
        OSError: It cannot be reached; ConnectionRefusedError if no process listens there.
    """
    if address.place == here.place:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return _connected(link, address.name, seconds)
    failures = [OSError(errno.EHOSTUNREACH, "it has no address outside its host")]
    hosts = near_first(address.interfaces, here.interfaces)
    for number in range(len(hosts)):
        host = hosts[(first + number) % len(hosts)]
        try:
            link = _connected(socket.socket(socket.AF_INET, socket.SOCK_STREAM), (host, address.port), seconds)
        except OSError as error:
            failures.append(error)
        else:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return link
    # Another machine may have one of these addresses in a network of its own, and refuse.
    others = [one for one in failures[1:] if not isinstance(one, ConnectionRefusedError)]
    raise others[0] if others else failures[-1]


def near_first(theirs: Iterable[str], ours: Sequence[str]) -> list[str]:
    """Local. Addresses in the order in which to try them.

    >>> near_first(["192.168.0.7/24", "10.1.0.7/16"], ["10.1.0.5/16"])
    ['10.1.0.7', '192.168.0.7']
    """
    networks = [ipaddress.ip_interface(one).network for one in ours]
    found = [ipaddress.ip_interface(one) for one in theirs]
    return [str(one.ip) for one in sorted(found, key=lambda one: not any(one.ip in network for network in networks))]


def watch_silence(link: socket.socket, seconds: float) -> None:
    """Local. Have the kernels of both hosts ask each other for signs of life, whatever their processes do.

    They ask only over a connection on which nothing waits to be sent. There is no TCP_USER_TIMEOUT: it also breaks a
    connection whose other end is alive, answers, and reads nothing for a while (`tcp_probe_timer` in Linux).

    Args:
        link: A connection; nothing happens to one within a host.
        seconds: The time without data from the other host after which it breaks (`man 7 tcp`), in whole intervals.
    """
    if link.family == socket.AF_INET:
        first, pause = max(1, int(seconds / 3)), max(1, int(seconds / 6))
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, first)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, math.ceil((seconds - first) / pause)))


def _connected(link: socket.socket, address: bytes | tuple[str, int], seconds: float) -> socket.socket:
    link.settimeout(seconds)
    try:
        link.connect(address)
    except OSError:
        link.close()
        raise
    return link
