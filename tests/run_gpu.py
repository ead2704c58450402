"""Run all that is known of GPUs: on this machine's GPUs, or with the real CuPy on GPUs in host memory.

    python tests/run_gpu.py               where there are GPUs, with the benchmark; writes card and versions into the
                                          table of docs/gpus.md, and the benchmark's record into benchmarks/results
    python tests/run_gpu.py --simulated   where there are none

Options of pytest, such as `--long` or `-k`, may follow. Exit code 0: everything passed.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # Started as a file: the folder above tests is where it and mpidist stand.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mpidist.cluster.devices.names import visible_gpus
from mpidist.comm.choice.capabilities import NCCL_HOST
from tests.helpers.launching import find_mpirun, launch_environment, mpirun_command

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "gpus.md"
PART_SECONDS = 1200
RANKS = 3
# What needs no GPU, what ranks do together, and what starts whole programs.
ALONE = ["test_compilation.py", "test_signatures.py"]
TOGETHER = [
    "test_device_binding.py", "test_fused_updates.py", "test_device_variables.py", "test_device_strategy.py",
    "test_device_input.py", "test_device_reader.py", "test_device_metrics.py", "test_late_streams.py",
    "test_device_collectives.py", "test_central_storage.py", "test_device_adapters.py",
]
PROGRAMS = ["test_device_programs.py", "test_doctor_gpus.py"]
# Of the benchmark, which only a machine with GPUs runs as a whole.
SPEED = "benchmark"
SHARED = "NCCL on a shared GPU"
# The rows of the table by their first cells, and the tests whose success proves them: all that have the text in their
# names, of which at least one has run.
ROWS = {
    "arrays staged through pinned memory": "collectives.test_reductions[staged",
    "arrays in a CUDA-aware MPI": "collectives.test_reductions[cuda-aware",
    "NCCL": "collectives.test_reductions[nccl",
    "reductions in the background": "collectives.test_a_reduction_in_the_background",
    "batches that are copied to a GPU": "input.test_kernels",
    "metrics": "metrics.test_a_metric",
    "fused updates": "fused_updates.test_an_update",
    "training": "variables.test_an_optimizer",
    "a strategy on the GPU that it names": "strategy.test_",
    "variables in host memory, replicas on GPUs": "central_storage.test_",
    "calls of adapters of frameworks": "adapters.test_arrays_stay",
    "programs": "programs.test_",
    "speed": SPEED,
}


def main() -> int:
    """Run the parts one after another, and fill the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulated", action="store_true", help="use GPUs in host memory")
    options, others = parser.parse_known_args()
    count = RANKS if options.simulated else max(2, len(visible_gpus()))
    if not options.simulated and not visible_gpus():
        print("run_gpu: no GPU is visible; --simulated proves what can be proven without one", file=sys.stderr)
        return 1
    others += ["--host-gpus"] if options.simulated else []
    with tempfile.TemporaryDirectory(prefix="mpidist-gpu-") as folder:
        report = Path(folder, "report.xml")
        pytest = [sys.executable, "-m", "pytest", "-q", "--durations=5", *others]
        # Without simulated GPUs: these look at CuPy and the compiler as they are installed.
        alone = [one for one in pytest if one != "--host-gpus"]
        together = [*pytest, "--with-mpi", *_files(TOGETHER)]
        parts = {
            "compiler": [*alone, *_files(ALONE)],
            # One rank writes the report.
            f"{count} ranks": [
                *mpirun_command(1, find_mpirun()), *together, f"--junit-xml={report}",
                ":", "-n", str(count - 1), *together,
            ],
            "programs": [*pytest, f"--junit-xml={report}.programs", *_files(PROGRAMS)],
        }
        if not options.simulated and len(visible_gpus()) < count:
            parts[SHARED] = _nccl_on_one_gpu([*together, "-k", "nccl"], count, f"{report}.nccl")
        if not options.simulated:
            record = ROOT / "benchmarks" / "results" / "gpu.json"
            parts[SPEED] = [
                *mpirun_command(count, find_mpirun()), sys.executable, "benchmarks/gpu.py",
                "--plot", str(record.with_suffix(".png")), "--json", str(record),
            ]
        results = {name: _run(name, command, folder) for name, command in parts.items()}
        if not options.simulated:
            # What ranks that share a GPU skip in the first one, the last one may have run.
            reports = [path for path in (report, *(Path(f"{report}.{name}") for name in ("programs", "nccl")))
                       if path.exists()]
            outcomes = {**_outcomes(reports), SPEED: results[SPEED].split(" ")[0].lower()}
            TABLE.write_text(fill(TABLE.read_text(), outcomes, _machine()))
    print("\n" + "\n".join(f"{name:20} {result}" for name, result in results.items()))
    return 0 if all(result.startswith("passed") for result in results.values()) else 1


def _nccl_on_one_gpu(command: list[str], count: int, report: str) -> list[str]:
    """NCCL wants a GPU for each rank of a host; here it takes each rank for a host, and a socket for their network."""
    ranks = [
        [*(["-n", "1"] if rank else mpirun_command(1, find_mpirun())), "env", f"{NCCL_HOST}=host{rank}",
         "NCCL_SOCKET_IFNAME=lo", *command, *([] if rank else [f"--junit-xml={report}"]), ":"]
        for rank in range(count)
    ]
    return [word for rank in ranks for word in rank][:-1]


def fill(page: str, outcomes: dict[str, str], machine: str) -> str:
    """The page with the machine's name in the last cells of all rows whose tests have passed."""
    lines = page.splitlines(keepends=True)
    for place, line in enumerate(lines):
        cells = line.strip().strip("|").split("|")
        text = ROWS.get(cells[0].strip())
        if text is None:
            continue
        chosen = [outcome for name, outcome in outcomes.items() if text in name]
        if "passed" in chosen and "failed" not in chosen:
            lines[place] = "|".join(["", *cells[:-1], f" {machine} ", "\n"])
    return "".join(lines)


def _files(names: list[str]) -> list[str]:
    return [f"tests/gpu/{name}" for name in names]


def _run(name: str, command: list[str], folder: str) -> str:
    print(f"\n===== {name}: {' '.join(command)}", flush=True)
    begin = time.monotonic()
    environment = {**launch_environment(), "PYTEST_DEBUG_TEMPROOT": folder}
    try:
        code = subprocess.run(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, timeout=PART_SECONDS, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return f"FAILED: not done after {PART_SECONDS} s"
    return f"{'passed' if code == 0 else f'FAILED with code {code}'} in {time.monotonic() - begin:.0f} s"


def _outcomes(reports: list[Path]) -> dict[str, str]:
    """Passed, failed or skipped, by the names of tests."""
    outcomes = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            outcomes[f"{case.get('classname')}.{case.get('name')}"] = outcome
    return outcomes


def _machine() -> str:
    """The card and the versions."""
    cupy: Any = importlib.import_module("cupy")
    runtime = cupy.cuda.runtime
    card = runtime.getDeviceProperties(0)["name"].decode()
    nccl: Any = importlib.import_module("mpidist.comm.gpu.cuda").load_nccl()
    versions = f"driver {runtime.driverGetVersion()}, CUDA {runtime.runtimeGetVersion()}, CuPy {cupy.__version__}"
    return f"{card}, {versions}, NCCL {nccl.get_version() if nccl.available else 'none'}"


if __name__ == "__main__":
    sys.exit(main())
