"""The layout of a checkpoint: the names of its datasets, and the bytes that each rank handles; pure.

A dataset's path is the attribute path of its variable, `model/layers/0/kernel`. A part of a path stands as it is,
except for text that HDF5 cannot hold: `%`, `/`, NUL, a leading `.`, a part called `_mpidist` and invalid Unicode are
percent-encoded as in URLs (`a/b` becomes `a%2Fb`, `.x` becomes `%2Ex`), and an empty part becomes a lone `%`.

A dataset is cut into pieces of 1 MiB, each with its checksum. Where every replica has a value of its own (ON_READ
with aggregation NONE), the dataset has the replicas as its first dimension. Its pieces end where a replica's component
ends, so that each rank has all bytes of its checksums. Where one page holds bytes of several components, the rank of
the first component writes it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import numpy as np

from mpidist.errors import CheckpointError

FORMAT = 1
PIECE_BYTES = 1 << 20
# Two hosts must never write into the same page of a file at the same time. Network file systems cache whole pages: the
# host that writes its page back last overwrites the other's bytes with old ones, and no call reports an error.
PAGE_BYTES = 4096
# The group of the library's own datasets.
OWN_GROUP = "_mpidist"
SAVE_COUNTER = "save_counter"

_RESERVED = re.compile("[%/\x00\ud800-\udfff]|^\\.")


def escape(part: str) -> str:
    """Local. Turn one part of an attribute path into the name of an HDF5 link; see the module."""
    if not part:
        return "%"
    if part == OWN_GROUP:
        return "%5F" + part[1:]
    return _RESERVED.sub(
        lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass")), part
    )


def unescape(name: str) -> str:
    """Local. Undo `escape`."""
    return "" if name == "%" else unquote_to_bytes(name).decode("utf-8", "surrogatepass")


def join(parts: Iterable[object]) -> str:
    """Local. Make the path of a dataset from the attribute names, keys and indices that lead to it."""
    return "/".join(map(escape, map(str, parts)))


def split(path: str) -> tuple[str, ...]:
    """Local. Undo `join`; all parts come back as strings."""
    return tuple(unescape(name) for name in path.split("/")) if path else ()


@dataclass(frozen=True)
class Record:
    """One dataset: its place in the file's tree, and its sizes.

    Args:
        path: Its escaped path.
        shape: The full, global shape.
        dtype: Of NumPy; a byte string type stands for one text in UTF-8.
        replicas: Number of replicas whose components the first dimension holds; 0 where all share one value.

    Attributes:
        size: Number of elements.
        nbytes: Number of bytes.
        component_bytes: Number of bytes of each component; of the whole dataset, where there is one value.
        component_pieces: Number of pieces of each component; all but the last have `PIECE_BYTES`.
        piece_count: Number of pieces.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    replicas: int = 0
    size: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)
    component_bytes: int = field(init=False, repr=False, compare=False)
    component_pieces: int = field(init=False, repr=False, compare=False)
    piece_count: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        size = math.prod(self.shape)
        nbytes = size * self.dtype.itemsize
        components = max(1, self.replicas)
        component_bytes = nbytes // components
        component_pieces = -(-component_bytes // PIECE_BYTES)
        # The class is frozen: its attributes are set once, here.
        vars(self).update(
            size=size, nbytes=nbytes, component_bytes=component_bytes, component_pieces=component_pieces,
            piece_count=components * component_pieces,
        )

    def piece(self, number: int) -> tuple[int, int]:
        """Local. Give the first byte of a piece and the one behind its last."""
        component, place = divmod(number, self.component_pieces)
        first = component * self.component_bytes
        start, stop = place * PIECE_BYTES, min((place + 1) * PIECE_BYTES, self.component_bytes)
        return first + start, first + stop


class Piece(NamedTuple):
    """Bytes of a dataset that have one checksum.

    Attributes:
        number: Place of the checksum among those of all datasets.
        start: First byte, counted from the beginning of the dataset.
        stop: The byte behind the last.
    """

    number: int
    start: int
    stop: int


def deal(records: Iterable[Record], rank: int, size: int) -> list[list[Piece]]:
    """Local. Deal the pieces of all datasets out to the ranks, each piece to one rank.

    Args:
        records: The datasets, in the order of their checksums.
        rank: The rank whose pieces are wanted.
        size: Number of ranks.

    Returns:
        For each dataset the pieces that `rank` writes, or checks.
    """
    dealt: list[list[Piece]] = []
    first = 0
    for number, record in enumerate(records):
        pieces: list[Piece] = []
        for piece in share(record, number, rank, size):
            pieces.append(Piece(first + piece, *record.piece(piece)))
        dealt.append(pieces)
        first += record.piece_count
    return dealt


def share(record: Record, number: int, rank: int, size: int) -> range:
    """Local. Choose the pieces of one dataset that `rank` writes, or checks.

    Args:
        record: The dataset.
        number: Its place among the datasets. Where there are fewer pieces than ranks, the ranks take turns.
        rank: The rank whose pieces are wanted.
        size: Number of ranks.

    Returns:
        The numbers of consecutive pieces. Where there is one component for each rank, they are its own.
    """
    if record.replicas == size:
        return range(rank * record.component_pieces, (rank + 1) * record.component_pieces)
    if record.nbytes < PAGE_BYTES:
        # Rank 0 writes the small datasets, as `hdf5.create` puts several of them into one page.
        return range(record.piece_count if rank == 0 else 0)
    turn = (rank - number) % size
    return range(record.piece_count * turn // size, record.piece_count * (turn + 1) // size)


def component_share(record: Record, rank: int) -> tuple[int, int]:
    """Local. Choose the bytes of a dataset of components that `rank` writes: whole pages, each page one rank's.

    They begin in the rank's own component. They may end in the component of a later rank, by less than a page.

    Returns:
        The first byte and the one behind the last. They are equal where the pages of earlier ranks hold the whole
        component.
    """
    start, stop = (
        min(-(-component * record.component_bytes // PAGE_BYTES) * PAGE_BYTES, record.nbytes)
        for component in (rank, rank + 1)
    )
    return start, stop


def encode_index(records: Sequence[Record], shared: Mapping[str, str]) -> bytes:
    """Local. Make the text that a checkpoint keeps about its datasets.

    Args:
        records: One per dataset, in the order of their checksums.
        shared: The other paths of objects that several paths lead to, each with the path under which it is stored.

    Returns:
        JSON in ASCII.
    """
    arrays = []
    for record in records:
        array = {"path": record.path, "shape": list(record.shape), "dtype": record.dtype.str}
        arrays.append({**array, "replicas": record.replicas} if record.replicas else array)
    return json.dumps({"format": FORMAT, "arrays": arrays, "shared": dict(shared)}).encode("ascii")


def decode_index(text: bytes) -> tuple[list[Record], dict[str, str]]:
    """Local. Undo `encode_index`.

    Raises:
        CheckpointError: A later version of mpidist wrote it.
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
    """Local. Find the path under which something is stored, from any path that leads to it.

    Args:
        path: Parts joined by `/`; it may pass through shared objects, also in circles.
        shared: As `encode_index` takes it.

    Returns:
        The stored path; `path` itself where nothing on the way is shared.
    """
    way = ""
    for part in path.split("/"):
        way = f"{way}/{part}" if way else part
        way = shared.get(way, way)
    return way
