"""Seconds in the environment, and a timeline that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpidist.observe import trace
from mpidist.recorder import time_limits


@pytest.mark.parametrize("text", ["-1", "nan", "soon"])
def test_seconds_are_numbers_from_0_on(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(time_limits.LIMIT_VARIABLE, text)
    with pytest.raises(ValueError, match=f"must be a number of seconds, got {text!r}"):
        time_limits.limit_seconds()


@pytest.mark.parametrize("place", ["file/below", "full"])
def test_a_timeline_that_cannot_be_written_ends_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], place: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "rank-0.jsonl").symlink_to("/dev/full")
    monkeypatch.setenv(trace.VARIABLE, str(tmp_path / place))
    timeline = trace.Trace()
    for number in range(3):
        timeline.add("call", 0, thread=1, number=number)
        timeline.write()
    timeline.finish()
    told = capfd.readouterr().err
    assert told.count(f"{trace.VARIABLE}={tmp_path / place}: the timeline of rank 0 ends here: ") == 1
