"""The findings of the commands of `mpidist checkpoint` in files, as values for JSON, and as texts for people."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpidist.checkpoint.directory.state import SUFFIX, DirectoryState, candidates, read_state
from mpidist.checkpoint.file.layout import SAVE_COUNTER
from mpidist.checkpoint.reader import CheckpointReader, load_checkpoint
from mpidist.cli.texts import text_of
from mpidist.errors import CheckpointError


def rows_of(directory: str) -> list[dict[str, Any]]:
    """Local. The checkpoints of a directory, the oldest first; what is wrong with one is its "error"."""
    state = read_state(directory, DirectoryState())
    rows = []
    for name in reversed(candidates(directory, state)):
        path = os.path.join(directory, name)
        row: dict[str, Any] = {"path": path, "latest": name == state.latest}
        try:
            row.update(bytes=os.path.getsize(path), written_at=os.path.getmtime(path))
            reader = CheckpointReader(path)
            counter = reader.arrays.get(SAVE_COUNTER)
            row.update(
                arrays=len(reader.arrays), save_counter=None if counter is None else int(counter),
                metadata=reader.metadata,
            )
        except (CheckpointError, OSError) as error:
            row["error"] = text_of(error)
        rows.append(row)
    return rows


def content_of(path: str) -> dict[str, Any]:
    """Local. The content of a checkpoint."""
    reader = load_checkpoint(path)
    arrays = [
        {
            "path": name, "shape": list(array.shape), "dtype": array.type_name,
            "bytes": array.size * array.dtype.itemsize, "replicas": array.replicas,
        }
        for name, array in sorted(reader.arrays.items())
    ]
    return {
        "path": reader.path, "format": reader.format, "file_bytes": os.path.getsize(reader.path), "arrays": arrays,
        "shared": reader.shared, "metadata": reader.metadata,
    }


def differences(first: str, second: str) -> list[dict[str, Any]]:
    """Local. In what two checkpoints differ, one entry for a path; equal checksums count as equal values."""
    one, other = load_checkpoint(first), load_checkpoint(second)
    sums = one.checksums(), other.checksums()
    found = []
    for path in sorted(one.arrays.keys() | other.arrays.keys()):
        its = [_described(reader, path) for reader in (one, other)]
        if None in its:
            found.append({"path": path, "what": "missing", "first": its[0], "second": its[1]})
        elif its[0] != its[1]:
            found.append({"path": path, "what": "type", "first": its[0], "second": its[1]})
        elif sums[0][path] != sums[1][path]:
            found.append({"path": path, "what": "values", "first": its[0], "second": its[1]})
    for alias in sorted(one.shared.keys() | other.shared.keys()):
        places = one.shared.get(alias), other.shared.get(alias)
        if places[0] != places[1]:
            found.append({"path": alias, "what": "shared", "first": places[0], "second": places[1]})
    notes = one.metadata, other.metadata
    for key in sorted(notes[0].keys() | notes[1].keys()):
        texts = [repr(note[key]) if key in note else None for note in notes]
        if texts[0] != texts[1]:
            found.append({"path": key, "what": "metadata", "first": texts[0], "second": texts[1]})
    return found


def verified(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Local. Read files, and all checkpoints of directories; what is wrong with one is its "error"."""
    rows: list[dict[str, Any]] = []
    for path in _files(paths):
        try:
            rows.append({"path": path, "bytes": CheckpointReader(path).verify()})
        except (CheckpointError, OSError) as error:
            rows.append({"path": path, "error": text_of(error)})
    return rows


def _files(paths: Iterable[str]) -> list[str]:
    files = []
    for path in paths:
        if not os.path.isdir(path):
            files.append(path)
            continue
        names = [name for name in os.listdir(path) if name.endswith(SUFFIX)]
        if not names:
            raise FileNotFoundError(f"the directory {path!r} has no checkpoint")
        files += [os.path.join(path, name) for name in sorted(names)]
    return files


def _described(reader: CheckpointReader, path: str) -> str | None:
    array = reader.arrays.get(path)
    if array is None:
        return None
    return f"{array.type_name} {list(array.shape)}" + (f" of {array.replicas} replicas" if array.replicas else "")


def text_of_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Local. The output of `ls`."""
    lines = []
    for row in rows:
        mark = "*" if row["latest"] else " "
        if "error" in row:
            lines.append(f"{mark} {row['path']}  {row['error']}\n")
            continue
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["written_at"]))
        notes = f"  {row['metadata']}" if row["metadata"] else ""
        lines.append(f"{mark} {row['path']}  {written}  {_size(row['bytes'])}  {row['arrays']} arrays{notes}\n")
    return "".join(lines)


def text_of_content(content: Mapping[str, Any]) -> str:
    """Local. The output of `show`."""
    rows = [(one["path"], one["dtype"], str(one["shape"]), _size(one["bytes"])) for one in content["arrays"]]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    lines = [
        f"{path:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:<{widths[2]}}  {size}\n"
        for path, dtype, shape, size in rows
    ]
    lines += [f"{alias} is {path}\n" for alias, path in sorted(content["shared"].items())]
    lines += [f"metadata {name}: {value!r}\n" for name, value in sorted(content["metadata"].items())]
    total = sum(one["bytes"] for one in content["arrays"])
    return "".join(lines) + f"{content['path']}: {len(rows)} arrays, {_size(total)}\n"


def text_of_differences(found: Sequence[Mapping[str, Any]]) -> str:
    """Local. The output of `diff`."""
    lines = []
    for one in found:
        what, path = one["what"], one["path"]
        if what == "values":
            lines.append(f"{path}: values differ ({one['first']})\n")
        else:
            name = f"{what} {path}" if what in ("metadata", "shared") else path
            lines.append(f"{name}: {one['first'] or 'missing'} | {one['second'] or 'missing'}\n")
    return "".join(lines)


def text_of_verified(rows: Sequence[Mapping[str, Any]]) -> str:
    """Local. The output of `verify`."""
    return "".join(
        f"{row['error']}\n" if "error" in row else f"{row['path']}: whole, {_size(row['bytes'])}\n" for row in rows
    )


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
