"""An exception on a thread of a framework ends the job, as one of the main thread does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import run_code

pytestmark = pytest.mark.timeout_seconds(150)

HEAD = """
import threading
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
extended, rank = strategy.extended, strategy.communicator.rank
def bug():
    raise ValueError("the bug of rank %d" % rank)
def work():
    extended.all_reduce("SUM", 1.0)
    if rank == 1:
        ACTION
    extended.all_reduce("SUM", 1.0)
thread = threading.Thread(target=work)
thread.start()
thread.join()
extended.all_reduce("SUM", 1.0)
"""


@pytest.mark.parametrize("action", ["bug()", "try: bug()\n        except ValueError as error: extended.fail(error)"])
def test_an_exception_on_a_thread_ends_the_job(tmp_path: Path, action: str) -> None:
    result, text = run_code(tmp_path, HEAD.replace("ACTION", action), ranks=2)
    assert result.returncode != 0
    assert text.count("ValueError: the bug of rank 1") == 1, text
    assert "in bug" in text
    assert "rank 1 of 2" in text


def test_functions_are_called_at_the_end_of_a_program(tmp_path: Path) -> None:
    # Each line in one call: `print` writes its parts one after another, and two ranks share the pipe.
    code = HEAD.replace("ACTION", "pass") + (
        "import os\n"
        "strategy.on_close(lambda: os.write(1, b'first %d\\n' % rank))\n"
        "strategy.on_close(lambda: os.write(1, b'second %d\\n' % rank))\n"
    )
    result, text = run_code(tmp_path, code, ranks=2)
    assert result.returncode == 0, text
    assert all(text.count(f"{name} {rank}") == 1 for name in ("first", "second") for rank in (0, 1)), text
