"""Summaries for TensorBoard, with the names of tf.summary; they need the extra `tensorboard`.

    writer = mpidist.summary.create_file_writer("logs")
    with writer.as_default():
        mpidist.summary.scalar("loss", loss, step=step)

Call these functions on every rank; only the chief writes.
"""

from mpidist.summary import step as experimental
from mpidist.summary.recording import audio, histogram, image, scalar, text
from mpidist.summary.writer import (
    SummaryWriter,
    create_file_writer,
    flush,
    record_if,
    should_record_summaries,
)

__all__ = [
    "SummaryWriter",
    "audio",
    "create_file_writer",
    "experimental",
    "flush",
    "histogram",
    "image",
    "record_if",
    "scalar",
    "should_record_summaries",
    "text",
]
