"""Scales beside the elements that use them, in place of in a header; see
ScaleChunk in proto/quantd/v1/encoding.proto."""

from __future__ import annotations

import math
from typing import Any, Iterator, Optional, Sequence

import numpy as np

from quantd import errors
from quantd.encoding import (MOST_SCALES_IN_HEADER, OUTER_SCALE_TYPES,
                             Encoding, default_scale_type, scale_type_name,
                             scales_of)
from quantd.tensor import FORMATS, Array, format_info, format_options
from quantd.v1 import encoding_pb2

xxh3_64: Any = None
try:
    import xxhash
    xxh3_64 = xxhash.xxh3_64
except ImportError:
    # Then what comes down is not compared with its checksum.
    pass

# Size of a chunk's scales and zero points.
_CHUNK_BYTES = 512 << 10
_STORED: dict[str, Any] = {
    "float32": np.dtype("<f4"), "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"), "e8m0": np.dtype(np.uint8),
    "e4m3": np.dtype(np.uint8), "integer": np.dtype(np.uint8)}


def counts(shape: Sequence[int], block_size: Sequence[int]) -> list[int]:
    """Scales along each dimension. Requires: sizes that fit the shape."""
    return [-(-size // block) if block else 1
            for size, block in zip(shape, block_size)] if block_size else (
                [1] * len(shape))


def block_size_of(spec: Any, shape: Sequence[int]) -> list[int]:
    """Block size of an EncodingSpec of proto/, as the server takes it; nothing
    where the server is going to refuse it."""
    rank = len(shape)
    if spec.block_size:
        return list(spec.block_size) if len(spec.block_size) == rank else []
    sizes = [1] * rank
    if spec.HasField("granularity"):
        axis = spec.granularity.axis + (
            rank if spec.granularity.axis < 0 else 0)
        if rank < 2 or not 0 <= axis < rank:
            return []
        if not spec.granularity.group_size:
            sizes = [0] * rank
        sizes[axis] = spec.granularity.group_size or 1
        return sizes
    group = format_options(FORMATS.name(spec.format)).default_group
    if not group or not rank:
        return []
    sizes[-1] = group
    return sizes


def scale_type_of(message: Any) -> str:
    """Scale type of an Encoding or EncodingSpec of proto/."""
    return (scale_type_name(message.scale_type) if message.scale_type else
            default_scale_type(FORMATS.name(message.format)))


def outer_block_size_of(spec: Any, shape: Sequence[int]) -> list[int]:
    """Block size of the outer scales of a spec whose scales stand under
    such."""
    if spec.outer_block_size or scale_type_of(spec) != "integer" or (
            len(shape) < 2):
        return list(spec.outer_block_size)
    # One for each channel, or as many as share a block.
    block_size = block_size_of(spec, shape)
    return [block_size[0] if block_size else 0] + [0] * (len(shape) - 1)


def wants_chunks(spec: Any, shape: Sequence[int]) -> bool:
    """True if the scales that a spec comes to are many."""
    # Chunks have the scales of elements, so without these there are none.
    if FORMATS.name(spec.format) not in FORMATS or 0 in shape:
        return False
    return math.prod(
        counts(shape, block_size_of(spec, shape))) > MOST_SCALES_IN_HEADER


def _zero_point_dtype(format_name: str, exclude_zero: bool, is_real: bool
                      ) -> Any:
    """Dtype of a single code."""
    info = format_info(format_name)
    if is_real:
        return np.dtype("<f4")
    if exclude_zero:
        return np.dtype("<i4")
    return np.dtype(("<i" if info.is_signed else "<u") + str(
        max(info.storage_bits // 8, 1)))


def _widened(zero_point: Array) -> Array:
    return zero_point.astype(
        np.float32 if zero_point.dtype.kind == "f" else np.int32)


class ScaleFeed:
    """Scales of an encoding that go up, for the elements from `first` on."""

    def __init__(self, encoding: Encoding, shape: Sequence[int],
                 first: int = 0) -> None:
        """Raises: ARGUMENT_INVALID for other scales than the shape has."""
        block_size = tuple(encoding.block_size)
        if block_size and len(block_size) != len(shape):
            raise errors.argument_invalid(
                f"expected block sizes for {len(shape)} dimensions, got "
                f"{block_size}", "encoding")
        dims = counts(shape, block_size)
        if encoding.scale_count != math.prod(dims):
            raise errors.argument_invalid(
                f"expected {math.prod(dims)} scales for a tensor of "
                f"{tuple(shape)}, got {encoding.scale_count}", "encoding")
        self._encoding = encoding
        self._scale = encoding.stored_scale.reshape(-1)
        self._zero_point = encoding.zero_point.reshape(-1)
        self._has_zero_points = encoding.has_zero_points
        self._dtype = _zero_point_dtype(
            encoding.format, encoding.exclude_zero,
            encoding.zero_points_are_real)
        self._outer = encoding.outer_scale.reshape(-1)
        # Scales of the first dimension that has more than one index.
        at = next((d for d, size in enumerate(shape) if size > 1), len(shape))
        self._row = max(1, math.prod(shape[at + 1:]))
        self._row_scales = math.prod(dims[at + 1:])
        self._rows = (block_size[at] or shape[at]
                      if block_size and at < len(shape) else 1 << 62)
        self._first = first // self._row // self._rows * self._row_scales

    def check_exact(self) -> None:
        """Raises: ARGUMENT_INVALID unless the scales are values of the type
        that they are stored in, and each has a zero point or none has."""
        encoding = self._encoding
        if self._zero_point.size not in (0, self._scale.size):
            raise errors.argument_invalid(
                f"expected {self._scale.size} zero points or none, got "
                f"{self._zero_point.size}", "encoding")
        narrow = self._zero_point.astype(self._dtype)
        if (narrow != self._zero_point).any():
            raise errors.argument_invalid(
                f"expected zero points that are codes of {encoding.format}",
                "encoding")
        if encoding.scale_code.size:
            return
        stored = scales_of(self._scale)["scale"]
        scale = encoding.scale.reshape(-1)
        # The server refuses those that are not finite.
        wrong = np.flatnonzero((stored != scale) & np.isfinite(scale))
        if wrong.size:
            raise errors.argument_invalid(
                f"expected scales that {encoding.stored_scale_type} holds, got "
                f"{scale[wrong[0]]} for scale {wrong[0]}", "encoding")

    def end(self, element: int) -> int:
        """Scales before this one are all that elements before that use."""
        if element <= 0:
            return self._first
        rows = (element - 1) // self._row // self._rows + 1
        return min(self._scale.size, rows * self._row_scales)

    def chunks(self, begin: int, end: int, outer: int) -> Iterator[bytes]:
        """Messages with the scales from `begin` on, before them all outer ones
        from `outer` on."""
        for at in range(outer, self._outer.size, _CHUNK_BYTES // 4):
            yield encoding_pb2.ScaleChunk(
                first=begin, first_outer=at, outer_scale=self._outer[
                    at:at + _CHUNK_BYTES // 4].tobytes()).SerializeToString()
        step = _CHUNK_BYTES // (self._scale.itemsize + (
            self._dtype.itemsize if self._has_zero_points else 0))
        for at in range(begin, end, step):
            chunk = encoding_pb2.ScaleChunk(
                first=at, first_outer=self._outer.size,
                scale=self._scale[at:min(end, at + step)].tobytes())
            if self._has_zero_points:
                chunk.zero_point = self._zero_point[
                    at:min(end, at + step)].astype(self._dtype).tobytes()
            yield chunk.SerializeToString()

    @property
    def first(self) -> int:
        """The first scale that is sent."""
        return self._first

    @property
    def outer_count(self) -> int:
        """Outer scales."""
        return int(self._outer.size)


class ScaleFeeding:
    """One time that the scales go up."""

    def __init__(self, feed: ScaleFeed) -> None:
        self._feed = feed
        self._at = feed.first
        self._outer = 0

    def until(self, element: int) -> Iterator[bytes]:
        """Serialized ScaleChunks: what elements before that use and did not
        go up yet."""
        end = self._feed.end(element)
        begin, self._at = self._at, max(self._at, end)
        outer, self._outer = self._outer, self._feed.outer_count
        if element > 0:
            yield from self._feed.chunks(begin, end, outer)


class _Numbers:
    """Numbers of one kind that come down."""

    def __init__(self, count: int, dtype: Any) -> None:
        self._numbers = np.empty(count, dtype)
        self._hash = xxh3_64() if xxh3_64 is not None else None
        self._count = 0

    def add(self, first: int, data: Any) -> None:
        """Takes the numbers from `first` on. Raises: RESPONSE_MALFORMED."""
        if not len(data):
            return
        size = self._numbers.itemsize
        end = self._count + len(data) // size
        if first != self._count or len(data) % size or (
                end > self._numbers.size):
            raise errors.response_malformed(
                f"expected scales from {self._count} up to "
                f"{self._numbers.size}, got {len(data)} bytes from {first}")
        self._numbers[self._count:end] = np.frombuffer(data,
                                                       self._numbers.dtype)
        self._count = end
        if self._hash is not None:
            self._hash.update(data)

    def take(self, checksum: int) -> Array:
        """All of them. Raises: RESPONSE_MALFORMED, CHECKSUM_MISMATCH."""
        if self._count != self._numbers.size:
            raise errors.response_malformed(
                f"expected {self._numbers.size} scales, got {self._count}")
        # Nothing at all was not sent.
        if self._hash is not None and self._count and (
                self._hash.intdigest() != checksum):
            raise errors.checksum_mismatch(checksum, self._hash.intdigest())
        return self._numbers


class ScaleSink:
    """Scales that come down, of the encoding of a header with
    scales_in_chunks."""

    def __init__(self, encoding: Any, shape: Sequence[int]) -> None:
        """Requires: _answers.check_encoding(encoding)."""
        self._message = encoding
        self._dims = counts(shape, encoding.block_size)
        count = math.prod(self._dims)
        format_name = FORMATS.name(encoding.format)
        self._scale_type = scale_type_of(encoding)
        self._scale = _Numbers(count, _STORED[self._scale_type])
        self._zero_point = _Numbers(
            count if encoding.chunks_have_zero_points else 0,
            _zero_point_dtype(format_name, encoding.exclude_zero,
                              encoding.zero_points_are_real))
        outer_count = 0
        if self._scale_type in OUTER_SCALE_TYPES:
            outer_count = math.prod(counts(shape, encoding.outer_block_size))
        self._outer = _Numbers(outer_count, np.dtype("<f4"))

    def add(self, message: Any) -> None:
        """A serialized ScaleChunk. Raises: RESPONSE_MALFORMED, DecodeError."""
        chunk = encoding_pb2.ScaleChunk.FromString(bytes(message))
        self._scale.add(chunk.first, chunk.scale)
        self._zero_point.add(chunk.first, chunk.zero_point)
        self._outer.add(chunk.first_outer, chunk.outer_scale)

    def take(self, summary: Any) -> Encoding:
        """The encoding. Raises: RESPONSE_MALFORMED, CHECKSUM_MISMATCH."""
        scale = self._scale.take(summary.scale_checksum_xxh3)
        zero_point = self._zero_point.take(summary.zero_point_checksum_xxh3)
        outer = self._outer.take(summary.outer_scale_checksum_xxh3)
        fields: dict[str, Any] = {**scales_of(scale.reshape(self._dims))}
        if zero_point.size:
            fields["zero_point"] = _widened(zero_point).reshape(self._dims)
        return Encoding.from_proto(self._message).with_scales(
            scale_shape=tuple(self._dims), outer_scale=outer,
            degenerate_count=summary.degenerate_count, **fields)


def join_chunks(encoding: Any, chunks: Sequence[Any]) -> Encoding:
    """The whole of an Encoding of proto/ without scales, and its ScaleChunks.

    Raises: RESPONSE_MALFORMED.
    """
    scale_type = scale_type_of(encoding)
    dtype = _STORED[scale_type]
    scale, outer = (
        np.frombuffer(b"".join(getattr(chunk, field) for chunk in chunks),
                      kind) for field, kind in (("scale", dtype),
                                                ("outer_scale", "<f4")))
    zero_point = np.frombuffer(
        b"".join(chunk.zero_point for chunk in chunks), _zero_point_dtype(
            FORMATS.name(encoding.format), encoding.exclude_zero,
            encoding.zero_points_are_real))
    at = 0
    for chunk in chunks:
        if chunk.scale and chunk.first != at:
            raise errors.response_malformed(
                f"expected scales from {at}, got them from {chunk.first}")
        at += len(chunk.scale) // dtype.itemsize
    dims = tuple(encoding.scale_shape) or (at,)
    if not at or math.prod(dims) != at or zero_point.size not in (0, at):
        raise errors.response_malformed(
            f"expected {math.prod(dims)} scales, got {at} with "
            f"{zero_point.size} zero points")
    fields: dict[str, Any] = {**scales_of(scale.reshape(dims))}
    if zero_point.size:
        fields["zero_point"] = _widened(zero_point).reshape(dims)
    return Encoding.from_proto(encoding).with_scales(outer_scale=outer,
                                                     **fields)


def outer_maximum(spec: Any, shape: Sequence[int], element_type: str,
                  payload: Array) -> Optional[list[float]]:
    """The largest magnitude of the finite elements of each outer block that a
    spec will have; None where it has none, or where that is not known here."""
    scale_type = scale_type_of(spec)
    if scale_type not in OUTER_SCALE_TYPES or element_type == "float64":
        return None
    # With other methods the range is not that of the extremes.
    if spec.method not in (encoding_pb2.CALIBRATION_METHOD_UNSPECIFIED,
                           encoding_pb2.CALIBRATION_METHOD_MIN_MAX):
        return None
    outer = outer_block_size_of(spec, shape)
    # Blocks of the first dimension, whole in all others.
    if any(outer[1:]) or (outer and len(outer) != len(shape)):
        return None
    rows = outer[0] if outer else 0
    if not payload.size:
        return None
    return largest_magnitudes(
        element_type, payload, rows * math.prod(shape[1:]) if rows else 0)


def outer_count(spec: Any, shape: Sequence[int]) -> int:
    """How many outer scales a spec has."""
    if scale_type_of(spec) not in OUTER_SCALE_TYPES:
        return 0
    return math.prod(counts(shape, outer_block_size_of(spec, shape)))


def largest_magnitudes(element_type: str, payload: Array, step: int = 0
                       ) -> list[float]:
    """Largest of the finite magnitudes of each `step` elements, or of all; 0
    where there is none."""
    if not payload.size:
        return [0.0]
    # Magnitudes compare as the integers that their bits are.
    mask, infinity = {"float32": (0x7FFFFFFF, 0x7F800000),
                      "float16": (0x7FFF, 0x7C00),
                      "bfloat16": (0x7FFF, 0x7F80)}[element_type]
    dtype = np.dtype("<u4" if element_type == "float32" else "<u2")
    elements = payload.view(dtype)
    step = step or elements.size
    found = np.array([_largest(elements[at:at + step], mask, infinity)
                      for at in range(0, elements.size, step)], dtype)
    if element_type == "float16":
        return [float(value) for value in found.view("<f2")]
    if element_type == "bfloat16":
        found = found.astype(np.uint32) << 16
    return [float(value) for value in found.view("<f4")]


def _largest(elements: Array, mask: int, infinity: int) -> int:
    largest = 0
    # A part that stays in the cache.
    for at in range(0, elements.size, 1 << 16):
        bits = elements[at:at + (1 << 16)] & elements.dtype.type(mask)
        top = int(bits.max())
        if top >= infinity:
            finite = bits[bits < infinity]
            top = int(finite.max()) if finite.size else 0
        largest = max(largest, top)
    return largest
