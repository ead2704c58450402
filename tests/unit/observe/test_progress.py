"""Progress: a bar on a terminal, lines in a log, silence on other ranks."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest

from mpidist import launch
from mpidist.observe import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_the_last_step_only_when_steps_are_quick() -> None:
    stream = io.StringIO()
    with Progress(3, description="epoch 1", stream=stream) as bar:
        for step in range(3):
            bar.update(loss=np.float32(1 / (step + 1)), name="x", count=step)
    assert stream.getvalue() == "epoch 1: 3/3 loss=0.3333 name=x count=2\n"


def test_a_log_gets_a_line_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with Progress(10, interval_seconds=2, stream=stream, initial=4) as bar:
        for _ in range(5):
            now[0] += 1
            bar.update(a=0.5)
        bar.write("a remark")
    assert stream.getvalue().splitlines() == ["6/10 a=0.5", "8/10 a=0.5", "a remark", "9/10 a=0.5"]


def test_unknown_totals_and_no_steps() -> None:
    stream = io.StringIO()
    with Progress(description="steps", stream=stream) as bar:
        bar.update(7)
    with Progress(5, stream=stream):
        pass
    assert stream.getvalue() == "steps: 7\n"
    bar.close()
    assert stream.getvalue() == "steps: 7\n", "closing again says nothing again"


def test_a_terminal_gets_a_bar() -> None:
    stream = Terminal()
    with Progress(2, description="epoch 1", stream=stream) as bar:
        bar.update(loss=0.25)
        bar.write("a remark")
        bar.update()
    text = stream.getvalue()
    assert "epoch 1" in text
    assert "a remark\n" in text
    assert "\r" in text
    # However little time has passed since it was drawn last.
    assert "2/2" in text
    assert "100%" in text


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> None:
    monkeypatch.setattr(launch, "world_rank", lambda: 1)
    with Progress(2, stream=stream) as bar:
        bar.update(2)
        bar.write("a remark")
    assert stream.getvalue() == ""
    assert bar.done == 2


def test_steps_are_counted_in_whole_numbers() -> None:
    with pytest.raises(TypeError, match="`total` must be an integer of at least 0, got 'a' of type str"):
        Progress("a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`initial` must be an integer of at least 0, got -1"):
        Progress(initial=-1)
    with pytest.raises(TypeError, match=r"`steps` must be an integer, got 1.5"):
        Progress(3).update(1.5)  # type: ignore[arg-type]
