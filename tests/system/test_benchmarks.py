"""The benchmarks of collectives, small: they measure what they say, and their model keeps to its formulas."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.amounts import amount
from tests.helpers.launching import run_program
from tests.helpers.measured import run_measured
from tests.hosts.virtual_hosts import why_unavailable

pytestmark = pytest.mark.timeout_seconds(240)

# What ranks do together takes longer in microseconds, and not in seconds.
ABOVE_US = 0.1

# Of what a benchmark has fixed: see benchmarks/measure.py.
SMALL = "0.125"

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def cost_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("cost_model")


def test_the_table_of_the_readme_is_that_of_the_figures_record() -> None:
    figures = json.loads((FOLDER / "results" / "sync_step_mpich.json").read_text())["figures"]
    text = (FOLDER.parent / "README.md").read_text()
    assert "benchmarks/results/sync_step_mpich.png" in text
    rows = {"reduction": "reduction", "reduction and SGD": "with SGD", "reduction and Adam": "with Adam"}
    for row, case in rows.items():
        times, best = figures[case]["times_ms"], figures[case]["best"]
        names = ("mpidist, fast" if "mpidist, fast" in times else "mpidist", "mpidist", best["MPI"], best["PyTorch"])
        assert " | ".join([f"| {row}", *(f"{times[name]['median']:.1f}" for name in names)]) + " |\n" in text


# In a process of its own: matplotlib keeps the files of its fonts open.
BOXES = """
import io, json, sys, step_plot
figure = step_plot.draw(json.load(open(sys.argv[1])))
figure.savefig(io.BytesIO(), dpi=110)
for axis in figure.axes:
    rows = [label for label in axis.get_xticklabels() if label.get_text()], list(axis.texts)
    print(json.dumps([axis.get_window_extent().y1, [[label.get_window_extent().extents.tolist() for label in row]
                                                    for row in rows]]))
