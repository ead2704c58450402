"""The doctor's look at what killed jobs have left in /dev/shm: files of MPICH, which nothing else removes."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from mpidist.cli.doctor.finding import Finding

_FOLDER = Path("/dev/shm")
_NAMES = re.compile(r"mpich_shm_[0-9a-f]+_[0-9]+")
# A job that starts makes its files before all ranks have mapped them.
_LEAST_SECONDS = 600.0
# The PID namespace of the first process, which contains all processes of the machine (PROC_PID_INIT_INO of Linux).
_FIRST_NAMESPACE = "pid:[4026531836]"
_SHOWN = 3
_MILLION = 1e6


def look_at_leftovers(
    folder: Path = _FOLDER, processes: Path = Path("/proc"), *, clean: bool = False, now: float | None = None
) -> Iterator[Finding]:
    """Local. Look for files that killed jobs of MPICH have left, and remove those that certainly no process uses.

    Args:
        folder: The folder of the files.
        processes: A directory of the form of /proc.
        clean: Whether to remove them: the user's own, older than ten minutes, that no process has mapped.
        now: The time, in seconds since 1970.
    """
    files = {path: status for path in _named(folder) if (status := _status(path)) is not None}
    if not files:
        return
    now = time.time() if now is None else now
    mapped, sees_all = _mapped(processes, folder), _namespace(processes) == _FIRST_NAMESPACE
    left: list[Path] = []
    kept: dict[str, list[Path]] = {}
    for path, status in files.items():
        reason = (
            "in use" if path.name in mapped
            else "not a plain file" if not stat.S_ISREG(status.st_mode)
            else "of another user" if status.st_uid != os.getuid()
            else "younger than 10 minutes" if now - status.st_mtime < _LEAST_SECONDS
            else "perhaps in use outside this PID namespace, whose processes are all that can be seen" if not sees_all
            else ""
        )
        kept.setdefault(reason, []).append(path) if reason else left.append(path)
    removed = [path for path in left if clean and _remove(path)]
    data: dict[str, object] = {
        "removed": _names(removed), "left": _names(path for path in left if path not in removed),
        "kept": {reason: _names(paths) for reason, paths in kept.items()},
    }
    yield from _findings(folder, left, removed, kept, sum(files[path].st_size for path in left), data)


def _findings(
    folder: Path, left: list[Path], removed: list[Path], kept: dict[str, list[Path]], size: int,
    data: dict[str, object],
) -> Iterator[Finding]:
    others = "; ".join(f"{_listed(paths)}: {reason}" for reason, paths in kept.items())
    rest = f"; not removed: {others}" if others else ""
    subject = "left by jobs"
    if removed:
        text = f"removed {_listed(removed)} from {folder}, {size / _MILLION:.0f} MB{rest}"
        yield Finding(subject, "ok", text, data=data)
    elif left:
        text = f"killed jobs of MPICH have left {_listed(left)} in {folder}, {size / _MILLION:.0f} MB{rest}"
        yield Finding(subject, "note", text, "mpidist doctor --clean", data)
    elif set(kept) - {"in use"}:
        yield Finding(subject, "note", f"files of MPICH in {folder}: {others}", data=data)


def _named(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if _NAMES.fullmatch(path.name))
    except OSError:
        return []


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        # Its job has ended meanwhile.
        return None


def _mapped(processes: Path, folder: Path) -> set[str]:
    """The names of files in the folder that a process has mapped, as far as this user may read that."""
    found: set[str] = set()
    for maps in processes.glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            for line in maps.read_text(errors="replace").splitlines():
                if f"{folder}/" in line and "(deleted)" not in line:
                    found.add(Path(line.split()[-1]).name)
    return found


def _namespace(processes: Path) -> str:
    try:
        return os.readlink(processes / "self/ns/pid")
    except OSError:
        return ""


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _names(paths: Iterable[Path]) -> list[str]:
    return [path.name for path in paths]


def _listed(paths: list[Path]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return f"{len(paths)} file(s) ({', '.join(_names(paths[:_SHOWN]))}{more})"
