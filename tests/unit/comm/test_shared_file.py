"""Shared files: the memory of one stays when its descriptor is closed."""

from __future__ import annotations

import os

import pytest

from mpidist.comm.group.shared_file import SharedFile, map_to_the_end


def test_a_mapping_shares_memory_and_keeps_no_descriptor() -> None:
    file = SharedFile(None)
    os.ftruncate(file.descriptor, 8192)
    before = len(os.listdir("/proc/self/fd"))
    one, other = (map_to_the_end(file.descriptor, 8192) for _ in range(2))
    assert len(os.listdir("/proc/self/fd")) == before
    file.close()
    one[8000:8003] = b"abc"
    assert bytes(other[8000:8003]) == b"abc"
    words = one.cast("q")
    words[1] = 1 << 40
    assert other.cast("q")[1] == 1 << 40


def test_a_file_that_is_too_short_is_an_error_and_no_death() -> None:
    file = SharedFile(None)
    os.ftruncate(file.descriptor, 100)
    with pytest.raises(OSError, match="expected a file of 8192 bytes, got 100"):
        map_to_the_end(file.descriptor, 8192)
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_to_the_end(file.descriptor, 0)
