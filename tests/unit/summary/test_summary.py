"""Summaries on one rank: event files are read back record by record; and calls that do not fit."""

from __future__ import annotations

import importlib.util
import io
import struct
import threading
import wave
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import Variable, summary
from mpidist.errors import UnavailableError
from mpidist.summary.encoders import encode_png, encode_wav, to_pixels

event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2", reason="tensorboardX is in the extra 'tensorboard'")
record_writer = pytest.importorskip("tensorboardX.record_writer")


def read_events(directory: Path) -> list[Any]:
    """Every event of a log directory's files, in order; checksums are checked."""
    events = []
    for path in sorted(directory.glob("events.out.tfevents.*")):
        data, place = path.read_bytes(), 0
        while place < len(data):
            length, check = struct.unpack_from("<QI", data, place)
            assert check == record_writer.masked_crc32c(data[place : place + 8])
            record = data[place + 12 : place + 12 + length]
            assert struct.unpack_from("<I", data, place + 12 + length) == (record_writer.masked_crc32c(record),)
            events.append(event_pb2.Event.FromString(record))
            place += 16 + length
    return events


def read_values(directory: Path) -> list[tuple[int, Any]]:
    """(step, value) of every summary."""
    first, *events = read_events(directory)
    assert first.file_version == "brain.Event:2"
    return [(event.step, event.summary.value[0]) for event in events]


