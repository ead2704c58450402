"""Conversion of checkpoints from and to files of other libraries, each read and written by its own library."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpidist.arrays import AnyArray
from mpidist.checkpoint.directory.state import DirectoryWork
from mpidist.checkpoint.file.layout import OF_ML_DTYPES, Record, join, split
from mpidist.checkpoint.reader import load_checkpoint
from mpidist.checkpoint.transfer import ArrayToWrite, write_checkpoint
from mpidist.cli.checkpoints import formats
from mpidist.comm.group.solo import SoloCommunicator


class _Format(NamedTuple):
    """A kind of file.

    Attributes:
        suffix: The end of its names.
        separator: Stands between the parts of a name.
        read: A function that returns the arrays of a file by name, and notes of what was left out, by name.
        write: Writes arrays by name; gives notes of what was changed.
    """

    suffix: str
    separator: str
    read: Any
    write: Any


FORMATS = (
    _Format(".npz", "/", formats.read_npz, formats.write_npz),
    _Format(".safetensors", ".", formats.read_safetensors, formats.write_safetensors),
    _Format(".pt", ".", formats.read_torch, formats.write_torch),
    _Format(".pth", ".", formats.read_torch, formats.write_torch),
    _Format(".weights.h5", "/", formats.read_keras, formats.write_keras),
)


def convert(source: str, target: str, below: str = "", *, force: bool = False) -> dict[str, Any]:
    """Local. Convert a file to another one; the suffixes say what they are.

    Args:
        source: A checkpoint, a directory of checkpoints, or a file of another library.
        target: A file of another library, or a checkpoint.
        below: The path in the checkpoint that the names of the other file are below.
        force: Whether an existing target is replaced.

    Returns:
        The number of "arrays" and "bytes", and "notes" of what was left out or changed, by name.

    Raises:
        ValueError: Both files are checkpoints, or none is; two arrays would have one name; a library
            refuses one, or is not installed.
        FileExistsError: The target exists.
        OSError, CheckpointError: One cannot be read or written.
    """
    kinds = _format_of(source), _format_of(target)
    if (kinds[0] is None) is (kinds[1] is None):
        suffixes = ", ".join(one.suffix for one in FORMATS)
        raise ValueError(
            f"expected a checkpoint (.h5) and a file of another library ({suffixes}), got {source!r} and {target!r}"
        )
    if os.path.lexists(target) and not force:
        raise FileExistsError(f"{target!r} exists; --force replaces it")
    if kinds[1] is not None:
        arrays, notes = _from_checkpoint(source, below, kinds[1].separator)
        # Readers see the whole file or none.
        temporary = f"{target.removesuffix(kinds[1].suffix)}.{secrets.token_hex(4)}.tmp{kinds[1].suffix}"
        try:
            notes.update(kinds[1].write(temporary, arrays))
            os.replace(temporary, target)
        finally:
            if os.path.lexists(temporary):
                os.unlink(temporary)
    elif kinds[0] is not None:
        arrays, notes = kinds[0].read(source)
        _to_checkpoint(target, arrays, below, kinds[0].separator)
    return {"arrays": len(arrays), "bytes": sum(array.nbytes for array in arrays.values()), "notes": notes}


def _format_of(path: str) -> _Format | None:
    return next((one for one in FORMATS if path.endswith(one.suffix)), None)


def _from_checkpoint(source: str, below: str, separator: str) -> tuple[dict[str, AnyArray], dict[str, str]]:
    reader = load_checkpoint(source)
    reader.verify()
    arrays: dict[str, AnyArray] = {}
    notes: dict[str, str] = {}
    for path, array in sorted(reader.arrays.items()):
        if below and not path.startswith(f"{below}/"):
            continue
        rest = path[len(below) + 1 :] if below else path
        name = rest if separator == "/" else separator.join(split(rest))
        if array.kind or array.dtype.kind == "S":
            notes[path] = f"left out, since it is {array.type_name}, no array of numbers"
        elif name in arrays:
            raise ValueError(f"two arrays of {source!r} have the name {name!r} with {separator!r} between its parts")
        else:
            arrays[name] = array.numpy()
    if not arrays:
        raise ValueError(f"{source!r} has no arrays" + (f" below {below!r}" if below else ""))
    return arrays, notes


def _to_checkpoint(target: str, arrays: Mapping[str, AnyArray], below: str, separator: str) -> None:
    def listed() -> Iterator[ArrayToWrite]:
        for name, array in sorted(arrays.items()):
            path = name if separator == "/" else join(name.split(separator))
            given = f"{below}/{path}" if below else path
            if join(split(given)) != given:
                raise ValueError(f"{name!r} is no path of a checkpoint: {join(name.split('/'))!r} would be one")
            kind = array.dtype if array.dtype.isbuiltin == OF_ML_DTYPES else array.dtype.newbyteorder("=")
            yield ArrayToWrite(Record(given, array.shape, kind), np.ascontiguousarray(array, kind).reshape(array.shape))

    write_checkpoint(SoloCommunicator(), target, list(listed()), {}, DirectoryWork())
