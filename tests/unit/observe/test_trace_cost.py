"""What a timeline costs a program, in counts that are the same on every machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from mpidist.observe import trace
from mpidist.observe.trace import Trace
from mpidist.recorder import recorder
from mpidist.recorder.calls import PLACE_WORDS, Calls, new_words
from mpidist.recorder.recorder import _TracedCalls

CALLS = 2000
# Calls of Python functions for a line of the timeline, those of the JSON encoder too.
MOST_FUNCTIONS = 20


class CountedTrace(Trace):
    """Counts how often it writes to its file. Its clock stands still: all calls are in one second."""

    writes = 0

    def now(self) -> int:
        return 10**18

    def write(self) -> None:
        self.writes += 1
        super().write()


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedTrace]:
    monkeypatch.setenv(trace.VARIABLE, str(tmp_path / "trace"))
    one = CountedTrace()
    monkeypatch.setattr(recorder, "TRACE", one)
    yield one
    if one._file is not None:
        one._file.close()


def functions_of(calls: Calls) -> int:
    """The functions of Python that a call runs."""
    count = 0

    def note(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    calls.enter("warm")
    calls.leave()
    sys.setprofile(note)
    try:
        calls.enter("all_reduce")
        calls.leave()
    finally:
        sys.setprofile(None)
    return count


def test_a_call_is_one_line_and_a_second_one_write(traced: CountedTrace, tmp_path: Path) -> None:
    calls = _TracedCalls(5, (0,), 0, new_words(PLACE_WORDS))
    for _ in range(CALLS):
        calls.enter("all_reduce")
        calls.leave()
    # The first line of a second.
    assert traced.writes == 1
    traced.write()
    lines = (tmp_path / "trace" / "rank-0.jsonl").read_text().splitlines()
    assert len(lines) == CALLS
    # Of a training with ten calls a second: less than a kilobyte in each.
    assert max(map(len, lines)) < 300
    assert [json.loads(one)["number"] for one in lines] == list(range(1, CALLS + 1))


def test_a_call_runs_few_functions_more(traced: CountedTrace) -> None:
    plain = functions_of(Calls(5, (0,), 0, new_words(PLACE_WORDS)))
    assert functions_of(_TracedCalls(5, (0,), 0, new_words(PLACE_WORDS))) - plain <= MOST_FUNCTIONS


def test_without_a_timeline_a_read_is_the_function_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def read() -> int:
        return 5

    monkeypatch.delenv(trace.VARIABLE, raising=False)
    assert Trace().timed("input", read) is read
    monkeypatch.setenv(trace.VARIABLE, str(tmp_path))
    noted = Trace()
    assert noted.timed("input", read)() == 5
    noted.write()
    assert noted._file is not None
    noted._file.close()
    (event,) = map(json.loads, (tmp_path / "rank-0.jsonl").read_text().splitlines())
    assert (event["name"], event["communicator"]) == ("input", trace.NO_COMMUNICATOR)
    assert event["begin"] <= event["end"]
