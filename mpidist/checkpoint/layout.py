"""How a checkpoint is laid out: the names of its datasets, and which rank handles which bytes; pure.

A dataset's path is the attribute path of its variable, `model/layers/0/kernel`. A part of a path stands as it is,
except for what HDF5 cannot hold: `%`, `/`, NUL, a leading `.`, a part called `_mpidist` and what is not valid Unicode
are percent-encoded as in URLs (`a/b` becomes `a%2Fb`, `.x` becomes `%2Ex`), and an empty part becomes a lone `%`.

The dataset of a variable of which every replica has a value of its own (ON_READ with aggregation NONE) has the
replicas as its first dimension. Its pieces end where a replica's component ends, so that each rank has the bytes of
its checksums; bytes of one page that belong to several components are written by the rank of the first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np

from mpidist.errors import CheckpointError

FORMAT = 1
PIECE_BYTES = 1 << 20
# Two hosts must not write into one page of a file at the same time: network file systems then lose bytes.
PAGE_BYTES = 4096
# The group of the library's own datasets.
OWN_GROUP = "_mpidist"
SAVE_COUNTER = "save_counter"

_RESERVED = re.compile("[%/\x00\ud800-\udfff]|^\\.")


def escape(part: str) -> str:
    """Local. One part of an attribute path as the name of an HDF5 link; see the module."""
    if not part:
        return "%"
    if part == OWN_GROUP:
        return "%5F" + part[1:]
    return _RESERVED.sub(
        lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass")), part
    )


def unescape(name: str) -> str:
    """Local. The part that `escape` made `name` of."""
    return "" if name == "%" else unquote_to_bytes(name).decode("utf-8", "surrogatepass")


def join(parts: Iterable[object]) -> str:
    """Local. The path of a dataset from the attribute names, keys and indices that lead to it."""
    return "/".join(escape(str(part)) for part in parts)


def split(path: str) -> tuple[str, ...]:
    """Local. The parts that `join` made `path` of, all of them as strings."""
    return tuple(unescape(name) for name in path.split("/")) if path else ()


@dataclass(frozen=True)
class Record:
    """What one dataset holds.

    Attributes:
        path: Its escaped path.
        shape: The full, global shape.
        dtype: Of NumPy; a byte string type stands for one text in UTF-8.
        replicas: Of how many replicas the first dimension holds the components; 0 where all share one value.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    replicas: int = 0

    @property
    def size(self) -> int:
        """Local. Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Local. Number of bytes."""
        return self.size * self.dtype.itemsize

    @property
    def component_bytes(self) -> int:
        """Local. Number of bytes of each component; of all, where there is one value."""
        return self.nbytes // max(1, self.replicas)

    @property
    def component_pieces(self) -> int:
        """Local. Number of pieces of each component; all but the last have `PIECE_BYTES`."""
        return -(-self.component_bytes // PIECE_BYTES)

    @property
    def piece_count(self) -> int:
        """Local. Number of pieces."""
        return max(1, self.replicas) * self.component_pieces

    def piece(self, number: int) -> tuple[int, int]:
        """Local. First byte of a piece and the one behind its last."""
        component, place = divmod(number, self.component_pieces)
        first = component * self.component_bytes
        start, stop = place * PIECE_BYTES, min((place + 1) * PIECE_BYTES, self.component_bytes)
        return first + start, first + stop


def share(record: Record, number: int, rank: int, size: int) -> range:
    """Local. The pieces of a dataset that `rank` writes, or checks; each piece is one rank's.

    Args:
        record: The dataset.
        number: Its place among the datasets: where there are fewer pieces than ranks, they are dealt in turn.
        rank: Whose share.
        size: Number of ranks.

    Returns:
        The numbers of consecutive pieces.
    """
    count = record.piece_count
    if record.nbytes < PAGE_BYTES:
        return range(count if rank == 0 else 0)
    turn = (rank - number) % size
    return range(count * turn // size, count * (turn + 1) // size)


def component_share(record: Record, rank: int) -> tuple[int, int]:
    """Local. The bytes of a dataset of components that `rank` writes: whole pages, each one rank's.

    They begin in the rank's own component, and may end in one of the next ranks', by less than a page.

    Returns:
        First byte and the one behind the last; equal where pages of earlier ranks hold the whole component.
    """
    start, stop = (
        min(-(-component * record.component_bytes // PAGE_BYTES) * PAGE_BYTES, record.nbytes)
        for component in (rank, rank + 1)
    )
    return start, stop


def first_pieces(records: Sequence[Record]) -> list[int]:
    """Local. Place of each dataset's first checksum in the list of all checksums."""
    return [0, *np.cumsum([record.piece_count for record in records], dtype=np.int64).tolist()]


def encode_index(records: Sequence[Record], shared: Mapping[str, str]) -> bytes:
    """Local. The text that a checkpoint keeps about its datasets.

    Args:
        records: One per dataset, in the order of their checksums.
        shared: Further paths of objects that are reachable by several, each with the path under which it is stored.

    Returns:
        JSON in ASCII.
    """
    arrays = [
        {
            "path": r.path, "shape": list(r.shape), "dtype": r.dtype.str,
            **({"replicas": r.replicas} if r.replicas else {}),
        }
        for r in records
    ]
    return json.dumps({"format": FORMAT, "arrays": arrays, "shared": dict(shared)}).encode("ascii")


def decode_index(text: bytes) -> tuple[list[Record], dict[str, str]]:
    """Local. What `encode_index` was given.

    Raises:
        CheckpointError: A format of a later version.
    """
    content = json.loads(text)
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"expected a checkpoint of format {FORMAT}, got format {content['format']!r}; update mpidist to read it"
        )
    records = [
        Record(a["path"], tuple(a["shape"]), np.dtype(a["dtype"]), a.get("replicas", 0)) for a in content["arrays"]
    ]
    return records, content["shared"]


def resolve(path: str, shared: Mapping[str, str]) -> str:
    """Local. The path under which something is stored, from any path that leads to it.

    Args:
        path: Parts joined by `/`; it may pass through shared objects, also in circles.
        shared: Of `encode_index`.

    Returns:
        The path, itself where nothing on the way is shared.
    """
    way = ""
    for part in path.split("/"):
        way = f"{way}/{part}" if way else part
        way = shared.get(way, way)
    return way
