"""The event file: records that TensorBoard reads.

The only module that imports tensorboardX. It is loaded by name, so that programs without summaries do not need it.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboardX.proto.tensor_pb2 import TensorProto
from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboardX.record_writer import masked_crc32c


class EventFile:
    """A new event file in a directory; a missing directory is created.

    Args:
        directory: The log directory.
        suffix: Last part of the file's name.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, directory: str, suffix: str) -> None:
        os.makedirs(directory, exist_ok=True)
        # The names that TensorFlow gives: TensorBoard reads the files of a directory in the order of their names.
        number = 0
        while True:
            name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{number}{suffix}"
            self.path = Path(directory) / name
            try:
                self._file = self.path.open("xb")
                break
            except FileExistsError:
                number += 1
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self.flush()

    def add_number(self, name: str, step: int, number: float, description: str) -> None:
        """Local. Append one number."""
        metadata = _metadata("scalars", description)
        self._add(step, Summary.Value(tag=name, simple_value=number, metadata=metadata))

    def add_strings(
        self, name: str, step: int, plugin: str, strings: Sequence[bytes], shape: Sequence[int], description: str,
        content: bytes = b"",
    ) -> None:
        """Local. Append an array of strings for a plugin of TensorBoard; `content` is the plugin's own message."""
        tensor = TensorProto(dtype="DT_STRING", string_val=strings, tensor_shape=_shape(shape))
        self._add(step, Summary.Value(tag=name, tensor=tensor, metadata=_metadata(plugin, description, content)))

    def add_doubles(
        self, name: str, step: int, plugin: str, numbers: Sequence[float], shape: Sequence[int], description: str
    ) -> None:
        """Local. Append an array of numbers for a plugin of TensorBoard."""
        tensor = TensorProto(dtype="DT_DOUBLE", double_val=numbers, tensor_shape=_shape(shape))
        self._add(step, Summary.Value(tag=name, tensor=tensor, metadata=_metadata(plugin, description)))

    def flush(self) -> None:
        """Local. Write everything to the operating system, so that TensorBoard can read it."""
        self._file.flush()

    def close(self) -> None:
        """Local. Flush and close the file."""
        self._file.close()

    def _add(self, step: int, value: Summary.Value) -> None:
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))

    def _write(self, event: Event) -> None:
        # The format TFRecord: the length and its checksum, then the data and their checksum.
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        self._file.write(
            length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
        )


def _shape(shape: Sequence[int]) -> TensorShapeProto:
    return TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in shape])


def _metadata(plugin: str, description: str, content: bytes = b"") -> SummaryMetadata:
    return SummaryMetadata(
        plugin_data=SummaryMetadata.PluginData(plugin_name=plugin, content=content), summary_description=description
    )
