"""The layout of a checkpoint: the names of its datasets, and the bytes that each rank handles; pure.

A dataset's path is the attribute path of its variable, `model/layers/0/kernel`. A part of a path is unchanged,
except for text that HDF5 cannot hold: `%`, `/`, NUL, a leading `.`, a part called `_mpidist` and invalid Unicode are
percent-encoded as in URLs (`a/b` becomes `a%2Fb`, `.x` becomes `%2Ex`), and an empty part becomes a lone `%`.

A dataset is cut into pieces of 1 MiB, each with its checksum. Where every replica has a value of its own (ON_READ
with aggregation NONE), the dataset has the replicas as its first dimension, and its pieces end where a replica's
component ends.

Where each rank can read only a part of a dataset, it writes this part: a component, or a shard. Where one page holds
bytes of several parts, the rank of the first one writes it, and the others hand their bytes over. Where one piece does,
each rank has the checksum of its part of the piece, and these are joined.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

import numpy as np

from mpidist.comm.arithmetic.combine import named_dtype
from mpidist.errors import CheckpointError, DamagedCheckpointError, UnavailableError

FORMAT = 3
FORMATS = (1, 2, 3)
PIECE_BYTES = 1 << 20
# Two hosts must never write into the same page of a file at the same time. Network file systems cache whole pages: the
# host that writes its page back last overwrites the other's bytes with old ones, and no call reports an error.
PAGE_BYTES = 4096
# The group of the library's own datasets.
OWN_GROUP = "_mpidist"
SAVE_COUNTER = "save_counter"
# The program's own notes about a checkpoint: a text in JSON.
METADATA = f"{OWN_GROUP}/metadata"
# `isbuiltin` of a dtype that another package adds to NumPy: bfloat16 and float8, which have the kind V or f.
OF_ML_DTYPES = 2
# The value that a dataset of bytes, or of texts, holds; see `Record`.
TEXT, BYTES, NONE = "text", "bytes", "none"

# The parts of a dataset that the ranks can read: part i has the bytes [bounds[i], bounds[i + 1]). It begins with 0 and
# ends with the number of bytes.
Bounds = tuple[int, ...]
# The rank of each part; None: part r is rank r's. A rank may have several parts, or none. Part 0 is rank 0's, since it
# writes all of a small dataset.
Owners = tuple[int, ...] | None

_RESERVED = re.compile("[%/\x00\ud800-\udfff]|^\\.")


def escape(part: str) -> str:
    """Local. Turn one part of an attribute path into the name of an HDF5 link; see the module."""
    if part == OWN_GROUP:
        return "%5F" + part[1:]
    if not part:
        return "%"
    return _RESERVED.sub(
        lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode("utf-8", "surrogatepass")), part
    )


def unescape(name: str) -> str:
    """Local. Undo `escape`."""
    return "" if name == "%" else unquote_to_bytes(name).decode("utf-8", "surrogatepass")


def join(parts: Iterable[object]) -> str:
    """Local. Make the path of a dataset from the attribute names, keys and indices that lead to it."""
    names = []
    for part in parts:
        name = str(part)
        # Most are names or numbers.
        is_plain = (name.isidentifier() or name.isdecimal()) and name != OWN_GROUP
        names.append(name if is_plain else escape(name))
    return "/".join(names)


def split(path: str) -> tuple[str, ...]:
    """Local. Undo `join`; all parts come back as strings."""
    if "%" not in path:
        return tuple(path.split("/")) if path else ()
    return tuple(map(unescape, path.split("/")))


@dataclass(frozen=True, init=False)
class Record:
    """One dataset: its place in the file's tree, and its sizes.

    Args:
        path: Its escaped path.
        shape: The full, global shape.
        dtype: The dtype of NumPy; a byte string type is that of texts in UTF-8.
        replicas: Number of replicas whose components the first dimension holds; 0 where all share one value.
        kind: The value that the bytes hold where that is no array of numbers: `TEXT` for a text that no byte
            string type keeps (it ends with NUL, or is no valid Unicode), `BYTES` for bytes, `NONE` for None. The name
            of the dtype where `dtype` is that of its bits, since this Python lacks ml_dtypes.

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
    kind: str = ""
    size: int = field(init=False, repr=False, compare=False)
    nbytes: int = field(init=False, repr=False, compare=False)
    component_bytes: int = field(init=False, repr=False, compare=False)
    component_pieces: int = field(init=False, repr=False, compare=False)
    piece_count: int = field(init=False, repr=False, compare=False)

    # A frozen dataclass's own would set attribute after attribute by a call each, and there may be 10,000 datasets.
    def __init__(
        self, path: str, shape: tuple[int, ...], dtype: np.dtype[Any], replicas: int = 0, kind: str = ""
    ) -> None:
        size = math.prod(shape)
        nbytes = size * dtype.itemsize
        components = replicas or 1
        component_bytes = nbytes // components
        component_pieces = -(-component_bytes // PIECE_BYTES)
        vars(self).update(
            path=path, shape=shape, dtype=dtype, replicas=replicas, kind=kind, size=size, nbytes=nbytes,
            component_bytes=component_bytes, component_pieces=component_pieces,
            piece_count=components * component_pieces,
        )

    def __reduce__(self) -> tuple[type[Record], tuple[Any, ...]]:
        """Local. The ranks of a restore get the records of the first one."""
        return Record, (self.path, self.shape, self.dtype, self.replicas, self.kind)

    @property
    def type_name(self) -> str:
        """Local. The kind, or the name of the dtype, for people."""
        return self.kind or (TEXT if self.dtype.kind == "S" else self.dtype.name)

    def piece(self, number: int) -> tuple[int, int]:
        """Local. The first byte of a piece and the one after its last."""
        component, place = divmod(number, self.component_pieces)
        first = component * self.component_bytes
        start, stop = place * PIECE_BYTES, min((place + 1) * PIECE_BYTES, self.component_bytes)
        return first + start, first + stop

    def piece_at(self, byte: int) -> int:
        """Local. The number of the piece that has a byte."""
        component, place = divmod(byte, self.component_bytes)
        return component * self.component_pieces + place // PIECE_BYTES


class Piece(NamedTuple):
    """Bytes of a dataset that have one checksum.

    Attributes:
        number: Place of the checksum among those of all datasets.
        start: First byte, counted from the beginning of the dataset.
        stop: The byte after the last.
    """

    number: int
    start: int
    stop: int


def deal(
    records: Iterable[Record], rank: int, size: int, bounds: Sequence[Bounds | None] | None = None,
    owners: Sequence[Owners] | None = None,
) -> list[list[Piece]]:
    """Local. Deal the pieces of all datasets out to the ranks, each piece to one rank, or in parts to several.

    Args:
        records: The datasets, in the order of their checksums.
        rank: The rank whose pieces are wanted.
        size: Number of ranks.
        bounds: For each dataset the parts that the ranks must take, None where any rank can take any piece.
        owners: For each dataset the ranks of its parts.

    Returns:
        For each dataset the pieces that `rank` writes, or checks; with `bounds` its parts of pieces, part by part.
    """
    dealt: list[list[Piece]] = []
    first = 0
    for number, record in enumerate(records):
        own = None if bounds is None else bounds[number]
        parts = [rank] if own is None or owners is None else parts_of(owners[number], rank)
        pieces: list[Piece] = []
        for part in parts:
            begin, end = (0, record.nbytes) if own is None else (own[part], own[part + 1])
            if own is None and not record.replicas and record.nbytes < PAGE_BYTES:
                # See `share`.
                numbers = range(record.piece_count if rank == 0 else 0)
            elif own is None or record.replicas:
                numbers = share(record, number, rank, size)
            else:
                numbers = range(begin // PIECE_BYTES, -(-end // PIECE_BYTES) if begin < end else 0)
            for piece in numbers:
                # Most are small.
                start, stop = (0, record.nbytes) if record.piece_count == 1 else record.piece(piece)
                pieces.append(Piece(first + piece, max(start, begin), min(stop, end)))
        dealt.append(pieces)
        first += record.piece_count
    return dealt


def parts_of(owners: Owners, rank: int) -> list[int]:
    """Local. The numbers of the parts of a rank."""
    return [rank] if owners is None else [part for part, owner in enumerate(owners) if owner == rank]


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


def page_share(bounds: Bounds, part: int) -> tuple[int, int]:
    """Local. Choose the bytes of a dataset that are written with a part: each page is written by one rank.

    They may end in a later part, by less than a page.

    Args:
        bounds: The parts.
        part: The number of the part.

    Returns:
        The first byte and the one after the last. They are equal where the pages of earlier parts hold the whole part.
    """
    if bounds[-1] < PAGE_BYTES:
        # Rank 0 writes the small datasets, as `share` says, also where other ranks could read them.
        return (0 if part == 0 else bounds[-1]), bounds[-1]
    start, stop = (
        min(-(-edge // PAGE_BYTES) * PAGE_BYTES, bounds[-1]) for edge in (bounds[part], bounds[part + 1])
    )
    return start, stop


@cache
def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Local. The dtype of a dataset in the file: of those of ml_dtypes, which HDF5 lacks, it holds the bits."""
    return np.dtype(f"<u{dtype.itemsize}") if dtype.isbuiltin == OF_ML_DTYPES else dtype


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
        dtype = record.dtype.name if record.dtype.isbuiltin == OF_ML_DTYPES else record.dtype.str
        array = {"path": record.path, "shape": list(record.shape), "dtype": dtype}
        if record.replicas:
            array["replicas"] = record.replicas
        if record.kind:
            array["kind"] = record.kind
        arrays.append(array)
    return json.dumps({"format": FORMAT, "arrays": arrays, "shared": dict(shared)}).encode("ascii")


def decode_index(text: bytes) -> tuple[list[Record], dict[str, str], int]:
    """Local. Undo `encode_index`.

    Returns:
        The datasets, the shared paths and the number of the format.

    Raises:
        CheckpointError: A later version of mpidist wrote it.
        DamagedCheckpointError: It says what no checkpoint can hold.
    """
    content = json.loads(text)
    if content["format"] not in FORMATS:
        raise CheckpointError(
            f"expected a checkpoint of format {FORMAT} or lower, got format {content['format']!r}; update "
            "mpidist to read it"
        )
    records, shared = list(map(_record, content["arrays"])), content["shared"]
    if not isinstance(shared, dict) or not all(map(_is_path, [*shared, *shared.values()])):
        raise DamagedCheckpointError(f"its index has impossible shared paths {_shown(shared)}")
    paths = {record.path for record in records}
    leaves = [record.path for record in records] + [alias for alias, path in shared.items() if path in paths]
    inner: set[str] = set()
    for path in leaves:
        way = path.rpartition("/")[0]
        while way and way not in inner:
            inner.add(way)
            way = way.rpartition("/")[0]
    if len(set(leaves)) < len(leaves) or not inner.isdisjoint(leaves):
        raise DamagedCheckpointError(
            "two of its datasets have the same path, or the path of one is inside that of another"
        )
    return records, shared, content["format"]


def _record(array: Any) -> Record:
    path, shape, name, replicas = array["path"], array["shape"], array["dtype"], array.get("replicas", 0)
    kind = array.get("kind", "")
    is_possible = (
        (_is_path(path) or path == METADATA) and isinstance(shape, list)
        and all(type(n) is int and n >= 0 for n in shape) and isinstance(name, str)
        and type(replicas) is int and (replicas == 0 or [replicas] == shape[:1]) and kind in ("", TEXT, BYTES, NONE)
    )
    if is_possible:
        dtype, is_known = _dtype_of(name)
        kind = kind if is_known else name
        is_possible = stored_dtype(dtype).kind in "biufcS" and not (
            kind in (TEXT, BYTES, NONE) and dtype.kind != "S" and (dtype != np.uint8 or len(shape) != 1)
        )
    if not is_possible:
        raise DamagedCheckpointError(f"its index has an impossible entry {_shown(array)}")
    return Record(path, tuple(shape), dtype, replicas, kind)


@cache
def _dtype_of(name: str) -> tuple[np.dtype[Any], bool]:
    """The dtype of a name in the index, or that of its bits, and whether it is known here."""
    try:
        return named_dtype(name), True
    except UnavailableError:
        # The bits can be looked at. A variable of this dtype cannot exist here.
        return np.dtype("<u2" if name == "bfloat16" else "u1"), False


def _is_path(path: object) -> bool:
    return isinstance(path, str) and path != "" and join(split(path)) == path


def _shown(value: object) -> str:
    return repr(value)[:200]


def resolve(path: str, shared: Mapping[str, str]) -> str:
    """Local. Find the path under which something is stored, from any path that leads to it.

    Args:
        path: Parts joined by `/`; it may pass through shared objects, also in circles.
        shared: The value that `encode_index` takes.

    Returns:
        The stored path; `path` itself where no part of it is shared.
    """
    if not shared:
        return path
    way = ""
    for part in path.split("/"):
        way = f"{way}/{part}" if way else part
        way = shared.get(way, way)
    return way
