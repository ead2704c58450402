"""Sound as WAV files."""

from __future__ import annotations

import io
import wave
from typing import Any

import numpy as np
import numpy.typing as npt

SAMPLE_BYTES = 2


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
