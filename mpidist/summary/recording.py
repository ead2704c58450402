"""Summaries: numbers, histograms, pictures and texts of a program's course, with tf.summary's names."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.summary.png import encode_png, to_pixels
from mpidist.summary.step import Step, require_step
from mpidist.summary.wav import encode_wav, fits_wav
from mpidist.summary.writer import recording_writer

# Of TensorBoard's audio plugin: its message with the field `encoding`, number 2, set to WAV, which is 11.
WAV = b"\x10\x0b"


def scalar(name: str, data: npt.ArrayLike, step: Step | None = None, description: str | None = None) -> bool:
    """Write a number.

    Local, with a number or an array. Call it on every rank: reading a variable of `data` may be collective.

    Args:
        name: Under which TensorBoard shows it.
        data: One number.
        step: Default: what `experimental.set_step` or `as_default` set.
        description: For people, in Markdown.

    Returns:
        Whether it is recorded: there is a default writer, and `record_if` does not say no. Else nothing happens.

    Raises:
        ValueError: `data` is no single real number, or there is no step.
        RuntimeError: The writer is closed.
        OSError: The chief cannot write.
    """
    writer = recording_writer()
    if writer is None:
        return False
    # Everything but the writing happens on every rank: what is wrong is wrong everywhere, and a variable may have to
    # be read by all.
    array, number = np.asarray(data), require_step(step)
    if array.shape != () or not _is_real(array):
        raise ValueError(
            f"summary {name!r}: expected one real number, got dtype {array.dtype} and shape {array.shape}. "
            "Several numbers make a histogram"
        )
    with writer.writing() as file:
        if file is not None:
            file.add_number(name, number, float(array), description or "")
    return True


def histogram(
    name: str,
    data: npt.ArrayLike,
    step: Step | None = None,
    buckets: int | None = None,
    description: str | None = None,
) -> bool:
    """Write how values are distributed; see `scalar`.

    Local, with an array. Call it on every rank.

    Args:
        name: Under which TensorBoard shows it.
        data: Numbers of any shape. Those that are not finite are left out.
        step: As in `scalar`.
        buckets: Number of equal intervals from the least to the greatest; default 30.
        description: For people, in Markdown.

    Returns:
        Whether it is recorded.

    Raises:
        ValueError: `data` is no real numbers, `buckets` is not positive, or there is no step.
        RuntimeError: The writer is closed.
        OSError: The chief cannot write.
    """
    writer = recording_writer()
    if writer is None:
        return False
    array, number = np.asarray(data), require_step(step)
    count = 30 if buckets is None else buckets
    if count < 1 or not _is_real(array):
        raise ValueError(
            f"summary {name!r}: expected an array of real numbers and at least one bucket, got dtype {array.dtype} "
            f"and buckets={buckets!r}"
        )
    with writer.writing() as file:
        if file is not None:
            rows = _count(array, count)
            file.add_doubles(name, number, "histograms", rows.reshape(-1).tolist(), rows.shape, description or "")
    return True


def image(
    name: str,
    data: npt.ArrayLike,
    step: Step | None = None,
    max_outputs: int = 3,
    description: str | None = None,
) -> bool:
    """Write pictures; see `scalar`.

    Local, with an array. Call it on every rank.

    Args:
        name: Under which TensorBoard shows them.
        data: Shape (pictures, height, width, channels); 1 to 4 channels: grey, grey with opacity, red, green and
            blue, the same with opacity. uint8, or floats from 0 to 1.
        step: As in `scalar`.
        max_outputs: Only so many of the pictures are written.
        description: For people, in Markdown.

    Returns:
        Whether it is recorded.

    Raises:
        ValueError: Another shape or dtype, or there is no step.
        RuntimeError: The writer is closed.
        OSError: The chief cannot write.
    """
    writer = recording_writer()
    if writer is None:
        return False
    array, number = np.asarray(data), require_step(step)
    is_picture = array.ndim == 4 and 1 <= array.shape[3] <= 4 and min(array.shape[1:3]) > 0
    if not is_picture or max_outputs < 0 or not (array.dtype == np.uint8 or array.dtype.kind == "f"):
        raise ValueError(
            f"summary {name!r}: expected uint8 or floats of shape (pictures, height, width, 1 to 4 channels) and "
            f"max_outputs of at least 0, got dtype {array.dtype}, shape {array.shape} and max_outputs={max_outputs!r}"
        )
    with writer.writing() as file:
        if file is not None:
            _, height, width, _ = array.shape
            files = [encode_png(to_pixels(picture)) for picture in array[:max_outputs]]
            # Width and height come first: the form that TensorBoard expects.
            strings = [str(width).encode(), str(height).encode(), *files]
            file.add_strings(name, number, "images", strings, [len(strings)], description or "")
    return True


def audio(
    name: str,
    data: npt.ArrayLike,
    sample_rate: int,
    step: Step | None = None,
    max_outputs: int = 3,
    encoding: str | None = None,
    description: str | None = None,
) -> bool:
    """Write sounds; see `scalar`.

    Local, with an array. Call it on every rank.

    Args:
        name: Under which TensorBoard shows them.
        data: Floats from -1 to 1 of shape (sounds, frames, channels).
        sample_rate: Frames per second.
        step: As in `scalar`.
        max_outputs: Only so many of the sounds are written.
        encoding: Of the files: None or "wav".
        description: For people, in Markdown.

    Returns:
        Whether it is recorded.

    Raises:
        ValueError: Another shape, dtype, rate or encoding, or there is no step.
        RuntimeError: The writer is closed.
        OSError: The chief cannot write.
    """
    writer = recording_writer()
    if writer is None:
        return False
    array, number = np.asarray(data), require_step(step)
    if encoding not in (None, "wav"):
        raise ValueError(f"summary {name!r}: expected encoding 'wav' or None, got {encoding!r}")
    rate = int(sample_rate) if isinstance(sample_rate, (int, np.integer)) else 0
    is_sound = array.ndim == 3 and array.dtype.kind == "f" and fits_wav(array.shape[2], rate)
    if not is_sound or max_outputs < 0:
        raise ValueError(
            f"summary {name!r}: expected floats of shape (sounds, frames, channels), max_outputs of at least 0 and a "
            f"whole number of frames per second that a WAV file can hold, got dtype {array.dtype}, shape "
            f"{array.shape}, max_outputs={max_outputs!r} and sample_rate={sample_rate!r}"
        )
    with writer.writing() as file:
        if file is not None:
            # A pair for each sound, of the file and a label that TensorBoard no longer shows.
            pairs = [(encode_wav(sound, rate), b"") for sound in array[:max_outputs]]
            strings = [part for pair in pairs for part in pair]
            file.add_strings(name, number, "audio", strings, [len(pairs), 2], description or "", WAV)
    return True


def text(name: str, data: npt.ArrayLike, step: Step | None = None, description: str | None = None) -> bool:
    """Write a text, or a table of texts; see `scalar`.

    Local. Call it on every rank.

    Args:
        name: Under which TensorBoard shows it.
        data: A string in Markdown, or an array of strings, which is shown as a table.
        step: As in `scalar`.
        description: For people, in Markdown.

    Returns:
        Whether it is recorded.

    Raises:
        ValueError: `data` is no strings, or there is no step.
        RuntimeError: The writer is closed.
        OSError: The chief cannot write.
    """
    writer = recording_writer()
    if writer is None:
        return False
    array, number = np.asarray(data), require_step(step)
    if array.dtype.kind not in "US":
        raise ValueError(f"summary {name!r}: expected a string or an array of strings, got dtype {array.dtype}")
    with writer.writing() as file:
        if file is not None:
            strings = [part if isinstance(part, bytes) else str(part).encode() for part in array.reshape(-1).tolist()]
            file.add_strings(name, number, "text", strings, array.shape, description or "")
    return True


def _is_real(array: npt.NDArray[Any]) -> bool:
    return array.dtype.kind in "biuf" or (array.dtype.kind == "V" and array.dtype.names is None)


def _count(array: npt.NDArray[Any], buckets: int) -> npt.NDArray[np.float64]:
    """A row (from, to, how many) for each bucket."""
    values = array.astype(np.float64).reshape(-1)
    values = values[np.isfinite(values)]
    if not values.size:
        return np.zeros((buckets, 3))
    counts, edges = np.histogram(values, buckets)
    return np.stack([edges[:-1], edges[1:], counts.astype(np.float64)], axis=1)