def decode_png(data: bytes) -> Any:
    """What `encode_png` wrote, from its chunks."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(data):
        (length,) = struct.unpack_from(">I", data, place)
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        assert struct.unpack_from(">I", data, place + 8 + length) == (zlib.crc32(kind + body),)
        chunks[kind] = body
        place += 12 + length
    width, height, depth, color = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert depth == 8
    channels = {0: 1, 4: 2, 2: 3, 6: 4}[color]
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, channels)


def test_a_scalar_of_each_kind(tmp_path: Path) -> None:
    writer = summary.create_file_writer(tmp_path / "logs" / "train")
    with writer.as_default():
        for step, number in enumerate((0.5, 2, np.float32(0.25), np.array(4), True, Variable(1.5), float("nan"))):
            assert summary.scalar("train loss/a", number, step=step, description="of *all*")
    writer.close()
    values = read_values(tmp_path / "logs" / "train")
    assert [step for step, _ in values] == list(range(7))
    assert np.array_equal([v.simple_value for _, v in values], [0.5, 2, 0.25, 4, 1, 1.5, np.nan], equal_nan=True)
    assert {v.tag for _, v in values} == {"train loss/a"}
    assert {v.metadata.plugin_data.plugin_name for _, v in values} == {"scalars"}
    assert {v.metadata.summary_description for _, v in values} == {"of *all*"}


def test_a_histogram(tmp_path: Path) -> None:
    data = np.random.default_rng(0).normal(size=(20, 50))
    with summary.create_file_writer(tmp_path).as_default(step=1):
        summary.histogram("weights", data)
        summary.histogram("few", [1.0, 2.0, np.nan, np.inf], buckets=2)
        summary.histogram("none", np.zeros(0), buckets=2)
        summary.histogram("same", [3.0, 3.0], buckets=1)
    tables = {
        value.tag: np.reshape(value.tensor.double_val, [d.size for d in value.tensor.tensor_shape.dim])
        for _, value in read_values(tmp_path)
    }
    counts, edges = np.histogram(data, 30)
    assert np.array_equal(tables["weights"], np.stack([edges[:-1], edges[1:], counts], 1))
    assert tables["few"].tolist() == [[1, 1.5, 1], [1.5, 2, 1]]
    assert tables["none"].tolist() == [[0, 0, 0]] * 2
    assert tables["same"].tolist() == [[2.5, 3.5, 2]]


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_images(tmp_path: Path, channels: int) -> None:
    pictures = np.random.default_rng(0).integers(0, 256, (5, 4, 6, channels), dtype="uint8")
    with summary.create_file_writer(tmp_path).as_default():
        summary.image("bytes", pictures, step=1)
        summary.image("floats", pictures.astype("float32") / 255, step=2, max_outputs=9)
    for (step, value), count in zip(read_values(tmp_path), (3, 5), strict=True):
        width, height, *files = value.tensor.string_val
        assert (width, height, len(files)) == (b"6", b"4", count)
        assert value.tensor.tensor_shape.dim[0].size == 2 + count
        assert value.metadata.plugin_data.plugin_name == "images"
        assert np.array_equal([decode_png(file) for file in files], pictures[:count]), step


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.binary(min_size=100, max_size=100))
def test_pixels_survive_a_png(height: int, width: int, channels: int, data: bytes) -> None:
    pixels = np.frombuffer(data, np.uint8)[: height * width * channels].reshape(height, width, channels)
    assert np.array_equal(decode_png(encode_png(pixels)), pixels)


def test_floats_outside_are_cut_off() -> None:
    assert to_pixels(np.array([-1, 0, 0.5, 1, 2, np.nan, np.inf, -np.inf])).tolist() == [0, 0, 127, 255, 255, 0, 255, 0]


def decode_wav(data: bytes) -> tuple[int, Any]:
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getsampwidth(), file.getcomptype()) == (2, "NONE")
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        return file.getframerate(), samples.reshape(file.getnframes(), file.getnchannels())


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_sounds(tmp_path: Path, channels: int) -> None:
    sounds = np.random.default_rng(0).uniform(-1, 0.99, (5, 40, channels)).astype("float32")
    with summary.create_file_writer(tmp_path).as_default(step=1):
        assert summary.audio("few", sounds, 8000, description="of *all*")
        assert summary.audio("all", sounds, np.int64(192_000), step=2, max_outputs=9, encoding="wav")
        assert summary.audio("none", sounds[:0], 8000)
    rates, counts = (8000, 192_000, None), (3, 5, 0)
    for (step, value), rate, count in zip(read_values(tmp_path), rates, counts, strict=True):
        assert [d.size for d in value.tensor.tensor_shape.dim] == [count, 2]
        assert step == (2 if value.tag == "all" else 1)
        files, labels = value.tensor.string_val[::2], value.tensor.string_val[1::2]
        assert set(labels) <= {b""}
        for sound, file in zip(sounds[:count], files, strict=True):
            found, samples = decode_wav(file)
            assert found == rate
            assert np.array_equal(samples, np.round(sound * 2**15))
        # TensorBoard plays only what says that it is WAV: field 2 (varint) is 11.
        plugin = value.metadata.plugin_data
        assert (plugin.plugin_name, plugin.content) == ("audio", bytes([2 << 3, 11]))
        assert value.metadata.summary_description == ("of *all*" if value.tag == "few" else "")


def test_sounds_that_are_too_loud_are_cut_off() -> None:
    sound = np.array([[-2.0], [-1.0], [0.5], [1.0], [np.nan], [np.inf], [-np.inf]])
    assert decode_wav(encode_wav(sound, 9))[1].ravel().tolist() == [
        -(2**15), -(2**15), 2**14, 2**15 - 1, 0, 2**15 - 1, -(2**15)
    ]


def test_recording_only_sometimes(tmp_path: Path) -> None:
    asked: list[int] = []

    def every_third() -> bool:
        asked.append(len(asked))
        return asked[-1] % 3 == 0

    flag = Variable(False)
    assert not summary.should_record_summaries(), "there is no writer"
    with summary.create_file_writer(tmp_path).as_default(step=0):
        assert summary.should_record_summaries()
        with summary.record_if(every_third):
            assert asked == [], "the function is asked when a summary comes"
            assert [summary.scalar("a", n) for n in range(7)] == [True, False, False, True, False, False, True]
            with summary.record_if(True):
                assert summary.scalar("b", 0)
        with summary.record_if(np.bool_(False)):
            assert not summary.should_record_summaries()
            # Nothing of the call is looked at then, not even its step.
            assert not summary.histogram("c", "no numbers")
            assert not summary.image("c", 0)
            assert not summary.audio("c", 0, 0)
            assert not summary.text("c", 0)
            thread_saw: list[bool] = []
            thread = threading.Thread(target=lambda: thread_saw.append(summary.should_record_summaries()))
            thread.start()
            thread.join()
        with summary.record_if(flag):
            assert not summary.scalar("d", 0)
            flag.assign(True)
            assert summary.scalar("d", 1)
        with pytest.raises(KeyError, match="of the program"), summary.record_if(False):
            raise KeyError("of the program")
        assert summary.should_record_summaries(), "an error ends it too"
    assert thread_saw == [False], "that thread has no writer"
    assert len(asked) == 7
    found = [(value.tag, value.simple_value) for _, value in read_values(tmp_path)]
    assert found == [("a", 0), ("a", 3), ("a", 6), ("b", 0), ("d", 1)]


@pytest.mark.parametrize("condition", [1, "yes", None, [True, False], lambda: 1, lambda: [True]])
def test_conditions_that_do_not_fit(tmp_path: Path, condition: Any) -> None:
    with (
        summary.create_file_writer(tmp_path).as_default(step=0),
        pytest.raises(TypeError, match="`record_if` expects True, False or a function that gives one of them, got"),
        summary.record_if(condition),
    ):
        summary.scalar("a", 0)
    assert read_values(tmp_path) == []


def test_texts(tmp_path: Path) -> None:
    with summary.create_file_writer(tmp_path).as_default():
        summary.text("note", "**größer**", step=0)
        summary.text("table", [["a", "b"], ["c", "d"]], step=0)
    note, table = (value for _, value in read_values(tmp_path))
    assert list(note.tensor.string_val) == ["**größer**".encode()]
    assert len(note.tensor.tensor_shape.dim) == 0
    assert list(table.tensor.string_val) == [b"a", b"b", b"c", b"d"]
    assert [d.size for d in table.tensor.tensor_shape.dim] == [2, 2]
    assert table.metadata.plugin_data.plugin_name == "text"


def test_steps(tmp_path: Path) -> None:
    writer, counter = summary.create_file_writer(tmp_path), Variable(10)
    with writer.as_default():
        with pytest.raises(ValueError, match=r"a summary needs a step, got none\. Pass `step`, or set one with"):
            summary.scalar("a", 0.0)
        summary.experimental.set_step(counter)
        try:
            summary.scalar("a", 0.0)
            counter.assign_add(1)
            summary.scalar("a", 0.0)
            with writer.as_default(step=3):
                assert summary.experimental.get_step() == 3
                summary.scalar("a", 0.0)
                summary.scalar("a", 0.0, step=4)
            assert summary.experimental.get_step() is counter
        finally:
            summary.experimental.set_step(None)
    assert [step for step, _ in read_values(tmp_path)] == [10, 11, 3, 4]
    assert summary.experimental.get_step() is None


def test_without_a_writer_nothing_happens(tmp_path: Path) -> None:
    assert not summary.scalar("a", 1.0)
    assert not summary.histogram("a", [1.0], step=0)
    assert not summary.image("a", np.zeros((1, 2, 2, 1)), step=0)
    assert not summary.audio("a", np.zeros((1, 2, 1)), 8, step=0)
    assert not summary.text("a", "b", step=0)
    summary.flush()
    seen: list[bool] = []
    with summary.create_file_writer(tmp_path).as_default():
        thread = threading.Thread(target=lambda: seen.append(summary.scalar("a", 1.0, step=0)))
        thread.start()
        thread.join()
    assert seen == [False], "another thread has no writer"
    assert read_values(tmp_path) == []


def test_when_summaries_reach_the_file(tmp_path: Path) -> None:
    writer = summary.create_file_writer(tmp_path / "a", max_queue=3)
    with writer.as_default(step=0):
        for expected in (0, 0, 3, 3):
            summary.scalar("a", 1.0)
            assert len(read_values(tmp_path / "a")) == expected
        writer.flush()
        assert len(read_values(tmp_path / "a")) == 4
        summary.scalar("a", 1.0)
        summary.flush()
        assert len(read_values(tmp_path / "a")) == 5
        with summary.create_file_writer(tmp_path / "b", flush_millis=0).as_default():
            summary.scalar("b", 1.0)
            assert len(read_values(tmp_path / "b")) == 1
        summary.scalar("a", 1.0)
    assert len(read_values(tmp_path / "a")) == 6, "leaving `with` flushes"
    del writer

    def replace_the_default() -> None:
        summary.create_file_writer(tmp_path / "d").set_as_default(step=7)
        summary.scalar("d", 1.0)
        summary.create_file_writer(tmp_path / "c").set_as_default()
        assert read_values(tmp_path / "d")[-1][0] == 7, "a writer that goes writes out what it has"

    # A thread of its own has a default of its own, which goes with it.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(replace_the_default).result()


def test_a_closed_writer(tmp_path: Path) -> None:
    writer = summary.create_file_writer(tmp_path, filename_suffix=".eval")
    with writer.as_default(step=0):
        writer.close()
        writer.close()
        with pytest.raises(RuntimeError, match=r"the summary writer of '.*' is closed; make another one"):
            summary.scalar("a", 1.0)
    for use in (writer.set_as_default, lambda: writer.as_default().__enter__()):
        with pytest.raises(RuntimeError, match="is closed"):
            use()
    writer.flush()
    # A second writer of the same second gets a file of its own.
    summary.create_file_writer(tmp_path, filename_suffix=".eval").close()
    assert len(sorted(tmp_path.glob("*.eval"))) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: summary.scalar("a", [1.0, 2.0], step=0), r"summary 'a': expected one real .* shape \(2,\)"),
        (lambda: summary.scalar("a", 1.0, step=2**63), "`step` of a summary must be an integer of at most 64 bits"),
        (lambda: summary.scalar("a", 1j, step=0), "expected one real number, got dtype complex128"),
        (lambda: summary.histogram("a", ["x"], step=0), "expected an array of real numbers .* got dtype <U1"),
        (lambda: summary.histogram("a", [1.0], step=0, buckets=0), "got dtype float64 and buckets=0"),
        (lambda: summary.image("a", np.zeros((2, 2, 3)), step=0), r"of shape \(images, .* got .* shape \(2, 2, 3\)"),
        (lambda: summary.image("a", np.zeros((1, 2, 2, 5)), step=0), "1 to 4 channels"),
        (lambda: summary.image("a", np.zeros((1, 2, 2, 3), int), step=0), "got dtype int64"),
        (lambda: summary.image("a", np.zeros((1, 2, 2, 3)), step=0, max_outputs=-1), "max_outputs=-1"),
        (lambda: summary.audio("a", np.zeros((2, 9)), 8, step=0), r"floats of shape \(sounds, .* shape \(2, 9\)"),
        (lambda: summary.audio("a", np.zeros((2, 9, 1), int), 8, step=0), "got dtype int64"),
        (lambda: summary.audio("a", np.zeros((2, 9, 1)), 0, step=0), "sample_rate=0"),
        (lambda: summary.audio("a", np.zeros((2, 9, 1)), 8.5, step=0), "sample_rate=8.5"),  # type: ignore[arg-type]
        (lambda: summary.audio("a", np.zeros((2, 9, 4)), 2**30, step=0), "that a WAV file can hold"),
        (lambda: summary.audio("a", np.zeros((2, 9, 1)), 8, step=0, max_outputs=-1), "max_outputs=-1"),
        (lambda: summary.audio("a", np.zeros((2, 9, 1)), 8, step=0, encoding="mp3"), "expected encoding 'wav' or None"),
        (lambda: summary.text("a", 5, step=0), "expected a string or an array of strings, got dtype int64"),
        (lambda: summary.create_file_writer("x", max_queue=0), "expected `max_queue` of at least 1"),
    ],
)
def test_calls_that_do_not_fit(tmp_path: Path, call: Any, message: str) -> None:
    with summary.create_file_writer(tmp_path).as_default(), pytest.raises(ValueError, match=message):
        call()
    assert read_values(tmp_path) == []


def test_without_tensorboardx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"not installed here\. pip install 'mpidist\[tensorboard\]'"):
        summary.create_file_writer(tmp_path / "logs")
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(
    "data",
    [
        [0.1 + 0.2, 0.3], [1e17, 1e17 + 16], [-1e308, 1e308], [-1.7e308, 1.7e308, 0.0], [5e-324, 1e-323],
        [1.7976931348623157e308, 1.7976931348623155e308],
    ],
)
def test_a_histogram_of_numbers_close_together_or_far_apart(tmp_path: Path, data: list[float]) -> None:
    with summary.create_file_writer(tmp_path).as_default(step=1):
        summary.histogram("h", np.array(data), buckets=30)
    ((_, value),) = read_values(tmp_path)
    table = np.reshape(value.tensor.double_val, (30, 3))
    assert np.isfinite(table).all()
    assert table[:, 2].sum() == len(data)
    assert (table[:, 0] < table[:, 1]).all()
    assert table[0, 0] <= min(data)
    assert table[-1, 1] >= max(data)


def test_steps_and_names_of_wrong_kinds(tmp_path: Path) -> None:
    wrong: Any
    with summary.create_file_writer(tmp_path).as_default():
        for wrong in (1.5, "1", b"1", np.float32(0.5), np.nan):
            with pytest.raises(TypeError, match="`step` of a summary must be an integer"):
                summary.scalar("s", 1.0, step=wrong)
        for wrong in (3, None, b"s"):
            with pytest.raises(TypeError, match="`name` of a summary must be a string"):
                summary.scalar(wrong, 1.0, step=1)
        summary.scalar("s", 1.0, step=np.int64(2**53 + 1))
    assert [step for step, _ in read_values(tmp_path)] == [2**53 + 1]
