"""What adapters of frameworks call where no replicas are in sync, and on one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.parameter_server.options import ServerOptions


def test_servers_refuse_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    closed: list[str] = []
    with mpidist.ParameterServerStrategy(options=ServerOptions(heap_bytes=1 << 22)) as strategy:
        extended = strategy.extended
        calls: list[Callable[[], Any]] = [
            lambda: extended.all_reduce("SUM", 1.0), lambda: extended.broadcast(1.0), lambda: extended.allocate(3),
            lambda: extended.all_gather_object(1), lambda: extended.step("train").__enter__(),
            lambda: extended.rows(3), lambda: extended.all_gather(np.ones(2)),
            lambda: extended.reduce_scatter("SUM", np.ones(2)),
        ]
        for call in calls:
            with pytest.raises(NotImplementedError, match=r"ParameterServerStrategy: .* has no meaning here.*schedule"):
                call()
        assert extended.cores_per_replica >= 1
        with strategy.scope():
            variable = mpidist.Variable(1.0)
        # The servers still answer.
        strategy.on_close(lambda: closed.append(str(variable.numpy())))
    assert closed == ["1.0"]


def test_one_rank_without_a_launcher() -> None:
    extended = mpidist.get_strategy().extended
    array = np.arange(3.0)
    (made,) = extended.all_reduce("MEAN", [array])
    assert made.tolist() == [0, 1, 2]
    assert made is not array
    assert extended.all_reduce("SUM", {"a": array}, in_place=True)["a"] is array
    assert extended.broadcast([1, 2.5]) == [1, 2.5]
    assert extended.rows(5) == slice(0, 5)
    assert extended.allocate((2, 2)).tolist() == [[0, 0], [0, 0]]
    results: list[float] = []
    with extended.step("train"):
        thread = threading.Thread(target=lambda: results.append(extended.all_reduce("SUM", 2.0)))
        thread.start()
        thread.join()
    assert results == [2.0]
    with pytest.raises(ValueError, match=r"expected a Python int of -2\*\*63 to 2\*\*63 - 1, got one of 65 bits"):
        extended.all_reduce("SUM", 1 << 64)
