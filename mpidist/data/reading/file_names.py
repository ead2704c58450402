"""Names of files: patterns and lists as the user gives them, resolved to a list of names."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from typing import Any

from mpidist.arguments import described


def resolve_file_names(files: str | os.PathLike[str] | Iterable[Any]) -> list[str]:
    """Local. The names of files, given by a name, a pattern, or a list of names and patterns.

    The matches of a pattern are sorted: file systems list names in any order, and ranks on different hosts would
    otherwise have different lists. A list keeps its order. A name under which there is a file is that file's, and no
    pattern: `[1].npy` is.

    Raises:
        FileNotFoundError: A pattern matches nothing, or the list is empty.
        TypeError: `files`, or an entry of it, is no name.
    """
    given = [files] if not isinstance(files, Iterable) or isinstance(files, (str, os.PathLike)) else list(files)
    for one in given:
        if not isinstance(one, (str, os.PathLike)):
            raise TypeError(
                f"list_files: expected a file name, a pattern or a list of them, got {described(one)}"
            )
    names: list[str] = []
    for one in (os.fspath(name) for name in given):
        is_pattern = glob.has_magic(one) and not os.path.lexists(one)
        found = sorted(glob.glob(one, recursive=True)) if is_pattern else [one]
        if not found:
            raise FileNotFoundError(
                2, f"list_files: no file matches the pattern on this host, in the directory {os.getcwd()}", one
            )
        names += [str(name) for name in found]
    if not names:
        raise FileNotFoundError(2, "list_files: expected a pattern or at least one file name, got an empty list")
    return names
