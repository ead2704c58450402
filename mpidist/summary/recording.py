"""Recording of summaries: numbers, histograms, images, sounds and texts, with the functions of tf.summary.

Call these functions on every rank. Only the chief writes, but all ranks read `data` and check it: reading a variable
may be a collective call, and a wrong argument must raise an error on every rank, not on the chief alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mpidist.arguments import described, whole
from mpidist.summary.encoders import encode_png, encode_wav, fits_wav, to_pixels
from mpidist.summary.step import Step, require_step
from mpidist.summary.writer import recording_writer

if TYPE_CHECKING:
    from mpidist.summary.event_file import EventFile

# The message of TensorBoard's audio plugin: its field number 2, `encoding`, set to 11, which is WAV.
WAV = b"\x10\x0b"
DEFAULT_BUCKETS = 30
# Writes one summary, of the given step, into the chief's file.
_Write = Callable[["EventFile", int], None]


def scalar(name: str, data: npt.ArrayLike, step: Step | None = None, description: str | None = None) -> bool:
    """Local. Write a number. Call it on every rank; if `data` is a variable, reading it may be collective.

    Args:
        name: The name in TensorBoard.
        data: One number.
        step: The step; default: the one set by `experimental.set_step` or `as_default`.
        description: A description in Markdown, shown by TensorBoard.

    Returns:
        Whether the summary is recorded. It is if there is a default writer, and `record_if` does not forbid it; else
        nothing happens.

    Raises:
        ValueError: `data` is not a single real number, or there is no step.
        RuntimeError: The writer is closed.
        OSError: The chief cannot write.
    """

    def prepare(array: npt.NDArray[Any]) -> _Write:
        if array.shape != () or not _is_real(array):
            raise ValueError(
                f"summary {name!r}: expected one real number, got dtype {array.dtype} and shape {array.shape}. Use "
                "histogram for several numbers"
            )
        return lambda file, number: file.add_number(name, number, float(array), description or "")

    return _record(name, data, step, prepare)


def histogram(
    name: str,
    data: npt.ArrayLike,
    step: Step | None = None,
    buckets: int | None = None,
    description: str | None = None,
) -> bool:
    """Local. Write the distribution of values. Call it on every rank, as `scalar`.

    Args:
        name: The name in TensorBoard.
        data: Numbers of any shape. Those that are not finite are left out.
        step: See `scalar`.
        buckets: Number of equal intervals from the least to the greatest value; default 30.
        description: A description in Markdown, shown by TensorBoard.

    Returns:
        Whether the summary is recorded.

    Raises:
        ValueError: `data` does not hold real numbers, `buckets` is not positive, or there is no step.
        RuntimeError: The writer is closed.
        OSError: The chief cannot write.
    """

    def prepare(array: npt.NDArray[Any]) -> _Write:
        count = DEFAULT_BUCKETS if buckets is None else whole("buckets", buckets)
        if count < 1 or not _is_real(array):
            raise ValueError(
                f"summary {name!r}: expected an array of real numbers and at least one bucket, got dtype {array.dtype} "
                f"and buckets={buckets!r}"
            )

        def write(file: EventFile, number: int) -> None:
            rows = _count(array, count)
            file.add_doubles(name, number, "histograms", rows.reshape(-1).tolist(), rows.shape, description or "")

        return write

    return _record(name, data, step, prepare)


def image(
    name: str,
    data: npt.ArrayLike,
    step: Step | None = None,
    max_outputs: int = 3,
    description: str | None = None,
) -> bool:
    """Local. Write images. Call it on every rank, as `scalar`.

    Args:
        name: The name in TensorBoard.
        data: Shape (images, height, width, channels), uint8, or floats from 0 to 1. The channels are: 1 gray; 2 gray
            and opacity; 3 red, green and blue; 4 the same and opacity.
        step: See `scalar`.
        max_outputs: The largest number of images to write.
        description: A description in Markdown, shown by TensorBoard.

    Returns:
        Whether the summary is recorded.

    Raises:
        ValueError: `data` has another shape or dtype, or there is no step.
        RuntimeError: The writer is closed.
        OSError: The chief cannot write.
    """

    def prepare(array: npt.NDArray[Any]) -> _Write:
        is_picture = array.ndim == 4 and 1 <= array.shape[3] <= 4 and min(array.shape[1:3]) > 0
        has_room = whole("max_outputs", max_outputs) >= 0
        if not is_picture or not has_room or not (array.dtype == np.uint8 or array.dtype.kind == "f"):
            raise ValueError(
                f"summary {name!r}: expected uint8 or floats of shape (images, height, width, 1 to 4 channels) and "
                f"max_outputs of at least 0, got dtype {array.dtype}, shape {array.shape} and "
                f"max_outputs={max_outputs!r}"
            )

        def write(file: EventFile, number: int) -> None:
            _, height, width, _ = array.shape
            files = [encode_png(to_pixels(picture)) for picture in array[:max_outputs]]
            # TensorBoard expects the width and the height, then the files.
            strings = [str(width).encode(), str(height).encode(), *files]
            file.add_strings(name, number, "images", strings, [len(strings)], description or "")

        return write

    return _record(name, data, step, prepare)


def audio(
    name: str,
    data: npt.ArrayLike,
    sample_rate: int,
    step: Step | None = None,
    max_outputs: int = 3,
    encoding: str | None = None,
    description: str | None = None,
) -> bool:
    """Local. Write sounds. Call it on every rank, as `scalar`.

    Args:
        name: The name in TensorBoard.
        data: Floats from -1 to 1 of shape (sounds, frames, channels).
        sample_rate: Frames per second.
        step: See `scalar`.
        max_outputs: The largest number of sounds to write.
        encoding: Format of the files: None or "wav".
        description: A description in Markdown, shown by TensorBoard.

    Returns:
        Whether the summary is recorded.

    Raises:
        ValueError: `data`, the rate or the encoding is not as expected, or there is no step.
        RuntimeError: The writer is closed.
        OSError: The chief cannot write.
    """

    def prepare(array: npt.NDArray[Any]) -> _Write:
        if encoding not in (None, "wav"):
            raise ValueError(f"summary {name!r}: expected encoding 'wav' or None, got {encoding!r}")
        rate = int(sample_rate) if isinstance(sample_rate, (int, np.integer)) else 0
        is_sound = array.ndim == 3 and array.dtype.kind == "f" and fits_wav(array.shape[2], rate)
        if not is_sound or whole("max_outputs", max_outputs) < 0:
            raise ValueError(
                f"summary {name!r}: expected floats of shape (sounds, frames, channels), max_outputs of at least 0 and "
                f"a whole number of frames per second that a WAV file can hold, got dtype {array.dtype}, shape "
                f"{array.shape}, max_outputs={max_outputs!r} and sample_rate={sample_rate!r}"
            )

        def write(file: EventFile, number: int) -> None:
            # A pair for each sound: the file, and a label that TensorBoard no longer shows.
            pairs = [(encode_wav(sound, rate), b"") for sound in array[:max_outputs]]
            strings = [one for pair in pairs for one in pair]
            file.add_strings(name, number, "audio", strings, [len(pairs), 2], description or "", WAV)

        return write

    return _record(name, data, step, prepare)


def text(name: str, data: npt.ArrayLike, step: Step | None = None, description: str | None = None) -> bool:
    """Local. Write a text, or a table of texts. Call it on every rank, as `scalar`.

    Args:
        name: The name in TensorBoard.
        data: A string in Markdown, or an array of strings, which is shown as a table.
        step: See `scalar`.
        description: A description in Markdown, shown by TensorBoard.

    Returns:
        Whether the summary is recorded.

    Raises:
        ValueError: `data` does not hold strings, or there is no step.
        RuntimeError: The writer is closed.
        OSError: The chief cannot write.
    """

    def prepare(array: npt.NDArray[Any]) -> _Write:
        if array.dtype.kind not in "US":
            raise ValueError(f"summary {name!r}: expected a string or an array of strings, got dtype {array.dtype}")

        def write(file: EventFile, number: int) -> None:
            strings = [one if isinstance(one, bytes) else str(one).encode() for one in array.reshape(-1).tolist()]
            file.add_strings(name, number, "text", strings, array.shape, description or "")

        return write

    return _record(name, data, step, prepare)


def _record(
    name: str, data: npt.ArrayLike, step: Step | None, prepare: Callable[[npt.NDArray[Any]], _Write]
) -> bool:
    """Check a summary on every rank and write it on the chief.

    Args:
        name: The user's name.
        data: The user's data.
        step: The user's step.
        prepare: Checks the array and returns the function that writes it. Only the chief calls that function, so it
            must not communicate.

    Returns:
        Whether the summary is recorded.
    """
    writer = recording_writer()
    if writer is None:
        return False
    if not isinstance(name, str):
        raise TypeError(f"`name` of a summary must be a string, got {described(name)}")
    array, number = np.asarray(data), require_step(step)
    write = prepare(array)
    with writer.writing() as file:
        if file is not None:
            write(file, number)
    return True


def _is_real(array: npt.NDArray[Any]) -> bool:
    return array.dtype.kind in "biuf" or (array.dtype.kind == "V" and array.dtype.names is None)


def _count(array: npt.NDArray[Any], buckets: int) -> npt.NDArray[np.float64]:
    """A row (from, to, count) for each bucket."""
    values = array.astype(np.float64).reshape(-1)
    values = values[np.isfinite(values)]
    if not values.size:
        return np.zeros((buckets, 3))
    low, high = float(values.min()), float(values.max())
    # The distance of two numbers may be more than the largest number: that of their halves is not.
    scale = 1.0 if math.isfinite(high - low) else 0.5
    # Between two numbers there may be fewer others than buckets.
    least = 2 * buckets * math.ulp(max(abs(low), abs(high)))
    if 0 < high - low < least:
        low, high = max(low - least, -sys.float_info.max), min(high + least, sys.float_info.max)
    counts, edges = np.histogram(values * scale, buckets, (low * scale, high * scale))
    edges /= scale
    return np.stack([edges[:-1], edges[1:], counts.astype(np.float64)], axis=1)
