"""The doctor's look at messages between hosts: how long one takes, how much they carry, and which hosts are slow."""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Sequence

from mpidist.cli.doctor.clock import SharedClock
from mpidist.cli.doctor.finding import Finding
from mpidist.comm.group.communicator import Channel, Communicator

_SIZES = (8, 1 << 16, 1 << 20, 1 << 24)
# From this size on twice the bytes take twice the time, or less.
_LINEAR_FROM = 1 << 16
_ROUNDS = 5
_SHOWN_HOSTS = 8
_FEW = 3


def look_at_messages(communicator: Communicator, clock: SharedClock, first_of: dict[str, int]) -> list[Finding]:
    """Collective. Measure messages between rank 0 and the first rank of each other host.

    Args:
        communicator: All ranks.
        clock: Its end is that of the measurement.
        first_of: The first rank of each host.
    """
    channel = communicator.open_channel()
    names = sorted(first_of, key=first_of.__getitem__)
    measured: list[tuple[str, float, float]] = []
    for number, name in enumerate(names[1:]):
        if not clock.allows(0.0):
            break
        if communicator.rank == 0:
            times = _send(channel, first_of[name], clock.share(len(names) - 1 - number))
            size, seconds = times[-1]
            measured.append((name, times[0][1], size / seconds / 1e9))
        elif communicator.rank == first_of[name]:
            _answer(channel)
    measured = communicator.broadcast_object(measured)
    findings = [_pair(names[0], *one) for one in measured]
    if len(findings) > _SHOWN_HOSTS:
        rates = sorted((rate, name) for name, _, rate in measured)
        text = (
            f"{names[0]} and {len(measured)} others: from {rates[0][0]:.3f} GB/s ({rates[0][1]}) to {rates[-1][0]:.3f} "
            f"GB/s ({rates[-1][1]})"
        )
        data: dict[str, object] = {"hosts": [one.data for one in findings]}
        findings = [Finding("between hosts", "ok", text, data=data)]
    findings += find_slow_hosts([(name, rate) for name, _, rate in measured])
    if len(measured) < len(names) - 1:
        rest = ", ".join(names[1 + len(measured) :])
        findings.append(Finding(
            "hosts left out", "note", f"{rest}: no time was left", "mpidist doctor --seconds 60"
        ))
    return findings


def _pair(first: str, name: str, latency: float, rate: float) -> Finding:
    data: dict[str, object] = {"hosts": [first, name], "us": latency * 1e6, "GB_per_s": rate}
    return Finding("between hosts", "ok", f"{first} - {name}: {latency * 1e6:.1f} us, {rate:.3f} GB/s", data=data)


def find_slow_hosts(rates: Sequence[tuple[str, float]]) -> list[Finding]:
    """Local. Find hosts to which messages take more than twice as long as to most others.

    Args:
        rates: GB/s of each host.
    """
    if len(rates) < _FEW:
        return []
    usual = statistics.median(rate for _, rate in rates)
    slow = [name for name, rate in rates if rate < usual / 2]
    return [Finding(
        "slow hosts", "note", f"{', '.join(slow)}: less than half of the {usual:.3f} GB/s of most hosts",
        f"srun --exclude={','.join(slow)}, or mpirun --host with the others; then look at their network",
    )] if slow else []


def _send(channel: Channel, other: int, until: float) -> list[tuple[int, float]]:
    """Send messages there and back as long as there is time; the seconds of one way for each size."""
    times: list[tuple[int, float]] = []
    for size in _SIZES:
        if times:
            # There and back, and once more for what is not measured.
            expected = 2 * (1 + _ROUNDS) * times[-1][1] * size / times[-1][0]
            if times[-1][0] >= _LINEAR_FROM and time.monotonic() + expected > until:
                break
        channel.mpi.Send(array("q", [size]), other, channel.tag)
        buffer, taken = bytearray(size), []
        for _ in range(1 + _ROUNDS):
            begin = time.perf_counter()
            channel.mpi.Send(buffer, other, channel.tag)
            channel.mpi.Recv(buffer, other, channel.tag)
            taken.append((time.perf_counter() - begin) / 2)
        times.append((size, statistics.median(taken[1:])))
    channel.mpi.Send(array("q", [0]), other, channel.tag)
    return times


def _answer(channel: Channel) -> None:
    """Send back what comes from rank 0 until it sends a zero."""
    size = array("q", [0])
    while True:
        channel.mpi.Recv(size, 0, channel.tag)
        if size[0] == 0:
            return
        buffer = bytearray(size[0])
        for _ in range(1 + _ROUNDS):
            channel.mpi.Recv(buffer, 0, channel.tag)
            channel.mpi.Send(buffer, 0, channel.tag)
