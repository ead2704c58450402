"""Try an installed package as a user on a login node does: from another folder, without MPI on the PATH.

    env -i PATH=/usr/bin:/bin ENVIRONMENT/bin/python -I .ci/try_package.py [TAG]

With a TAG such as v0.1.0 the version must be that one, as at a release.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib import metadata, resources
from pathlib import Path

import mpidist


def call(*words: str) -> str:
    """The output of `mpidist`, which must end well."""
    program = Path(sys.executable).with_name("mpidist")
    return subprocess.run([program, *words], check=True, capture_output=True, text=True, timeout=120).stdout


def main() -> int:
    """Try it.

    Returns:
        The exit code: 1 where something is missing, which is printed.
    """
    wrong = []
    version = metadata.version("mpidist")
    if "site-packages" not in mpidist.__file__:
        wrong.append(f"mpidist is imported from {mpidist.__file__}")
    if not version == mpidist.__version__ == call("--version").split()[-1]:
        wrong.append(f"the versions differ: {version}, {mpidist.__version__}, {call('--version')}")
    if sys.argv[1:] and sys.argv[1] != f"v{version}":
        wrong.append(f"the tag is {sys.argv[1]}, the version {version}")
    if "mpi4py.MPI" in sys.modules:
        wrong.append("the import has started MPI")
    missing = [name for name in ("doctor", "run", "sbatch", "trace") if name not in call("--help")]
    if missing:
        wrong.append(f"`mpidist --help` has no {', '.join(missing)}")
    if not resources.files("mpidist").joinpath("py.typed").is_file():
        wrong.append("there is no py.typed: its types are lost")
    with tempfile.TemporaryDirectory() as folder:
        event = {"rank": 0, "name": "save", "bytes": 0, "begin": 0, "end": 9, "where": "", "thread": 1, "depth": 0}
        Path(folder, "rank-0.jsonl").write_text(json.dumps({**event, "communicator": 5, "number": 1}) + "\n")
        call("trace", folder)
        script = Path(folder, "job.sh")
        script.write_text("#!/bin/bash\ntrue\n")
        call("lint", str(script))
    strategy = mpidist.MultiWorkerMirroredStrategy()
    if strategy.reduce("SUM", 2.0, axis=None) != 2.0:
        wrong.append("a strategy of one rank does not add up")
    print(f"Python {sys.version.split()[0]}, mpidist {version}: {'; '.join(wrong) or 'whole'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
