"""Containers of Apptainer for tests: whether this machine has them, an image to run, and a site's MPI to bind in."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers.markdown import ROOT

# Debian with Python and what mpidist needs, and without MPI, as .ci/apptainer makes it.
BASE = Path("/opt/mpidist/image")
# Where Debian's Python has what its users install.
PACKAGES = "usr/local/lib/python3.11/dist-packages"


@functools.cache
def why_no_apptainer() -> str | None:
    """The reason why this machine has no containers of Apptainer for tests, or None."""
    if shutil.which("apptainer") is None:
        return "there is no Apptainer (.ci/apptainer makes one, as root on Debian)"
    if not BASE.exists():
        return f"there is no image in {BASE} (.ci/apptainer makes it, as root on Debian)"
    tried = subprocess.run(
        ["apptainer", "exec", BASE, "python", "-c", ""], capture_output=True, text=True, check=False, timeout=60
    )
    return f"Apptainer starts no container: {tried.stderr.strip()}" if tried.returncode else None


def make_image(folder: Path) -> Path:
    """Make an image that has mpidist, as this checkout has it; a folder is one for Apptainer, too."""
    image = folder / "image"
    subprocess.run(["cp", "--archive", BASE, image], check=True, timeout=60)
    shutil.copytree(ROOT / "mpidist", image / PACKAGES / "mpidist", ignore=shutil.ignore_patterns("__pycache__"))
    compiling = ["python", "-m", "compileall", "-q", f"/{PACKAGES}/mpidist"]
    subprocess.run(["apptainer", "exec", "--writable", image, *compiling], check=True, timeout=60)
    return image


def site_mpi(folder: Path) -> tuple[Path, Path] | None:
    """A folder that looks like the MPI of a site, and the one that its libraries lie in; None where there is none."""
    libraries = Path(sys.prefix) / "lib"
    # In Python's packages `libmpi.so` is a text for linkers; at a site it is the library.
    numbered = next(iter(sorted(libraries.glob("libmpi.so.*"))), None)
    if numbered is None:
        return None
    place = folder / "mpi"
    (place / "lib").mkdir(parents=True)
    for one in libraries.iterdir():
        if one.name != "libmpi.so":
            (place / "lib" / one.name).symlink_to(one)
    (place / "lib" / "libmpi.so").symlink_to(numbered)
    return place, libraries
