"""Options of communication merge and print as tf.distribute's do."""

from __future__ import annotations

import importlib
import re

import pytest

import mpidist
from mpidist.experimental import CollectiveCommunication, CollectiveHints, CommunicationOptions


def test_what_the_other_options_say_wins() -> None:
    own = CommunicationOptions(bytes_per_pack=64, timeout_seconds=5, implementation="RING", check=True)
    assert own.merge(None) == own
    assert own.merge(CommunicationOptions()) == own
    said = CommunicationOptions(bytes_per_pack=8, timeout_seconds=0, implementation="MPI", wire_dtype="float16")
    assert own.merge(said) == CommunicationOptions(8, 0, CollectiveCommunication.MPI, check=True, wire_dtype="float16")
    assert own.bytes_per_pack == 64
    with pytest.raises(ValueError, match="`wire_dtype` rounds"):
        said.merge(CommunicationOptions(reproducible=True))


def test_they_print_as_in_tf_distribute() -> None:
    expected = "Options(bytes_per_pack=0,timeout_seconds=None, implementation=CommunicationImplementation.AUTO)"
    assert str(CommunicationOptions()) == expected
    assert str(CommunicationOptions(check=True)) == expected.removesuffix(")") + ", check=True)"


def test_older_names() -> None:
    assert CollectiveHints(50, 2.5) == CommunicationOptions(bytes_per_pack=50, timeout_seconds=2.5)
    assert CommunicationOptions(50, 2.5, CollectiveCommunication.NCCL) == CommunicationOptions(
        bytes_per_pack=50, timeout_seconds=2.5, implementation="nccl"
    )


def test_what_is_no_option_says_where_the_names_are() -> None:
    with pytest.raises(TypeError, match="`timeout_seconds` must be a number, got '5' of type str"):
        CommunicationOptions(timeout_seconds="5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`timeout_seconds` must not be negative, got -1"):
        CommunicationOptions(timeout_seconds=-1)
    with pytest.raises(TypeError, match=r"`bytes_per_pack` must be an integer, got 1.5"):
        CommunicationOptions(bytes_per_pack=1.5)  # type: ignore[arg-type]
    assert CommunicationOptions(timeout_seconds=float("inf")).timeout_seconds == float("inf")
    with pytest.raises(TypeError, match=r"`mpidist.experimental.CommunicationImplementation`.*AUTO, .*got 5") as error:
        CommunicationOptions(implementation=5)  # type: ignore[arg-type]
    named = re.findall(r"`(mpidist[.\w]+)`", str(error.value))
    assert [importlib.import_module(name.rpartition(".")[0]) for name in named] == [mpidist.experimental]
