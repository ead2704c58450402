"""Arrays of pixels as PNG files."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

# PNG's color types by the number of channels: gray, gray with opacity, color, color with opacity.
_COLOR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}


def encode_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Local. Encode one image.

    Args:
        pixels: Shape (height, width, channels) with 1 to 4 channels; neither side may be 0.

    Returns:
        The bytes of the file.
    """
    height, width, channels = pixels.shape
    # Each row begins with the number of its filter; 0 means no filter.
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOR_TYPES[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def to_pixels(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Local. Floats from 0 to 1 as 0 to 255; values outside are clipped, NaN becomes 0. uint8 stays as it is."""
    if array.dtype == np.uint8:
        return array
    scaled = np.nan_to_num(array.astype(np.float64) * 255.5, posinf=255.0, neginf=0.0)
    return np.clip(scaled, 0, 255).astype(np.uint8)
