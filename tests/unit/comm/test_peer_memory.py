"""Peer memory of this very process: what the kernel copies, and what it says where it cannot."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpidist.arrays import AnyArray
from mpidist.comm.group.solo import SoloCommunicator
from mpidist.comm.memory import peer_memory
from mpidist.comm.memory.peer_memory import PeerMemory, open_peer_memory


def open_own(source: AnyArray, target: AnyArray, process: int | None = None) -> PeerMemory:
    peers = PeerMemory([process or os.getpid()], 0, np.zeros((1, 3), np.int64), lambda: None)
    peers.show(source, target, source.nbytes)
    return peers


@pytest.fixture(autouse=True)
def _is_allowed() -> None:
    peers, why = open_peer_memory(SoloCommunicator(), np.zeros((1, 3), np.int64), lambda: None)
    if peers is None:
        pytest.skip(f"this system does not let processes read one another: {why}")


def test_reads_and_writes_at_an_offset() -> None:
    source, target = np.arange(1000.0), np.zeros(1000)
    peers = open_own(source, target)
    into = np.empty(10)
    peers.read(0, 8 * 500, into)
    np.testing.assert_array_equal(into, source[500:510])
    peers.write(0, 8 * 990, into)
    np.testing.assert_array_equal(target[990:], source[500:510])
    assert not target[:990].any()
    peers.read(0, 0, np.empty(0))


def test_memory_of_a_driver_is_found_out_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's page of clocks is mapped as devices' memory is: programs read it, the kernel does not copy it."""
    line = next((line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[vvar]")), None)
    if line is None:
        pytest.skip("this system maps no page of clocks")
    # Addresses are looked up where a library is loaded whose driver may have mapped them.
    monkeypatch.setattr(peer_memory, "_DRIVERS", frozenset(("sys",)))
    page = (ctypes.c_uint8 * 64).from_address(int(line.partition("-")[0], 16))
    clocks, usual = np.ctypeslib.as_array(page), np.zeros(64, np.uint8)
    peers = PeerMemory([os.getpid()], 0, np.zeros((1, 3), np.int64), lambda: None)
    assert not peers.show(clocks, usual, 64)
    assert not peers.show(usual, clocks, 64)
    assert peers.show(usual, usual, 64)


def test_an_address_that_is_not_there_is_an_error_with_the_way_out() -> None:
    peers = open_own(np.zeros(8), np.zeros(8))
    # No program has memory at the beginning of its addresses.
    peers._sources = [16]
    with pytest.raises(OSError, match=r"process_vm_readv of 64 bytes with rank 0 of this node: Bad address\. MPIDIST_"):
        peers.read(0, 0, np.empty(8))


def test_a_process_that_has_ended_is_an_error() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    with pytest.raises(OSError, match="No such process"):
        open_own(np.zeros(8), np.zeros(8), child.pid).write(0, 0, np.zeros(8))


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(peer_memory.SWITCH, "0")
    assert open_peer_memory(SoloCommunicator(), np.zeros((1, 3), np.int64), lambda: None) == (
        None, "MPIDIST_PEER_MEMORY=0"
    )
