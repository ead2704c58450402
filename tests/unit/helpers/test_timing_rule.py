"""No test bounds a clock from above, and none orders processes by sleeps (`tests/helpers/timing_rule.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.timing_rule import files, findings

ROOT = Path(__file__).resolve().parents[3]
# They wait for others, look again after a pause, and give up after a limit, which is a watchdog's; or hold texts of the
# package itself.
HELPERS = (
    "tests/faults/", "tests/hosts/", "tests/slurm/", "tests/helpers/carrier.py", "tests/helpers/joining.py",
    "tests/helpers/launching.py", "tests/helpers/leaks.py", "tests/helpers/leftovers.py", "tests/helpers/marks.py",
    "tests/helpers/messages.py", "tests/helpers/stuck.py", "tests/helpers/waiting.py",
)
UPPER, NO_REASON, ORDER, FIXED = (
    "a clock is bounded from above", "a sleep that says no reason", "a sleep orders what comes next",
    "a sleep of always the same time",
)
BEGIN = "begin = time.monotonic()\nwork()\n"
WRONG = [
    (BEGIN + "assert time.monotonic() - begin < 5", UPPER),
    (BEGIN + "assert 5 > time.monotonic() - begin", UPPER),
    (BEGIN + "assert 0.2 < time.monotonic() - begin < 5", UPPER),
    (BEGIN + "assert time.monotonic() < begin + 5", UPPER),
    (BEGIN + "assert not work() and time.monotonic() <= begin + 5, 'late'", UPPER),
    (BEGIN + "end = time.monotonic()\nassert end - begin < 5", UPPER),
    (BEGIN + "end = time.monotonic()\nassert end < begin + 5", UPPER),
    (BEGIN + "seconds = int(time.monotonic() - begin)\nassert seconds == 0", UPPER),
    (BEGIN + "assert ranks.all_reduce_max(int(time.monotonic() - begin)) < 20", UPPER),
    (BEGIN + "assert (time.monotonic() - begin) / 2 < 20", UPPER),
    (BEGIN + "in_time = time.monotonic() - begin < 5\nassert in_time", UPPER),
    (BEGIN + "print(f'in time {time.monotonic() - begin < 5}')", UPPER),
    (BEGIN + "if time.monotonic() - begin > 5:\n    raise AssertionError('late')", UPPER),
    (BEGIN + "if time.monotonic() - begin > 5:\n    pytest.fail('late')", UPPER),
    ("end = time.monotonic() + 5\nwhile not done():\n    assert time.monotonic() < end", UPPER),
    ("end = time.monotonic() + 5\nwork()\nassert end - time.monotonic() > 0", UPPER),
    ("import time as clock\nassert clock.perf_counter() < limit", UPPER),
    ("from time import process_time as cpu\nused = cpu()\nwork()\nassert cpu() - used < 0.1", UPPER),
    ("assert time.time() - path.stat().st_mtime < 25", UPPER),
    ("assert seconds_since_begin(program) < 25", UPPER),
    ("times = [time.monotonic(), time.monotonic()]\nassert times[1] - times[0] < 1", UPPER),
    ("def took():\n    begin = time.time()\n    return time.time() - begin\nassert took() < 3 * took()", UPPER),
    ("def took():\n    begin = time.time()\n    return 1, time.time() - begin\nkind, seconds = took()\n"
     "assert seconds < 5", UPPER),
    ("seconds = [time.monotonic() - one for one in begun]\nassert all(one < 5 for one in seconds)", UPPER),
    ("time.sleep(1)", NO_REASON),
    ("from time import sleep as nap\nnap(1)", NO_REASON),
    ("time.sleep(1)  # simulates work:", NO_REASON),
    ("time.sleep(1)  # any moment:", NO_REASON),
    ("for _ in range(100):\n    time.sleep(0.01)", NO_REASON),
    ("while True:\n    time.sleep(0.01)", NO_REASON),
    ("end = time.monotonic() + 5\nwhile time.monotonic() < end:\n    time.sleep(0.01)", NO_REASON),
    ("while not path.exists():\n    time.sleep(20)", NO_REASON),
    ("ctypes.PyDLL(None).sleep(5)", NO_REASON),
    ("threading.Event().wait(5)", NO_REASON),
    ("await asyncio.sleep(0.5)", NO_REASON),
    ("time.sleep(1)  # any moment: it is right whenever", FIXED),
    ("time.sleep(1)  # simulates work: slow\nos.kill(process, 9)", ORDER),
    ("if late:\n    time.sleep(1)  # simulates work: slow\n    raise ValueError('late')", ORDER),
    ("time.sleep(1)  # simulates work: slow\nassert not path.touch()", ORDER),
]
RIGHT = [
    BEGIN + "assert time.monotonic() - begin >= 2",
    BEGIN + "assert 2 < time.monotonic() - begin",
    BEGIN + "assert time.monotonic() > begin + 2",
    BEGIN + "seconds = time.monotonic() - begin\nassert seconds > 2 and count < 5",
    BEGIN + "assert work(begin) < 5 and len([begin]) == 1",
    BEGIN + "assert begin < path.stat().st_mtime",
    BEGIN + "end = time.monotonic()\nassert begin <= end",
    BEGIN + "while not done() and time.monotonic() < begin + 60:\n    step()",
    BEGIN + "if time.monotonic() - begin < 5:\n    step()",
    "def took():\n    begin = time.time()\n    return 1, time.time() - begin\nassert took()[0] < 5",
    "def one():\n    seconds = time.time() - begun\n\ndef other(seconds):\n    assert seconds < 5",
    "clock.sleep(1)",
    "await asyncio.sleep(0)",
    "done.wait(60)",
    "threading.Event().wait()",
    "while not path.exists():\n    time.sleep(0.01)",
    "while True:\n    if path.exists():\n        break\n    time.sleep(0.01)",
    "while not path.exists() and time.monotonic() < end:\n    time.sleep(0.01)",
    "time.sleep(1)  # simulates work: the reader is slower than the writer",
    "time.sleep(1)  # simulates work: slow\nwork()\nos.kill(process, 9)",
    "time.sleep(\n    delay\n)  # any moment: it is right whenever\nos.kill(process, 9)",
]


def of(program: str) -> list[str]:
    return [one.what for one in findings(program)]


@pytest.mark.parametrize(("program", "what"), WRONG)
def test_what_breaks_the_rule_is_found(program: str, what: str) -> None:
    (found,) = of(program)
    assert found.startswith(what)


@pytest.mark.parametrize("program", RIGHT)
def test_what_keeps_the_rule_is_not(program: str) -> None:
    assert of(program) == []


@pytest.mark.parametrize(("program", "what"), WRONG)
def test_programs_in_strings_keep_it_too(program: str, what: str) -> None:
    for source in (f"\n\nPROGRAM = {program!r}", f"\n\nrun({program!r}, seconds=(1, f'{{x}}'))"):
        ((line, found),) = findings(source)
        assert (line, found.startswith(what)) == (3, True)
    assert of(f"def test(x):\n    {program!r}\n    assert {program!r} in output") == [], "no program"


@pytest.mark.parametrize("program", RIGHT)
def test_programs_in_strings_that_keep_it_are_not_found(program: str) -> None:
    assert of(f"run({program!r})") == []


def test_programs_of_several_pieces_are_read() -> None:
    assert of("run(f'time.sleep({seconds})\\nwork()')") == [NO_REASON]
    assert of("CODE = '''\n    time.sleep(1)\n    work()\n'''") == [NO_REASON]
    assert of("run('time.sleep(1)\\n    work()\\n')") == [NO_REASON], "behind a line that begins a block"


def test_no_test_bounds_a_clock_from_above_or_orders_by_sleeps() -> None:
    wrong = []
    for path in files(ROOT):
        name = str(path.relative_to(ROOT))
        # This module's own texts break the rule, as they shall.
        if path != Path(__file__) and not name.startswith(HELPERS):
            wrong += [f"{name}:{line}: {what}" for line, what in findings(path.read_text())]
    assert not wrong, "\n".join(wrong)
