"""Lists of files, and which of them a rank reads: rewriting a pipeline for the policies FILE and HINT."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from mpidist.data.items.stream import INFINITE, Epoch, Items, Rows, Seed, Shard, Stream
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.pipeline.places import Interleave

SHARD_HINT = -1


@dataclass(frozen=True)
class FileRows(Rows):
    """The row numbers of a list of files.

    Attributes:
        digest: Tells lists apart.
    """

    digest: str = ""


@dataclass(frozen=True)
class FileShard(Shard):
    """A rank's files; the order of the list is one and the same on all ranks, so that each file is read once."""

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. Seeks as its parent does."""
        return super().blocks(epoch._replace(salt=0), start)


@dataclass(frozen=True)
class HintedShard:
    """Where the policy HINT puts `shard(number of pipelines, number of this one)`; under other policies, nothing."""

    parent: Stream

    def cardinality(self) -> int:
        """Local. The parent's."""
        return self.parent.cardinality()

    def blocks(self, epoch: Epoch, start: int) -> Iterator[Items]:
        """Local. The parent's."""
        return self.parent.blocks(epoch, start)

    def seeds(self) -> list[Seed]:
        """Local. Those of its parent."""
        return self.parent.seeds()


def resolve(files: str | os.PathLike[str] | Iterable[Any]) -> list[str]:
    """Local. The names of files, of a pattern or several, or of a list.

    Names that a pattern matches are sorted, since file systems give them in any order; a list keeps its order.

    Raises:
        FileNotFoundError: A pattern matches nothing, or the list is empty.
    """
    given = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    names: list[str] = []
    for one in (os.fspath(name) for name in given):
        found = sorted(glob.glob(one, recursive=True)) if glob.has_magic(one) else [one]
        if not found:
            raise FileNotFoundError(2, f"list_files: no file matches the pattern, on this host in {os.getcwd()}", one)
        names += [str(name) for name in found]
    if not names:
        raise FileNotFoundError(2, "list_files: expected a pattern or at least one file name, got an empty list")
    return names


def file_rows(names: list[str]) -> FileRows:
    """Local. The stream of a list of files."""
    return FileRows(len(names), hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()[:16])


def file_count(pipeline: Pipeline) -> int | None:
    """Local. How many files, at least, each of its readers can be shared out by; INFINITE; None: it reads no files."""
    counts: list[int] = []

    def count(stream: Stream) -> Stream:
        counts.append(stream.cardinality())
        return stream

    _on_files(pipeline, count)
    return min((one for one in counts if one != INFINITE), default=INFINITE) if counts else None


def file_digests(pipeline: Pipeline) -> tuple[str, ...]:
    """Local. What tells its lists of files from those of another rank."""
    found: list[str] = []

    def look(node: Any) -> Any:
        if isinstance(node, FileRows):
            found.append(node.digest)
        return None

    _rewrite(pipeline, look)
    return tuple(found)


def shard_files(pipeline: Pipeline, parts: int, index: int) -> Pipeline:
    """Local. The pipeline over the files number i with i mod `parts` = `index`, as its readers get them."""
    return _on_files(pipeline, lambda stream: FileShard(stream, parts, index))


def has_hint(pipeline: Pipeline) -> bool:
    """Local. Whether the pipeline has a `shard(SHARD_HINT, SHARD_HINT)`."""
    found = []

    def look(node: Any) -> Any:
        if isinstance(node, HintedShard):
            found.append(node)
        return None

    _rewrite(pipeline, look)
    return bool(found)


def shard_hints(pipeline: Pipeline, parts: int, index: int) -> Pipeline:
    """Local. The pipeline with its hints replaced by real shards."""

    def fill(node: Any) -> Any:
        # `FileShard` shards an order that is the same on all ranks, which is what a hint needs, too.
        return FileShard(_rewrite(node.parent, fill), parts, index) if isinstance(node, HintedShard) else None

    result: Pipeline = _rewrite(pipeline, fill)
    return result


def _on_files(pipeline: Pipeline, change: Callable[[Stream], Stream]) -> Pipeline:
    """Change the streams that give readers their files: what comes before the reader counts, what comes after not."""

    def visit(node: Any) -> Any:
        if isinstance(node, FileRows):
            return change(node)
        if not isinstance(node, Interleave) or not _reads_names(node.pipeline):
            return None
        return replace(node, pipeline=replace(node.pipeline, stream=change(node.pipeline.stream)))

    result: Pipeline = _rewrite(pipeline, visit)
    return result


def _reads_names(pipeline: Pipeline) -> bool:
    """Whether its elements come of a list of files with no reader in between."""
    names: list[bool] = []

    def look(node: Any) -> Any:
        if isinstance(node, (Interleave, FileRows)):
            names.append(isinstance(node, FileRows))
            return node
        return None

    _rewrite(pipeline, look)
    return bool(names) and all(names)


def _rewrite(node: Any, change: Callable[[Any], Any]) -> Any:
    """A pipeline or stream with some nodes changed: `change` gives another node, or None to look further inside."""
    changed = change(node)
    if changed is not None:
        return changed
    updates = {}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if isinstance(value, tuple) and value and isinstance(value[0], Pipeline):
            new: Any = tuple(_rewrite(one, change) for one in value)
            is_changed = any(a is not b for a, b in zip(new, value, strict=True))
        elif isinstance(value, Pipeline) or (dataclasses.is_dataclass(value) and hasattr(value, "blocks")):
            new = _rewrite(value, change)
            is_changed = new is not value
        else:
            continue
        if is_changed:
            updates[field.name] = new
    return replace(node, **updates) if updates else node