"""


@pytest.mark.parametrize("library", ["mpich", "openmpi"])
def test_labels_of_the_figure_of_steps_do_not_collide(library: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    record = FOLDER / "results" / f"sync_step_{library}.json"
    shown = subprocess.run(
        [sys.executable, "-c", BOXES, record], cwd=FOLDER, capture_output=True, text=True, check=True, timeout=100
    )
    axes = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(axes) == 3
    for top, rows in axes:
        for boxes in rows:
            assert len(boxes) >= 4
            assert all(left[2] < right[0] for left, right in itertools.pairwise(boxes)), boxes
        assert all(y1 < top for _, _, _, y1 in rows[1])


def test_collectives_are_compared_and_give_times_to_the_model(tmp_path: Path) -> None:
    figures, picture = tmp_path / "collectives.json", tmp_path / "collectives.png"
    result, most = run_measured(
        2, FOLDER / "collectives.py", "--to-bytes", 1 << 18, "--rounds", 2, "--seconds", 1, "--no-gloo", "--no-model",
        "--json", figures, "--plot", picture, timeout_seconds=100, share=SMALL,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(figures.read_text())
    assert content["machine"]["ranks"] == 2
    sizes = [4**power for power in range(1, 10)]
    assert list(map(int, content["times_us"])) == sizes
    for size in sizes:
        times = content["times_us"][str(size)]
        assert {"AUTO", "MPI", "RING", "NODE", "raw MPI, one call", "raw MPI, in place"} <= set(times)
        assert ("memory limit" in times) == ("NODE, allocated" in times) == (size >= 1 << 16)
        assert all(ABOVE_US < t["min"] <= t["median"] < most for t in times.values())
    assert set(content["ratios"]["min"]["raw MPI at its best / AUTO"]) == set(map(str, sizes))

    model = tmp_path / "model.json"
    result = run_program(
        1, FOLDER / "scale_model.py", "--times", figures, "--network", "aries", "--ranks-per-node", 8,
        "--json", model, "--plot", tmp_path / "model.png", timeout_seconds=60,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    predicted = json.loads(model.read_text())
    assert set(predicted["errors"]) == {"RING", "MPI", "NODE"}
    assert predicted["errors"]["NODE"]["points"] == 3
    assert set(predicted["predicted"]) == {str(4**power) for power in range(1, 9)}
    row = predicted["predicted"]["65536"]
    assert row["best"] == min(row["seconds"], key=row["seconds"].get)
    assert 0 < row["efficiency"] <= row["efficiency_overlapped"] <= 1


@pytest.mark.skipif(
    importlib.util.find_spec("llvmlite") is None, reason="needs llvmlite: pip install 'mpidist[fast]'"
)
def test_a_step_is_measured_beside_the_traffic_that_it_needs(tmp_path: Path) -> None:
    figures = tmp_path / "sync_step.json"
    result = run_program(
        2, FOLDER / "sync_step.py", "--rounds", 1, "--json", figures, timeout_seconds=200,
        MPIDIST_BENCHMARK_SHARE=SMALL,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    found = json.loads(figures.read_text())["figures"]
    assert set(found) == {"reduction", "with SGD", "with Adam"}
    for name, figure in found.items():
        assert {"traffic limit", "mpidist", "MPI in place"} <= set(figure["times_ms"])
        assert ("mpidist, fast" in figure["times_ms"]) == (name != "reduction")


@pytest.mark.skipif(
    importlib.util.find_spec("llvmlite") is None, reason="needs llvmlite: pip install 'mpidist[fast]'"
)
def test_what_is_compiled_is_compared_with_numpy(tmp_path: Path) -> None:
    figures, picture = tmp_path / "fast.json", tmp_path / "fast.png"
    result = run_program(
        3, FOLDER / "fast.py", "--rounds", 1, "--json", figures, "--plot", picture, timeout_seconds=200,
        MPIDIST_BENCHMARK_SHARE=SMALL,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    cases = json.loads(figures.read_text())["figures"]
    assert {"sum, node memory", "SGD, global_clipnorm", "Adam on rows"} <= set(cases)
    assert all(set(times) == {"without", "with"} for times in cases.values())


def test_resnet50s_gradients_are_measured_alone(tmp_path: Path) -> None:
    figures = tmp_path / "collectives.json"
    result = run_program(
        2, FOLDER / "collectives.py", "--no-sweep", "--no-gloo", "--rounds", 1, "--json", figures, timeout_seconds=200,
        MPIDIST_BENCHMARK_SHARE=SMALL,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    content = json.loads(figures.read_text())
    assert content["times_us"] == content["ratios"] == {}
    assert {"AUTO, nest of 161", "AUTO, nest of 161 views", "raw MPI, per tensor"} <= set(content["resnet50_us"])


def test_the_cost_of_comparing_calls_between_nodes_is_a_ratio(tmp_path: Path) -> None:
    figures = tmp_path / "dispatch.json"
    result, most = run_measured(2, FOLDER / "dispatch.py", "--calls", 200, "--json", figures, timeout_seconds=100)
    assert result.returncode == 0, result.stderr + result.stdout
    times = json.loads(figures.read_text())["between nodes"]
    for kind in ("min", "median"):
        # There are so many of them.
        assert ABOVE_US < times["not compared"][kind] < most / 200
        assert times["ratio"][kind] == pytest.approx(times["compared"][kind] / times["not compared"][kind])
    assert "compared " in result.stdout


@pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed: see benchmarks/install_horovod.sh"
)
def test_horovod_starts_anew_for_each_of_its_turns(tmp_path: Path) -> None:
    figures = tmp_path / "collectives.json"
    result = run_program(
        2, FOLDER / "collectives.py", "--no-sweep", "--rounds", 1, "--json", figures, timeout_seconds=200,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    times = json.loads(figures.read_text())["resnet50_us"]
    settings = [f"{cycle} ms, {fusion} MB" for cycle in ("0.1", "1") for fusion in (1, 4, 16, 64, 128)]
    for path in ("fused", "grouped"):
        assert {f"Horovod, {path}, {setting}" for setting in settings} <= set(times)
    # Its defaults and its best over our arrays apart and as views, from minima and from medians.
    assert result.stdout.count(" / AUTO, nest of 161") == 8


def test_the_model_measures_for_itself_under_mpirun(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    result = run_program(2, FOLDER / "scale_model.py", "--rounds", 1, "--json", model, timeout_seconds=100)
    assert result.returncode == 0, result.stderr + result.stdout
    assert set(json.loads(model.read_text())["lines"]) == {"RING", "MPI", "NODE", "TO ONE"}


def test_a_fit_finds_the_numbers_that_made_the_times(cost_model: ModuleType) -> None:
    made = cost_model.Line(3e-6, 1e-10, float(1 << 20), 4e-10)
    for algorithm in cost_model.COUNTS:
        points = {
            (ranks, 4**power): cost_model.predicted(algorithm, made, ranks, 4**power)
            for ranks in (2, 3, 4) for power in range(2, 14)
        }
        # The knee lies at one of the points' own counts of bytes only for NODE: elsewhere near it.
        line = cost_model.fit(algorithm, points)
        assert line.start == pytest.approx(3e-6, rel=0.05)
        off = [abs(cost_model.predicted(algorithm, line, *key) / value - 1) for key, value in points.items()]
        assert max(off) < (1e-6 if algorithm == "NODE" else 0.2)
    with pytest.raises(ValueError, match="at least 4 points"):
        cost_model.fit("RING", {(2, 4): 1.0})


def test_costs_keep_to_the_formulas(cost_model: ModuleType) -> None:
    slow = cost_model.Network("slow", 1e-3, 1e9, "made up")
    free = cost_model.Line(0.0, 0.0, 1.0, 0.0)
    machine = cost_model.Machine(free, free, 0.0, slow)
    # Eight nodes of one rank and 8 MB: latency and bytes by hand.
    assert cost_model.ring(machine, 8, 1, 8e6) == pytest.approx(14 * (1e-3 + 1e-3))
    assert cost_model.recursive_doubling(machine, 8, 1, 8e6) == pytest.approx(3 * (1e-3 + 8e-3))
    assert cost_model.rabenseifner(machine, 8, 1, 8e6) == pytest.approx(6e-3 + 2 * 7 / 8 * 8e-3)
    assert cost_model.to_one(machine, 8, 1, 8e6) == pytest.approx(2 * (1e-3 + 7 * 8e-3))
    # Lanes send each byte of a node once; whole arrays of all its ranks go over the same link.
    lanes = cost_model.node_and_lanes(machine, 32, 4, 8e6)
    assert lanes == pytest.approx(6e-3 + 2 * 7 / 8 * 8e-3)
    assert cost_model.recursive_doubling(machine, 32, 4, 8e6) == pytest.approx(3 * (1e-3 + 32e-3))
    # Latency decides for small arrays, bytes for large ones.
    machine = cost_model.Machine(cost_model.Line(1e-3, 0.0, 1.0, 0.0), free, 0.0, slow)
    assert cost_model.to_one(machine, 8, 1, 8e6) == pytest.approx(2 * (1e-3 + 7 * 8e-3) + 14e-3)
    assert cost_model.best(machine, 8, 1, 4) == "recursive doubling"
    assert cost_model.best(machine, 8, 1, 8e7, ("recursive doubling", "ring")) == "ring"
    assert cost_model.best(machine, 4096, 1, 8e6, ("recursive doubling", "ring")) == "recursive doubling"
    for cost in cost_model.ALGORITHMS.values():
        assert cost(machine, 1 << 16, 64, 1e8) > cost(machine, 256, 64, 1e8) * 0.999


def test_windows_are_compared_with_raw_mpi_and_a_copy(tmp_path: Path) -> None:
    figures, picture = tmp_path / "windows.json", tmp_path / "windows.png"
    result, most = run_measured(
        2, FOLDER / "windows.py", "--megabytes", 1, "--rounds", 2, "--messages", 40, "--json", figures,
        "--plot", picture, timeout_seconds=100,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(figures.read_text())
    for times in content["latencies_us"].values():
        assert set(times) == {"RMA", "SOCKETS", "raw MPI"}
        assert all(ABOVE_US < one["min"] <= one["median"] < most for one in times.values())
    for what in ("get", "put"):
        times = content["moves_us"][str(1 << 20)][what]
        assert set(times) == {"RMA", "SOCKETS", "raw MPI", "memory copy"}
        # Nothing moves a megabyte in less than ten microseconds.
        assert all(10 < one["min"] <= one["median"] < most for one in times.values())
        ratio = content["of_raw_mpi"][str(1 << 20)][what]["RMA"]
        assert ratio == pytest.approx(times["RMA"]["median"] / times["raw MPI"]["median"])


def test_rows_of_tables_are_measured_by_both_ways(tmp_path: Path) -> None:
    figures, picture = tmp_path / "tables.json", tmp_path / "tables.png"
    result, most = run_measured(
        3, FOLDER / "tables.py", "--megabytes", 1, "--megabytes", 2, "--rounds", 2,
        "--json", figures, "--plot", picture, timeout_seconds=100, share=SMALL,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(figures.read_text())
    assert (content["rows"], content["TensorFlow"]) == (32, {})
    for size in ("1 MB", "2 MB"):
        assert set(content["raw, us"][size]) == {"Get", "Put", "Get of rows", "Put of rows"}
        for way in ("RMA", "SOCKETS"):
            assert set(content[way][size]) == {
                "pull", "pull and add", "pull and SGD", "pull within a function", "add to a scalar",
                "pull and add within a function", "pull and add, queued", "within a function, queued",
            }
            assert all(ABOVE_US < time < most for time in content[way][size].values())
    assert "2 MB / 1 MB" in result.stdout


def test_parameter_servers_are_measured_by_both_ways(tmp_path: Path) -> None:
    figures, picture = tmp_path / "servers.json", tmp_path / "servers.png"
    result = run_program(
        3, FOLDER / "parameter_servers.py", "--megabytes", 1, "--closures", 10, "--rounds", 1, "--idle", 0,
        "--json", figures, "--plot", picture, timeout_seconds=100,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(figures.read_text())
    assert content["workers"] == 1
    assert set(content["raw, us"]["1 MB"]) == {"Get", "Put", "copy", "in turns"}
    for way in ("RMA", "SOCKETS"):
        assert {"null closure, us", "closures per second", "ring to prepared, us"} < set(content[way])
        assert {"1 MB and 5 ms, us", "1 MB and 5 ms with prefetch, us"} < set(content[way])
        assert all(time > 0 for time in content[way]["1 MB"].values())


def test_the_start_of_ranks_beside_mpi4py_alone(tmp_path: Path) -> None:
    figures = tmp_path / "startup.json"
    result = run_program(
        1, FOLDER / "startup.py", "--ranks", 2, "--rounds", 1, "--json", figures, timeout_seconds=100
    )
    assert result.returncode == 0, result.stdout + result.stderr
    medians = json.loads(figures.read_text())["medians"]
    bare, ours = medians["mpi4py and NumPy"], medians["mpidist"]
    assert bare["seconds"] > 0
    # It has loaded more, and so little that a dataset or HDF5 is not among it.
    assert 0 < ours["own MB"] - bare["own MB"] < 14


def test_hosts_are_limited_in_their_bandwidth(tmp_path: Path) -> None:
    reason = why_unavailable()
    if reason:
        pytest.skip(reason)
    figures = tmp_path / "hosts.json"
    result = run_program(
        1, FOLDER / "hosts.py", "--layout", "1+1+1", "--kilobytes", 1024, "--megabits", 200, "--rounds", 1,
        "--json", figures, timeout_seconds=100,
    )
    if "tc cannot limit" in result.stderr:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stderr + result.stdout
    (size, times), = json.loads(figures.read_text())["ms"]["1+1+1"].items()
    assert int(size) == 1 << 20
    # 1.4 MB from each host at 200 Mbit/s, but for what the filter lets through at once.
    assert len(times) == 4
    assert all(ms > 45 for ms in times.values()), times


def test_strategies_show_what_a_node_holds_and_sends(tmp_path: Path) -> None:
    reason = why_unavailable()
    if reason:
        pytest.skip(reason)
    figures = tmp_path / "strategies.json"
    kinds = ("multi-worker", "sharded", "hybrid")
    result = run_program(
        1, FOLDER / "strategies.py", *(word for kind in kinds for word in ("--only", kind)), "--layout", "1+1",
        "--windows", amount(1, 3), "--json", figures, timeout_seconds=100,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    everywhere, sharded, hybrid = json.loads(figures.read_text())["rows"]
    parameters = 2 * 2048 * 2048 * 4
    # An all-reduce between two nodes sends each byte once, and so does what takes its place.
    for one in (everywhere, sharded):
        assert 1 <= one["sent"] / parameters < 1.1, one
    assert hybrid["sent"] < everywhere["sent"] / 16 * 1.1
    # Of Adam's two moments a node keeps a half.
    assert 0.8 < (everywhere["memory"] - sharded["memory"]) / parameters < 1.2


def test_groups_send_less_than_synchronous_steps_take(tmp_path: Path) -> None:
    reason = why_unavailable()
    if reason:
        pytest.skip(reason)
    figures = tmp_path / "hosts.json"
    words = [word for way in ("groups, every=16", "MultiWorkerMirroredStrategy") for word in ("--way", way)]
    result = run_program(
        1, FOLDER / "hybrid_hosts.py", *words, "--megabits", 200, "--steps", 12, "--json", figures, timeout_seconds=100,
    )
    if "tc cannot limit" in result.stderr:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stderr + result.stdout
    found = json.loads(figures.read_text())
    rates = found["examples_per_second"]
    # What the filter lets through at once is a few percent of the gradients.
    assert 0 < rates["MultiWorkerMirroredStrategy"] < 1.1 * found["limit"], found
    assert rates["groups, every=16"] > 0
