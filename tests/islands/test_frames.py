"""Frames on a stream that is a list, so that every kind of damage can be tried."""

import tracemalloc
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest

from noloco_jax.islands import frames
from noloco_jax.islands.frames import SCHEMA, ArraySpec, Frame, read_frame, write_frame
from noloco_jax.islands.payload import specs_of
from noloco_jax.islands.peer_errors import BrokenError, PeerError, RefusedError

HEADER = {"round": 7, "text": "ü", "none": None, "list": [1, 2.5]}


class Stream:
    """Fake Flight stream: a list of messages, each of which has a record batch or metadata."""

    def __init__(self, messages=()):
        self.messages = list(messages)
        self.read = 0

    def write_metadata(self, content: bytes) -> None:
        self.messages.append((None, bytes(content)))

    def write_batch(self, batch: pa.RecordBatch) -> None:
        self.messages.append((batch, None))

    def read_chunk(self):
        if self.read == len(self.messages):
            raise StopIteration
        batch, content = self.messages[self.read]
        self.read += 1
        return SimpleNamespace(data=batch, app_metadata=None if content is None else pa.py_buffer(content))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(frames, "PIECE_BYTES", 1000)


def sample_arrays() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [
        generator.standard_normal((30, 40)).astype(np.float32),
        np.asarray(1.5),
        np.zeros((0, 3), np.int8),
        generator.standard_normal(20).astype(ml_dtypes.bfloat16),
        np.asfortranarray(generator.integers(0, 9, (3, 4))),
        np.arange(1000, dtype=np.uint8),
        generator.standard_normal((8, 8))[::2, ::3],
        np.asarray([True, False]),
    ]


def expected(_=None) -> list[ArraySpec]:
    return specs_of(sample_arrays())


def written_frame() -> list:
    stream = Stream()
    write_frame(stream, "frame", HEADER, sample_arrays())
    return stream.messages


def test_a_written_frame_is_read_back_unchanged():
    read = read_frame(Stream(written_frame()), expected)
    assert read is not None
    kind, (header, arrays) = read
    assert (kind, header) == ("frame", HEADER)
    assert arrays is not None and len(arrays) == len(sample_arrays())
    for array, original in zip(arrays, sample_arrays(), strict=True):
        assert (array.dtype, array.shape) == (original.dtype, original.shape)
        assert array.tobytes() == original.tobytes()
        assert array.flags.c_contiguous and array.flags.aligned and not array.flags.writeable


def test_frames_are_read_in_order_until_the_stream_ends():
    stream = Stream()
    for number in range(3):
        write_frame(stream, "frame", {"number": number}, [np.full(5, number)] if number % 2 else None)
    specs = [ArraySpec((5,), np.dtype(int))]
    read = [read_frame(stream, lambda header: specs if header["number"] % 2 else None) for _ in range(4)]
    assert [None if x is None else x[1].header["number"] for x in read] == [0, 1, 2, None]
    assert read[0] == ("frame", Frame({"number": 0}, None))


def test_an_array_of_one_piece_shares_memory_with_the_received_buffer():
    messages = written_frame()
    read = read_frame(Stream(messages), expected)
    assert read is not None and read[1].arrays is not None
    buffers = [batch.column(0).to_numpy() for batch, _ in messages if batch is not None]
    for array in read[1].arrays:
        if 0 < array.nbytes <= frames.PIECE_BYTES:
            assert any(np.shares_memory(array, buffer) for buffer in buffers)


def test_a_truncated_frame_is_refused():
    messages = written_frame()
    assert read_frame(Stream([]), expected) is None
    for end in range(1, len(messages)):
        with pytest.raises(BrokenError, match="ended before the message was whole"):
            read_frame(Stream(messages[:end]), expected)


def test_missing_repeated_and_reordered_messages_of_a_frame_are_refused():
    messages = written_frame()
    others = [messages[:i] + messages[i + 1 :] for i in range(len(messages))]
    others += [[*messages[:i], messages[i], *messages[i:]] for i in range(len(messages) - 1)]
    others += [[*messages[:i], messages[i + 1], messages[i], *messages[i + 2 :]] for i in range(len(messages) - 1)]
    for changed in others:
        with pytest.raises(PeerError):
            read_frame(Stream(changed), expected)


