"""Arrays of pixels as PNG files, and sound as WAV files."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

# PNG's color types by the number of channels: gray, gray with opacity, color, color with opacity.
_COLOR_TYPES = {1: 0, 2: 4, 3: 2, 4: 6}
SAMPLE_BYTES = 2


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


def fits_wav(channels: int, sample_rate: int) -> bool:
    """Local. Whether a WAV header can hold the bytes per frame (in 16 bits) and per second (in 32 bits)."""
    frame_bytes = SAMPLE_BYTES * channels
    return channels > 0 and sample_rate > 0 and frame_bytes < 2**16 and frame_bytes * sample_rate < 2**32


def encode_wav(sound: npt.NDArray[Any], sample_rate: int) -> bytes:
    """Local. Encode one sound, with 16 bits per sample.

    Args:
        sound: Floats from -1 to 1 of shape (frames, channels). Values outside are clipped, NaN becomes silence.
        sample_rate: Frames per second; see `fits_wav`.

    Returns:
        The bytes of the file.
    """
    scaled = np.nan_to_num(np.round(sound.astype(np.float64) * 2**15), posinf=2**15, neginf=-(2**15))
    samples = np.clip(scaled, -(2**15), 2**15 - 1).astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(sound.shape[1])
        file.setsampwidth(SAMPLE_BYTES)
        file.setframerate(sample_rate)
        file.writeframes(samples.tobytes())
    return buffer.getvalue()
