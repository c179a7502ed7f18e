"""Writes GGUF files, as client/jobs/gguf_output.cc and
client/files/gguf_builder.cc do."""

from __future__ import annotations

import dataclasses
import math
import os
import struct
import tempfile
from typing import Iterable, Optional, Sequence

import numpy as np

from quantd import _files, _gguf, errors
from quantd.results import QuantizedTensor
from quantd.tensor import Array, format_info, unpack

_BLOCK = 32
_MOST_NAME_BYTES = 63
_MOST_DIMENSIONS = 4
_MOST_HALF = 65504
# Keys of what a file says of itself, whatever its metadata come from.
_FILE_TYPE = b"general.file_type"
_VERSION = b"general.quantization_version"
# They say that a model goes on in other files: this one does not.
_SPLIT = b"split."
_VERSION_OF_BLOCKS = 2


@dataclasses.dataclass(frozen=True)
class _Row:
    """An encoding that is blocks of a type.

    file_type: llama.cpp's number of a file that has most of it.
    """

    type: str
    format: str
    scale_type: str
    has_minimum: bool
    file_type: int


_ROWS = (_Row("q8_0", "int8", "float16", False, 7),
         _Row("q5_0", "int5", "float16", False, 8),
         _Row("q5_1", "uint5", "float16", True, 9),
         _Row("q4_0", "int4", "float16", False, 2),
         _Row("q4_1", "uint4", "float16", True, 3),
         _Row("mxfp4", "mxfp4_e2m1", "e8m0", False, 38))
_NUMBERS = {kind.name: number for number, kind in _gguf.TYPES.items()}
_NUMBERS_OF_PLAIN = {kind.dtype: number
                     for number, kind in _gguf.TYPES.items()
                     if kind.decode_blocks is None}
# File types by the number of the tensors' type.
_FILE_TYPES = {_NUMBERS[row.type]: row.file_type for row in _ROWS}


@dataclasses.dataclass(frozen=True, eq=False)
class GgufItem:
    """A tensor of the file.

    number: of its type.
    data: its bytes, or anything that has them.
    """

    name: str
    number: int
    shape: tuple[int, ...]
    data: Array


def plain_item(path: str, name: str, dtype: str, array: Array) -> GgufItem:
    """Raises: FILE_UNSUPPORTED."""
    number = _NUMBERS_OF_PLAIN.get(dtype)
    if number is None:
        raise _files.unsupported(
            path, f"tensor {name!r}: GGUF has no type for {dtype}")
    return GgufItem(name, number, array.shape, array)


def quantized_item(name: str, tensor: QuantizedTensor) -> GgufItem:
    """Raises: ARGUMENT_INVALID for an encoding that no blocks hold."""
    row = _row_of(tensor)
    encoding = tensor.encoding
    if row is None or encoding is None:
        raise errors.argument_invalid(
            f"expected an encoding that has a type in GGUF for {name!r}: one "
            "of " + ", ".join(_spec_of(row) for row in _ROWS))
    info = format_info(encoding.format)
    # Two's complement becomes a distance from the lowest code, but for 8 bits.
    offset = 1 << info.bits - 1 if info.is_signed and info.bits < 8 else 0
    codes = unpack(tensor._numpy_codes(), encoding.format,
                   math.prod(tensor.shape)).astype(np.int16) + offset
    values = (codes & (1 << info.bits) - 1).astype(np.uint8).reshape(-1, _BLOCK)
    scale = np.ascontiguousarray(encoding.stored_scale).reshape(-1, 1)
    if row.scale_type == "e8m0" and (scale == 255).any():
        raise errors.argument_invalid(
            f"tensor {name!r}: GGUF has no blocks whose scale is NaN")
    parts: list[Array] = [scale.view(np.uint8)]
    zero_point = encoding.zero_point.reshape(-1, 1)
    if row.has_minimum:
        parts.append(_minimum(name, scale, zero_point))
    elif zero_point.any():
        raise errors.argument_invalid(
            f"tensor {name!r}: {row.type} has no zero points")
    parts += _packed_codes(values, info.bits)
    return GgufItem(name, _NUMBERS[row.type], tensor.shape,
                    np.concatenate(parts, axis=1))


def _packed_codes(codes: Array, bits: int) -> list[Array]:
    """Bytes of blocks of 32 codes of 4, 5 or 8 bits."""
    if bits == 8:
        return [codes]
    high = [np.packbits(codes >> 4, axis=1, bitorder="little")]
    half = _BLOCK // 2
    return (high if bits == 5 else []) + [
        codes[:, :half] & 15 | (codes[:, half:] & 15) << 4]


def _row_of(tensor: QuantizedTensor) -> Optional[_Row]:
    encoding = tensor.encoding
    if encoding is None or not tensor.shape or tensor.shape[-1] % _BLOCK:
        return None
    groups = (1,) * (len(tensor.shape) - 1) + (_BLOCK,)
    if tuple(encoding.block_size) != groups:
        return None
    return next((row for row in _ROWS if row.format == encoding.format and
                 row.scale_type == encoding.stored_scale_type), None)


