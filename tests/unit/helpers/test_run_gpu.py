"""What is run of GPUs, and the table of what is proven: its rows, and how a run on GPUs fills them."""

from __future__ import annotations

from tests.run_gpu import ALONE, PROGRAMS, ROOT, ROWS, SPEED, TABLE, TOGETHER, fill

FOLDER = ROOT / "tests" / "gpu"


def test_a_row_is_filled_by_the_tests_that_passed() -> None:
    page = TABLE.read_text()
    outcomes = {
        "tests.gpu.test_device_collectives.test_reductions[staged-int8]": "passed",
        "tests.gpu.test_device_collectives.test_reductions[staged-bool]": "skipped",
        "tests.gpu.test_device_collectives.test_reductions[nccl-int8]": "failed",
        "tests.gpu.test_device_collectives.test_reductions[nccl-bool]": "passed",
        "tests.gpu.test_device_collectives.test_reductions[cuda-aware-bool]": "skipped",
    }
    filled = fill(page, outcomes, "a card")
    changed = [line for line in filled.splitlines() if line not in page.splitlines()]
    assert len(changed) == 1
    assert changed[0].startswith("| arrays staged through pinned memory |")
    assert changed[0].endswith("| a card |")
    assert fill(filled, {}, "another") == filled
    assert "| speed | | a card |" in fill(page, {SPEED: "passed"}, "a card")
    assert fill(page, {SPEED: "failed"}, "a card") == page


def test_every_row_is_in_the_table() -> None:
    firsts = [line.split("|")[1].strip() for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    assert [row for row in ROWS if firsts.count(row) != 1] == []


def test_every_file_is_run() -> None:
    assert sorted([*ALONE, *TOGETHER, *PROGRAMS]) == sorted(path.name for path in FOLDER.glob("test_*.py"))


def test_every_row_has_tests_that_may_prove_it() -> None:
    found = [
        f"{path.stem}.{line.removeprefix('def ')}"
        for path in FOLDER.glob("test_*.py") for line in path.read_text().splitlines() if line.startswith("def test_")
    ]
    names = [text.partition("[")[0] for text in ROWS.values() if text != SPEED]
    assert [name for name in names if not any(name in one for one in found)] == []
