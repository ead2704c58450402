"""`mpidist trace`: the shares of time, what more ranks would give, and the page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from mpidist import summary
from mpidist.cli.doctor.times import SIZES
from mpidist.cli.main import main
from mpidist.cli.trace.efficiency import look_at
from mpidist.cli.trace.growth import expect, largest_of
from mpidist.cli.trace.report import Machine
from mpidist.cli.trace.summaries import read_curves
from mpidist.cli.trace.timeline import CHECKPOINT, COMMUNICATION, COMPUTE, READING, WAITING, read_timeline
from tests.helpers.traces import COMPUTED, READ, SUMMED, line, write_trace


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["trace", *map(str, arguments)])


def test_the_time_of_a_rank_is_shared_out(tmp_path: Path) -> None:
    """Everything is known: the late rank computes for 20 ms a step, and the others wait for it for 10."""
    steps, ranks = 20, 4
    whole = write_trace(tmp_path, ranks, steps, late=2)
    found = look_at(read_timeline(tmp_path))
    seconds = 1e3 * found.seconds
    np.testing.assert_allclose(seconds.sum(axis=1), whole, rtol=1e-6)
    np.testing.assert_allclose(seconds[:, READING], READ * steps, rtol=1e-6)
    np.testing.assert_allclose(seconds[:, COMMUNICATION], SUMMED * steps, rtol=1e-6)
    np.testing.assert_allclose(seconds[:, CHECKPOINT], 5, rtol=1e-6)
    np.testing.assert_allclose(seconds[:, WAITING], [COMPUTED * steps] * 2 + [0] + [COMPUTED * steps], atol=0.1 * steps)
    np.testing.assert_allclose(seconds[2, COMPUTE], 2 * COMPUTED * steps, atol=0.1 * steps)
    # The save at the end begins at one time on all ranks.
    assert found.late.tolist() == [0, 0, steps, 0]
    np.testing.assert_allclose(found.caused[2], 3 * COMPUTED * steps * 1e-3, rtol=0.02)
    (summed,) = [one for one in found.operations if one.name == "apply_gradients"]
    assert (summed.meetings, summed.size) == (steps, 1 << 20)
    assert summed.bandwidth == pytest.approx((1 << 20) * 1.5 / (SUMMED * 1e-3), rel=1e-3)


def test_calls_inside_others_and_beside_the_program_take_no_time_of_it(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank-{rank}.jsonl").write_text(
            line(rank, "all_reduce", 0, 10, communicator=5, number=1)
            # On the communicator of a lane; and in a thread, while the program computes.
            + line(rank, "all_reduce", 2 + 2 * rank, 9, communicator=6, number=1)
            + line(rank, "all_reduce", 12 + 5 * rank, 19, communicator=7, number=1, thread=2)
            + line(rank, "barrier", 20, 20, communicator=5, number=2)
        )
    found = look_at(read_timeline(tmp_path))
    np.testing.assert_allclose(found.seconds[:, COMMUNICATION], 0.010)
    np.testing.assert_allclose(found.seconds[:, WAITING], 0)
    np.testing.assert_allclose(found.seconds[:, COMPUTE], 0.010)
    assert found.meetings == 2


def test_a_worker_waits_between_functions(tmp_path: Path) -> None:
    (tmp_path / "rank-1.jsonl").write_text(
        line(1, "step", 0, 4, attempt=1, number=1) + line(1, "step", 10, 13, attempt=1, number=2)
    )
    found = look_at(read_timeline(tmp_path))
    np.testing.assert_allclose(found.seconds[0, [COMPUTE, WAITING]], [0.007, 0.006])


def test_more_ranks_are_late_more_often(tmp_path: Path) -> None:
    write_trace(tmp_path, 8, 50)
    found = look_at(read_timeline(tmp_path))
    rows = expect(found)
    assert [one.ranks for one in rows] == [16, 32, 64]
    shares = [found.share, *(one.efficiency for one in rows)]
    assert shares == sorted(shares, reverse=True)
    assert all(1 < one.speed < factor for one, factor in zip(rows, (2, 4, 8), strict=True))
    # The mean of the largest of n numbers that are uniform between 0 and 1 is n / (n + 1).
    assert largest_of(np.linspace(0, 1, 10_001), 9) == pytest.approx(0.9, abs=1e-3)


def test_a_rank_that_is_always_late_is_late_once_on_any_number_of_ranks(tmp_path: Path) -> None:
    write_trace(tmp_path, 8, 50, late=3)
    found = look_at(read_timeline(tmp_path))
    assert [one.efficiency for one in expect(found)] == pytest.approx([found.share] * 3, rel=0.05)


def test_the_report_and_the_page_of_1024_ranks(tmp_path: Path) -> None:
    write_trace(tmp_path / "run", 1024, 3, late=700)
    doctor = {"findings": [{"data": {"bytes": 1 << 20, "bus_GB_per_s": 2.0, "mpi_bus_GB_per_s": 4.0}}, {"data": {}}]}
    (tmp_path / "doctor.json").write_text(json.dumps(doctor))
    result = call(tmp_path / "run", "--doctor", tmp_path / "doctor.json")
    assert result.exit_code == 0, result.output
    assert re.search(r"^1024 ranks, 7168 calls, 4 meetings, ", result.output)
    assert re.search(r"^ +700 .* 3 of 4 ", result.output, re.MULTILINE)
    assert "and 1008 more ranks" in result.output
    assert re.search(r"^apply_gradients +3 +1048576 .* 26% of 4.000$", result.output, re.MULTILINE)
    assert re.search(r"^ +8192 ", result.output, re.MULTILINE)
    page = (tmp_path / "run" / "trace.html").read_text()
    assert not re.search(r"https?:|\bsrc=|@import|<link", page), "the page needs a network"
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [one["late"] for one in data["by_rank"]].index(3) == 700
    assert 700 in data["calls"]["rank"]
    assert len(page) < 4 << 20


def test_a_size_that_is_far_from_all_measured_ones_is_not_compared() -> None:
    whole = Machine({size: float(size) for size in SIZES})
    assert None not in [whole.bandwidth(1 << shift) for shift in range(3, 30)]
    assert whole.bandwidth(1 << 20) == 1 << 20
    cut = Machine({8: 1.0, 1 << 16: 2.0})
    assert [cut.bandwidth(size) for size in (1, 16, 1 << 17, 1 << 20)] == [None, 1.0, 2.0, None]


def test_figures_for_programs(tmp_path: Path) -> None:
    write_trace(tmp_path, 2, 3)
    result = call(tmp_path, "--json", "--html", tmp_path / "page.html", "--perfetto")
    figures = json.loads(result.output)
    assert [one["rank"] for one in figures["by_rank"]] == [0, 1]
    assert figures["operations"][0]["name"] == "apply_gradients"
    assert [one["ranks"] for one in figures["expected"]] == [4, 8, 16]
    assert Path(figures["page"]).exists()
    assert len(json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]) == 2 + 2 * 7


def test_half_a_line_of_a_killed_rank_is_counted(tmp_path: Path) -> None:
    write_trace(tmp_path, 2, 3)
    with open(tmp_path / "rank-1.jsonl", "a") as file:
        file.write('{"rank": 1, "na')
    assert "1 lines could not be read" in call(tmp_path).output


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    result = call(tmp_path)
    assert result.exit_code == 1
    assert f"Run the program with MPIDIST_TRACE={tmp_path}" in result.output
    write_trace(tmp_path, 2, 3)
    (tmp_path / "other.json").write_text("{}")
    result = call(tmp_path, "--doctor", tmp_path / "other.json")
    assert result.exit_code == 1
    assert "expected the measured sums of `mpidist doctor --json`" in result.output


def test_losses_are_drawn_and_the_steps_per_second(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="tensorboardX is not installed")
    writer = summary.create_file_writer(str(tmp_path / "logs"))
    with writer.as_default():
        for step in range(5):
            summary.scalar("train/loss", 2.0**-step, step=step)
            summary.scalar("<rate>", 1.0, step=step)
    writer.close()
    loss, rate, *_ = read_curves(tmp_path / "logs")
    assert [(one.step, one.value) for one in loss.points] == [(step, 2.0**-step) for step in range(5)]
    assert (loss.name, rate.name) == ("train/loss", "<rate>")
    write_trace(tmp_path / "run", 2, 3)
    assert call(tmp_path / "run", "--summaries", tmp_path / "logs").exit_code == 0
    page = (tmp_path / "run" / "trace.html").read_text()
    assert re.search(r"<figcaption>train/loss</figcaption><svg .*<polyline points=", page)
    assert "<figcaption>&lt;rate&gt;" in page


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.long
@pytest.mark.timeout_seconds(120)
@pytest.mark.parametrize("ranks", [8, 1024])
def test_a_browser_draws_the_page(ranks: int, tmp_path: Path) -> None:
    if BROWSER is None:
        pytest.skip("Chromium is not installed")
    write_trace(tmp_path, ranks, 20, late=3)
    assert call(tmp_path).exit_code == 0
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000"]
    page = f"file://{tmp_path}/trace.html"
    shown = subprocess.run(
        [*command, "--dump-dom", page], capture_output=True, text=True, timeout=100, check=True,
    ).stdout
    assert 'data-state="drawn"' in shown
    assert shown.count("<tr>") == (ranks + 1) + (2 + 1) + (3 + 1)
    assert shown.count(f"<span>0 s</span><span>ranks 0 to {ranks - 1}, from the top</span><span>466.") == 2
    # Of many ranks those that others waited for are first.
    first = re.search(r'<table id="ranks">.*?<td>(\d+)</td>', shown, re.DOTALL)
    assert first is not None
    assert int(first[1]) == (3 if ranks > 16 else 0)
    picture = tmp_path / "page.png"
    subprocess.run(
        [*command, f"--screenshot={picture}", "--window-size=1400,2400", page], capture_output=True, timeout=100,
        check=True,
    )
    assert picture.stat().st_size > 20_000, "an empty page"