def _spec_of(row: _Row) -> str:
    scale = "" if row.scale_type == "e8m0" else ":group:32:scale=float16"
    return f"{row.format}{scale} ({row.type})"


def _minimum(name: str, scale: Array, zero_point: Array) -> Array:
    if not zero_point.size:
        zero_point = np.zeros((len(scale), 1), np.int32)
    # With one sign of zero.
    minimum = -zero_point.astype(np.float32) * scale.astype(np.float32) + 0
    if (np.abs(minimum) > _MOST_HALF).any():
        raise errors.argument_invalid(
            f"tensor {name!r}: the minimum of a block is more than float16 has")
    return minimum.astype(np.float16).view(np.uint8)


def _pair(key: bytes, value: int) -> bytes:
    return (struct.pack("<Q", len(key)) + key +
            struct.pack("<II", 4, value))


def _check(path: str, name: str, shape: tuple[int, ...]) -> bytes:
    """The name as it is stored. Raises: FILE_UNSUPPORTED."""
    stored = name.encode("utf-8", "replace")
    if len(stored) > _MOST_NAME_BYTES or len(shape) > _MOST_DIMENSIONS or (
            0 in shape):
        raise _files.unsupported(
            path, f"tensor {name!r}: GGUF takes names of at most "
            f"{_MOST_NAME_BYTES} bytes, and tensors with elements, of at most "
            f"{_MOST_DIMENSIONS} dimensions")
    return stored


def _padding(size: int, alignment: int) -> bytes:
    return bytes(-size % alignment)


def _name_of(number: int) -> str:
    return _gguf.TYPES[number].name


class _Header:
    """Header that comes before the data."""

    def __init__(self, pairs: Sequence[tuple[bytes, bytes]],
                 alignment: int) -> None:
        self.alignment = alignment
        self._pairs = [(key, pair) for key, pair in pairs
                       if key != _VERSION and not key.startswith(_SPLIT)]
        self._tensors: dict[bytes, bytes] = {}
        # Elements of each type that has blocks.
        self._counts: dict[int, int] = {}

    def add(self, path: str, item: GgufItem, offset: int) -> None:
        """Raises: FILE_UNSUPPORTED; FILE_MALFORMED for a name that is taken."""
        name = _check(path, item.name, item.shape)
        if name in self._tensors:
            raise _files.malformed(path, f"the name {item.name!r} is taken")
        shape = item.shape[::-1]
        self._tensors[name] = struct.pack("<Q", len(name)) + name + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *shape, item.number, offset)
        if item.number in _FILE_TYPES:
            self._counts[item.number] = (self._counts.get(item.number, 0) +
                                         math.prod(item.shape))

    def text(self) -> bytes:
        """With what brings the data to a multiple of the alignment."""
        pairs = [_pair(_VERSION, _VERSION_OF_BLOCKS)]
        if self._counts:
            most = max(sorted(self._counts, key=_name_of),
                       key=self._counts.__getitem__)
            pairs.append(_pair(_FILE_TYPE, _FILE_TYPES[most]))
        pairs += [pair for key, pair in self._pairs
                  if key != _FILE_TYPE or not self._counts]
        text = b"GGUF" + struct.pack("<IQQ", 3, len(self._tensors),
                                     len(pairs)) + b"".join(
                                         [*pairs, *self._tensors.values()])
        return text + _padding(len(text), self.alignment)


def write(path: str, overwrite: bool, items: Iterable[GgufItem],
          metadata_from: Optional[str]) -> int:
    """Writes a file that appears complete or not at all; says how large it is.
    The next item is asked for when the last one is on disk.

    metadata_from: a GGUF file; None for metadata of no model.

    Raises: FILE_EXISTS, FILE_UNREADABLE, FILE_UNWRITABLE, FILE_MALFORMED,
        FILE_UNSUPPORTED.
    """
    _files.check_writable(path, overwrite)
    source = (_files.InputFile(path, {}) if metadata_from is None else
              _files.open_gguf(metadata_from))
    header = _Header(source.pairs, source.alignment)
    size = 0
    try:
        spool = tempfile.TemporaryFile(dir=os.path.dirname(path) or ".")
    except OSError as error:
        raise _files.unwritable(path, error) from error
    with spool:
        for item in items:
            header.add(path, item, size)
            data = np.ascontiguousarray(item.data).reshape(-1).view(np.uint8)
            try:
                spool.write(data.data)
                spool.write(_padding(data.size, header.alignment))
            except OSError as error:
                raise _files.unwritable(path, error) from error
            size += data.size + len(_padding(data.size, header.alignment))
        text = header.text()
        with _files.AtomicFile(path, overwrite) as file:
            file.write(text)
            spool.flush()
            file.write_from(spool.fileno(), 0, size)
            file.commit()
    return len(text) + size
