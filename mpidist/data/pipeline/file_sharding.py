"""Sharding of files: the policies FILE and HINT rewrite a pipeline so that a rank reads its own files only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mpidist.data.items.files import FileRows, FileShard, HintedShard
from mpidist.data.items.stream import INFINITE, Elements, RowNumbers, Stream
from mpidist.data.pipeline.pipeline import Pipeline
from mpidist.data.pipeline.places import Interleave


def file_count(pipeline: Pipeline) -> int | None:
    """Local. The number of files of the pipeline; of several lists, that of the shortest.

    Returns:
        The number, or INFINITE, or UNKNOWN; None where the pipeline reads no files.
    """
    counts: list[int] = []

    def count(stream: Stream) -> Stream:
        counts.append(stream.cardinality())
        return stream

    _on_files(pipeline, count)
    return min((one for one in counts if one != INFINITE), default=INFINITE) if counts else None


def file_digests(pipeline: Pipeline) -> tuple[str, ...]:
    """Local. The digests of the pipeline's lists of files, to compare them between ranks."""
    found: list[str] = []

    def look(node: Any) -> Any:
        if isinstance(node, FileRows):
            found.append(node.digest)
        return None

    _rewrite(pipeline, look)
    return tuple(found)


def is_all_of_files(pipeline: Pipeline, pairs: type[Any]) -> bool:
    """Local. Whether all examples are of files that ranks can share without losing, repeating or re-pairing any.

    Args:
        pipeline: The pipeline.
        pairs: The type of streams that read several pipelines at the same pace. These keep their pairs where they read
            the same files.
    """
    others: list[Any] = []

    def look(node: Any) -> Any:
        if isinstance(node, FileRows) or (isinstance(node, Interleave) and _reads_names(node.pipeline)):
            return node
        # Each reader would have all of other rows, and would begin with the first.
        if isinstance(node, (RowNumbers, Elements)) or (
            isinstance(node, pairs) and len(set(map(file_digests, node.pipelines))) > 1
        ):
            others.append(node)
        return None

    _rewrite(pipeline, look)
    return not others


def shard_files(pipeline: Pipeline, readers: int, reader: int) -> Pipeline:
    """Local. The pipeline over the files of one of several readers: every `readers`-th, beginning with `reader`."""
    return _on_files(pipeline, lambda stream: FileShard(stream, readers, reader))


def has_hint(pipeline: Pipeline) -> bool:
    """Local. Whether the pipeline has a `shard(SHARD_HINT, SHARD_HINT)`."""
    found = []

    def look(node: Any) -> Any:
        if isinstance(node, HintedShard):
            found.append(node)
        return None

    _rewrite(pipeline, look)
    return bool(found)


def shard_hints(pipeline: Pipeline, readers: int, reader: int) -> Pipeline:
    """Local. The pipeline with each hint replaced by the shard of one of several readers."""

    def fill(node: Any) -> Any:
        # `FileShard` shards an order that is the same on all ranks; a hint needs that, too.
        return FileShard(_rewrite(node.parent, fill), readers, reader) if isinstance(node, HintedShard) else None

    result: Pipeline = _rewrite(pipeline, fill)
    return result


def _on_files(pipeline: Pipeline, change: Callable[[Stream], Stream]) -> Pipeline:
    """Change the streams that hand file names to `interleave`, or that are lists of files themselves.

    The stream in front of `interleave` is changed, with all steps on the names: a `shuffle` or `take` of names comes
    before the sharding, as the user wrote it.
    """

    def visit(node: Any) -> Any:
        if isinstance(node, FileRows):
            return change(node)
        if not isinstance(node, Interleave) or not _reads_names(node.pipeline):
            return None
        return replace(node, pipeline=replace(node.pipeline, stream=change(node.pipeline.stream)))

    result: Pipeline = _rewrite(pipeline, visit)
    return result


def _reads_names(pipeline: Pipeline) -> bool:
    """Whether the elements are file names: they come from a list of files, and nothing has opened these yet."""
    names: list[bool] = []

    def look(node: Any) -> Any:
        if isinstance(node, (Interleave, FileRows)):
            names.append(isinstance(node, FileRows))
            return node
        return None

    _rewrite(pipeline, look)
    return bool(names) and all(names)


def _rewrite(node: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild a pipeline or stream with some nodes changed.

    `change` returns another node, or None to look further inside. Nodes without a change are kept, not copied: their
    caches and seeds stay shared with the original.
    """
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
