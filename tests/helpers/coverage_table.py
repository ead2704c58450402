"""The share of mpidist's lines that tests run, by package; measured with coverage.py on all ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# After `python -m`, before what is measured.
RUN = ["coverage", "run", "--parallel-mode", "--source=mpidist", "-m"]


def environment(folder: str) -> dict[str, str]:
    """Variables for the processes that are measured: where their data go, and the cheapest way to get them.

    Args:
        folder: Of this measurement alone; each process writes a file there.
    """
    # Python's own monitoring costs a few per cent. Older versions have a trace function, which can double the time.
    core = {"COVERAGE_CORE": "sysmon"} if sys.version_info >= (3, 12) else {}
    return {"COVERAGE_FILE": str(Path(folder) / "data"), **core}


def make(folder: str) -> str:
    """The table of what was measured.

    Args:
        folder: As `environment` was given.
    """
    report = Path(folder) / "report.json"
    for command in (["combine", "--quiet"], ["json", "--quiet", "-o", str(report)]):
        result = subprocess.run(
            [sys.executable, "-m", "coverage", *command, f"--data-file={Path(folder) / 'data'}"],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )
        if result.returncode:
            return f"no coverage: {result.stdout}{result.stderr}"
    lines: Counter[str] = Counter()
    run: Counter[str] = Counter()
    for name, file in json.loads(report.read_text())["files"].items():
        below = (ROOT / name).relative_to(ROOT / "mpidist").parts
        package = "mpidist" if len(below) == 1 else f"mpidist.{below[0]}"
        for key in (package, "all"):
            lines[key] += file["summary"]["num_statements"]
            run[key] += file["summary"]["covered_lines"]
    rows = [f"{key:24} {lines[key]:6} {100 * run[key] / max(lines[key], 1):5.1f} %" for key in sorted(lines, key=order)]
    return "\n".join([f"\n{'package':24} {'lines':>6} {'run':>7}", *rows])


def order(package: str) -> tuple[bool, str]:
    """The sum comes last."""
    return package == "all", package