def test_a_flipped_bit_is_detected():
    generator = np.random.default_rng(1)
    for place, (batch, content) in enumerate(written_frame()):
        for _ in range(20):
            messages = written_frame()
            raw = bytearray(content if batch is None else batch.column(0).to_numpy().tobytes())
            raw[generator.integers(len(raw))] ^= 1 << int(generator.integers(8))
            column = pa.array(np.frombuffer(bytes(raw), np.uint8))
            messages[place] = (
                (None, bytes(raw)) if batch is None else (pa.RecordBatch.from_arrays([column], schema=SCHEMA), None)
            )
            with pytest.raises(BrokenError):
                read_frame(Stream(messages), expected)


@pytest.mark.parametrize(
    ("others", "announced"),
    [
        (lambda specs: specs[:-1], '["bool", [2]]'),
        (lambda specs: [*specs, specs[0]], "would fit here"),
        (lambda specs: [specs[0]._replace(shape=(40, 30)), *specs[1:]], '["float32", [30, 40]]'),
        (lambda specs: [specs[0]._replace(dtype=np.dtype("int32")), *specs[1:]], '["float32", [30, 40]]'),
        (lambda specs: None, "no arrays would fit here"),
    ],
)
def test_unexpected_arrays_are_refused_before_any_is_read(others, announced):
    stream = Stream(written_frame())
    with pytest.raises(RefusedError) as error:
        read_frame(stream, lambda header: others(expected()))
    assert stream.read == 1
    assert announced in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


def test_an_announced_size_allocates_nothing():
    """The receiver allocates only what it expects, whatever a header announces."""
    huge = Stream()
    huge.write_metadata(frames._seal({"kind": "frame", "header": {}, "arrays": [["float32", [1 << 40]]]}))
    tracemalloc.start()
    try:
        with pytest.raises(RefusedError):
            read_frame(huge, expected)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_missing_arrays_are_refused():
    stream = Stream()
    write_frame(stream, "frame", HEADER)
    with pytest.raises(RefusedError, match="it announces no arrays, and arrays of "):
        read_frame(stream, expected)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"x" * 16, b"[]", b"5", b"{", b"\xff", b"[" * 60_000, b'{"kind": 3, "header": {}}'),
        *(b'{"kind": "frame"}', b'{"kind": "frame", "header": []}', b" " * (65 << 10)),
    ],
)
@pytest.mark.parametrize("sealed", [True, False])
def test_content_that_is_no_frame_is_refused(content, sealed):
    stream = Stream()
    stream.write_metadata(frames.xxhash.xxh3_128_digest(content) + content if sealed else content)
    with pytest.raises(BrokenError):
        read_frame(stream, lambda header: None)


def test_malformed_pieces_are_refused():
    head, *rest = written_frame()
    for column in (
        pa.array(np.arange(10, dtype=np.uint8)),
        pa.array(np.zeros(0, np.uint8)),
        pa.array([1, None], pa.uint8()),
        pa.array(np.zeros(10_000, np.uint8)),
    ):
        batch = pa.RecordBatch.from_arrays([column], names=["bytes"])
        with pytest.raises(BrokenError):
            read_frame(Stream([head, (batch, None), *rest[1:]]), expected)


def test_a_piece_that_claims_to_be_longer_than_its_buffer_is_refused():
    """Arrow hands such a batch on, and numpy would read whatever lies behind the buffer."""
    size, longer = (number.to_bytes(8, "little") for number in (345, 1 << 20))
    raw = pa.RecordBatch.from_arrays([pa.array(np.zeros(345, np.uint8))], schema=SCHEMA).serialize().to_pybytes()
    rows, buffer, column, rest = raw.split(size)  # the batch's rows, the buffer's bytes and the column's length follow
    lying = pa.ipc.read_record_batch(pa.py_buffer(rows + longer + buffer + size + column + longer + rest), SCHEMA)
    assert lying.num_rows == 1 << 20
    with pytest.raises(BrokenError, match="damaged piece"):
        read_frame(Stream([written_frame()[0], (lying, None)]), expected)


def test_only_plain_numbers_and_small_headers_are_sent():
    with pytest.raises(ValueError, match="arrays of object cannot be sent"):
        write_frame(Stream(), "frame", {}, [np.asarray([{}])])
    with pytest.raises(ValueError, match="cannot be sent: convert them to numbers in native byte order"):
        write_frame(Stream(), "frame", {}, [np.zeros(3, ">f4")])
    with pytest.raises(ValueError, match="65536 is the most"):
        write_frame(Stream(), "frame", {"text": "x" * (64 << 10)})
    with pytest.raises(ValueError, match="JSON"):
        write_frame(Stream(), "frame", {"number": float("nan")})
