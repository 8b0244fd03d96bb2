"""Frames: a small JSON header and arrays, on an Arrow Flight stream, whole and checked or not at all.

A frame travels as one message of metadata with header, array types and a digest of both; then the arrays' bytes in
pieces of up to 8 MB; then a trailer with their number and digest. A stream that ends early looks like one that ends
properly (pyarrow 26: the reader of a killed peer's stream simply stops), so nothing counts before its trailer.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import xxhash

from noloco_jax.islands.peer_errors import BrokenError, DamagedError, RefusedError

# Bytes of one message: 4 to 16 MB are fastest on loopback; one of 256 MB takes four times as long per byte.
PIECE_BYTES = 8 << 20
MAX_HEADER_BYTES = 64 << 10
SCHEMA = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])
_DIGEST_BYTES = 16


class ArraySpec(NamedTuple):
    """Shape and dtype that a receiver expects of an array.

    Attributes:
      shape: its dimensions.
      dtype: dtype of numpy, or of `ml_dtypes`, in this machine's byte order.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


class Frame(NamedTuple):
    """Header and its arrays, if any, read-only: most lie in the buffers that were received."""

    header: dict[str, Any]
    arrays: list[np.ndarray] | None


# Maps a frame's header to the specs of the arrays that may come with it; None for none.
Expects = Callable[[Mapping[str, Any]], Sequence[ArraySpec] | None]


class _Writer(Protocol):
    def write_metadata(self, buf: bytes, /) -> None: ...
    def write_batch(self, batch: pa.RecordBatch, /) -> None: ...


def write_frame(
    writer: _Writer, kind: str, header: Mapping[str, Any], arrays: Sequence[np.ndarray] | None = None
) -> None:
    """Write a frame. Arrays are not copied where they are contiguous, and must not change until this returns.

    Raises `ValueError` for a header above 64 KiB, and for arrays without a plain form in bytes.
    """
    announced = None if arrays is None else [[array.dtype.name, list(array.shape)] for array in arrays]
    writer.write_metadata(_seal({"kind": kind, "header": dict(header), "arrays": announced}))
    if arrays is None:
        return
    digest, written = xxhash.xxh3_128(), 0
    for array in arrays:
        for piece in _pieces(array):
            digest.update(piece.data)
            column = pa.Array.from_buffers(pa.uint8(), piece.size, [None, pa.py_buffer(piece)])
            writer.write_batch(pa.RecordBatch.from_arrays([column], schema=SCHEMA))
            written += piece.size
    writer.write_metadata(_seal({"bytes": written, "digest": digest.hexdigest()}))


def read_frame(reader: Any, expects: Expects) -> tuple[str, Frame] | None:
    """Read the next frame and its kind; return None where the stream ends.

    The announced arrays are compared with those that `expects` returns before any array is read or allocated.

    Args:
      reader: reader of a Flight stream, with `read_chunk()`.
      expects: maps a header to the specs of its arrays; its exceptions pass.

    Raises:
      RefusedError: if the announced arrays differ from those expected.
      BrokenError: if the stream ends within the frame; `DamagedError` if anything in it is damaged.
    """
    message = _next(reader)
    if message is None:
        return None
    opening = _unseal(message.app_metadata)
    kind, header, announced = opening.get("kind"), opening.get("header"), opening.get("arrays")
    if message.data is not None or not isinstance(kind, str) or not isinstance(header, dict):
        raise DamagedError("it sent what is no frame")
    expected = expects(header) if kind == "frame" else None
    wanted = None if expected is None else [[spec.dtype.name, list(spec.shape)] for spec in expected]
    if announced != wanted:
        raise RefusedError(f"it announces {_shown(announced)}, and {_shown(wanted)} would fit here")
    if expected is None:
        return kind, Frame(header, None)
    digest = xxhash.xxh3_128()
    arrays = [_read_array(reader, spec, digest) for spec in expected]
    trailer = _next(reader)
    if trailer is None:
        raise BrokenError("the stream ended before the message was whole")
    total = sum(spec.nbytes for spec in expected)
    if trailer.data is not None or _unseal(trailer.app_metadata) != {"bytes": total, "digest": digest.hexdigest()}:
        raise DamagedError("the digest behind the message is not that of what came")
    return kind, Frame(header, arrays)


def drain(reader: Any) -> None:
    """Read to the end of a stream and keep nothing, so that its sender is not held up."""
    while _next(reader) is not None:
        pass


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield an array's bytes, in C order, without copying a contiguous one."""
    if array.dtype.hasobject or not array.dtype.isnative:
        raise ValueError(f"arrays of {array.dtype} cannot be sent: convert them to numbers in native byte order")
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, flat.size, PIECE_BYTES):
        yield flat[start : start + PIECE_BYTES]


def _read_array(reader: Any, spec: ArraySpec, digest: Any) -> np.ndarray:
    """Read an array: a view of the received buffer if it came in one piece, else assembled in memory."""
    whole: np.ndarray | None = None
    filled = 0
    while filled < spec.nbytes:
        piece = _read_piece(reader)
        if piece.size == 0 or filled + piece.size > spec.nbytes:
            raise DamagedError("it sent another number of bytes than it announced")
        digest.update(piece.data)
        if piece.size == spec.nbytes:
            whole = piece
        else:
            whole = np.empty(spec.nbytes, np.uint8) if whole is None else whole
            whole[filled : filled + piece.size] = piece
        filled += piece.size
    whole = np.empty(0, np.uint8) if whole is None else whole
    array = whole.view(spec.dtype).reshape(spec.shape)
    array = array if array.flags.aligned else array.copy()
    array.flags.writeable = False
    return array


def _read_piece(reader: Any) -> np.ndarray:
    message = _next(reader)
    if message is None:
        raise BrokenError("the stream ended before the message was whole")
    if message.data is None or message.app_metadata is not None:
        raise DamagedError("it sent another number of bytes than it announced")
    try:
        message.data.validate()
        return message.data.column(0).to_numpy(zero_copy_only=True)
    except pa.ArrowInvalid as error:
        raise DamagedError(f"it sent a damaged piece ({str(error)[:80]})") from None


def _next(reader: Any) -> Any:
    """Return a stream's next message, None at its end."""
    try:
        return reader.read_chunk()
    except StopIteration:
        return None


def _seal(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes: {MAX_HEADER_BYTES} is the most")
    return xxhash.xxh3_128_digest(text) + text


def _unseal(metadata: pa.Buffer | None) -> dict[str, Any]:
    if metadata is None or not _DIGEST_BYTES < metadata.size <= MAX_HEADER_BYTES + _DIGEST_BYTES:
        raise DamagedError("it sent what is no frame")
    sealed = metadata.to_pybytes()
    digest, text = sealed[:_DIGEST_BYTES], sealed[_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(text) != digest:
        raise DamagedError("a header's digest is not that of what came")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise DamagedError("it sent what is no frame")
    return content


def _shown(announced: Any) -> str:
    """Format the types of announced arrays in one line; another machine may send anything."""
    return "no arrays" if announced is None else f"arrays of {json.dumps(announced)[:200]}"
